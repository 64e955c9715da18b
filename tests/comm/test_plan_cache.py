"""Collectives that were called before in the same way: run by the engine without Python, and told apart from others."""

import copy
import inspect
import pickle
import sys

import pytest
import torch
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep import comm
from wholestep.comm import flight_recorder
from wholestep.comm.api import collectives, issue, plan_cache
from wholestep.comm.shared_tensors import native
from wholestep.testing import run_ranks


def never(*_args, **_kwargs):
    raise AssertionError("the call went through Python")


def calls():
    """Each quick collective, once: what it gives, flat."""
    n, rank = comm.get_world_size(), comm.get_rank()
    x, wide = torch.arange(4.0 * n) + rank, torch.empty(4 * n * n)
    part, turned = torch.empty(4), torch.empty(4 * n)
    comm.all_reduce(x)
    comm.all_reduce(x, "max")
    comm.broadcast(x, 1)
    comm.all_gather_into_tensor(wide, x)
    comm.reduce_scatter_tensor(part, x)
    comm.all_to_all_single(turned, x + rank)
    comm.barrier()
    listed = calls_with_lists(n, rank)
    last = torch.full((3,), 1 + rank, dtype=torch.int64)
    work = comm.all_reduce(last, async_op=True)
    work.wait()
    return torch.cat([x, wide, part, turned, listed, last.to(x.dtype)]).tolist(), work.result()[0] is last


def calls_with_lists(n, rank):
    """Those that take a list, and those with a root: where the lists are given differs by rank."""
    x, parts, others = torch.arange(4.0) + rank, list(torch.zeros(n, 4)), list(torch.arange(4.0 * n).view(n, 4) + rank)
    sums, root, found = x.clone(), 1, torch.zeros(4)
    comm.reduce(sums, root, "sum")
    comm.gather(x, parts if rank == root else None, root)
    comm.scatter(found, [part + 1 for part in others] if rank == 0 else None)
    all_parts, turned, mine = list(torch.zeros(n, 4)), list(torch.zeros(n, 4)), torch.zeros(4)
    comm.all_gather(all_parts, x)
    comm.reduce_scatter(mine, others)
    comm.all_to_all(turned, others)
    later = torch.zeros(n, 4)
    work = comm.gather(x + 5, list(later) if rank == root else [], root, async_op=True)
    work.wait()
    return torch.cat([sums, *parts, found, *all_parts, *turned, mine, later.view(-1)])


def in_turn():
    first = calls()
    kept = issue.launch
    issue.launch = collectives.launch = never  # that of the barrier, too
    try:
        again = calls()
    finally:
        issue.launch = collectives.launch = kept
    return first, again


def test_the_second_call_gives_the_same_without_python():
    for first, again in run_ranks(in_turn, 3, "shm"):
        assert first == again and first[1]


def of_many_sizes():
    """How many of a hundred calls, each of another size, go through Python the second time."""
    slow, kept = [], issue.launch
    some = [torch.ones(size) for size in range(1, 101)]
    for x in some:
        comm.all_reduce(x)
    issue.launch = lambda *args, **kwargs: slow.append(1) or kept(*args, **kwargs)
    try:
        for x in some:
            comm.all_reduce(x)
    finally:
        issue.launch = kept
    return len(slow)


def test_calls_of_many_sizes_have_plans():
    for slow in run_ranks(of_many_sizes, 2, "shm"):
        assert slow < 5


def profiled():
    x = torch.ones(4)
    for _ in range(2):
        comm.all_reduce(x)
    with profile(record_shapes=True) as seen:
        comm.all_reduce(x)
        comm.broadcast(x, 0, async_op=True).wait()
        comm.barrier()
    comm.all_reduce(x)
    return [(one.name, one.input_shapes) for one in seen.events() if one.name.startswith(comm.get_backend())]


@pytest.mark.parametrize("transport", ["shm", "gloo"])  # one profiler a process
def test_profiles_have_a_range_for_each_collective(transport):
    for found in run_ranks(profiled, 2, transport):
        assert [name for name, _ in found[:2]] == [f"{transport}:all_reduce", f"{transport}:broadcast"]
        assert found[0][1] == [[4]]
        assert transport == "gloo" or found[2:] == [(f"{transport}:barrier", [])]


