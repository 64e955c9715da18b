"""Persistent objects: the code that reads their tensors and compares what they hold, by identity and in bulk.

A module's attributes or an optimizer's state are the same objects at each call: the code refers to them directly.
Identity is strict where equality is not, and costs 15 ns a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from types import FunctionType
from typing import Any

import torch

from wholestep.capture.container_access import base_of, is_exact
from wholestep.capture.guards.bulk import ANY, flatten, hooks, layouts_of
from wholestep.capture.guards.code_writer import CodeWriter
from wholestep.capture.guards.per_call_objects import PERSISTENT, PerCallObjects
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.reachable import Container
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.capture.snapshot.user_code import is_library, is_user_class
from wholestep.capture.sources import REGISTRIES, Attr, Source

_KIND = attrgetter("layout", "requires_grad", "dtype")
_TABLES = kinds.MAPPING, kinds.ATTRIBUTES, kinds.MODULE


class PersistentObjects:
    """The containers of one snapshot that are the same at each call.

    Args:
        inputs: of the program, whose gradients are kept.

    Attributes:
        tensors: theirs, which the code has in the list ``t``.
        watched: positions in it of those that may have gradients.
        memo: what `gather` remembers.
    """

    def __init__(self, snap: Snapshot, writer: CodeWriter, per_call: PerCallObjects, inputs: Sequence[Source]) -> None:
        self._snap, self._writer, self._per_call = snap, writer, per_call
        self._read = {source.path for source in inputs}
        constant = (kinds.TENSOR, kinds.TUPLE, kinds.FROZENSET)
        self._containers = [c for c in snap.containers if id(c.owner) not in per_call.ids and c.kind not in constant]
        self.tensors: list[torch.Tensor] = []
        self.watched: list[int] = []
        self.memo = bytearray()
        self._whole: set[int] = set()
        self._nested: set[int] = set()
        self._inner: dict[int, dict[Any, Any]] = {}

    # their tensors -------------------------------------------------------------------------------------

    def _add(self, tensor: torch.Tensor) -> None:
        self._writer.tensors[id(tensor)] = f"t[{len(self.tensors)}]"
        self.tensors.append(tensor)

    def gather(self) -> None:
        """Reads every tensor into the list ``t``: whole dicts first, then one by one."""
        known, write = self._writer.tensors, self._writer
        whole = self._tables_of_tensors()
        ids = {id(table) for table in whole}
        nested = [c for c in self._containers if c.kind is kinds.MAPPING and isinstance(c.value, dict) and c.before and
                  ids.issuperset(map(id, c.before.values())) and not c.ignored and
                  all(type(key) in (str, int) for table in c.before.values() for key in table)]  # fmt: skip
        inner = [table for c in nested for table in c.before.values()]
        self._nested, self._inner = {id(c.value) for c in nested}, {id(table): table for table in inner}
        whole = [table for table in whole if id(table) not in self._inner]
        singles: list[str] = []
        for value in chain.from_iterable(map(dict.values, [*whole, *self._inner.values()])):
            self._add(value)
        for container in self._containers:
            for key in container.compared if container.kind is not kinds.SET else ():
                value = container.before[key]
                if isinstance(value, torch.Tensor) and id(value) not in known:
                    self._add(value)
                    singles.append(write.at(container, key))
        by_path = {id(c.before[key]) for c in self._snap.containers if id(c.owner) in self._per_call.ids
                   for key in c.compared}
        by_path |= {id(value) for _, value in self._snap.reachable.roots}
        by_path -= {id(key) for c in self._snap.containers if c.kind is kinds.MAPPING for key in c.before}
        for found in self._snap.tensors.values():  # in tuples, sets and keys, whose identity is compared elsewhere
            is_grad = isinstance(found.source, Attr) and found.source.key == "grad"
            if id(found.tensor) not in known and id(found.tensor) not in by_path and not is_grad:
                self._add(found.tensor)
                singles.append(write.name(found.tensor))
        self._whole = ids
        tables = write.constant([c.value for c in nested]), write.constant([tuple(table) for table in inner])
        write.lines.append(f"t = gather({write.constant(self.memo)}, {write.constant(whole)}, {', '.join(tables)})")
        write.lines.append(f"t += [{', '.join(singles)}]")
        self._compare_gradients()
        self._compare_metadata()

    def _tables_of_tensors(self) -> list[dict[Any, Any]]:
        """Dicts of nothing but tensors, each of which is in none of those before."""
        found: list[dict[Any, Any]] = []
        taken = set(self._writer.tensors)
        for container in self._containers:
            values = list(container.before.values())
            if container.kind in (kinds.MAPPING, kinds.ATTRIBUTES) and values and not container.ignored and \
                    all(isinstance(v, torch.Tensor) and id(v) not in taken for v in values) and \
                    len({id(v) for v in values}) == len(values):
                found.append(container.value)
                taken.update(map(id, values))
        return found

    def _compare_gradients(self) -> None:
        """Checks ``.grad`` and hooks of tensors that may have some; grads join the list ``t``."""
        write, tensors = self._writer, self.tensors
        own = {id(f.tensor) for f in self._snap.tensors.values() if f.kind in ("state", "grad")}
        self.watched = watched = [i for i, t in enumerate(tensors) if t.is_leaf and id(t) not in own]
        if not watched:
            return
        grads_now = [tensors[i].grad for i in watched]
        write.lines.append(f"w = {write.constant(_picker(watched))}(t)")
        write.require(f"hooks(w) == {write.constant(hooks(tuple([tensors[i] for i in watched])))}")
        write.lines.append("g = grads(w)")
        free = [self._snap.replaces_gradient_of(tensors[i]) for i in watched]
        grads = [(j, grad) for j, grad in enumerate(grads_now) if grad is not None and not free[j]]
        there = [f or grad is None for f, grad in zip(free, grads_now, strict=True)]
        if any(free):
            write.require(f"[f or x is None for f, x in zip({write.constant(free)}, g)] == {write.constant(there)}")
        else:
            write.require(f"[x is None for x in g] == {write.constant(there)}")
        if grads:
            self._compare_present(grads)

    def _compare_present(self, grads: list[tuple[int, torch.Tensor]]) -> None:
        """Gradients that are there: those that the program reads join ``t``, others may be let go while it runs."""
        write, tensors = self._writer, self._snap.tensors
        fresh = [(j, grad, tensors[id(grad)].source.path in self._read) for j, grad in grads
                 if id(grad) not in write.tensors]
        unread = [(j, _KIND(grad)) for j, grad, is_read in fresh if not is_read]
        if unread:
            write.require(f"[kind(g[j]) for j in {[j for j, _ in unread]}] == "
                          f"{write.constant([kind for _, kind in unread])}")
            write.space["kind"] = _KIND
        read = [(j, grad) for j, grad, is_read in fresh if is_read]
        if read:
            write.lines.append(f"t += [{', '.join(f'g[{j}]' for j, _ in read)}]")
        for _, grad in read:
            self._add(grad)

    def _compare_metadata(self) -> None:
        write, tensors = self._writer, self.tensors
        write.require("known(t)")
        state = {id(f.tensor) for f in self._snap.tensors.values() if f.kind in ("state", "grad")}
        checked = [i for i, t in enumerate(tensors) if id(t) not in state]
        if checked:
            picked = tuple([tensors[i] for i in checked])
            form = layouts_of(picked)
            write.require(f"{write.constant(form)}({write.constant(_picker(checked))}(t)) == "
                          f"{write.constant(form(picked))}")

    # what they hold ------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compares tables and lists in bulk, odd containers by themselves."""
        write = self._writer
        tables: list[tuple[Any, tuple[Any, ...], tuple[Any, ...], bool]] = []
        empty: tuple[list[Any], list[Any]] = [], []  # dicts, others
        lists: list[Any] = []
        for container in self._containers:
            kind, value, before = container.kind, container.value, container.before
            if id(value) in self._inner:
                continue
            special = [key for key in container.compared if self._is_special(before[key], container)]
            if not is_exact(value) and kind in (kinds.MAPPING, kinds.LIST):
                self._one_by_one(container)
            elif not before and kind in (*_TABLES, kinds.SET, kinds.LIST):
                empty[not isinstance(value, dict)].append(value)
            elif kind in _TABLES and base_of(value) is dict and all(type(key) in (str, int) for key in before):
                # not by the keys, which may be tensors: `in` would compare their elements
                tables.append(self._table(container))
                for key in special if id(value) not in self._whole else ():
                    self._by_path(container, key)
            elif kind in kinds.USED and value.library is not None:
                taken = itemgetter(*before, next(iter(before)))
                write.require(f"identical({write.constant(taken)}({write.name(value.table)}), "
                              f"{write.constant(taken(before))})")
            elif kind is kinds.MAPPING and id(value) in self._nested:
                write.require(f"len({write.name(value)}) == {len(before)} and "
                              f"identical({write.name(value)}, {self._expected([*before])})")
            elif kind is kinds.SET or (kind in (kinds.LIST, kinds.DEQUE) and not special and not container.ignored):
                lists.append(value)
            else:
                self._one_by_one(container)
        self._compare_classes()
        self._compare_code()
        if tables or empty[0]:
            write.require(f"match({write.constant(flatten(tables, empty[0]))}, {write.constant(tables)}, "
                          f"{write.constant(empty[0])})")
        self._compare_lists(lists)
        if empty[1]:
            write.require(f"not any({write.constant(empty[1])})")

    def _table(self, container: Container) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], bool]:
        """A dictionary of attributes or items, with its keys, the values known for them, and whether order counts."""
        value, before, kind = container.value, container.before, container.kind
        known = [ANY if key in container.ignored or self._is_special(before[key], container) else before[key]
                 for key in before]  # fmt: skip
        left = [name for name in value if kinds.is_left_out(value, name)] if kind is kinds.MODULE else []
        return value, (*before, *left), (*known, *[ANY] * len(left)), kind is kinds.MAPPING

    def _compare_code(self) -> None:
        """Compares the code of functions, which may be reloaded in place, as by IPython."""
        functions = [f for f in self._snap.reachable.kept if type(f) is FunctionType and not f.__closure__ and
                     id(f) not in self._per_call.ids and not is_library(f.__code__.co_filename)]  # fmt: skip
        if functions:
            write, codes = self._writer, [function.__code__ for function in functions]
            write.require(f"identical(map({write.constant(attrgetter('__code__'))}, {write.constant(functions)}), "
                          f"{write.constant(codes)})")

    def _compare_lists(self, lists: list[Any]) -> None:
        """Compares lists and sets by length and items; those of tensors are expected without a copy of ``t``."""
        write = self._writer
        of_tensors = [x for x in lists if all(isinstance(v, torch.Tensor) for v in x)]
        for those in (of_tensors, [x for x in lists if not any(x is one for one in of_tensors)]):
            if those:
                name, sizes = write.constant(those), write.constant([len(x) for x in those])
                values = self._expected([v for x in those for v in x])
                write.require(f"list(map(len, {name})) == {sizes} and identical(chain({name}), {values})")

    def _by_path(self, container: Container, key: Any) -> None:
        value = container.before[key]
        self._per_call.compare_value(self._writer.at(container, key), value, self._keeps(container)(value))

    def _compare_classes(self) -> None:
        """Compares the classes of objects, which may be assigned; those that none of these keeps are known weakly."""
        write = self._writer
        named = (kinds.ATTRIBUTES, kinds.SLOTS)
        owners = {id(c.owner): c.owner for c in self._containers if c.kind in named and
                  (isinstance(c.owner, PERSISTENT) or is_user_class(type(c.owner)))}  # fmt: skip
        kept = {id(v) for c in self._containers for v in c.before.values() if id(v) in owners and self._keeps(c)(v)}
        inner = [owner for key, owner in owners.items() if key in kept]
        if inner:
            write.require(f"list(map(type, {write.constant(inner)})) == {write.constant([*map(type, inner)])}")
        for key, owner in owners.items():
            if key not in kept:
                write.require(f"type({self._per_call.weakly(owner)}) is {write.name(type(owner))}")

    def _expected(self, values: list[Any]) -> str:
        """An expression for known values, of which the code keeps no tensor alive."""
        places = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        others = [value for value in values if id(value) not in places]
        if len(others) == len(values):
            return self._writer.constant(values)
        behind = iter(range(len(places), len(places) + len(others)))
        picked = _picker([places[id(value)] if id(value) in places else next(behind) for value in values])
        return f"{self._writer.constant(picked)}(" + (f"[*t, *{self._writer.constant(others)}])" if others else "t)")

    def _is_special(self, value: Any, container: Container) -> bool:
        """True for a value that is not compared by identity with the last one: it has a path of its own."""
        if isinstance(value, torch.Tensor):  # a list may be where it is read from, or another way to reach it
            read_here = self._snap.tensors[id(value)].source.path.startswith(container.source.path)
            return container.kind is not kinds.LIST or read_here
        return id(value) in self._per_call.ids or not self._keeps(container)(value)

    def _one_by_one(self, container: Container) -> None:
        self._per_call.compare_contents(container, self._writer.name(container.value), self._keeps(container))

    def _keeps(self, container: Container) -> Callable[[Any], bool]:
        """Tells which values the code may keep alive: not modules and optimizers that the user may drop."""
        theirs = isinstance(container.owner, torch.nn.Module) or getattr(container.source, "key", "") in REGISTRIES
        return lambda value: theirs or not isinstance(value, PERSISTENT)


def _picker(positions: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Takes what is at some positions of a list."""
    return itemgetter(*positions) if len(positions) > 1 else lambda values: (values[positions[0]],)
