"""Placement: where each value of a program lies, and how each call puts it there: which memory it may write over.

New values of inputs are computed in the inputs' own memory where that can be, from the last call back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from wholestep.functional import base_name, is_view, is_wait
from wholestep.ir import GETITEM, info
from wholestep.lower.plan.arena import Slot
from wholestep.lower.plan.liveness import Liveness
from wholestep.lower.plan.operator_facts import SELF_ONLY_INPLACE, aten, inplace_variant, is_pointwise
from wholestep.lower.plan.value_facts import (
    How,
    Written,
    dense,
    layout,
    origin_of,
    tensor_operands,
    variable,
    writer,
    writes_anywhere,
)
from wholestep.torch_compat import OpOverload


@dataclass(eq=False)
class Store:
    """A piece of memory that values share over time.

    Attributes:
        kind: an input's own; "constant"; "arena"; "lent" by the arena to a result; "fresh" memory for a result; what a
            "kernel" allocates; "scratch" of a chain; "rows" of a product that a group reads by rows.
        index: of the input.
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


# CPU kernels whose result may lie over the first operand: they read all of a row before they write it, or add to it.
ROW_BY_ROW = {
    aten._softmax.default, aten._log_softmax.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
}  # fmt: skip
ACCUMULATE = {aten.addmm.default, aten.addbmm.default, aten.baddbmm.default, aten.addmv.default}
_OVER_FIRST = ROW_BY_ROW | ACCUMULATE


def way(node: fx.Node) -> How | None:
    """How a call can put its result into memory that it is given; None when it cannot."""
    found, value = writer(node), info(node).value
    if found is None and isinstance(value, torch.Tensor) and isinstance(node.target, OpOverload):
        named = is_pointwise(node.target) or base_name(node.target) in SELF_ONLY_INPLACE
        if named and dense(value) and inplace_variant(node.target) is not None and not is_view(node.target):
            return "inplace"
    return found


