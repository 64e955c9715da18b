"""Our transport under torch.distributed: its collectives, stock DDP and FSDP2, against Gloo."""

import gc
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.checkpoint import async_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from wholestep import comm
from wholestep.comm import torch_backend
from wholestep.testing import run_ranks


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))


def made_by_hand(rank, n, folder, of):
    """What methods of a group give that no `init_process_group` made, as torch's own groups serve without it."""
    store, limit = dist.FileStore(f"{folder}/{of}", n), timedelta(seconds=60)
    group = torch_backend.ShmProcessGroup(store, rank, n, limit) if of == "shm" else dist.ProcessGroupGloo(
        store, rank, n, limit)  # fmt: skip
    x = torch.arange(3.0) + rank
    group.broadcast([x]).wait()  # root 0, as of torch's options
    group.allreduce([x]).wait()
    gathered = [[torch.zeros(3) for _ in range(n)]]
    group.allgather(gathered, [x * rank]).wait()
    with pytest.raises(RuntimeError, match="one for each of the 2 ranks" if of == "shm" else "invalid output tensor"):
        group.allgather([gathered[0][1:]], [x])
    work = group.barrier()
    work.wait()
    if of == "shm":
        for call in (group.allreduce, group.broadcast, lambda given: group.allgather(gathered * 2, given)):
            with pytest.raises(RuntimeError, match="single-element"):  # one device a process
                call([x, x])
        name = group.group_name
        assert group._get_backend(torch.device("cpu")) is group
        with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
            group._get_backend(torch.device("cuda"))
        del group, work
        gc.collect()
        with pytest.raises(ValueError, match="not registered"):
            comm.get_world_size(name)
    return x, gathered


def by_hand(folder):
    rank, n = comm.get_rank(), comm.get_world_size()
    return [made_by_hand(rank, n, folder, of) for of in ("gloo", "shm")]


def test_groups_made_by_hand(tmp_path):
    for theirs, ours in run_ranks(by_hand, 2, args=(str(tmp_path),)):
        assert torch.equal(theirs[0], ours[0])
        assert all(torch.equal(a, b) for one, two in zip(theirs[1], ours[1], strict=True)
                   for a, b in zip(one, two, strict=True))  # fmt: skip


def train(wrapped, rank):
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()


def with_torch(backend, folder):
    rank, n = comm.get_rank(), comm.get_world_size()
    dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=n)
    results = []
    for kind in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        x = torch.arange(4.0) * (rank + 1)
        dist.all_reduce(x, kind)
        results.append(x)
    x = torch.full((3,), float(rank))
    dist.broadcast(x, 1)
    gathered = [torch.zeros(3) for _ in range(n)]
    dist.all_gather(gathered, torch.full((3,), float(rank)))
    moved = torch.zeros(2 * n)
    dist.all_to_all_single(moved, torch.arange(2.0 * n) + 10 * rank)
    part = torch.zeros(2)
    dist.reduce_scatter(part, [torch.ones(2) * (i + rank) for i in range(n)])
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert [one["rank"] for one in objects] == list(range(n))
    if rank == 0:
        dist.send(torch.ones(5), 1)
    if rank == 1:
        dist.recv(came := torch.zeros(5), 0)
        assert came.sum() == 5
    pair = dist.new_group([0, 1])
    dist.barrier(group=pair)
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    train(ddp, rank)
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            ddp(torch.full((8, 10), rank + 1.0)).sum().backward()
    results += [p.grad.clone() for p in ddp.parameters()]
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (n,)))
    train(sharded, rank)
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, state if rank == 0 else {}, options=options)
    async_save(sharded.state_dict(), checkpoint_id=f"{folder}/saved {backend}").result()
    results += [x, *gathered, moved, part, *[p.detach().clone() for p in ddp.parameters()]]
    results += [p.detach().full_tensor() for p in sharded.parameters()]
    dist.destroy_process_group()
    return results


def test_stock_ddp_and_fsdp2_train_as_over_gloo(tmp_path):
    ours = run_ranks(with_torch, 2, "gloo", ("shm", str(tmp_path)))
    theirs = run_ranks(with_torch, 2, "gloo", ("gloo", str(tmp_path)))
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b)


def on_two_hosts(folder):
    os.environ["WHOLESTEP_HOST"] = str(comm.get_rank())
    return with_torch("shm", folder)


def test_the_same_over_two_hosts(tmp_path):
    ours = run_ranks(on_two_hosts, 2, "gloo", (str(tmp_path),))
    theirs = run_ranks(with_torch, 2, "gloo", ("gloo", str(tmp_path)))
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b)


