"""Expansion of whole steps: every rank's graph, run on its parts, gives the parts of what one device gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from wholestep import comm
from wholestep.capture_call import capture
from wholestep.comm.ops.functional_collectives import piece
from wholestep.errors import UnsupportedError
from wholestep.ir import Input, StepGraph, check, info
from wholestep.spmd.expand.expand import expand
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, Replicate, Shard
from wholestep.spmd.plans.global_view import state_placements
from wholestep.spmd.plans.plan import FullyShard, TensorParallel, fully_shard, tensor_parallel
from wholestep.spmd.schedule.coalesce import coalesce
from wholestep.spmd.schedule.overlap import start_early, wait_late
from wholestep.testing import run_ranks

PlacementOf = Callable[[Input, torch.Tensor], Placement]


def rows_of_everything(item: Input, value: torch.Tensor) -> Placement:
    """Rows of batches, and of large parameters and their states."""
    split = value.dim() > 0 and (item.kind in ("batch", "tensor") or value.numel() > 20)
    return Shard(0) if split else Replicate()


def cut(value: Any, placement: Placement, group: AxisGroup) -> Any:
    """What a rank holds of a whole value."""
    if not isinstance(placement, Shard):
        return value.clone() if isinstance(value, torch.Tensor) else value
    start, stop = piece(value.shape[placement.dim], group.size, group.rank)
    return value.narrow(placement.dim, start, stop - start).clone()


def compare(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    of: PlacementOf = rows_of_everything,
    plan: FullyShard | TensorParallel | None = None,
    passes: Sequence[Callable[[StepGraph], StepGraph]] = (),
) -> list[str]:
    """Runs a step whole, and expanded on thread ranks, by a plan or by placements; gives rank 0's operators."""
    traced = capture(fn, args, {}, differentiable=False)[1]
    step = traced.step
    real = [item.value for item in traced.inputs]
    values = [v.detach() if isinstance(v, torch.Tensor) else v for v in real[: len(step.placeholders)]]
    rest = state_placements(step, of if plan is None else plan.placement_of, AxisGroup("", ranks, 0))
    torch.manual_seed(1)
    want = step.gm(*values)
    lock = threading.Lock()

    def expand_by(step: StepGraph, group: AxisGroup) -> StepGraph:
        if isinstance(plan, FullyShard):
            return fully_shard(step, group=group, plan=plan)
        if plan is None:
            return expand(step, group=group, placements=rest)
        return tensor_parallel(step, group=group, plan=plan)

    def rank() -> tuple[list[Any], list[str]]:
        group = comm.get_group()
        group = AxisGroup(group.group_name, ranks, group.rank())
        with lock:
            mine = expand_by(step, group)
            for transform in passes:
                mine = transform(mine)
            check(mine, "expand")
        parts = [cut(v, p, group) for v, p in zip(values, rest.inputs, strict=True)]
        return list(mine.gm(*parts)), [str(node.target) for node in mine.graph.nodes]

    torch.manual_seed(1)
    found = run_ranks(rank, ranks, transport="thread")
    for number, (outputs, _) in enumerate(found):
        for index, (whole, part) in enumerate(zip(want, outputs, strict=True)):
            placement = rest.outputs.get(index, Replicate())
            mine = cut(whole, placement, AxisGroup("", ranks, number))
            torch.testing.assert_close(part, mine, rtol=1e-10, atol=1e-12)
    return list(found[0][1])


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_mlp(how: dict[str, bool], ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))
    operators = compare(train, model, torch.optim.AdamW(model.parameters(), **how), torch.randn(5, 6), ranks=ranks)
    assert any("wholestep" in name for name in operators)


def counts(operators: list[str]) -> dict[str, int]:
    """How often each collective occurs."""
    names = [name.split(".")[1] for name in operators if name.startswith("wholestep.")]
    return {name: names.count(name) for name in sorted(set(names) - {"wait"})}


