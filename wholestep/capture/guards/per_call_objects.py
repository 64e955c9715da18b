"""Volatile holders: which of them are new objects at each call, and the code that follows and compares them by path.

A batch or a tuple of hidden states is a new object at each call: its path is followed and its contents are compared one
by one.
"""

from __future__ import annotations

import weakref
from collections import deque
from types import FunctionType
from typing import Any

import torch

from wholestep.capture.guards.code_writer import Draft
from wholestep.capture.guards.compared_values import is_plain
from wholestep.capture.outside.external_calls import variables
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.numpy_arrays import as_stamped
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.capture.sources import REGISTRIES, contents, is_exact
from wholestep.torch_compat import HOOK_TABLES

_ANCHORS = (torch.nn.Module, torch.optim.Optimizer)
_NAMED = (kinds.ATTRIBUTES, kinds.SLOTS, kinds.CELL, kinds.GLOBALS)
_CONTAINERS = (dict, list, tuple, deque)


class Volatile(Draft):
    """A draft that compares arguments and other volatile holders."""

    def __init__(self, snap: Snapshot) -> None:
        super().__init__(snap)
        self._mark_volatile()

    # which holders are volatile ------------------------------------------------------------------------

    def _mark_volatile(self) -> None:
        for _, value in self.snap.reachable.roots[:-1]:
            self._mark(value)
        for container in self.snap.containers:
            if isinstance(container.owner, torch.optim.Optimizer) or container.kind not in _NAMED:
                continue
            for key, value in container.before.items():
                if type(value) in _CONTAINERS and key not in REGISTRIES and self._holds_tensor(value, set()):
                    self._mark(value)

    def _mark(self, value: Any) -> None:
        if id(value) in self.volatile or isinstance(value, (*_ANCHORS, torch.Tensor)):
            return
        if isinstance(value, FunctionType):
            self._mark_function(value)
            return
        holders = [p for p in self.places.get(id(value), ()) if p.kind not in (kinds.CELL, kinds.GLOBALS, kinds.CLASS)]
        if not holders or callable(value):
            return
        self.volatile.add(id(value))
        for container in holders:
            self.volatile_tables.add(id(container.value))
            for inner in container.before.values():
                self._mark(inner)

    def _mark_function(self, function: FunctionType) -> None:
        """A function made anew for each call, such as a hook, is known by its code and by what its cells hold."""
        cells = function.__closure__ or ()
        if vars(function) or any(not kinds.CELL.read(cell) for cell in cells):
            return
        self.volatile |= {id(function), *map(id, cells)}
        for held in (function.__defaults__, function.__kwdefaults__, *(cell.cell_contents for cell in cells)):
            self._mark(held)

    def _holds_tensor(self, value: Any, seen: set[int]) -> bool:
        if isinstance(value, torch.Tensor):
            return True
        if type(value) not in _CONTAINERS or id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._holds_tensor(v, seen) for v in (value.values() if isinstance(value, dict) else value))

    # their contents ------------------------------------------------------------------------------------

    def _arguments(self) -> None:
        call = self.snap.call
        self._require(f"len(args) == {len(call.args)} and " +
                      (f"[*kwargs] == {list(call.kwargs)!r}" if call.kwargs else "not kwargs"))
        self._require("global_state() == STATE")
        arrays = self.snap.reachable.arrays.values()
        if arrays:  # each is the very same, or the guards are compared one by one
            self.space["as_stamped"] = as_stamped
            self._require(f"as_stamped({self._fresh([a.value for a in arrays])}, "
                          f"{self._fresh([a.stamp for a in arrays])})")
        environment = self.snap.reachable.outside.environment
        if environment:
            self.space["variables"] = variables
            self._require(f"variables({self._fresh([*environment])}) == {self._fresh([*environment.values()])}")
        numbers = {number.source.path for number in self.snap.numbers}
        for source, value in self.snap.reachable.roots[:-1]:
            if source.path not in numbers:
                self._value(source.path, value)

    def _value(self, expression: str, value: Any) -> None:
        """Requires that an expression gives an equal of ``value``."""
        if is_plain(value):
            self._require(f"same({expression}, {self._fresh(value)})")
        elif isinstance(value, torch.Tensor):
            self._volatile_tensor(expression, value)
        elif id(value) in self.names and id(value) in self.volatile:
            self._require(f"{expression} is {self.names[id(value)]}")
        elif isinstance(value, FunctionType) and id(value) in self.volatile:
            self._volatile_function(expression, value)
        elif id(value) in self.volatile:
            self._volatile_holder(expression, value)
        else:
            self._require(f"{expression} is {self._argument(value)}")

    def _argument(self, value: Any) -> str:
        """An expression for an object that a call is given, by which the code does not keep it alive.

        With it goes all that the code holds of it, and so the code itself.
        """
        spaces = self.spaces

        def drop(_: Any) -> None:
            for space in spaces:
                space.clear()

        try:
            return f"{self._fresh(weakref.ref(value, drop))}()"
        except TypeError:
            return self._name(value)

    def _volatile_function(self, expression: str, function: FunctionType) -> None:
        name = self.names[id(function)] = f"v{len(self.names)}"
        self.lines.append(f"{name} = {expression}")
        self._require(f"type({name}) is {self._name(FunctionType)} and {name}.__code__ is "
                      f"{self._name(function.__code__)} and {name}.__globals__ is {self._name(function.__globals__)}"
                      f" and not {name}.__dict__")
        for attribute in ("__defaults__", "__kwdefaults__"):
            self._value(f"{name}.{attribute}", getattr(function, attribute))
        for index, cell in enumerate(function.__closure__ or ()):
            if id(cell) in self.names:
                self._require(f"{name}.__closure__[{index}] is {self.names[id(cell)]}")
            else:
                held = self.names[id(cell)] = f"v{len(self.names)}"
                self.lines.append(f"{held} = {name}.__closure__[{index}]")
                self._value(f"{held}.cell_contents", cell.cell_contents)

    def _volatile_holder(self, expression: str, value: Any) -> None:
        name = self.names[id(value)] = f"v{len(self.names)}"
        self.lines.append(f"{name} = {expression}")
        self._require(f"type({name}) is {self._name(type(value))}")
        for container in self.places[id(value)]:
            holder = name
            if not is_exact(container.value):
                holder = f"{name}_c"
                self.lines.append(f"{holder} = {self._name(contents)}({name})")
            if container.value is not value:  # its attributes
                holder = f"{name}_d"
                self.lines.append(f"{holder} = {name}.__dict__")
                self.names[id(container.value)] = holder
            if container.kind in (kinds.MAPPING, kinds.ATTRIBUTES):
                keys = list(container.before)
                strings = all(type(key) in (str, int) for key in keys)
                self._require(f"[*{holder}] == {self._fresh(keys)}" if strings else
                              f"len({holder}) == {len(keys)} and identical({holder}, {self._fresh(keys)})")
            elif container.kind is not kinds.SLOTS:
                self._require(f"len({holder}) == {len(container.before)}")
            if container.kind in (kinds.SET, kinds.FROZENSET):
                self._require(f"{holder} == {self._fresh(type(value)(value))}")
                continue
            if len(container.before) > 8 and not container.ignored and all(is_plain(v) for v in container.before.values()):
                values = f"{holder}.values()" if isinstance(container.value, dict) else holder
                self._require(f"all(map(same, {values}, {self._fresh(list(container.before.values()))}))")
                continue
            for key, inner in container.before.items():
                if key not in container.ignored:
                    self._value(self._at(container, key), inner)

    def _volatile_tensor(self, expression: str, tensor: torch.Tensor) -> None:
        if id(tensor) in self.anchored_tensors:
            self._require(f"{expression} is {self.anchored_tensors[id(tensor)]}")
            return
        if id(tensor) in self.names:
            self._require(f"{expression} is {self.names[id(tensor)]}")
            return
        name = self.names[id(tensor)] = f"x{len(self.names)}"
        self.volatile_tensors.append((name, tensor))
        self.lines.append(f"{name} = {expression}")
        self._require(f"type({name}) is {self._name(type(tensor))} and {name}.shape == {self._fresh(tensor.shape)}"
                      f" and {name}.dtype is {self._fresh(tensor.dtype)}"
                      f" and {name}.device == {self._fresh(tensor.device)}"
                      f" and {name}.requires_grad is {tensor.requires_grad} and {name}.is_leaf is {tensor.is_leaf}"
                      f" and {name}.layout is {self._fresh(tensor.layout)}")
        if tensor.layout == torch.strided:
            self._require(f"{name}.stride() == {tensor.stride()}")
        if tensor.requires_grad:
            for key in ("grad", *HOOK_TABLES):
                if not (tensor.is_leaf or (key == "grad" and tensor.retains_grad)):
                    continue
                self._value(f"{name}.{key}", getattr(tensor, key))
