"""What a sharding rule says: the ways in which one call can run on parts of its operands, along one mesh axis.

A rule takes a `Call`, with its values as one device has them, and gives `Row`s: placements of the operands, and the
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

from wholestep.comm.rows import piece
from wholestep.ir import GETITEM, NodeInfo, fake_tensors, info, set_info
from wholestep.pure import Functionalized, UnderGrad
from wholestep.spmd.mesh import Line
from wholestep.spmd.placements import Op, Partial, Placement, Replicate, Shard
from wholestep.spmd.rewrite import call as add_call

R = Replicate()
collectives = torch.ops.wholestep

Names = Sequence[str | None]  # a letter for each dimension; None: cannot be split


@dataclass(frozen=True)
class Call:
    """One call of the step, as one device runs it.

    Attributes:
        target: what is called.
        args, kwargs: its arguments, nodes among them.
        operands: the nodes that give tensors, in the order of the arguments, lists flattened.
        values: theirs, of the whole shapes.
        result: fake value, whole.
        line: the ranks of the axis.
        ends: where ranks hold unequal parts, by other axes: the call as the ranks with the largest and with the
            smallest parts make it. What is to be alike on all ranks goes by these.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[fx.Node, ...]
    values: tuple[torch.Tensor, ...]
    result: Any
    line: Line
    ends: tuple[Call, Call] | None = None

    @property
    def most(self) -> Call:
        """The call as the rank with the largest parts makes it."""
        return self.ends[0] if self.ends is not None else self

    @property
    def least(self) -> Call:
        """The call as the rank with the smallest parts makes it."""
        return self.ends[1] if self.ends is not None else self

    @property
    def results(self) -> list[torch.Tensor]:
        """The tensors of the result, flattened."""
        return list(fake_tensors(self.result))

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the operator's schema; what the schema says where it is not given."""
        op = self.target.op if isinstance(self.target, (Functionalized, UnderGrad)) else self.target
        for place, one in enumerate(op._schema.arguments):
            if one.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                if place < len(self.args):
                    return self.args[place]
                return one.default_value if one.has_default_value() else default
        return default

    def _named(self) -> Iterator[tuple[str, fx.Node]]:
        """The operands with the names of the arguments that they are in."""
        op = self.target.op if isinstance(self.target, (Functionalized, UnderGrad)) else self.target
        given = [*zip((one.name for one in op._schema.arguments), self.args, strict=False), *self.kwargs.items()]
        for name, argument in given:
            for one in argument if isinstance(argument, (list, tuple)) else [argument]:
                if isinstance(one, fx.Node) and isinstance(info(one).value, torch.Tensor):
                    yield name, one

    def placed(self, /, **where: Placement) -> tuple[Placement, ...]:
        """Placements of the operands by the names of their arguments; those that are not named are whole."""
        return tuple(where.get(name, R) for name, _ in self._named())

    def by_name(self, ins: Sequence[Any]) -> dict[str, Any]:
        """What belongs to the operands, by the names of their arguments."""
        return {name: one for (name, _), one in zip(self._named(), ins, strict=True)}

    @classmethod
    def of(cls, node: fx.Node, line: Line) -> Call:
        """The call that a node of the whole step makes."""
        operands: list[fx.Node] = []

        def take(one: fx.Node) -> fx.Node:
            if isinstance(info(one).value, torch.Tensor):
                operands.append(one)
            return one

        fx.map_arg((node.args, node.kwargs), take)
        values = tuple(info(one).value for one in operands)
        made = cls(node.target, node.args, node.kwargs, tuple(operands), values, info(node).value, line)
        ends = info(node).ends
        if not line.uneven or ends is None:
            return made
        most, least = (cls.of(one, replace(line, uneven=False)) for one in ends)
        return replace(made, ends=(replace(most, line=line), replace(least, line=line)))


