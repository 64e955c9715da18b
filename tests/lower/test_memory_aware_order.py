"""Memory by order: calls that free more than they take come first; rows are overwritten by kernels that read them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.lower.test_interpreter import compare
from tests.support.lower_programs import Builder, arena_bytes
from wholestep.lower.fusion import blocking_collectives
from wholestep.lower.plan.placement import ACCUMULATE, ROW_BY_ROW
from wholestep.testing import run_ranks

aten = torch.ops.aten


def test_the_gradient_of_a_weight_comes_before_that_of_its_input() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(512, 32)

    @ws.compile(fullgraph=True)
    def step() -> None:
        model(x).square().mean().backward()

    step()
    lines = [line for line in step.code.split("# backward")[1].splitlines() if "torch.mm(" in line]
    of_weights = ["torch.mm(t_default" in line for line in lines]
    assert of_weights == [True, False, True, False, True]  # autograd's order is the other one


@pytest.mark.parametrize("kept_by", ["nobody", "a later call", "the caller"])
def test_a_value_that_is_read_later_or_returned_is_not_freed(kept_by: str) -> None:
    b = Builder()
    x, w = b.input("x", torch.randn(256, 256), "batch"), b.input("w", torch.randn(256, 256), "batch")
    b.phase = "backward"
    kept = b.call(aten.exp.default, x)
    first = b.call(aten.mm.default, w, x)
    outs = [first, b.call(aten.sum.dim_IntList, kept, [0])]
    if kept_by == "a later call":
        outs.append(b.call(aten.mm.default, kept, first))
    elif kept_by == "the caller":
        outs.append(kept)
    code = compare(*b.finish(outs, {})).code
    assert (code.index("sum(") < code.index("mm(")) == (kept_by == "nobody")


def sharded_program(busy: bool) -> tuple[list[str], int, list[torch.Tensor]]:
    """A program whose parameters and gradients are sharded, line by line, its arena's bytes and what it computes.

    Args:
        busy: whether ranks compute on all cores, so that none is left for collectives.
    """
    blocking_collectives.cores_are_busy = lambda group: busy
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    mesh = ws.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    compiled = ws.compile(step, mesh=mesh, plan=ws.FullyShard("dp", gather="always"), fullgraph=True)
    compiled(torch.randn(512, 256))
    (program,) = compiled._capturer.known.programs.values()
    return compiled.code.splitlines(), arena_bytes(program.run), [p.grad for p in model.parameters()]


def collectives_of(lines: list[str]) -> list[str]:
    return [found[1] for line in lines if (found := re.search(r"(all_gather|reduce_scatter|all_reduce)\w*\(", line))]


def test_collectives_overlap_where_a_core_is_free_and_else_run_where_they_are_waited_for() -> None:
    """A wait takes nothing and frees a gradient, and yet stays late: what runs before it overlaps the collective."""
    (lines, arena, found), (busy, less, same) = (run_ranks(sharded_program, 2, args=(busy,))[0] for busy in (0, 1))
    last_product = max(i for i, line in enumerate(lines) if "torch.mm(" in line)
    waits = [i for i, line in enumerate(lines) if "wait(reduce_scatter" in line]
    assert len(waits) == 4 and min(waits) > last_product
    gathers = [i for i, line in enumerate(busy) if "all_gather_blocking(" in line]
    assert len(gathers) == 7 and all("mm(" in "".join(busy[i + 1 : i + 3]) for i in gathers)
    assert collectives_of(busy) == collectives_of(lines)  # so that ranks may differ
    assert less < arena
    assert all(map(torch.equal, found, same))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("op", sorted(ROW_BY_ROW, key=str), ids=str)
def test_rows_may_be_overwritten(op: torch._ops.OpOverload, dtype: torch.dtype, dim: int) -> None:
    for shape in ((3, 5, 7), (2, 300, 33), (40, 17, 129)):
        torch.manual_seed(0)
        one, two = (torch.randn(shape).to(dtype) for _ in range(2))
        other = (two.softmax(dim), dim, dtype) if "backward" in str(op) else (dim, False)
        over = one.clone()
        into = {"grad_input" if op is aten._softmax_backward_data.default else "out": over}
        assert op.overloadpacket.out(over, *other, **into) is over
        assert torch.equal(over, op(one, *other))
        turned = one.permute(2, 0, 1)  # results are contiguous, whatever the operands: it is no home for them
        if "backward" not in str(op):
            assert op(turned, *other).stride() != turned.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("op", sorted(ACCUMULATE, key=str), ids=str)
def test_products_are_added_to_their_first_operand_where_it_is(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    name = op.overloadpacket.__name__
    for rows, inner, columns in ((3, 5, 7), (33, 64, 17)):
        torch.manual_seed(0)
        one, two = torch.randn(4, rows, inner).to(dtype), torch.randn(4, inner, columns).to(dtype)
        factors = {"addmm": (one[0], two[0]), "addmv": (one[0], two[0, :, 0])}.get(name, (one, two))
        for beta in (0, 1, 2):
            old = torch.randn((rows, columns)[: 1 if name == "addmv" else 2]).to(dtype)
            old = old.expand(4, rows, columns).clone() if name == "baddbmm" else old
            over = old.clone()
            assert op.overloadpacket.out(over, *factors, beta=beta, out=over) is over
            assert torch.equal(over, op(old, *factors, beta=beta))


def test_large_vocabularies_take_two_buffers_of_logits() -> None:
    """Log-softmax lies over the logits, its gradient over that of the loss."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 5000), torch.randn(64, 4), torch.randint(5000, (64,))

    @ws.compile(fullgraph=True)
    def step() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    loss = step()
    torch.testing.assert_close(loss, nn.functional.cross_entropy(model(x), y).detach(), rtol=0, atol=0)
    assert "out=addmm_default" in next(line for line in step.code.splitlines() if "_log_softmax(" in line)
    gradient = next(line for line in step.code.splitlines() if "_log_softmax_backward_data(nll" in line)
    assert "out=nll_loss_backward_default" in gradient
