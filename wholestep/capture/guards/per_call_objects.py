"""Per-call objects: what is new at each call, followed by path, and compared one by one.

A batch or a tuple of hidden states is a new object at each call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Set
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from wholestep.capture.container_access import contents, is_exact
from wholestep.capture.guards.bulk import layouts_of
from wholestep.capture.guards.code_writer import CodeWriter
from wholestep.capture.guards.compared_values import is_plain
from wholestep.capture.outside.external_calls import variables
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.reachable import Container
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.capture.sources import REGISTRIES
from wholestep.torch_compat import HOOK_TABLES

PERSISTENT = (torch.nn.Module, torch.optim.Optimizer)
_NAMED = (kinds.ATTRIBUTES, kinds.SLOTS, kinds.CELL, kinds.GLOBALS)
_SEQUENCES = (kinds.LIST, kinds.TUPLE, kinds.SET, kinds.FROZENSET, kinds.DEQUE)
CONTAINERS = (dict, list, tuple, deque)
_BOUND = (MethodType, partial)  # made anew where a step is given `object.method`


class PerCallObjects:
    """The objects of one snapshot that are, or may be, replaced from call to call.

    Args:
        sizeless: paths of tensors whose sizes and strides are not compared.

    Attributes:
        ids: theirs.
        tables: ids of their attribute tables.
        tensors: the variable of each tensor among them.
    """

    def __init__(
        self, snap: Snapshot, writer: CodeWriter, replaced: Set[tuple[str, Any]], sizeless: frozenset[str]
    ) -> None:
        self._snap, self._writer, self._sizeless = snap, writer, sizeless
        roots, numbers = snap.reachable.roots[:-1], {number.source.path for number in snap.numbers}
        self._fixed = [(source, value) for source, value in roots if source.path not in numbers]
        self._containers: dict[int, list[Container]] = {}
        for container in snap.containers:
            self._containers.setdefault(id(container.owner), []).append(container)
        self.ids: set[int] = set()
        self.tables: set[int] = set()
        self.tensors: list[tuple[str, torch.Tensor]] = []
        for _, value in roots:
            self._mark(value)
        places = {path for path, _ in replaced}
        for container in snap.containers:
            for key, value in container.before.items() if container.source.path in places else ():
                if isinstance(value, CONTAINERS) and (container.source.path, key) in replaced:
                    self._mark(value)
            if isinstance(container.owner, torch.optim.Optimizer) or container.kind not in _NAMED:
                continue
            for key, value in container.before.items():
                if type(value) in CONTAINERS and key not in REGISTRIES and self._holds_tensor(value, set()):
                    self._mark(value)

    def _mark(self, value: Any) -> None:
        if id(value) in self.ids or isinstance(value, PERSISTENT):
            return
        if isinstance(value, FunctionType):
            self._mark_function(value)
            return
        bound = type(value) in _BOUND
        apart = (kinds.CELL, *kinds.USED, kinds.CLASS, kinds.TENSOR, *(() if bound else (kinds.FIELDS,)))
        shown = [c for c in self._containers.get(id(value), ()) if c.kind not in apart]
        if not shown or (callable(value) and not bound):
            return
        self.ids.add(id(value))
        for container in shown:
            self.tables.add(id(container.value))
            for inner in container.before.values():
                self._mark(inner)

    def _mark_function(self, function: FunctionType) -> None:
        """A function made anew for each call, such as a hook, is known by its code and by what its cells hold."""
        cells = function.__closure__ or ()
        if vars(function) or any(not kinds.CELL.read(cell) for cell in cells):
            return
        self.ids |= {id(function), *map(id, cells)}
        for held in (function.__defaults__, function.__kwdefaults__, *(cell.cell_contents for cell in cells)):
            self._mark(held)

    def _holds_tensor(self, value: Any, seen: set[int]) -> bool:
        if isinstance(value, torch.Tensor):
            return True
        if type(value) not in CONTAINERS or id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._holds_tensor(v, seen) for v in (value.values() if isinstance(value, dict) else value))

    # the code that compares them -----------------------------------------------------------------------

    def compare_quickly(self) -> None:
        """Compares settings, flags and objects among the arguments: they are what differs where programs take turns."""
        call, write, reached = self._snap.call, self._writer, self._snap.reachable
        write.require(f"len(args) == {len(call.args)} and " +
                      (f"[*kwargs] == {list(call.kwargs)!r}" if call.kwargs else "not kwargs"))
        write.require("quick_state() == STATE")
        environment = reached.outside.environment
        if environment:
            write.space["variables"] = variables
            write.require(f"variables({write.constant([*environment])}) == {write.constant([*environment.values()])}")
        for source, value in self._fixed:
            if self._is_one_value(value):
                self.compare_value(source.path, value)

    def compare(self) -> None:
        """Compares the other arguments, and what else the step has read of the world outside."""
        for source, value in self._fixed:
            if not self._is_one_value(value):
                self.compare_value(source.path, value)

    def _is_one_value(self, value: Any) -> bool:
        return is_plain(value) or not (isinstance(value, torch.Tensor) or id(value) in self.ids)

    def compare_value(self, expression: str, value: Any, keeps: bool = False) -> None:
        """Requires that an expression gives ``value`` or its equal.

        Args:
            keeps: whether the code may keep an object alive that is the same in each call.
        """
        write = self._writer
        if is_plain(value):
            known = write.constant(value)
            write.require(f"{expression} is {known} or same({expression}, {known})")
        elif isinstance(value, torch.Tensor):
            self._compare_tensor(expression, value)
        elif id(value) not in self.ids:
            write.require(f"{expression} is {write.name(value) if keeps else self.weakly(value)}")
        elif id(value) in write.names:
            write.require(f"{expression} is {write.names[id(value)]}")
        elif isinstance(value, FunctionType):
            self._compare_function(expression, value)
        else:
            self._compare_containers(expression, value)

    def weakly(self, value: Any) -> str:
        """An expression for an object that a call is given, by which the code does not keep it alive.

        With it goes all that the code holds of it, and so the code itself.
        """
        spaces = self._writer.spaces

        def drop(_: Any) -> None:
            for space in spaces:
                space.clear()

        try:
            self._writer.weak.append(weakref.ref(value, drop))
            return f"{self._writer.constant(self._writer.weak[-1])}()"
        except TypeError:
            return self._writer.name(value)

    def _compare_function(self, expression: str, function: FunctionType) -> None:
        write = self._writer
        name = write.variable(function, expression)
        write.require(f"type({name}) is {write.name(FunctionType)} and {name}.__code__ is "
                      f"{write.name(function.__code__)} and {name}.__globals__ is {write.name(function.__globals__)}"
                      f" and not {name}.__dict__")
        for attribute in ("__defaults__", "__kwdefaults__"):
            self.compare_value(f"{name}.{attribute}", getattr(function, attribute))
        for index, cell in enumerate(function.__closure__ or ()):
            if id(cell) in write.names:
                write.require(f"{name}.__closure__[{index}] is {write.names[id(cell)]}")
            else:
                held = write.variable(cell, f"{name}.__closure__[{index}]")
                self.compare_value(f"{held}.cell_contents", cell.cell_contents)

    def _compare_containers(self, expression: str, value: Any) -> None:
        write = self._writer
        name = write.variable(value, expression)
        write.require(f"type({name}) is {write.name(type(value))}")
        for container in self._containers[id(value)]:
            if container.value is not value:  # its attributes
                write.names[id(container.value)] = f"{name}_d"
                write.lines.append(f"{name}_d = {name}.__dict__")
            self.compare_contents(container, write.names[id(container.value)])

    def compare_contents(self, container: Container, name: str, keeps: Callable[[Any], bool] = lambda _: False) -> None:
        """Compares what a container holds, which stands under a name; see `compare_value`."""
        write, kind, before = self._writer, container.kind, container.before
        if not is_exact(container.value):
            copied = f"{name}_c"
            write.lines.append(f"{copied} = {write.name(contents)}({name})")
            name = copied
        if kind in (kinds.MAPPING, kinds.ATTRIBUTES):
            strings = all(type(key) in (str, int) for key in before)
            keys = write.constant(list(before))
            write.require(f"[*{name}] == {keys}" if strings else
                          f"len({name}) == {len(before)} and identical({name}, {keys})")
        elif kind in _SEQUENCES:
            write.require(f"len({name}) == {len(before)}")
        else:
            write.require_absent(container, name)
        if kind in (kinds.SET, kinds.FROZENSET):
            write.require(f"{{*{name}}} == {write.constant({*contents(container.value)})}")
        elif len(before) > 8 and not container.ignored and all(is_plain(v) for v in before.values()) and \
                kind in (*_SEQUENCES, kinds.MAPPING, kinds.ATTRIBUTES):
            values = f"{name}.values()" if isinstance(container.value, dict) else name
            write.require(f"all(map(same, {values}, {write.constant(list(before.values()))}))")
        else:
            for key in container.compared:
                self.compare_value(write.at(container, key), before[key], keeps(before[key]))

    def _compare_tensor(self, expression: str, tensor: torch.Tensor) -> None:
        write = self._writer
        known = write.tensors.get(id(tensor)) or write.names.get(id(tensor))
        if known is not None:
            write.require(f"{expression} is {known}")
        name = known or write.variable(tensor, expression, "x")
        for container in self._containers[id(tensor)] if id(tensor) in self.ids else ():
            if container.kind is kinds.ATTRIBUTES and id(container.value) not in write.names:
                self.compare_contents(container, write.variable(container.value, f"{name}.__dict__"))
        if known is not None:
            return
        self.tensors.append((name, tensor))
        write.require(f"type({name}) is {write.name(type(tensor))} and {name}.is_leaf is {tensor.is_leaf}"
                      f" and {name}.layout is {write.constant(tensor.layout)}")
        if self._snap.tensors[id(tensor)].source.path not in self._sizeless:
            form = layouts_of([tensor])
            write.require(f"{name}.is_nested is {tensor.is_nested} and "
                          f"{write.constant(form)}(({name},)) == {write.constant(form((tensor,)))}")
        else:
            write.require(f"{name}.dtype is {write.constant(tensor.dtype)} and {name}.device == "
                          f"{write.constant(tensor.device)} and {name}.requires_grad is {tensor.requires_grad}")
        for key in ("grad", *HOOK_TABLES) if tensor.requires_grad else ("grad",):
            if tensor.is_leaf or (key == "grad" and tensor.retains_grad):
                self.compare_value(f"{name}.{key}", getattr(tensor, key))
