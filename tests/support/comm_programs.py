"""A random program of collectives, run on a transport and compared with the plainest arithmetic on all ranks' inputs.

Every rank draws the same program and everybody's inputs from one seed, so that each can work out what it must get.
"""

import random

import torch

from wholestep import comm
from wholestep.comm.engines.reference_reduce import naive_reduce
from wholestep.comm.process_group import Options
from wholestep.comm.reduce_op import as_op

REDUCED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
NOT_BY_GLOO = [torch.int16, torch.uint16, torch.uint32, torch.uint64]
MOVED = [*REDUCED, *NOT_BY_GLOO, torch.bool, torch.complex64, torch.float8_e5m2]
SIZES = [0, 1, 2, 7, 64, 1000, 16384, 40000, 70001]


def tensor(draw, rank, shape, dtype, spread=7):
    """Small whole numbers: sums are exact, so that results must be equal to the bit."""
    generator = torch.Generator().manual_seed(draw * 1009 + rank)
    x = torch.randint(0, spread, shape, generator=generator).to(dtype)
    return x


def place(x, layout):
    """The same values in ordinary, shared or strided memory."""
    if layout == "shared":
        y = comm.empty(x.shape, dtype=x.dtype, shared=True)
    elif layout == "strided" and x.numel():
        y = torch.empty(2 * x.numel(), dtype=x.dtype)[::2].view(x.shape) if x.dim() == 1 else torch.empty_like(x)
    else:
        y = torch.empty_like(x)
    return y.copy_(x)


def reduced(rng):
    return rng.choice(REDUCED if comm.get_backend() == "gloo" else REDUCED + NOT_BY_GLOO)


def check(got, wanted, words):
    assert got.dtype == wanted.dtype and torch.equal(got, wanted), f"{words}: {got} is not {wanted}"


def all_reduce(r, n, draw, rng, layout, later):
    count, dtype = rng.choice(SIZES), reduced(rng)
    ops = ["sum", "min", "max", "avg"] + (["product"] if n <= 3 else [])
    ops += [] if dtype.is_floating_point else ["band", "bor", "bxor"]
    op = rng.choice(ops)
    parts = [tensor(draw, i, (count,), dtype, 3 if op == "product" else 7) for i in range(n)]
    x = place(parts[r], layout)
    work = comm.all_reduce(x, op, async_op=True)
    later(
        work, lambda: check(x, naive_reduce(parts, Options(as_op(op)[0])), f"all_reduce {op} {dtype} {count} {layout}")
    )


def reduce(r, n, draw, rng, layout, later):
    count, root = rng.choice(SIZES), rng.randrange(n)
    parts = [tensor(draw, i, (count,), torch.float32) for i in range(n)]
    x = place(parts[r], layout)
    work = comm.reduce(x, root, async_op=True)
    wanted = naive_reduce(parts, Options()) if r == root else parts[r]
    later(work, lambda: check(x, wanted, f"reduce {count}"))


def broadcast(r, n, draw, rng, layout, later):
    count, dtype, root = rng.choice(SIZES), rng.choice(MOVED), rng.randrange(n)
    x = place(tensor(draw, r, (count,), dtype), layout)
    work = comm.broadcast(x, root, async_op=True)
    later(work, lambda: check(x, tensor(draw, root, (count,), dtype), f"broadcast {dtype} {count} {layout}"))


def all_gather(r, n, draw, rng, layout, later):
    count, dtype = rng.choice(SIZES), rng.choice(MOVED)
    x = place(tensor(draw, r, (count,), dtype), layout)
    outs = [torch.empty(count, dtype=dtype) for _ in range(n)]
    if rng.random() < 0.5:
        work = comm.all_gather(outs, x, async_op=True)
    else:
        flat = torch.empty(n * count, dtype=dtype)
        outs = list(flat.view(n, count))
        work = comm.all_gather_into_tensor(flat, x, async_op=True)

    def compare():
        for i, out in enumerate(outs):
            check(out, tensor(draw, i, (count,), dtype), f"all_gather {dtype} {count} {layout}")

    later(work, compare)


