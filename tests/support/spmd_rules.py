"""The judge of sharding rules: each row that a rule gives, run on the parts it names, against the whole call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from wholestep import comm
from wholestep.comm.ops.functional_collectives import piece
from wholestep.ir import GETITEM, NodeInfo, info, set_info
from wholestep.nested import tensors_of
from wholestep.spmd import rules
from wholestep.spmd.expand.call_expansion import built
from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.strategy import Build, Strategy
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Opaque, Partial, Placement, Shard
from wholestep.spmd.rules.pointwise import columns_of, is_on_lists, of_columns
from wholestep.testing import run_ranks
from wholestep.torch_compat import FakeTensorMode, below_autograd


@dataclass(eq=False)
class Sample:
    """One call on small real tensors.

    Attributes:
        own: for an operand that only kernels read: what a rank has, given its parts of the other operands.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    own: Callable[..., torch.Tensor] | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def __str__(self) -> str:
        shown = tree_map(lambda a: list(a.shape) if isinstance(a, torch.Tensor) else a, (self.args, self.kwargs))
        return f"{rules.name_of(self.target)}{shown[0]}{shown[1] or ''}"


@functools.cache
def call_of(sample: Sample, group: AxisGroup) -> tuple[fx.Node, list[Call]]:
    """A whole step's node for a sample, and its call; of an operator on lists the calls of its columns."""
    mode, graph = FakeTensorMode(), fx.Graph()

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return set_info(graph.placeholder(f"x{len(graph.nodes)}"), NodeInfo(mode.from_tensor(leaf)))

    args, kwargs = tree_map(take, (sample.args, sample.kwargs))
    node = graph.call_function(sample.target, args, kwargs)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: info(n).value)
    with mode, torch.no_grad(), below_autograd():
        set_info(node, NodeInfo(sample.target(*args, **kwargs)))
    whole = Call.of(node, group)
    return node, list(columns_of(whole)) if is_on_lists(node.target) else [whole]


@dataclass
class Trial:
    """One row of one call, and what the ranks make of it."""

    sample: Sample
    column: int
    strategy: Strategy
    operands: list[torch.Tensor]
    wanted: list[torch.Tensor]
    ranks: int
    index: int = 0

    def __str__(self) -> str:
        return f"{self.sample} on {self.ranks} ranks: {shown(self.strategy)}"

    @functools.cached_property
    def parts(self) -> list[list[torch.Tensor]]:
        """What each rank holds of each operand."""
        sides = [parts_of(v, p, self.ranks) for v, p in zip(self.operands, self.strategy.ins, strict=True)]
        parts = [list(one) for one in zip(*sides, strict=True)] if sides else [[] for _ in range(self.ranks)]
        for index in (i for i, p in enumerate(self.strategy.ins) if isinstance(p, Opaque)):
            assert self.sample.own is not None
            for mine in parts:
                mine[index] = self.sample.own(*mine[:index], *mine[index + 1 :])
        return parts

    def program(self, group: AxisGroup) -> fx.GraphModule:
        """This rank's graph."""
        node, calls = call_of(self.sample, group)
        call, graph = calls[self.column], fx.Graph()
        mode = next(tensors_of([value for one in calls for value in one.values])).fake_mode  # type: ignore[attr-defined]
        ins = [set_info(graph.placeholder(f"x{i}"), NodeInfo(mode.from_tensor(part)))
               for i, part in enumerate(self.parts[group.rank])]  # fmt: skip
        build = Build(graph, info(node), group)
        if self.strategy.emit is not None:
            strategy = list(rules.strategies(call))[self.index]
            outs = list(built(build, call, strategy, ins))
        elif is_on_lists(node.target):
            (outs,) = of_columns(build, Call.of(node, group), [call], [ins])
        else:
            outs = list(leaves(graph, build.local(call, self.strategy, ins)))
        graph.output(tuple(outs))
        graph.lint()
        gm = fx.GraphModule(torch.nn.Module(), graph)
        gm.meta["values"] = [info(one).value for one in outs]
        return gm

    def judge(self, found: list[list[torch.Tensor]]) -> None:
        """Compares what all ranks hold with the whole results."""
        for place, (want, placement) in enumerate(zip(self.wanted, self.strategy.outs, strict=True)):
            if isinstance(placement, Opaque):
                continue
            got = [outs[place] for outs in found]
            for rank, part in enumerate(got):
                assert part.shape == part_of(want, placement, self.ranks, rank).shape, f"result {place}: {part.shape}"
            if isinstance(placement, Partial):
                got = [sum(got[1:], got[0]) if placement.op == "sum" else reduced(got, placement.op)] * self.ranks
                placement = R
            for rank, part in enumerate(got):
                close(part, part_of(want, placement, self.ranks, rank))


