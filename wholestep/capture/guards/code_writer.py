"""A draft: the generated function of a binder while it is written, with names for what its code refers to."""

from __future__ import annotations

from itertools import chain
from operator import call
from typing import Any

import torch

from wholestep.capture.guards.compared_values import global_state
from wholestep.capture.guards.identity_checks import identical, memory, same_plain
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.reachable import Container
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.capture.sources import is_exact, item


class Draft:
    """Lines of code around one snapshot.

    Attributes:
        names: id of an object -> the name that stands for it in the code.
        space: the code's global variables.
        spaces: these, and those of the code that goes with it.
        places: id of an object -> the places that show what it holds.
        volatile: ids of the holders that are other objects at each call, or may be.
        volatile_tables: ids of their attribute tables.
        volatile_tensors: the variable of each tensor that is another at each call.
        anchored_tensors: id of a tensor of an anchored holder -> an expression for it.
    """

    def __init__(self, snap: Snapshot) -> None:
        self.snap = snap
        self.names: dict[int, str] = {}
        self.space: dict[str, Any] = {
            "identical": identical, "same": same_plain, "chain": chain.from_iterable, "values": dict.values,
            "call": call, "global_state": global_state, "STATE": snap.reachable.state, "memory": memory,
        }
        self.spaces = [self.space]
        self.places: dict[int, list[Container]] = {}
        for container in snap.containers:
            self.places.setdefault(id(container.owner), []).append(container)
        self.lines: list[str] = []
        self.volatile: set[int] = set()
        self.volatile_tables: set[int] = set()
        self.volatile_tensors: list[tuple[str, torch.Tensor]] = []
        self.anchored_tensors: dict[int, str] = {}

    def is_anchored(self, value: Any) -> bool:
        """True for an object or attribute table that stays the very same while the fast path lets calls pass."""
        return id(value) not in self.volatile and id(value) not in self.volatile_tables

    def _name(self, value: Any, prefix: str = "c") -> str:
        """A name in the code for a constant."""
        if id(value) not in self.names:
            self.names[id(value)] = self._fresh(value, prefix)
        return self.names[id(value)]

    def _fresh(self, value: Any, prefix: str = "k") -> str:
        name = f"{prefix}{len(self.space)}"
        self.space[name] = value
        return name

    def _require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    def _at(self, container: Container, key: Any) -> str:
        """An expression for what an anchored or volatile holder has at a key."""
        holder = self._name(container.value)
        if container.kind is kinds.CELL:
            return f"{holder}.cell_contents"
        if container.kind is kinds.CONTEXT:
            return f"{holder}.get(None)"
        if container.kind is kinds.GLOBALS:
            return f"{self._name(container.value.table)}[{key!r}]"
        if container.kind is kinds.SLOTS:
            return f"{holder}.{key}"
        if container.kind is kinds.CLASS:
            return f"{holder}.__dict__[{key!r}]"
        key = str(key) if type(key) is int else repr(key) if type(key) is str else self._name(key)
        return f"{holder}[{key}]" if is_exact(container.value) else f"{self._name(item)}({holder}, {key})"