def may_write_over(live: Liveness, node: fx.Node, root: fx.Node, how: How) -> bool:
    """True when ``node`` may write where ``root`` lies although it reads it (or does not)."""
    if not live.dead_before(root, node):
        return False
    mine = [o for o in tensor_operands(node) if live.root[o] is root]
    if not mine:
        return True
    if any(layout(info(o).value) != layout(info(node).value) for o in mine):
        return False
    over_first = node.target in _OVER_FIRST and info(node).value.device.type == "cpu"
    if over_first or how in ("scatter", "collective") or (how == "inplace" and not is_pointwise(node.target)):
        return len(mine) == 1 and mine[0] is node.args[0]
    item = live.items[live.item_of[node]]
    if item.kind == "chain" and live.read_time(node, root) != live.position[node]:
        return False
    if info(node).value.is_complex():  # compiled twice, with and without overlap, which round products otherwise
        return how == "copy"
    return how == "copy" or is_pointwise(node.target)


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
        for out, into in live.step.signature.mutations.items():
            self._place_mutation(live.peel(live.outputs[out]), into)

    def new(self, node: fx.Node, kind: Any) -> Store:
        """Memory for a value alone."""
        store = self.store[node] = Store(kind, values=[node])
        self.stores.append(store)
        return store

    def share(self, node: fx.Node, old: fx.Node, name: str = "") -> None:
        """Puts a value where another one lies."""
        root = self.root[old]
        self.store[node], self.name[node] = self.store[root], name or self.name[old]
        self.store[node].values.append(node)
        if root in self.offset:
            self.offset[node] = self.offset[root]

    # New values of inputs, with the values that they are made from as far back as can be

    def _place_mutation(self, node: Any, into: int) -> None:
        """Computes an input's new value in the input's own memory, else has it copied there once nobody reads that."""
        live, old = self.live, self.live.inputs[into]
        if node is old:
            return
        made = node
        while isinstance(made, fx.Node) and is_wait(made.target):
            made = made.args[0]
        if isinstance(made, fx.Node) and made.op == "call_function" and self._place_in_input(made, old):
            return
        last = len(live.items)
        item = max([live.item_of.get(node, -1), *(live.item_of.get(reader, last) for reader in live.readers[old])])
        if self.root[node] in self.store and self.store[self.root[node]].kind == "input":
            item = last
        self.copies.setdefault(item, []).append((into, node))

    def _place_in_input(self, node: fx.Node, old: fx.Node) -> bool:
        """Places a value in an input's memory, and those before it that it is made from, as far back as can be."""
        placed, candidates = False, [node]
        while candidates:
            before = next((found for one in candidates if (found := self._try_input(one, old)) is not None), None)
            placed = placed or before is not None
            candidates = [one for one in before or [] if writes_anywhere(one)]  # eager has it in memory of its own
        return placed

    def _try_input(self, node: fx.Node, old: fx.Node) -> list[fx.Node] | None:
        """Places a value, with those that must lie there before it; gives those that may, or None if it cannot be."""
        chain: list[tuple[fx.Node, How | Written]] = []
        before: list[fx.Node] = []
        needed: fx.Node | None = node
        while needed is not None:
            node = needed
            if self.root[node] is not node or node in self.store or node in self.live.fixed:
                return None
            if layout(info(node).value) != layout(info(old).value) or not dense(info(old).value):
                return None
            found = self._written_in(node, old) if node.target is GETITEM else way(node)
            if found is None or (not isinstance(found, Written) and not may_write_over(self.live, node, old, found)):
                return None
            chain.append((node, found))
            operands = tensor_operands(node) if not isinstance(found, Written) else [found.old]
            needed = None
            if isinstance(found, Written):
                needed = found.old if found.old is not old else None
            elif found in ("inplace", "scatter") and self.root[operands[0]] is not old:
                needed = operands[0]
                if not self._may_precede(needed, node, found):
                    return None
            elif found == "collective":  # it copies what it is given
                before = [o for o in operands[:1] if self.root[o] is not old and self._may_precede(o, node, found)]
            elif is_pointwise(node.target) and not any(self.root[o] is old for o in operands):
                before = [o for o in operands if self._may_precede(o, node, found)]
        for node, found in reversed(chain):
            self.share(node, old)
            if isinstance(found, Written):
                found.in_place = True
            else:
                self.how[node] = found
                if node.target is aten.slice_scatter.default and self._place_rows(node, old):
                    self.how[node] = "skip"
        return before

    def _may_precede(self, operand: fx.Node, node: fx.Node, how: How) -> bool:
        """True when ``node`` may overwrite an operand of its own layout."""
        if operand.op != "call_function" or not isinstance(info(operand).value, torch.Tensor):
            return False
        same = layout(info(operand).value) == layout(info(node).value)
        return same and may_write_over(self.live, node, self.root[operand], how)

    def _written_in(self, leaf: fx.Node, old: fx.Node) -> Written | None:
        """The argument of an argument-writing call that a result of it is, where that may be written in place."""
        owner = origin_of(leaf)[0]
        written = self.live.written[owner]
        entry = next((w for w in written if w.leaf is leaf), None)
        if entry is None or not self.live.dead_before(self.root[entry.old], owner):
            return None
        root = self.root[entry.old]
        once = sum(w.writes and self.root[w.old] is root for w in written) == 1
        alone = sum(self.root[o] is root for o in owner.all_input_nodes) == 1
        return entry if once and alone and (entry.old is old or self.live.dead_before(old, owner)) else None

    def _place_rows(self, scatter: fx.Node, old: fx.Node) -> bool:
        """Computes new rows of an input where the old ones are, given that they are made from nothing else of it."""
        live, (new, *span) = self.live, scatter.args[1:]
        if not isinstance(new, fx.Node) or self.root[new] is not new or new in self.store or new in live.fixed:
            return False
        rows = next((u for u in old.users if u.target is aten.slice.Tensor and list(u.args[1:]) == span), None)
        if rows is None or live.readers[new] != [scatter] or layout(info(new).value) != layout(info(rows).value):
            return False
        maker = origin_of(new)[0]
        entry = next((w for w in live.written.get(maker, ()) if w.leaf is new), None)
        if entry is None and not (maker is new and is_pointwise(new.target) and way(new) == "out"):
            return False
        if entry is not None and [w.old for w in live.written[maker] if self.root[w.old] is old] != [rows]:
            return False
        readers = [r for r in live.readers[old] if r is not scatter]
        beside = [o for r in readers if live.item_of.get(r) == live.item_of[maker] for o in tensor_operands(r)]
        if any(self.root[o] is old and o is not rows for o in beside):
            return False
        if any(live.read_time(r, old) >= live.position[maker] for r in readers if r is not maker):
            return False
        self.share(new, old, variable(rows))
        if entry is None:
            self.how[new] = "out"
        else:
            entry.in_place = True
        return True
