"""Sharding strategies: the ways in which one call can run on shards of its operands, along one mesh axis.

A rule takes a `Call`, with its values as one device has them, and gives strategies: placements of the operands, and the
placements of the results that the same call on the local operands then gives. That everything can be replicated goes
without saying. Most rules name the dimensions of operands and results by letters, as `einsum` does: a dimension that
is split in an operand is split in every other tensor with that letter; where a result lacks the letter, the local
results are addends (`Partial`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from wholestep.comm.ops.functional_collectives import piece
from wholestep.fake_evaluate import evaluate
from wholestep.ir import add_call, info, set_info
from wholestep.nested import tensors_of
from wholestep.spmd.expand.calls import Call, R, arguments_of, exchanged, with_arguments
from wholestep.spmd.expand.graph_edits import Writer
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Op, Partial, Placement, Shard, local_shape
from wholestep.torch_compat import OpOverload

aten, collectives = torch.ops.aten, torch.ops.wholestep

_SIZES = ("size", "input_sizes", "input_size", "self_size")  # arguments that give the result's shape
VIEWS = (aten.view.default, aten._unsafe_view.default)

Names = Sequence[str | None]  # a letter for each dimension; None: cannot be split


@dataclass
class Build(Writer):
    """Adds the calls of one rank that stand for a call of the whole step, whose record they have.

    Attributes:
        group: the ranks of the axis.
        number_of: this rank's node for a node of the whole step that gives a number.
    """

    group: AxisGroup
    number_of: Callable[[fx.Node], fx.Node] = lambda number: number

    def same(self, call: Call, ins: Sequence[fx.Node], /, **changed: Any) -> fx.Node:
        """The call itself on local operands, some arguments exchanged by name."""
        args, kwargs = exchanged(call.args, call.kwargs, ins, self.number_of)
        return self.as_recorded(call.target, *with_arguments(call.target, args, kwargs, **changed), changed.get("size"))

    def local(self, call: Call, strategy: Strategy, ins: Sequence[fx.Node]) -> fx.Node:
        """The call itself on local operands: arguments that say the result's shape say that of this rank's."""
        target, sizes = call.target, {}
        if isinstance(target, OpOverload) and strategy.outs and isinstance(strategy.outs[0], Shard):
            shape = local_shape(call.results[0].shape, strategy.outs[:1], [self.group])
            names = [one.name for one in arguments_of(target) if str(one.type) == "List[int]"]
            sizes = {name: list(shape) for name in names if name in _SIZES}
        if target in VIEWS:
            ins = [self.viewable(ins[0], sizes.get("size", call.args[1]))]
        return self.same(call, ins, **sizes)

    def as_recorded(self, target: Any, args: Any, kwargs: Any, shape: Sequence[int] | None = None) -> fx.Node:
        """A call that stands for the whole step's own, whose record has the value of a number, and of a factory's.

        Args:
            shape: of what a factory gives, where it is another.
        """
        node, value = add_call(self.graph, target, args, kwargs), self.record.value
        has_operand = any(next(tensors_of(info(one).value), None) is not None for one in node.all_input_nodes)
        if has_operand and next(tensors_of(value), None) is not None:
            value = evaluate(None, target, args, kwargs)
        elif shape is not None:
            with value.fake_mode:
                value = value.new_empty(shape)
        return set_info(node, replace(self.record, value=value))

    def viewable(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A value that can be seen in another shape, copied where its strides do not allow it."""
        try:
            evaluate(None, aten.view.default, (node, list(shape)), {})
        except (RuntimeError, ValueError):  # operators of torch written in Python raise the second
            return self.clone(node)
        return node

    def collective(self, name: str, *args: Any, names: tuple[str, ...] = ()) -> fx.Node:
        """A collective over the axis, waited for at once; ``names`` are of what is sent."""
        started = self.call(getattr(collectives, name).default, *args, self.group.name, names=names)
        return self.call(collectives.wait.default, started)

    def all_reduce(self, node: fx.Node, op: Op = "sum") -> fx.Node:
        """The reduction of a value over the ranks."""
        return self.collective("all_reduce", node, op)

    def shard(self, node: fx.Node, dim: int) -> fx.Node:
        """This rank's shard of a whole value."""
        return self.call(aten.slice.Tensor, node, dim, *self.piece(info(node).value.shape[dim]))

    def pad(self, node: fx.Node, dim: int, before: int, after: int, value: float = 0) -> fx.Node:
        """More elements of a dimension, before and after those there are."""
        below = [0, 0] * (info(node).value.dim() - 1 - dim)
        return self.call(aten.constant_pad_nd.default, node, [*below, before, after], value)

    def piece(self, length: int) -> tuple[int, int]:
        """Where this rank's piece of a dimension of the whole starts and stops."""
        return piece(length, self.group.size, self.group.rank)

    def picks(self, node: fx.Node) -> list[fx.Node]:
        """The tensors of a call's results."""
        return [self.pick(node, i) for i, one in enumerate(info(node).value) if isinstance(one, torch.Tensor)]


