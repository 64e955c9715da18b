"""Groups: membership, rank translation, subgroups, sequence numbers, backends written in Python, reduce operators."""

import copy
import pickle
import warnings
from datetime import timedelta

import pytest
import torch

from wholestep import comm
from wholestep.testing import run_ranks

OPS = [comm.ReduceOp.SUM, comm.ReduceOp.AVG, comm.ReduceOp.PRODUCT, comm.ReduceOp.MIN, comm.ReduceOp.MAX]
OPS += [comm.ReduceOp.BAND, comm.ReduceOp.BOR, comm.ReduceOp.BXOR]
TRANSPORTS = ["thread", "shm", "gloo"]


def run_alone(fn, backend="null", **more):
    """``fn`` in a world of one in this process."""
    comm.init_process_group(backend, world_size=1, rank=0, store=comm.HashStore(), **more)
    try:
        return fn()
    finally:
        comm.destroy_process_group()


def membership():
    group = comm.new_group(ranks=[1])
    assert comm.get_group_rank(group, 1) == 0
    with pytest.raises(ValueError, match="not part of group"):
        comm.get_group_rank(group, 0)
    with pytest.raises(ValueError, match="not registered"):
        comm.get_group_rank(Dummy(0, 2), 0)
    assert comm.get_global_rank(group, 0) == 1
    with pytest.raises(ValueError, match="not part of group"):
        comm.get_global_rank(group, 1)
    with pytest.raises(ValueError, match="not registered"):
        comm.get_global_rank(Dummy(0, 2), 0)
    assert comm.get_process_group_ranks(group) == [1]
    assert (comm.get_rank(group) == -1) == comm.rank_not_in_group(group) == (comm.get_rank() == 0)


def warned_outside():
    group = comm.new_group([0])
    x, xs = torch.zeros(2, 2), [torch.zeros(2, 2)]
    calls = {
        "all_gather": lambda: comm.all_gather(xs, x, group=group),
        "all_reduce": lambda: comm.all_reduce(x, group=group),
        "barrier": lambda: comm.barrier(group=group),
        "broadcast": lambda: comm.broadcast(x, src=0, group=group),
    }
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
        if comm.get_rank() == 0:
            assert not seen
        else:
            assert f"Running {name} on global rank 1 which does not belong to" in str(seen[0].message)


def sequence_numbers():
    verify = comm.new_group()
    part = comm.new_group([0, 1, 2])
    seen = []
    for _ in range(10):
        comm.all_reduce(torch.ones(1), group=part) if comm.get_rank() < 3 else None
        numbers = [None] * 4
        comm.all_gather_object(numbers, part._get_sequence_number_for_group(), group=verify)
        seen.append(numbers[:3])
    assert seen == [[i] * 3 for i in range(1, 11)]


