"""The seed's tests of stores, groups and collectives (003), on CPU ranks: where each stands, and those not elsewhere.

Its tests of DistributedDataParallel, communication hooks, PowerSGD, SyncBatchNorm and bucket assignment are in
`test_seed_003_parallel.py`. `CommTensor` wrapped tensors so that a trace could see collectives; ours need no wrapping.
"""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from wholestep import comm
from wholestep.launcher import free_port
from wholestep.testing import run_ranks

TABLE = {
    "TimeoutTest._test_default_store_timeout": "seeds/test_seed_003::test_default_store_timeout",
    "TimeoutTest.test_store_based_barrier": "comm/test_stores::test_store_based_barrier",
    "CommTest._test_sequence_num_incremented_default_group": "seeds/test_seed_003::test_sequence_numbers",
    "CommTest._test_sequence_num_incremented_subgroup": "seeds/test_seed_003::test_sequence_numbers",
    "CommTest._test_sequence_num_set_default_pg": "seeds/test_seed_003::test_sequence_numbers",
    "CommTest._test_sequence_num_set_new_group": "seeds/test_seed_003::test_sequence_numbers",
    "CommTest._test_warn_not_in_group": "comm/test_groups::test_membership_and_warnings",
    "CommTest._test_rank_membership": "comm/test_groups::test_membership_and_warnings",
    "CommTest._test_tensor_dtype_mismatch": "comm/test_collectives::test_arguments_odd_tensors_messages_and_objects",
    "CommTest._test_tensor_dtype_complex": "comm/test_collectives::test_arguments_odd_tensors_messages_and_objects",
    "CommTest._test_bool_tensors": "comm/test_collectives::test_arguments_odd_tensors_messages_and_objects",
    "CommTest.test_debug_level": "comm/test_groups::test_debug_level",
    "LargeCommTest._test_new_group_local_sync": "comm/test_groups::test_sequence_numbers_and_local_groups",
    "LargeCommTest._test_new_group_local_sync_sanity_check": "comm/test_groups::test_sequence_numbers_and_local_groups",
    "LargeCommTest._test_new_group_local_sync_duplicate_pg": "comm/test_groups::test_sequence_numbers_and_local_groups",
    "PythonProcessGroupExtensionTest.test_get_backend_name": "comm/test_groups::test_backend_names",
    "PythonProcessGroupExtensionTest.test_backend_class_attr": "comm/test_groups::test_backend_names",
    "PythonProcessGroupExtensionTest.test_is_backend_available": (
        "seeds/test_seed_003::test_a_backend_is_there_once_registered"
    ),
    "PythonProcessGroupExtensionTest.test_backend_config": "comm/test_groups::test_backend_names",
    "PythonProcessGroupExtensionTest.test_init_process_group_with_multiple_backends": (
        "comm/test_groups::test_a_backend_written_in_python"
    ),
    "PythonProcessGroupExtensionTest.test_collectives": "comm/test_groups::test_a_backend_written_in_python",
    "PythonProcessGroupExtensionTest.test_send_recv": "comm/test_groups::test_a_backend_written_in_python",
    "DispatchedCollectives.test_init_process_group_optional_backend": (
        "comm/test_groups::test_optional_backend_and_device_without_one"
    ),
    "DispatchedCollectives.test_init_process_group_for_all_backends": (
        "seeds/test_seed_003::test_a_group_of_every_backend"
    ),
    "DispatchedCollectives._test_collectives": "comm/test_groups::test_every_collective_on_every_backend_alone",
    "DispatchedCollectives._test_allreduce_coalesced": "comm/test_groups::test_every_collective_on_every_backend_alone",
    "DispatchedCollectives._test_all_to_all_single": "comm/test_groups::test_every_collective_on_every_backend_alone",
    "CompilerTest (all ten forms)": "comm/test_traced_calls::test_traced_work_wait",
    "ReduceOpTest.test_op_isinstance_of_reduceop": "comm/test_groups::test_reduce_ops_copy_pickle_and_compare",
    "ReduceOpTest.test_reduceop_copyable": "comm/test_groups::test_reduce_ops_copy_pickle_and_compare",
    "ReduceOpTest.test_reduceop_pickle": "comm/test_groups::test_reduce_ops_copy_pickle_and_compare",
    "ReduceOpTest.test_reduceop_equal": "comm/test_groups::test_reduce_ops_copy_pickle_and_compare",
    "LocalRankTest (all four)": "comm/test_groups::test_node_local_rank",
}


@pytest.mark.parametrize("place", sorted(set(TABLE.values())))
def test_every_row_names_a_test(place):
    file, name = place.split("::")
    assert f"def {name}(" in (Path(__file__).parents[1] / f"{file}.py").read_text(encoding="utf8")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("method", ["file", "tcp"])
def test_default_store_timeout(backend, method, tmp_path):
    address = f"file://{tmp_path}/store" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
    took = []

    def work():
        comm.init_process_group(backend, address, timedelta(seconds=1), 1, 0)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Timeout"):
            comm.default_store().get("nonexistent key")
        took.append(time.monotonic() - began)
        comm.destroy_process_group()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert len(took) == 1
    assert took[0] >= 1


def number_alike(group, verify):
    """The group's sequence number, which is the same on every rank of ``verify``."""
    numbers = [None] * comm.get_world_size(verify)
    comm.all_gather_object(numbers, group._get_sequence_number_for_group(), group=verify)
    assert len(set(numbers)) == 1
    return numbers[0]


def count_up(group, ranks):
    verify = comm.new_group(ranks)
    if comm.rank_not_in_group(group):
        return
    first, x = number_alike(group, verify), torch.ones(1)
    for i in range(10):
        comm.all_reduce(x, group=group)
        assert number_alike(group, verify) == first + i + 1
    rank = comm.get_rank(group)
    if rank not in (0, 2):  # one that the others do not come to
        comm.all_reduce(x, group=group, async_op=True)
    pairs = [None] * 3
    comm.all_gather_object(pairs, (rank, group._get_sequence_number_for_group()), group=verify)
    numbers = dict(pairs)
    assert numbers[0] == numbers[2] == numbers[1] - 1


def sequence_numbers():
    count_up(comm.get_group(), [0, 1, 2])
    comm.destroy_process_group()
    comm.init_process_group("null", rank=0, world_size=1, store=comm.HashStore())


def sequence_numbers_of_a_subgroup():
    count_up(comm.new_group([0, 1, 2]), [0, 1, 2])


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_sequence_numbers(backend):
    run_ranks(sequence_numbers, 3, backend)
    run_ranks(sequence_numbers_of_a_subgroup, 4, backend)


def test_a_backend_is_there_once_registered():
    assert comm.is_ucc_available() == comm.is_backend_available("ucc")
    assert not comm.is_backend_available("seedling")
    comm.Backend.register_backend("seedling", lambda store, rank, size, timeout: comm.ProcessGroup(rank, size))
    assert comm.is_backend_available("seedling")


def test_a_group_of_every_backend():
    for backend in comm.Backend.backend_list:
        if backend == comm.Backend.UNDEFINED or not comm.is_backend_available(backend):
            continue
        if backend == comm.Backend.NCCL and not torch.cuda.is_available():
            continue
        if backend not in ("shm", "thread", "null", "gloo", "nccl", "mpi", "ucc"):
            continue  # registered by another test
        comm.init_process_group(backend, rank=0, world_size=1, store=comm.HashStore())
        group = comm.get_group()
        assert (group.rank(), group.size(), group.name()) == (0, 1, str(backend))
        comm.destroy_process_group()
