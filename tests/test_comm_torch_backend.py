"""Our transport under torch.distributed: its collectives, stock DDP and FSDP2, against Gloo."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep.comm.torch_backend  # noqa: F401 - the import registers the backend
from wholestep import comm
from wholestep.testing import run_ranks


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))


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
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (n,)))
    train(sharded, rank)
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