def lists_of_other_shapes():
    n, rank = comm.get_world_size(), comm.get_rank()
    found = []
    for sizes in ([4] * n, [4] * n, [2 + r for r in range(n)], [2 + r for r in range(n)]):
        ins, outs = [torch.full((sizes[rank],), float(rank)) for _ in range(n)], [torch.zeros(s) for s in sizes]
        comm.all_to_all(outs, ins)
        found.append([out.tolist() for out in outs])
    shapes = [torch.zeros(2, 2), torch.zeros(4), torch.zeros(4, 1)]
    for _ in range(2):
        comm.all_gather(shapes, torch.ones(4))
    with pytest.raises(ValueError, match="tensor_list"):
        comm.all_gather(shapes[:2], torch.ones(4))
    return found, [one.sum().item() for one in shapes]


def test_lists_of_tensors_that_are_not_alike():
    for found, sums in run_ranks(lists_of_other_shapes, 3, "shm"):
        assert found[:2] == [[[float(r)] * 4 for r in range(3)]] * 2
        assert found[2:] == [[[float(r)] * (2 + r) for r in range(3)]] * 2
        assert sums == [4.0, 4.0, 4.0]


def other_ways():
    comm.all_reduce(torch.ones(4))
    found = []
    for tensor in (
        torch.ones(4, dtype=torch.float64), torch.ones(4, 1), torch.ones(8)[::2], torch.ones(4, dtype=torch.bool),
        torch.ones(4, dtype=torch.complex64), torch.nn.Parameter(torch.ones(4)).detach(), torch.ones(0), torch.ones(()),
    ):  # fmt: skip
        comm.all_reduce(tensor)
        found.append(tensor.double().sum().item() if not tensor.is_complex() else tensor.real.sum().item())
    x = torch.ones(4)
    comm.all_reduce(x, "min")
    found.append(x.sum().item())
    pair = comm.new_group([0, 1])
    comm.all_reduce(x, group=pair)
    found.append(x.sum().item())
    with pytest.raises(TypeError, match="tensor"):
        comm.all_reduce([1.0])
    return found


def test_other_tensors_and_groups_are_told_apart():
    for rank, found in enumerate(run_ranks(other_ways, 3, "shm")):
        assert found == [12, 12, 12, 4, 12, 12, 0, 3, 4, 8 if rank < 2 else 4]


def negated_elements():
    found = []
    for one in (torch.ones(()), torch.tensor(1 + 2j).conj().imag, torch.tensor([1 + 2j]).conj().imag):
        parts = [torch.zeros(one.shape) for _ in range(2)]
        comm.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))
        comm.all_gather(parts, one)
        found.append([part.item() for part in parts])
    return found


def test_an_element_that_is_read_as_its_negative_is_sent_as_that():
    assert run_ranks(negated_elements, 2, "shm") == [[[1, 1], [-2, -2], [-2, -2]]] * 2


def test_small_tensors_are_copied_as_by_torch_and_all_others_left():
    sources = [torch.rand(3, 4), torch.rand(()), torch.rand(2).bfloat16()]
    to = [torch.zeros_like(one) for one in sources]
    others = torch.rand(20000), torch.rand(2, 2).t(), torch.tensor([1 + 2j]).conj().imag, torch.ones(1).cfloat()
    sources += [None, torch.rand(2).double(), *others]
    to += [torch.zeros(2), torch.zeros(2), *(torch.zeros(one.shape, dtype=one.dtype) for one in others)]
    assert native.copy_small(to, sources) == [*range(3, 9)]
    assert all(torch.equal(to[i], sources[i]) for i in range(3))
    with Watching():
        assert native.copy_small(to[:1], sources[:1]) == [0]


def what_is_recorded():
    for _ in range(2):
        comm.all_reduce(torch.ones(4))
        line = sys._getframe().f_lineno - 1
    first, second = flight_recorder.records()[-2:]
    return line, first, second


def test_the_flight_recorder_has_the_same_of_both():
    for line, first, second in run_ranks(what_is_recorded, 2, "shm"):
        assert first["where"] == second["where"] == f"{__file__}:{line}"
        assert second["seq"] == first["seq"] + 1 and second["number"] == first["number"] + 1
        assert first["state"] == second["state"] == "completed"
        assert [first[k] for k in ("group", "op", "shape", "dtype")] == [
            second[k] for k in ("group", "op", "shape", "dtype")
        ]