def leaves(graph: fx.Graph, node: fx.Node) -> Iterator[fx.Node]:
    """Nodes for all tensors that a node gives."""
    value = info(node).value
    if isinstance(value, torch.Tensor):
        yield node
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            picked = graph.call_function(GETITEM, (node, index))
            yield from leaves(graph, set_info(picked, NodeInfo(one)))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    loose = want.dtype in (torch.float32, torch.bfloat16)
    bounds = {"rtol": 2e-2 if want.dtype == torch.bfloat16 else 1e-4, "atol": 1e-5} if loose else {}
    bounds = bounds or {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(got, want, equal_nan=True, **bounds)


def reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    folds = {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}
    return functools.reduce(folds[op], parts)


def part_of(value: torch.Tensor, placement: Placement, ranks: int, rank: int) -> torch.Tensor:
    """What a rank holds of a value that is not in addends."""
    if not isinstance(placement, Shard):
        return value
    start, stop = piece(value.shape[placement.dim], ranks, rank)
    return value.narrow(placement.dim, start, stop - start)


def parts_of(
    value: torch.Tensor, placement: Placement, ranks: int, generator: torch.Generator | None = None
) -> list[torch.Tensor]:
    """What each rank holds; addends are random."""
    if not isinstance(placement, Partial):
        return [part_of(value, placement, ranks, rank).clone() for rank in range(ranks)]
    assert placement.op == "sum" and value.dtype != torch.bool, "operands are addends of sums"
    noise = [torch.randn(value.shape, generator=generator).to(value.dtype) for _ in range(ranks - 1)]
    return [*noise, value - sum(noise)]


def shown(strategy: Strategy) -> str:
    """A row in a few letters: placements of operands, of results; * for other calls."""
    sides = [" ".join(map(letter, side)) for side in (strategy.ins, strategy.outs)]
    return f"{sides[0]} → {sides[1]}{'*' if strategy.emit else ''}"


def letter(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Opaque):
        return "O"
    return "R" if placement == R else "P" if placement == Partial() else f"P({placement.op})"  # type: ignore[union-attr]


def trials_of(sample: Sample, ranks: int, extra: Sequence[Strategy] = ()) -> Iterator[Trial]:
    """All rows of a sample's calls; ``extra`` for rows to be judged beside."""
    _, calls = call_of(sample, AxisGroup("", ranks, 0))
    torch.manual_seed(0)
    result = sample.target(*sample.args, **sample.kwargs)
    for column, call in enumerate(calls):
        real = iter(sample.tensors)
        places = dict(zip(_nodes(call), real, strict=False))
        operands = [places[node] for node in call.operands]
        wanted = list(tensors_of(result)) if len(calls) == 1 and not is_on_lists(sample.target) else None
        if wanted is None:
            parts = [r for r in result if r] if isinstance(result[0], (list, tuple)) else [result]
            wanted = [one[column] for one in parts]
        for index, strategy in enumerate([*rules.strategies(call), *extra]):
            yield Trial(sample, column, strategy, operands, wanted, ranks, index)


def _nodes(call: Call) -> list[fx.Node]:
    """The placeholders of a sample, in order."""
    graph = call.operands[0].graph
    return [node for node in graph.nodes if node.op == "placeholder"]


def run_all(trials: Sequence[Trial], ranks: int) -> list[list[Any]]:
    """In each rank, as a thread: its results of each trial, or the error."""
    lock, gate = threading.Lock(), threading.Barrier(ranks)
    for trial in trials:
        assert trial.parts  # drawn here, once for all ranks
    bad: set[int] = set()

    def rank() -> list[Any]:
        group = AxisGroup("", ranks, comm.get_rank())
        programs: list[Any] = []
        for number, trial in enumerate(trials):
            with lock:
                try:
                    programs.append(trial.program(group))
                except Exception as error:
                    programs.append(error)
                    bad.add(number)
        gate.wait()
        return [run(p, t.parts[group.rank]) if i not in bad else p
                for i, (p, t) in enumerate(zip(programs, trials, strict=True))]  # fmt: skip

    return run_ranks(rank, ranks, transport="thread", timeout=300)


def run(program: fx.GraphModule, operands: Sequence[torch.Tensor]) -> Any:
    """The results of a rank's graph; the error where it fails, or gives other shapes than its records say."""
    try:
        found = list(program(*[one.clone() for one in operands]))
        for got, said in zip(found, program.meta["values"], strict=True):
            unknown = said.dtype == torch.uint8 and said.numel() == 0  # a workspace: the kernel says how large
            same = (got.shape, got.dtype) == (said.shape, said.dtype)
            assert unknown or same, f"{got.shape} {got.dtype}, recorded as {said}"
        return found
    except Exception as error:
        return error


Extra = Callable[[Sample], Sequence[Strategy]]


def failures(samples: Sequence[Sample], ranks: int, extra: Extra = lambda sample: ()) -> list[str]:
    """Judges every row of every sample; gives what is wrong, in words."""
    trials = [t for sample in samples for t in trials_of(sample, ranks, extra(sample))]
    found = run_all(trials, ranks)
    wrong = []
    for number, trial in enumerate(trials):
        outcomes = [one[number] for one in found]
        errors = [one for one in outcomes if isinstance(one, Exception)]
        try:
            assert not errors, f"{type(errors[0]).__name__}: {errors[0]}"
            trial.judge(outcomes)
        except AssertionError as error:
            wrong.append(f"{trial}: {str(error)[:500]}")
    return wrong