def ddp_beside_a_rank_that_calls_another(folder):
    rank = comm.get_rank()
    os.environ["WHOLESTEP_DUMP"] = folder
    dist.init_process_group("shm", f"file://{folder}/meet", rank=rank, world_size=2)
    ddp, x = DistributedDataParallel(torch.nn.Linear(4, 4)), torch.ones(2, 4)
    for _ in range(2):
        ddp(x).sum().backward()
    loss = ddp(x).sum()
    with pytest.raises(RuntimeError, match="disagree: rank . calls #. all_reduce") as caught:
        loss.backward() if rank == 0 else dist.all_reduce(torch.ones(3))
    line = caught.traceback[0].lineno + 1
    dist.destroy_process_group()
    return line


def test_a_failure_under_stock_ddp_is_an_error_and_the_doctor_names_both_lines(tmp_path):
    line, _ = run_ranks(ddp_beside_a_rank_that_calls_another, 2, "gloo", (str(tmp_path),))
    found = comm.diagnose([tmp_path])
    assert "does not agree" in found
    assert f"rank 0 calls all_reduce of float32 [20] at {__file__}:{line}" in found
    assert f"rank 1 calls all_reduce of float32 [3] at {__file__}:{line}" in found


def begin(folder, timeout=60):
    rank = comm.get_rank()
    dist.init_process_group("shm", f"file://{folder}/meet", timeout, world_size=2, rank=rank)
    return rank


