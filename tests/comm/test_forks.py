"""Forked processes of ranks: their calls are errors, and the ranks go on unharmed."""

import atexit
import gc
import multiprocessing
import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import wholestep.comm.torch_backend  # noqa: F401 - the import registers the backend
from wholestep import comm
from wholestep.testing import run_ranks


def in_a_fork(fn):
    """What ``fn`` gives in a forked process, which then ends by its exit handlers."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        try:
            result = fn()
        except BaseException as failure:  # noqa: BLE001 - the parent shows it
            result = repr(failure)
        os.write(into, pickle.dumps(result))
        os.close(into)
        atexit._run_exitfuncs()
        gc.collect()
        os._exit(0)
    os.close(into)
    with open(out, "rb") as file:
        result = pickle.load(file)
    os.waitpid(child, 0)
    return result


def refused(*calls):
    """How many calls are the error of a fork."""
    count = 0
    for call in calls:
        with pytest.raises(comm.DistBackendError, match="forked from .*rank.* spawn"):
            call()
        count += 1
    return count


def everything(group, work, message, left):
    x = torch.ones(4)
    outs = [torch.ones(4), torch.ones(4)]
    assert comm.get_rank() in (0, 1)
    assert comm.get_world_size(group) == 2
    count = refused(
        lambda: comm.all_reduce(x), lambda: comm.all_reduce(x, async_op=True), lambda: comm.all_reduce(x, group=group),
        lambda: comm.broadcast(x, 0), lambda: comm.all_gather(outs, x), lambda: comm.reduce(x, 0),
        lambda: comm.all_gather_into_tensor(torch.ones(8), x), lambda: comm.reduce_scatter(x, outs),
        lambda: comm.all_to_all(outs, [x, x]), lambda: comm.barrier(), lambda: comm.send(x, 1 - comm.get_rank()),
        lambda: comm.recv(x, 1 - comm.get_rank()), lambda: comm.all_gather_object([None, None], 1),
        lambda: work.wait(), lambda: message.wait(), lambda: comm.new_group([0, 1]), comm.monitored_barrier,
    )  # fmt: skip
    comm.destroy_process_group()
    mine = comm.HashStore()
    comm.init_process_group("shm", store=mine, world_size=1, rank=0)
    comm.all_reduce(x)
    if left is not None:
        taken = comm.empty(1024, shared=True)
        taken.fill_(7)
    comm.destroy_process_group()
    return count


everything.__test__ = False


def ranks_that_fork():
    rank = comm.get_rank()
    shm = comm.get_backend() == "shm"
    group = comm.new_group([0, 1])
    x = torch.ones(4)
    for _ in range(3):
        comm.all_reduce(torch.ones(4))
        comm.all_reduce(torch.ones(4), async_op=True).wait()
    left = comm.empty(1024, shared=True) if shm else None
    if shm:
        comm.empty(1024, shared=True).fill_(3)  # goes back to the pool at once
    peer, y = 1 - rank, torch.ones(20000)
    message = comm.isend(x, peer) if rank == 0 else comm.irecv(x, peer)
    work = comm.all_reduce(y, async_op=True)
    counts = [in_a_fork(lambda: everything(group, work, message, left)) for _ in range(2)]
    message.wait()
    work.wait()
    assert (y == 2).all()
    again = comm.empty(1024, shared=True) if shm else None
    assert again is None or not (again == 7).any()
    for number in range(4):
        comm.all_reduce(x := torch.full((4,), float(number)))
        assert (x == 2 * number).all()
    return counts


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_calls_of_forks_are_errors_and_the_ranks_go_on(transport):
    assert run_ranks(ranks_that_fork, 2, transport) == [[17, 17]] * 2


def fork_during_collectives():
    """While another thread is in the middle of collectives."""
    stop, seen = threading.Event(), []

    def reduce():
        group = comm.new_group([0, 1])
        while True:
            comm.all_reduce(flag := torch.tensor([float(stop.is_set())]), "max", group)
            comm.all_reduce(x := torch.ones(50000), group=group)
            seen.append(bool((x == 2).all()))
            if flag:
                return

    thread = threading.Thread(target=reduce)
    thread.start()
    while len(seen) < 3:
        pass
    counts = [in_a_fork(lambda: refused(comm.barrier, lambda: comm.all_reduce(torch.ones(3)))) for _ in range(5)]
    stop.set()
    thread.join()
    comm.barrier()
    return counts, all(seen)


def test_a_fork_in_the_middle_of_a_collective_harms_nobody():
    assert run_ranks(fork_during_collectives, 2) == [([2] * 5, True)] * 2


class Numbers(torch.utils.data.Dataset):
    """Items whose workers ask for the rank, and try to communicate."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + comm.get_rank() + refused(comm.barrier)


def loading(folder):
    rank = comm.get_rank()
    total = sum(int(batch.sum()) for batch in DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context="fork"))
    comm.all_reduce(x := torch.tensor([total]))
    dist.init_process_group("shm", f"file://{folder}/meet", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3))

    def child():
        with pytest.raises(RuntimeError, match="forked from rank"):
            dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    dist.all_reduce(y := torch.ones(3))
    dist.destroy_process_group()
    return int(x), process.exitcode, y.tolist()


def test_workers_of_a_loader_and_children_of_torchs_groups(tmp_path):
    run_ranks_daemons = run_ranks(loading_in_a_process, 2, "shm", (str(tmp_path),))
    assert run_ranks_daemons == [(2 * (28 + 8) + 8, 0, [2.0] * 3)] * 2


def loading_in_a_process(folder):
    multiprocessing.current_process()._config["daemon"] = False  # a rank of a test may have no children else
    return loading(folder)
