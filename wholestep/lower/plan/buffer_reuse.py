"""In place: which values come to lie where an input, or a dying value, lies.

A value may overwrite another one when that one's other readers all come earlier, it has the very same
layout, and the operator reads only the elements that it writes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import fx

from wholestep.ir import GETITEM, info
from wholestep.lower.plan.liveness import Lives, Store, variable
from wholestep.lower.plan.operator_facts import (
    SELF_ONLY_INPLACE,
    aten,
    base_name,
    inplace_variant,
    is_pointwise,
    is_view,
    is_wait,
    mutable_twin,
)
from wholestep.lower.plan.value_facts import (
    How,
    Written,
    is_dense,
    layout,
    origin_of,
    tensor_operands,
    writer,
    written_arguments,
)
from wholestep.torch_compat import OpOverload

# CPU kernels that have read all of a row before they write it: their result may lie over the first operand.
ROW_BY_ROW = {
    aten._softmax.default, aten._log_softmax.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
}  # fmt: skip


# A claim gives those that it depends on, and is sent whether each succeeded: chains of them are as long as the program.
Claim = Generator["Claim", bool, bool]


def _succeeds(claim: Claim) -> bool:
    stack: list[Claim] = [claim]
    found: Any = None  # what a generator that has just begun is sent
    while stack:
        try:
            stack.append(stack[-1].send(found))
            found = None
        except StopIteration as end:
            stack.pop()
            found = end.value
    return bool(found)


class Claims(Lives):
    """Finds the values that are computed in the memory of the inputs that they become."""

    def _may_write_over(self, node: fx.Node, root: fx.Node, how: How) -> bool:
        """True when ``node`` may write where ``root`` lies although it reads it (or does not)."""
        if not self._dead_before(root, node):
            return False
        mine = [o for o in tensor_operands(node) if self.root[o] is root]
        if not mine:
            return True
        if any(layout(info(o).value) != layout(info(node).value) for o in mine):
            return False
        rowwise = node.target in ROW_BY_ROW and info(node).value.device.type == "cpu"
        if rowwise or how in ("scatter", "collective") or (how == "inplace" and not is_pointwise(node.target)):
            return len(mine) == 1 and mine[0] is node.args[0]
        item = self.items[self.item_of[node]]
        if item.by_pieces and self._read_time(node, root, None) != self.position[node]:
            return False
        return how == "copy" or is_pointwise(node.target)

    def _ways(self, node: fx.Node) -> How | None:
        found = writer(node)
        if found is not None:
            return found
        value = info(node).value
        if isinstance(value, torch.Tensor) and isinstance(node.target, OpOverload) and is_dense(value):
            named = is_pointwise(node.target) or base_name(node.target) in SELF_ONLY_INPLACE
            if named and inplace_variant(node.target) is not None and not is_view(node.target):
                return "inplace"
        return None

    def _place_mutation(self, node: Any, into: int) -> None:
        placeholder = self.inputs[into]
        if node is placeholder:
            return
        made = node
        while isinstance(made, fx.Node) and is_wait(made.target):
            made = made.args[0]
        if isinstance(made, fx.Node) and made.op == "call_function" and _succeeds(self._claim(made, into)):
            return
        item = self.item_of.get(node, -1)
        for reader in self.readers[placeholder]:
            item = max(item, len(self.items) if reader is self.output else self.item_of[reader])
        if self.plan.store.get(self.root[node], Store("call")).kind == "input":
            item = len(self.items)
        self.plan.copies.setdefault(item, []).append((into, node))

    def _owner(self, node: fx.Node) -> fx.Node:
        return origin_of(node)[0] if node.target is GETITEM else node

    def _claim(self, node: fx.Node, into: int) -> Claim:
        """Makes input ``into``'s memory the home of ``node`` and of the dying values it is made from."""
        placeholder = self.inputs[into]
        if self.root[node] is not node or node in self.plan.store or node in self.fixed:
            return False
        old = info(placeholder).value
        if layout(info(node).value) != layout(old) or not is_dense(old):
            return False
        if node.target is GETITEM:
            return (yield self._claim_written(node, into))
        how = self._ways(node)
        if how is None or not self._may_write_over(node, placeholder, how):
            return False
        operands = tensor_operands(node)
        if how in ("inplace", "scatter", "collective") and self.root[operands[0]] is not placeholder:
            dying = yield self._claim_dying(operands[0], node, into)
            if not dying and how != "collective":  # which copies what it is given
                return False
        self.plan.store[node] = self.plan.store[placeholder]
        self.plan.name[node] = self.plan.name[placeholder]
        self.plan.how[node] = how
        if is_pointwise(node.target) and not any(self.root[o] is placeholder for o in operands):
            for operand in operands:
                if (yield self._claim_dying(operand, node, into)):
                    break
        if node.target is aten.slice_scatter.default and self._claim_slice(node, into):
            self.plan.how[node] = "skip"
        return True

    def _claim_slice(self, scatter: fx.Node, into: int) -> bool:
        """Computes new rows of an input where the old ones are, given that they are made from nothing else of it."""
        placeholder, (new, *span) = self.inputs[into], scatter.args[1:]
        if not isinstance(new, fx.Node) or self.root[new] is not new or new in self.plan.store or new in self.fixed:
            return False
        old = next((u for u in placeholder.users if u.target is aten.slice.Tensor and list(u.args[1:]) == span), None)
        if old is None or self.readers[new] != [scatter] or not is_pointwise(new.target):
            return False
        readers = [r for r in self.readers[placeholder] if r is not scatter]
        beside = [o for r in readers if self.item_of.get(r) == self.item_of[new] for o in tensor_operands(r)]
        if any(self.root[o] is placeholder and o is not old for o in beside):
            return False
        late = [r for r in readers if r is not new and self._read_time(r, placeholder, None) >= self._write_time(new)]
        how = self._ways(new)
        if late or how != "out" or layout(info(new).value) != layout(info(old).value):
            return False
        self.plan.store[new], self.plan.how[new] = self.plan.store[placeholder], how
        self.plan.name[new] = variable(old)
        return True

    def _claim_dying(self, operand: fx.Node, node: fx.Node, into: int) -> Claim:
        if operand.op != "call_function" or not isinstance(info(operand).value, torch.Tensor):
            return False
        same = layout(info(operand).value) == layout(info(node).value)
        alone = self._may_write_over(node, self.root[operand], self._ways(node) or "call")
        return same and alone and (yield self._claim(operand, into))

    def _claim_written(self, leaf: fx.Node, into: int) -> Claim:
        """The same for a result of an argument-writing call."""
        owner = self._owner(leaf)
        entry = next((w for w in self._written(owner) if w.leaf is leaf), None)
        placeholder = self.inputs[into]
        if entry is None or not self._dead_before(self.root[entry.old], owner):
            return False
        if sum(self.root[w.old] is self.root[entry.old] for w in self._written(owner)) > 1:
            return False
        reads = [o for o in owner.all_input_nodes if self.root[o] is self.root[entry.old]]
        if len(reads) > 1:
            return False
        if entry.old is not placeholder:
            if not self._dead_before(placeholder, owner) or not (yield self._claim(entry.old, into)):
                return False
        entry.in_place = True
        self.plan.store[leaf] = self.plan.store[placeholder]
        self.plan.name[leaf] = self.plan.name[placeholder]
        return True

    def _written(self, owner: fx.Node) -> list[Written]:
        if owner not in self.plan.written:
            twin = mutable_twin(owner.target)
            self.plan.written[owner] = [] if twin is None else written_arguments(owner, twin, self.leaves)
        return self.plan.written[owner]