def local_groups():
    rank, n = comm.get_rank(), comm.get_world_size()
    inside = [rank, (rank + 2) % n]
    outside = [i for i in range(n) if i not in inside]
    assert comm.new_group(outside, use_local_synchronization=True) is None
    group = comm.new_group(inside, use_local_synchronization=True)
    inside.sort()
    assert isinstance(group, comm.ProcessGroup)
    assert comm.get_group_rank(group, rank) == inside.index(rank)
    assert comm.get_process_group_ranks(group) == inside
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    groups = [comm.new_group(pair, use_local_synchronization=True) for _ in range(2)]
    assert groups[0].group_name != groups[1].group_name
    for one in groups:
        outs = [torch.tensor([-1, -1]) for _ in range(one.size())]
        comm.all_gather(outs, torch.tensor([rank // 2, rank]), group=one)
        assert [out.tolist() for out in outs] == [[rank // 2, pair[0]], [rank // 2, pair[1]]]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_membership_and_warnings(transport):
    run_ranks(membership_and_warnings, 2, transport)


def long_timeouts():
    """No clock overflows, of Python's locks, of Gloo's (292 years) or of the compiled engine."""
    x, other = torch.ones(2), 1 - comm.get_rank()
    comm.barrier(timeout=timedelta.max)
    group = comm.new_group(timeout=timedelta.max)
    comm.all_reduce(x, group=group, async_op=True).wait(timedelta.max)
    message = comm.isend(x, other, group) if comm.get_rank() else comm.irecv(x, other, group)
    message.wait(timedelta.max)
    comm.get_group().set_timeout(timedelta.max)
    comm.all_reduce(x)
    comm.monitored_barrier(timeout=timedelta.max)
    assert x.tolist() == [4.0, 4.0]
    with pytest.raises(comm.DistTimeoutError):
        comm.irecv(x, other).wait(0)
    comm.barrier()
    if comm.get_rank() == 0:
        with pytest.raises(comm.DistTimeoutError, match="Rank 1 failed to pass monitoredBarrier in 0 s"):
            comm.monitored_barrier(timeout=timedelta(0))
    comm.barrier()


@pytest.mark.parametrize("transport", ["shm", "gloo", "thread"])
def test_the_longest_timeouts(transport):
    run_ranks(long_timeouts, 2, transport, timeout=40.0)


def membership_and_warnings():
    membership()
    if comm.get_backend() != "thread":  # catching warnings is not safe among threads
        warned_outside()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sequence_numbers_and_local_groups(transport):
    run_ranks(sequences_and_locals, 4, transport)


def sequences_and_locals():
    sequence_numbers()
    local_groups()


@pytest.mark.parametrize("ranks", [[0, 0], [5], [], [-1]])
def test_groups_that_cannot_be(ranks):
    with pytest.raises(ValueError, match="new_group: ranks"):
        run_alone(lambda: comm.new_group(ranks))


def test_life_of_the_default_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="has not been initialized"):
        comm.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="RANK is not in the environment"):
        comm.init_process_group("null")
    with pytest.raises(ValueError, match="outside a world of 2"):
        comm.init_process_group("null", rank=2, world_size=2)
    with pytest.raises(ValueError, match="is not an address"):
        comm.init_process_group("null", "udp://x", rank=0, world_size=1)
    with pytest.raises(ValueError, match="unknown backend"):
        comm.init_process_group("carrier-pigeon", rank=0, world_size=1)
    with pytest.raises(ValueError, match="twice"):
        run_alone(lambda: comm.init_process_group("null", rank=0, world_size=1))
    left = run_alone(comm.get_group)
    with pytest.raises(ValueError, match="not registered"):
        comm.all_reduce(torch.ones(1), group=left)


def test_a_wrong_world_size_is_told():
    store = comm.HashStore()
    comm.init_process_group("null", world_size=1, rank=0, store=store)
    comm.destroy_process_group()
    with pytest.raises(ValueError, match="says world_size 3, another rank says 1"):
        comm.init_process_group("null", world_size=3, rank=0, store=store)
    assert not comm.is_initialized()


def test_node_local_rank(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        comm.get_node_local_rank()
    assert comm.get_node_local_rank(fallback_rank=2) == 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert comm.get_node_local_rank(fallback_rank=123) == 1
    assert comm.get_node_local_rank() == 1


def test_debug_level(monkeypatch):
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    comm.set_debug_level_from_env()
    assert comm.get_debug_level() is comm.DebugLevel.OFF
    for mode in ("OFF", "oFf", "INFO", "INfO", "DETAIL", "DeTaIl"):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", mode)
        comm.set_debug_level_from_env()
        assert comm.get_debug_level() is comm.DebugLevel[mode.upper()]
    for mode in ("foo", "0", "1", "-1"):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", mode)
        with pytest.raises(ValueError, match="The value of TORCH_DISTRIBUTED_DEBUG must"):
            comm.set_debug_level_from_env()
    comm.set_debug_level(comm.DebugLevel.OFF)


# Reduce operators -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_reduce_ops_copy_pickle_and_compare(op):
    assert isinstance(op, comm.ReduceOp)
    whole = comm.ReduceOp(op)
    for one in (op, whole):
        assert copy.copy(one) == op
        assert copy.deepcopy(one) == op
        assert pickle.loads(pickle.dumps(one)) == op
    assert whole == whole  # noqa: PLR0124 - equality is what is tested
    assert whole == op
    assert whole != "abc"
    assert op != "abc"
    assert op != whole
    assert None not in (op, whole)
    assert "abc" not in (op, whole)
    assert hash(op) == hash(whole)


@pytest.mark.parametrize("factor", [2.0, torch.tensor(1.0)])
def test_premul_sum(factor):
    op = comm.premul_sum(factor)
    assert isinstance(op, comm.ReduceOp)
    assert copy.copy(op) == op
    assert copy.deepcopy(op) == op
    assert pickle.loads(pickle.dumps(op)) == op
    x = torch.ones(2)
    run_alone(lambda: comm.all_reduce(x, op))
    assert x.tolist() == [float(factor)] * 2


def test_an_unknown_reduction_is_told():
    with pytest.raises(ValueError, match="unknown reduction 'median'"):
        run_alone(lambda: comm.all_reduce(torch.ones(1), "median"))


# Backends written in Python ---------------------------------------------------------------------------------------


class DummyWork(comm.Work):
    def wait(self, timeout=5.0):
        return True


class Dummy(comm.ProcessGroup):
    def getBackendName(self):
        return "Dummy"

    def allgather(self, output_tensor_lists, input_tensor_list, opts=None):
        for outs, tensor in zip(output_tensor_lists, input_tensor_list, strict=True):
            for out in outs:
                out.copy_(tensor)
        return DummyWork()

    def allreduce(self, tensor_list, opts=None):
        for tensor in tensor_list:
            tensor.add_(2)
        return DummyWork()

    def barrier(self, opts=None):
        store, key = comm.default_store(), "TEST:DummyProcessGroup:barrier"
        if self.rank() == 0:
            while store.add(key, 0) < self.size() - 1:
                pass
        else:
            store.add(key, 1)
        return DummyWork()

    def broadcast(self, tensor_list, opts=None):
        for tensor in tensor_list:
            tensor.add_(1)
        return DummyWork()

    def reduce_scatter(self, output_tensor_list, input_tensor_lists, opts=None):
        for out, parts in zip(output_tensor_list, input_tensor_lists, strict=True):
            out.copy_(parts[self.rank()])
        return DummyWork()

    def send(self, tensor_list, dst, tag=0):
        for tensor in tensor_list:
            tensor.add_(1)
        return DummyWork()

    def recv(self, tensor_list, src, tag=0):
        for tensor in tensor_list:
            tensor.add_(2)
        return DummyWork()


def create_dummy(store, group_rank, group_size, timeout):
    return Dummy(group_rank, group_size)


def dummy_world(backend, store_path, rank):
    comm.Backend.register_backend("dummy", create_dummy)
    comm.init_process_group(backend, f"file://{store_path}", rank=rank, world_size=2)
    tensor = torch.ones(2, 2) * 7
    outs = [torch.zeros(2, 2) for _ in range(2)]
    comm.all_gather(outs, tensor)
    assert all(torch.equal(out, tensor) for out in outs)
    comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.ones(2, 2) * 9)
    tensor = torch.zeros(2, 2)
    comm.broadcast(tensor, 0, async_op=True).wait()
    assert torch.equal(tensor, torch.ones(2, 2))
    out = torch.zeros(2, 2)
    comm.reduce_scatter(out, [torch.ones(2, 2) for _ in range(2)])
    assert torch.equal(out, torch.ones(2, 2))
    tensor = torch.zeros(2, 2)
    comm.send(tensor, (rank + 1) % 2)
    assert torch.equal(tensor, torch.ones(2, 2))
    with pytest.raises(ValueError, match="Invalid destination rank"):
        comm.send(tensor, comm.get_rank())
    tensor = torch.zeros(2, 2)
    comm.recv(tensor, (rank + 1) % 2)
    assert torch.equal(tensor, torch.zeros(2, 2) + 2)
    with pytest.raises(comm.DistBackendError, match="Dummy does not implement all_to_all"):
        comm.all_to_all([tensor, tensor], [tensor, tensor])
    comm.barrier()
    comm.destroy_process_group()


def dummy_ranks(backend, folder):
    rank = comm.get_rank()
    comm.destroy_process_group()
    dummy_world(backend, f"{folder}/{backend.replace(':', '-')}", rank)
    comm.init_process_group("gloo", f"file://{folder}/after", rank=rank, world_size=2)


@pytest.mark.parametrize("backend", ["dummy", "cpu:dummy,cuda:dummy"])
def test_a_backend_written_in_python(backend, tmp_path):
    run_ranks(dummy_ranks, 2, "gloo", (backend, str(tmp_path)))


def test_backend_names():
    assert Dummy(0, 1).name() == "Dummy"
    comm.Backend.register_backend("dummy", create_dummy)
    assert comm.Backend.DUMMY == "dummy"
    assert comm.Backend._plugins["DUMMY"].creator_fn is create_dummy
    assert comm.is_backend_available("dummy")
    assert not comm.is_backend_available("carrier-pigeon")
    assert comm.is_ucc_available() == comm.is_backend_available("ucc")
    expected = {
        comm.Backend.GLOO: "cpu:gloo,cuda:gloo",
        comm.Backend.NCCL: "cuda:nccl",
        comm.Backend.MPI: "cpu:mpi,cuda:mpi",
        comm.Backend.UCC: "cpu:ucc,cuda:ucc",
        comm.Backend.SHM: "cpu:shm",
        "DUMMY": "cpu:dummy,cuda:dummy",
        "dummy": "cpu:dummy,cuda:dummy",
        "cpu:dummy,cuda:nccl": "cpu:dummy,cuda:nccl",
        "cpu:shm,cuda:nccl": "cpu:shm,cuda:nccl",
    }
    for given, wanted in expected.items():
        assert str(comm.BackendConfig(given)) == wanted
    for given in ("cpu:gloo,cuda:nccl,", "cpu:gloo,cuda:nccl,cpu:dummy", "cpu:", "nope"):
        with pytest.raises(ValueError, match="backend"):
            comm.BackendConfig(given)
    with pytest.raises(ValueError, match="built in"):
        comm.Backend.register_backend("gloo", create_dummy)


@pytest.mark.parametrize("backend", ["shm", "thread", "null", "gloo"])
def test_every_collective_on_every_backend_alone(backend):
    def body():
        group = comm.get_group()
        assert (group.rank(), group.size(), group.name()) == (0, 1, backend)
        x = torch.ones(2, 2)
        comm.reduce(x, 0)
        comm.broadcast(x, 0)
        comm.all_reduce(x)
        comm.all_reduce_coalesced([x, x])
        comm.all_gather([x.clone()], x)
        comm.reduce_scatter(x.clone(), [x])
        comm.all_to_all([x.clone()], [x])
        comm.all_to_all_single(torch.zeros(2, 2), x)
        comm.scatter(x, [x.clone()])
        comm.gather(x, [x.clone()])
        comm.barrier()
        assert torch.equal(x, torch.ones(2, 2))

    run_alone(body, backend)


def test_optional_backend_and_device_without_one():
    assert run_alone(comm.get_backend, None) == "shm"
    meta = torch.ones(2, device="meta")
    with pytest.raises(ValueError, match="no backend for meta tensors"):
        run_alone(lambda: comm.all_reduce(meta), "cpu:thread,cuda:null")
