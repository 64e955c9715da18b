"""New values of inputs: computed in the inputs' own memory where that can be, from the last call back."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.functional import is_wait
from wholestep.ir import GETITEM, info
from wholestep.lower.plan.in_place import may_write_over, way
from wholestep.lower.plan.operator_facts import aten, is_pointwise
from wholestep.lower.plan.placement import Placement
from wholestep.lower.plan.value_facts import (
    How,
    Written,
    dense,
    layout,
    origin_of,
    tensor_operands,
    variable,
    writes_anywhere,
)


class InputMemory:
    """Places new values of inputs, with the values that they are made from as far back as can be."""

    def __init__(self, placed: Placement) -> None:
        self.placed, self.live, self.root = placed, placed.live, placed.root
        self.store, self.how = placed.store, placed.how
        for out, into in self.live.step.signature.mutations.items():
            self._place_mutation(self.live.peel(self.live.outputs[out]), into)

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
        self.placed.copies.setdefault(item, []).append((into, node))

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
            self.placed.share(node, old)
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
        self.placed.share(new, old, variable(rows))
        if entry is None:
            self.how[new] = "out"
        else:
            entry.in_place = True
        return True
