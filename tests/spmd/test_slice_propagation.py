"""What no plan splits is made in pieces for readers that want a piece: masks, positions, and what they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.spmd.test_expand import compare, rows_of_everything
from wholestep import comm
from wholestep.capture_call import capture
from wholestep.ir import info
from wholestep.spmd.expand.expand import expand
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.plans.global_view import state_placements

BATCH, LENGTH, WIDTH = 6, 7, 4


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def masked(x: Tensor) -> Tensor:
    """Attention under a mask for each row of the batch, rows weighted by their place."""
    places = torch.arange(LENGTH)
    seen = (places[None, :] <= places[:, None])[None].expand(BATCH, LENGTH, LENGTH)
    bias = torch.zeros(BATCH, LENGTH, LENGTH).masked_fill(~seen, float("-inf"))
    weights = torch.arange(3, 3 + 2 * BATCH, 2)[:, None, None] + x.new_ones(BATCH, 1, 1)
    return (((x @ x.transpose(1, 2) + bias).softmax(-1) @ x) * weights).square().mean()


def laid_otherwise(x: Tensor) -> Tensor:
    """A cut of the whole has gaps in memory that a piece has not; the reader sees it in another shape."""
    table = torch.full((LENGTH, BATCH, WIDTH), 2.0).cumsum(0).transpose(0, 1) + 1
    return (x * table).reshape(-1).square().mean() + (x.transpose(1, 2) @ table).sum()


def read_whole_too(x: Tensor) -> Tensor:
    """A value that somebody wants whole stays whole."""
    scale = torch.arange(BATCH).to(x.dtype) + 1
    return (x * scale[:, None, None]).sum() * scale.square().sum()


def drawn(x: Tensor) -> Tensor:
    """Random numbers are drawn for the whole."""
    return (x * (torch.rand(BATCH, LENGTH, WIDTH) + 1)).square().mean()


STEPS: list[Callable[[Tensor], Tensor]] = [masked, laid_otherwise, read_whole_too]


def train(fn: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    loss = fn(model(x))
    loss.backward()
    return loss


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fn", STEPS)
def test_ranks_compute_what_one_device_does(fn: Callable[[Tensor], Tensor], ranks: int) -> None:
    compare(train, fn, nn.LayerNorm(WIDTH), torch.randn(BATCH, LENGTH, WIDTH), ranks=ranks)


def lengths(fn: Callable[[Tensor], Tensor], rank: int) -> dict[str, set[int]]:
    """Operators of one rank of two, each with the sizes of the first dimension of what it gives."""
    step = capture(train, (fn, nn.LayerNorm(WIDTH), torch.randn(BATCH, LENGTH, WIDTH)), {}, differentiable=False)
    rest = state_placements(step[1].step, rows_of_everything, AxisGroup("", 2, rank))
    comm.init_process_group("null", rank=rank, world_size=2)
    try:
        mine = expand(step[1].step, group=AxisGroup(comm.get_group().group_name, 2, rank), placements=rest)
    finally:
        comm.destroy_process_group()
    found: dict[str, set[int]] = {}
    for node in mine.graph.nodes:
        if node.op == "call_function" and isinstance(info(node).value, Tensor) and info(node).value.dim():
            found.setdefault(str(node.target), set()).add(info(node).value.shape[0])
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mask_is_made_for_the_rows_of_the_rank(rank: int) -> None:
    found, mine = lengths(masked, rank), BATCH // 2
    for name in ("aten.zeros.default", "aten.masked_fill.Scalar", "aten.bitwise_not.default", "aten.new_ones.default"):
        assert found[name] == {mine}
    assert found["aten.arange.start_step"] == {mine} and BATCH not in found["aten.expand.default"]
    assert "aten.slice.Tensor" not in found


def test_what_is_read_whole_or_drawn_stays_whole() -> None:
    assert BATCH in lengths(read_whole_too, 0)["aten._to_copy.default"]
    assert lengths(drawn, 0)["aten.rand.default"] == {BATCH}