def reduce_scatter(r, n, draw, rng, layout, later):
    count, dtype, op = rng.choice(SIZES), reduced(rng), rng.choice(["sum", "max", "avg"])
    parts = [tensor(draw, i, (n * count,), dtype) for i in range(n)]
    out, x = torch.empty(count, dtype=dtype), place(parts[r], layout)
    if rng.random() < 0.5:
        work = comm.reduce_scatter(out, list(x.view(n, count)) if count else [x] * n, op, async_op=True)
    else:
        work = comm.reduce_scatter_tensor(out, x, op, async_op=True)
    wanted = naive_reduce([p.view(n, count)[r] for p in parts], Options(as_op(op)[0]))
    later(work, lambda: check(out, wanted, f"reduce_scatter {op} {dtype} {count} {layout}"))


def gather(r, n, draw, rng, layout, later):
    count, root = rng.choice(SIZES), rng.randrange(n)
    x = place(tensor(draw, r, (count,), torch.int32), layout)
    outs = [torch.empty(count, dtype=torch.int32) for _ in range(n)] if r == root else None
    work = comm.gather(x, outs, root, async_op=True)

    def compare():
        for i, out in enumerate(outs or []):
            check(out, tensor(draw, i, (count,), torch.int32), f"gather {count}")

    later(work, compare)


def scatter(r, n, draw, rng, layout, later):
    count, root = rng.choice(SIZES), rng.randrange(n)
    whole = tensor(draw, root, (n, count), torch.float32)
    out = torch.empty(count)
    work = comm.scatter(out, list(whole) if r == root else None, root, async_op=True)
    later(work, lambda: check(out, whole[r], f"scatter {count}"))


def all_to_all(r, n, draw, rng, layout, later):
    top = rng.choice([0, 1, 5, 3000, 90000])
    table = [[rng.randrange(top + 1) for _ in range(n)] for _ in range(n)]
    x = place(tensor(draw, r, (sum(table[r]), 2), torch.float32), layout)
    coming = [table[i][r] for i in range(n)]
    out = torch.empty(sum(coming), 2)
    work = comm.all_to_all_single(out, x, coming, table[r], async_op=True)
    parts = [tensor(draw, i, (sum(table[i]), 2), torch.float32).split(table[i])[r] for i in range(n)]
    later(work, lambda: check(out, torch.cat(parts), f"all_to_all {table}"))


def message(r, n, draw, rng, layout, later):
    count, tag = rng.choice(SIZES), rng.randrange(3)
    if n == 1:
        return
    x, came = place(tensor(draw, r, (count,), torch.float32), layout), torch.empty(count)
    sent = comm.isend(x, (r + 1) % n, tag=tag)
    source = (r - 1) % n
    received = comm.irecv(came, source, tag=tag)

    def compare():
        sent.wait()
        check(came, tensor(draw, source, (count,), torch.float32), f"message {count}")

    later(received, compare)


def barrier(r, n, draw, rng, layout, later):
    later(comm.barrier(async_op=True), lambda: None)


STEPS = [
    all_reduce,
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    gather,
    scatter,
    all_to_all,
    message,
    barrier,
]


def run_program(seed, steps, layouts=("plain", "strided")):
    """Runs ``steps`` collectives, up to eight of them under way at once, and returns how many were compared."""
    rng, r, n = random.Random(seed), comm.get_rank(), comm.get_world_size()
    waiting, compared = [], 0

    def finish(keep):
        nonlocal compared
        while len(waiting) > keep:
            work, compare = waiting.pop(0)
            work.wait()
            compare()
            compared += 1

    for step in range(steps):
        before = len(waiting)
        rng.choice(STEPS)(r, n, seed * 100003 + step, rng, rng.choice(layouts), lambda *entry: waiting.append(entry))
        assert len(waiting) <= before + 1
        finish(rng.choice([0, 0, 0, 7]))
    finish(0)
    return compared