def waited_for_by_several_threads(folder):
    rank = begin(folder, timedelta(seconds=60))
    for _ in range(100):
        x, y = torch.ones(3000), torch.full((3000,), float(rank))
        works = [dist.all_reduce(x, async_op=True), dist.isend(y, 1) if rank == 0 else dist.irecv(y, 0)]
        # strided: divided, copied back once
        works.append(dist.all_reduce(z := torch.ones(6, 50)[:, ::2], dist.ReduceOp.AVG, async_op=True))
        threads = [threading.Thread(target=work.wait) for work in works for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (x == 2).all() and (y == 0).all() and (z == 1).all()
    small = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(100)])
    ddp = DistributedDataParallel(small, bucket_cap_mb=0.00001)
    for _ in range(3):
        ddp(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    return True


def test_works_are_waited_for_by_any_number_of_threads(tmp_path):
    assert run_ranks(waited_for_by_several_threads, 2, "gloo", (str(tmp_path),)) == [True, True]


def destroyed_while_threads_wait(folder):
    rank = begin(folder, timedelta(seconds=60))
    if rank == 1:
        comm.barrier()
        return ["", "", ""]
    works = [dist.all_reduce(torch.ones(3000), async_op=True), dist.irecv(torch.ones(3), 1)]
    found = []

    def wait(work):
        try:
            work.wait()
        except comm.DistError as failure:
            found.append(type(failure).__name__)

    threads = [threading.Thread(target=wait, args=(work,)) for work in (*works, works[0])]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    dist.destroy_process_group()
    for thread in threads:
        thread.join()
    comm.barrier()
    return found


def test_a_group_is_destroyed_while_threads_wait(tmp_path):
    found, _ = run_ranks(destroyed_while_threads_wait, 2, "gloo", (str(tmp_path),))
    assert found == ["DistBackendError"] * 3


def callbacks_that_communicate(folder):
    rank = begin(folder, timedelta(seconds=5))

    def again(future):
        dist.all_reduce(y := future.value()[0] * 2)
        return dist.all_reduce(y, async_op=True).get_future().wait()[0]

    results = [dist.all_reduce(torch.ones(3000), async_op=True).get_future().then(again).wait() for _ in range(5)]
    assert all((one == 16).all() for one in results)
    works = [dist.all_reduce(torch.ones(3000), async_op=True) for _ in range(4)]
    futures = [work.get_future() for work in works]
    # each waits for a later one, and by then two threads are in callbacks
    chained = [futures[i].then(lambda _, later=futures[i + 1]: later.wait()[0]) for i in range(3)]
    assert all((one.wait() == 2).all() for one in chained)
    dist.barrier()
    if rank == 0:  # the other rank never comes to the second collective
        alone = dist.all_reduce(torch.ones(3000), async_op=True).get_future().then(again)
        with pytest.raises(RuntimeError, match="waited 5 s|has left the group"):
            alone.wait()
    else:
        dist.all_reduce(torch.ones(3000))
        comm.barrier()
    if rank == 0:
        comm.barrier()
    return True


def test_callbacks_of_futures_may_communicate_and_wait(tmp_path):
    assert run_ranks(callbacks_that_communicate, 2, "gloo", (str(tmp_path),)) == [True, True]


def under_dynamo(folder, backend):
    rank = comm.get_rank()
    dist.init_process_group(backend, f"file://{folder}/{backend}", rank=rank, world_size=2)
    losses = []
    for wrap in (DistributedDataParallel, lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"))):
        wrapped = wrap(model())
        for step in (wrapped, torch.compile(wrapped, backend="eager"), wrapped):
            torch.manual_seed(rank)
            loss = step(torch.randn(8, 10)).square().mean()
            loss.backward()
            losses.append(loss.item())
    dist.destroy_process_group()
    return losses


def test_ddp_and_fsdp1_under_dynamo_are_as_over_gloo(tmp_path):
    ours, theirs = [run_ranks(under_dynamo, 2, "gloo", (str(tmp_path), backend)) for backend in ("shm", "gloo")]
    assert ours == theirs


def compiled_with_torchs_names(folder):
    rank = begin(folder, timedelta(seconds=30))

    def step(x):
        y = x * 2
        dist.all_reduce(y)
        work = dist.broadcast(z := x + 1, 1, async_op=True)
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.t().contiguous().t())
        work.wait()
        return y + 1, z, *parts

    compiled, results = ws.compile(step, fullgraph=True), []
    for scale in (1.0, 3.0):
        x = torch.arange(6.0).view(2, 3) * scale + rank
        results.append(all(torch.equal(a, b) for a, b in zip(compiled(x), step(x), strict=True)))
    dist.destroy_process_group()
    return results, len(compiled.graphs)


def test_collectives_of_torch_in_a_compiled_step_are_traced(tmp_path):
    assert run_ranks(compiled_with_torchs_names, 2, "gloo", (str(tmp_path),)) == [([True, True], 1)] * 2


def functional_collectives(x, rank):
    """Those that give new tensors, which nobody needs to wait for; which are read differs by rank."""
    group, row = dist.group.WORLD, x.expand(6).contiguous()
    one = functional.all_reduce(x * 2, "sum", group)
    other = functional.all_reduce(x * 3, "max", group)
    parts = functional.reduce_scatter_tensor(row + rank, "sum", 0, group)
    several = functional.all_reduce_coalesced([x + rank, row * 2], "sum", group)
    read = [functional.all_gather_tensor((row * rank).view(2, 3), 0, group) + 1, other + 1, several[1] * 2]
    read.append(functional.all_to_all_single(row * (rank + 1), None, None, group))
    read.append(functional.broadcast(x + rank, 1, group))
    for _ in range(4):  # memory for what the collectives have read
        row = row.sin() + 1
    return [one + 1, parts * 2, row, *read] if rank else [row, *read]


def objects_and_messages(x, rank):
    dist.all_gather_object(found := [None, None], rank)
    other, work = torch.empty_like(x), dist.isend(x + rank, 1 - rank)
    dist.recv(other, 1 - rank)
    work.wait()
    return [other, torch.tensor(found)]


def in_place(x, rank):
    dist.all_reduce(y := x + rank)
    work = dist.all_gather(parts := [torch.empty_like(x) for _ in range(2)], y * rank, async_op=True)
    work.wait()
    return [y, *parts]


def compiled_on(backend, folder):
    rank = comm.get_rank()
    dist.init_process_group(backend, f"file://{folder}/{backend}", timedelta(seconds=60), world_size=2, rank=rank)
    results = []
    for step in (functional_collectives, objects_and_messages, in_place):
        for options in ({"fullgraph": True}, {"fullgraph": False}):
            compiled = ws.compile(step, **options)
            for scale in (1.0, 3.0, 5.0, 7.0):
                x = torch.full((1,), scale)
                expected = step(x, rank)
                try:
                    results.append(all(map(torch.equal, compiled(x, rank), expected)))
                except ws.errors.UnsupportedError as refusal:
                    results.append((step.__name__, f"{refusal.what} {refusal.remedy}"))
                    break
    dist.destroy_process_group()
    return results


def test_functional_collectives_are_recorded_and_those_of_torchs_engines_refused_by_line(tmp_path):
    for found in run_ranks(compiled_on, 2, "gloo", ("gloo", str(tmp_path))):
        (one, objects), (other, words) = [refused for refused in found if isinstance(refused, tuple)]
        assert (one, other) == ("objects_and_messages", "in_place")
        assert "changes which memory a tensor uses" in objects
        assert words.startswith("torch.distributed's allreduce on a group of its own engines") and '"shm"' in words
        assert [one for one in found if one is not True] == [(one, objects), (other, words)] and len(found) == 18
    for found in run_ranks(compiled_on, 2, "gloo", ("shm", str(tmp_path))):
        assert [one for one in found if one is not True] == [(one, objects)] and len(found) == 21