def exchanged(
    args: Any, kwargs: Any, local: Iterable[fx.Node], number_of: Callable[[fx.Node], fx.Node]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with local operands in place of whole ones, and this rank's numbers."""
    operands = iter(local)

    def exchange(one: fx.Node) -> fx.Node:
        return next(operands) if isinstance(info(one).value, torch.Tensor) else number_of(one)

    return fx.map_arg((tuple(args), dict(kwargs)), exchange)  # type: ignore[return-value]


def with_arguments(target: Any, args: Any, kwargs: Any, /, **changed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, some exchanged by their names in the operator's schema."""
    op = target.op if isinstance(target, (Functionalized, UnderGrad)) else target
    names = [one.name for one in op._schema.arguments]
    args, kwargs = list(args), dict(kwargs)
    for name, value in changed.items():
        if names.index(name) < len(args):
            args[names.index(name)] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


@dataclass
class Build:
    """Adds the calls of one rank to its graph.

    Attributes:
        graph: new calls go to its insertion point.
        record: of the call of the whole step that they stand for.
        line: the ranks of the axis.
        number_of: this rank's node for a node of the whole step that gives a number.
    """

    graph: fx.Graph
    record: NodeInfo
    line: Line
    number_of: Callable[[fx.Node], fx.Node]

    def same(self, call: Call, ins: Sequence[fx.Node], /, **changed: Any) -> fx.Node:
        """The call itself on local operands, some arguments exchanged by name."""
        args, kwargs = exchanged(call.args, call.kwargs, ins, self.number_of)
        args, kwargs = with_arguments(call.target, args, kwargs, **changed)
        return self.call(call.target, *args, **kwargs)

    def number(self, value: Any) -> Any:
        """A number among the call's arguments, as this rank's graph has it."""
        return self.number_of(value) if isinstance(value, fx.Node) else value

    def call(self, target: Any, *args: Any, **keywords: Any) -> fx.Node:
        """A call on nodes of this rank's graph."""
        like = self.record
        return add_call(self.graph, target, *args, phase=like.phase, keywords=keywords, seq=like.seq, where=like.where,
                        module=like.module)  # fmt: skip

    def all_reduce(self, node: fx.Node, op: Op = "sum") -> fx.Node:
        """The reduction of a value over the ranks."""
        started = self.call(collectives.all_reduce.default, node, op, self.line.group)
        return self.call(collectives.wait.default, started)

    def all_gather(self, node: fx.Node) -> fx.Node:
        """The values of all ranks, one after the other along dimension 0."""
        started = self.call(collectives.all_gather.default, node, self.line.group)
        return self.call(collectives.wait.default, started)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A value in a dtype."""
        if info(node).value.dtype == dtype:
            return node
        return self.call(torch.ops.aten._to_copy.default, node, dtype=dtype)

    def cut(self, node: fx.Node, dim: int) -> fx.Node:
        """This rank's piece of a whole value."""
        start, stop = self.piece(info(node).value.shape[dim])
        return self.call(torch.ops.aten.slice.Tensor, node, dim, start, stop)

    def piece(self, length: int) -> tuple[int, int]:
        """Where this rank's piece of a dimension of the whole starts and stops."""
        return piece(length, self.line.size, self.line.rank)

    def pick(self, node: fx.Node, index: int) -> fx.Node:
        """One item of a call's results."""
        picked = self.graph.call_function(GETITEM, (node, index))
        return set_info(picked, replace(self.record, value=info(node).value[index], ends=None))


Emit = Callable[[Build, Call, Sequence[fx.Node]], Sequence[fx.Node]]


@dataclass(frozen=True)
class Row:
    """One way to run a call on parts.

    Attributes:
        ins: placements of the operands.
        outs: placements of the results.
        emit: adds other calls than the same one on the local operands; takes these, gives the local results.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    emit: Emit | None = None


Rule = Callable[[Call], Iterable[Row]]


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

    def rows(self, call: Call) -> Iterator[Row]:
        """One row for each letter that can be split."""
        for letter in dict.fromkeys(name for names in (*self.ins, *self.outs) for name in names if name):
            row = self.row(letter)
            if row is not None and _can_split(letter, self, call):
                yield row

    def row(self, letter: str) -> Row | None:
        """The row of one letter, of whatever sizes its dimensions are; None when it cannot be split."""
        ins: tuple[Placement, ...]
        ins = tuple(Shard(names.index(letter)) if letter in names else R for names in self.ins)
        if all(letter in names for names in self.outs):
            return Row(ins, tuple(Shard(names.index(letter)) for names in self.outs), self.emit)
        if letter not in self.reduced:
            return None
        part = Partial(self.reduced[letter])
        ins = tuple(part if i in self.added and one == R else one for i, one in enumerate(ins))
        outs = tuple(Shard(names.index(letter)) if letter in names else part for names in self.outs)
        return Row(ins, outs, self.emit)


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


def holds_on_all(call: Call, length: int) -> bool:
    """True when every rank has something of a dimension: some kernels refuse tensors without elements."""
    start, stop = piece(length, call.line.size, call.line.size - 1)
    return start < stop


def some_hold_none(call: Call, operand: int, dim: int) -> bool:
    """True when a rank may have nothing of an operand's dimension: what is done about it then is done on all ranks."""
    return not holds_on_all(call, call.least.values[operand].shape[dim])


def beside(call: Call, *dims: int) -> Iterator[Row]:
    """Rows that split all dimensions but some; all operands and results have these dimensions."""
    count = call.values[0].dim()
    letters: list[str | None] = [None if i in {d % count for d in dims} else a for i, a in enumerate(alphabet(count))]
    yield from Dims([letters] * len(call.values), [letters] * len(call.results)).rows(call)


def linear_rows(call: Call, groups: Iterable[Sequence[int]]) -> Iterator[Row]:
    """Rows in which some operands together are addends, the others whole: what is linear in those operands."""
    outs = tuple(Partial() for _ in call.results)
    if not all(_is_real(value) for value in call.results):
        return
    for group in groups:
        if all(_is_real(call.values[i]) for i in group):
            yield Row(tuple(Partial() if i in group else R for i in range(len(call.values))), outs)


def _is_real(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()

