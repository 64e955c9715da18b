"""Placement: where each value of a program lies, and how each call puts it there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from wholestep.lower.plan.arena import Slot
from wholestep.lower.plan.liveness import Liveness
from wholestep.lower.plan.value_facts import How, variable


@dataclass(eq=False)
class Store:
    """A piece of memory that values share over time.

    Attributes:
        kind: an input's own; "constant"; "arena"; "lent" by the arena to a result; "fresh" memory for a result; what a
            "kernel" allocates; "scratch" of a group that works by pieces; "rows" of a product that such a group reads.
        index: of the input, or of the scratch buffer.
        values: the roots that lie in it, the first as large as it.
        slot: when it is in use, and where in the arena it lies.
    """

    kind: Literal["input", "constant", "arena", "lent", "fresh", "kernel", "scratch", "rows"]
    index: int = -1
    values: list[fx.Node] = field(default_factory=list)
    slot: Slot | None = None

    @property
    def in_cache(self) -> bool:
        """True for memory that holds a piece of a value at a time."""
        return self.kind in ("scratch", "rows")


class _Names(dict[fx.Node, str]):
    """A value that shares no variable has its own."""

    def __missing__(self, node: fx.Node) -> str:
        return variable(node)


class Placement:
    """What is decided of a program's values: first of new values of inputs, then of all others.

    Attributes:
        how: the way each call is carried out.
        store: where each value lives; stores: all pieces of memory but inputs, in the order in which they are needed.
        name: the variable that holds each value; values in one place with one layout share it.
        offset: bytes from the start of its store to a value that lies in a part of it: its place in a `cat`, or this
            rank's rows of what a reduce-scatter reduces.
        copies: item index -> (input index, node) copied after that item.
        unpacked: `cat` -> (operand, first element, elements) of what must be copied; the rest is computed in place.
    """

    def __init__(self, live: Liveness) -> None:
        self.live, self.root = live, live.root
        self.how: dict[fx.Node, How] = {}
        self.store = {node: Store("constant") for node in live.step.graph.nodes if node.op == "get_attr"}
        self.store |= {node: Store("input", index) for index, node in enumerate(live.inputs)}
        self.stores: list[Store] = []
        self.name = _Names()
        self.offset: dict[fx.Node, int] = {}
        self.copies: dict[int, list[tuple[int, fx.Node]]] = {}
        self.unpacked: dict[fx.Node, list[tuple[fx.Node, int, int]]] = {}

    def new(self, node: fx.Node, kind: Any, index: int = -1) -> Store:
        """Memory for a value alone."""
        store = self.store[node] = Store(kind, index, [node])
        self.stores.append(store)
        return store

    def share(self, node: fx.Node, old: fx.Node, name: str = "") -> None:
        """Puts a value where another one lies."""
        root = self.root[old]
        self.store[node], self.name[node] = self.store[root], name or self.name[old]
        self.store[node].values.append(node)
        if root in self.offset:
            self.offset[node] = self.offset[root]
