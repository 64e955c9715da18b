"""Optimizer updates of equal parameters: recorded for the first of a kind, copied with other operands for the rest.

torch's optimizers update one parameter after another by the same operators. Where two parameters, their gradients and
their states have the same metadata, the second one's calls are the first one's, on other tensors: no operator is run
for them, on fakes or otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import fx

from wholestep.errors import CaptureError
from wholestep.ir import copy_node, info, is_effectful, set_info
from wholestep.nested import tensors_of
from wholestep.patches import Replacement, original
from wholestep.torch_compat import SINGLE_TENSOR_UPDATES, no_modes
from wholestep.trace.functionalize.aliases import Ref
from wholestep.trace.record.recorder import Recorder


def single_tensor_updates() -> Iterator[tuple[Any, str, FunctionType]]:
    """torch's own functions that update a list of parameters, not what somebody has put there, and where they are."""
    for owner, name in SINGLE_TENSOR_UPDATES:
        update = original(owner, name) if hasattr(owner, name) else None
        if isinstance(update, FunctionType) and update.__code__.co_filename == owner.__file__:
            yield owner, name, update


@dataclass
class Row:
    """One parameter, its gradient and its states.

    Attributes:
        refs: the tensors as views of their memory.
        kind: what makes rows alike; None for one of a kind of its own.
    """

    tensors: list[torch.Tensor]
    refs: list[Ref]
    kind: tuple[Any, ...] | None


@dataclass
class Update:
    """The calls that update one row.

    Attributes:
        calls: those that depend on the row's tensors, in order.
        reads: what held the tensors before.
        news: what those hold after that are written; None for the others.
        counts: how often each was written.
    """

    calls: list[fx.Node]
    reads: list[fx.Node]
    news: list[fx.Node | None]
    counts: list[int]


class LikeUpdates:
    """Stands in the place of torch's functions that update a list of parameters one by one."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.inputs, self.graph = recorder, recorder.inputs, recorder.builder.graph

    def patches(self) -> Iterator[Replacement]:
        """What is patched while a step is traced."""
        return ((owner, name, partial(self._update, update)) for owner, name, update in single_tensor_updates())

    def _update(self, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        place = self.recorder.builder.provenance
        place.optimizers += 1  # also where no optimizer's step calls
        try:
            self._each(update, args, kwargs)
        finally:
            place.optimizers -= 1

    def _each(self, update: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        columns = [a for a in args if type(a) is list and len(a) == len(args[0])]
        if len(args[0]) < 2 or torch.is_grad_enabled():
            return update(*args, **kwargs)
        known: dict[Any, Update | None] = {}
        for index, given in enumerate(zip(*columns, strict=True)):
            row = self._row(given)
            if row.kind is not None and (found := known.get(row.kind)) is not None:
                self._copy(found, row)
                continue
            singles = [[value] for value in given]
            rest = iter(singles)
            only = [next(rest) if any(a is column for column in columns) else a for a in args]
            if row.kind is None or row.kind in known:
                update(*only, **kwargs)
            else:
                found = self._recorded(partial(update, *only, **kwargs), row, kwargs)
                if found is not None or index > 0:  # the first row's may be the first to read what all rows do
                    known[row.kind] = found
            for column, (value,) in zip(columns, singles, strict=True):
                if value is not column[index]:  # a state that is made now
                    column[index], known[row.kind] = value, None
        return None

    def _row(self, given: tuple[torch.Tensor | None, ...]) -> Row:
        with no_modes():
            tensors = [t for t in given if t is not None]
            if any(t.layout != torch.strided or t.is_inference() for t in tensors):
                return Row(tensors, [], None)
            try:
                refs = [self.inputs.ref(t) for t in tensors]
                reads = {ref.read() for ref in refs}
            except CaptureError as error:
                raise self.recorder.numbers.refused(error) from None
            symbols = any(type(size) is not int for ref in refs for size in ref.geometry.shape)
            if symbols or len(reads) < len(refs) or len({id(ref.storage) for ref in refs}) < len(refs):
                return Row(tensors, refs, None)
            facts = [(ref.geometry, ref.parent is None) for ref in refs]
            flags = [(tensor.device, tensor.requires_grad) for tensor in tensors]
            return Row(tensors, refs, (*(value is None for value in given), *facts, *flags))

    def _recorded(self, update: Callable[[], None], row: Row, options: dict[str, Any]) -> Update | None:
        """Records an update; None where another row's may not be a copy of it."""
        with no_modes():
            shared = [self.inputs.ref(t).read() for t in tensors_of(options)]
            reads, contents = [ref.read() for ref in row.refs], [ref.storage.value for ref in row.refs]
            counts = [tensor._version for tensor in row.tensors]
        size, asked = len(self.graph.nodes), self._asked()
        update()
        with no_modes():
            made = self.recorder.builder.since(size)
            depend, calls = set(reads), list[fx.Node]()
            for node in made:
                if any(operand in depend for operand in node.all_input_nodes):
                    depend.add(node)
                    calls.append(node)
            others = {operand for node in calls for operand in node.all_input_nodes} - {*made, *reads, *shared}
            now = [ref.storage.value for ref in row.refs]
            news = [None if new is old else new for new, old in zip(now, contents, strict=True)]
            if (
                asked != self._asked()
                or any(map(is_effectful, made))
                or any(not isinstance(info(node).value, (int, float)) for node in others)
                or any(value is not None and ref.parent is not None for value, ref in zip(news, row.refs, strict=True))
            ):
                return None
            counts = [t._version - before for t, before in zip(row.tensors, counts, strict=True)]
            return Update(calls, reads, news, counts)

    def _asked(self) -> tuple[int, ...]:
        """How much is known that may be of one row alone: inputs, questions about them, decisions."""
        inputs, numbers = self.inputs, self.recorder.numbers
        return len(inputs.items), len(inputs.asked), len(inputs.reached), len(numbers.decided)

    def _copy(self, update: Update, row: Row) -> None:
        with no_modes():
            place = {old: ref.read() for old, ref in zip(update.reads, row.refs, strict=True)}

            def here(node: fx.Node) -> fx.Node:
                return place.get(node, node)

            for call in update.calls:
                place[call] = set_info(copy_node(self.graph, call, here), replace(info(call)))
            for ref, new, tensor, count in zip(row.refs, update.news, row.tensors, update.counts, strict=True):
                if new is not None:
                    ref.write(here(new))
                for _ in range(count):
                    torch.autograd.graph.increment_version([tensor])