@dataclass(frozen=True)
class Decomposed:
    """As a strategy's `emit`: the call comes down to others, each of which is expanded by rules of its own.

    Attributes:
        function: gives what a call gives, of the call and its arguments; None: torch's decomposition of the operator.
    """

    function: Callable[..., Any] | None = None


Emit = Callable[[Build, Call, Sequence[fx.Node]], Sequence[fx.Node]] | Decomposed


@dataclass(frozen=True)
class Strategy:
    """One way to run a call on parts.

    Attributes:
        ins: placements of the operands.
        outs: placements of the results.
        emit: adds other calls than the same one on the local operands; takes these, gives the local results.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    emit: Emit | None = None


Rule = Callable[[Call], Iterable[Strategy]]


@dataclass(frozen=True)
class Dims:
    """The dimensions of a call by letters.

    Attributes:
        ins, outs: names for the dimensions of each operand and result.
        reduced: how results that lack a letter are reduced; a letter that is neither here nor in every result is
            not split.
        added: operands that are summands of the result: where it is reduced, they are addends.
        emit: for all rows.
    """

    ins: Sequence[Names]
    outs: Sequence[Names]
    reduced: Mapping[str, Op] = field(default_factory=dict)
    added: frozenset[int] = frozenset()
    emit: Emit | None = None

    def strategies(self, call: Call) -> Iterator[Strategy]:
        """One strategy for each letter that can be split."""
        for letter in dict.fromkeys(name for names in (*self.ins, *self.outs) for name in names if name):
            strategy = self.strategy(letter)
            if strategy is not None and _can_split(letter, self, call):
                yield strategy

    def strategy(self, letter: str) -> Strategy | None:
        """The strategy of one letter, of whatever sizes its dimensions are; None when it cannot be split."""
        ins: tuple[Placement, ...]
        ins = tuple(Shard(names.index(letter)) if letter in names else R for names in self.ins)
        if all(letter in names for names in self.outs):
            return Strategy(ins, tuple(Shard(names.index(letter)) for names in self.outs), self.emit)
        if letter not in self.reduced:
            return None
        part = Partial(self.reduced[letter])
        ins = tuple(part if i in self.added and one == R else one for i, one in enumerate(ins))
        outs = tuple(Shard(names.index(letter)) if letter in names else part for names in self.outs)
        return Strategy(ins, outs, self.emit)


def _can_split(letter: str, dims: Dims, call: Call) -> bool:
    """True when all dimensions of a letter are of one size, so that their pieces are the same."""
    sides = (*zip(dims.ins, call.values, strict=True), *zip(dims.outs, call.results, strict=True))
    return len({value.shape[names.index(letter)] for names, value in sides if letter in names}) == 1


def alphabet(count: int) -> list[str]:
    """So many letters."""
    return [chr(ord("a") + i) if i < 26 else f"a{i}" for i in range(count)]


def trailing(value: torch.Tensor, letters: Sequence[str | None], shape: Sequence[int]) -> Names:
    """Names for a tensor that is broadcast to a shape: its dimensions are the last ones, those of size 1 unnamed."""
    skipped = len(letters) - value.dim()
    return [
        letter if length == whole else None
        for letter, length, whole in zip(letters[skipped:], value.shape, shape[skipped:], strict=True)
    ]


def beside(call: Call, *dims: int) -> Iterator[Strategy]:
    """Rows that split all dimensions but some; all operands and results have these dimensions."""
    count = call.values[0].dim()
    letters: list[str | None] = [None if i in {d % count for d in dims} else a for i, a in enumerate(alphabet(count))]
    yield from Dims([letters] * len(call.values), [letters] * len(call.results)).strategies(call)


def linear(rule: Rule, *groups: tuple[int, ...], when: Callable[[Call], bool] = lambda call: True) -> Rule:
    """A rule's strategies, and those that pass addends on: for what is linear in groups of operands, or the first.

    Args:
        when: it is.
    """

    def both(call: Call) -> Iterator[Strategy]:
        yield from rule(call)
        if when(call):
            yield from linear_strategies(call, [group for group in groups or [(0,)] if max(group) < len(call.values)])

    return both


def linear_strategies(call: Call, groups: Iterable[Sequence[int]]) -> Iterator[Strategy]:
    """Rows in which some operands together are addends, the others whole: what is linear in those operands."""
    outs = tuple(Partial() for _ in call.results)
    if not all(_is_real(value) for value in call.results):
        return
    for group in groups:
        if all(_is_real(call.values[i]) for i in group):
            yield Strategy(tuple(Partial() if i in group else R for i in range(len(call.values))), outs)


def _is_real(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