def known_calls_that_do_not_match():
    for _ in range(2):
        comm.all_reduce(torch.ones(4))
        comm.all_reduce(torch.ones(5))
    mine = torch.ones(4 + comm.get_rank())
    with pytest.raises(comm.DistMismatchError, match=r"\[4\].*\[5\]|\[5\].*\[4\]") as caught:
        comm.all_reduce(mine)
    note = caught.value.__notes__[0]
    state = flight_recorder.records()[-1]["state"]
    with pytest.raises(comm.DistMismatchError):
        comm.all_reduce(mine, async_op=True).wait()
    after = torch.ones(4)
    comm.all_reduce(after)
    return note, state, after.tolist()


def test_a_mismatch_of_known_calls_is_an_error_on_both_sides(tmp_path):
    for note, state, after in run_ranks(known_calls_that_do_not_match, 2, "shm"):
        assert f"at {__file__}:" in note
        assert state == "failed"
        assert after == [2.0] * 4


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def while_a_mode_watches():
    x = torch.ones(4)
    comm.all_reduce(x)
    comm.all_reduce(x)
    with Watching() as mode:
        comm.all_reduce(x)
    return mode.seen, x.tolist()


def test_a_recorder_sees_known_calls():
    for seen, x in run_ranks(while_a_mode_watches, 2, "shm"):
        assert any("all_reduce_" in name for name in seen)
        assert x == [8.0] * 4


def groups_that_come_and_go(folder):
    rank, found = comm.get_rank(), []
    for turn, size in enumerate((2, 2, 3)):
        comm.destroy_process_group()
        if rank < size:
            comm.init_process_group("shm", f"file://{folder}/{turn}", rank=rank, world_size=size)
        x = torch.ones(4)
        for _ in range(2) if rank < size else ():
            comm.all_reduce(x)
        found.append(x[0].item())
        if rank >= size:
            comm.init_process_group("null", store=comm.HashStore(), rank=0, world_size=1)
            with pytest.raises(ValueError, match="GROUP"):
                comm.all_reduce(x, group="GROUP")
    return found, comm.get_group()._get_sequence_number_for_group()


def test_no_plan_outlives_its_group(tmp_path):
    for rank, (found, sequence) in enumerate(run_ranks(groups_that_come_and_go, 3, "shm", (str(tmp_path),))):
        assert found == ([4.0, 4.0, 9.0] if rank < 2 else [1.0, 1.0, 9.0])
        assert sequence == 2


def with_all_ways_to_write_a_call():
    x, wide, n = torch.ones(4), torch.empty(4 * comm.get_world_size()), comm.get_world_size()
    for _ in range(2):
        comm.all_reduce(x, "max", None, False)
        comm.all_reduce(op="max", tensor=x)
        comm.all_gather_into_tensor(wide, input_tensor=x, group=None)
        comm.broadcast(x, group_src=n - 1)
        comm.all_to_all_single(wide, wide.clone(), [4] * n, [4] * n)
    before = comm.get_group()._get_sequence_number_for_group()
    for wrong in (
        lambda: comm.all_reduce(),
        lambda: comm.all_reduce(x, tensor=x),
        lambda: comm.all_reduce(x, "max", None, False, 5),
        lambda: comm.all_reduce(x, operation="max"),
    ):
        with pytest.raises(TypeError, match="argument"):
            wrong()
    for _ in range(flight_recorder.KEPT):
        comm.barrier()
    comm.reduce_scatter_tensor(torch.empty(4), wide)  # this one goes through Python
    kept = [record["seq"] for record in flight_recorder.records()]
    return x.tolist(), kept == list(range(before + 2, before + 2 + flight_recorder.KEPT))


def test_all_ways_to_write_a_call_do_the_same():
    assert run_ranks(with_all_ways_to_write_a_call, 2, "shm") == [([1.0] * 4, True)] * 2


def test_a_collective_looks_like_the_function():
    assert list(inspect.signature(comm.broadcast).parameters) == ["tensor", "src", "group", "async_op", "group_src"]
    assert comm.all_reduce.__doc__.startswith("Reduces")
    assert comm.all_reduce.__module__ == "wholestep.comm.api.collectives"
    assert pickle.loads(pickle.dumps(comm.all_reduce)) is comm.all_reduce is copy.deepcopy(comm.all_reduce)


def test_torch_offers_what_quick_calls_need():
    assert plan_cache.available