@pytest.mark.parametrize("ranks", [2, 3])
def test_fully_sharded_parameters_are_gathered_and_gradients_reduce_scattered(ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = FullyShard("dp", min_bytes=1)
    operators = compare(train, model, optimizer, torch.randn(6, 6), ranks=ranks, plan=plan)
    # two weights and biases for the forward, one weight again for the backward; four gradients; norms and loss
    assert counts(operators) == {"all_gather": 5, "all_reduce": 5, "reduce_scatter": 4}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wide_layer_on_few_rows_stays_where_it_is(ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 150), nn.ReLU(), nn.Linear(150, 150), nn.ReLU(), nn.Linear(150, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def largest(rows: int, gather: str) -> int:
        """Elements of the largest result of a call."""
        plan = FullyShard("dp", min_bytes=1, gather=gather)  # type: ignore[arg-type]
        args = model, optimizer, torch.randn(rows, 6)
        if rows == 6:
            compare(train, *args, ranks=ranks, plan=plan)
        comm.init_process_group("null", rank=0, world_size=ranks)
        try:
            step = capture(train, args, {}, differentiable=False)[1].step
            mine = fully_shard(step, group=AxisGroup(comm.get_group().group_name, ranks, 0), plan=plan)
        finally:
            comm.destroy_process_group()
        values = [info(node).value for node in mine.graph.nodes if node.op == "call_function"]
        return max(value.numel() for value in values if isinstance(value, torch.Tensor))

    assert largest(6, "always") == 150 * 150
    assert largest(6, "cheaper") == 150 * 150 // ranks
    assert largest(120, "cheaper") == 150 * 150  # now the weight is what is cheaper to move


def test_tensor_parallel_layers_meet_once_in_each_direction() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))
    plan = TensorParallel("tp", {"0": "column", "2": "row"})

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss

    assert counts(compare(step, model, torch.randn(6, 6), plan=plan)) == {"all_reduce": 1}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x.t().as_strided((5,), (2,), 1),
    "copy": lambda x: torch.as_strided_copy(x.t(), (3,), (2,)),
    "gaps": lambda x: x[:, ::2].as_strided((3,), (2,)),
    "three dimensions": lambda x: x.view(4, 3, 2).permute(2, 0, 1).as_strided((3, 3), (5, 2)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_as_strided_counts_in_the_memory_of_one_device(name: str) -> None:
    def step(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        made = (x @ weight).sin()
        loss = VIEWS[name](made).pow(3).sum() + made.mean()
        loss.backward()
        return loss

    compare(step, nn.Parameter(torch.randn(6, 6)), torch.randn(4, 6))


def test_as_strided_of_a_tensor_with_gaps_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided((4, 3), (6, 2)).copy_(x).as_strided((3,), (2,)).sin()

    with pytest.raises(UnsupportedError, match=r"strides \[6, 2\], of which each rank has a part"):
        compare(step, torch.randn(4, 3))


@pytest.mark.parametrize("ranks", [2, 3])
def test_small_collectives_are_packed_and_results_stay(ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9), nn.Linear(9, 7))
    plan = FullyShard("dp", min_bytes=1)
    arguments = (train, model, torch.optim.AdamW(model.parameters()), torch.randn(6, 6))
    operators = compare(*arguments, ranks=ranks, plan=plan, passes=[wait_late, start_early, coalesce])
    # the forward's parameters are there from the start, the backward's need what it makes before; then all gradients,
    # and their norms together
    assert counts(operators) == {"all_gather": 3, "all_reduce": 2, "reduce_scatter": 1}


def test_collectives_start_early_as_far_as_the_memory_in_flight_allows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9), nn.Linear(9, 7))
    plan = FullyShard("dp", min_bytes=1)
    arguments = (train, model, torch.optim.AdamW(model.parameters()), torch.randn(6, 6))

    def gathers_ahead(in_flight: int) -> int:
        """Gathers that are started before the first product."""
        operators = compare(*arguments, plan=plan, passes=[wait_late, partial(start_early, in_flight=in_flight)])
        return operators[: operators.index("aten.addmm.default")].count("wholestep.all_gather.default")

    one, many = (gathers_ahead(cap) for cap in (1, 1 << 20))
    assert one < 6 <= many
