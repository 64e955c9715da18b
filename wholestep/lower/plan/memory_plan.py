"""Where each value lives: in an input's own memory, in the arena, in a tile's scratch, fresh, or lent by the arena.

The graph is pure; here values of disjoint lives come to share memory. Terms:

- the *root* of a value is the node whose memory it is (a view's root is its base's);
- a root's *readers* are the nodes that read it or a view of it, outputs included;
- positions count nodes in the order of execution; those of a batch count as simultaneous.

Values that become inputs' new contents are placed first (`claims`), all others afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep import comm
from wholestep.ir import GETITEM, StepGraph, info
from wholestep.lower.fusion.blocked_matmuls import is_product, rows_at_once
from wholestep.lower.fusion.execution_order import Item
from wholestep.lower.plan.arena import SHARED, Slot, peak, place
from wholestep.lower.plan.buffer_reuse import Claims
from wholestep.lower.plan.concat_buffers import Part, find_parts
from wholestep.lower.plan.liveness import Plan, Store, variable
from wholestep.lower.plan.operator_facts import aten, is_collective, is_wait, mutable_twin
from wholestep.lower.plan.value_facts import (
    LEND_FROM,
    How,
    all_operands,
    base_of,
    is_dense,
    layout,
    origin_of,
    recyclable,
    tensor_operands,
)

_collectives = torch.ops.wholestep
_IN_PLACE = (_collectives.all_reduce.default, _collectives.reduce_rows.default)
_OUT_OF_PLACE = (_collectives.reduce_scatter.default, _collectives.all_gather.default)


def works_on_shared_memory(node: fx.Node) -> bool:
    """True for a collective over a transport that takes what others give from shared memory, if it lies there."""
    if node.target not in (*_IN_PLACE, *_OUT_OF_PLACE):
        return False
    return comm.is_initialized() and comm.get_group(node.args[-1]).backend_name == "shm"  # type: ignore[arg-type]


def make_plan(step: StepGraph, items: list[Item], apart: frozenset[str] = frozenset()) -> Plan:
    """Plans the memory of a program whose order is given.

    Args:
        apart: names of results that somebody holds when the program runs again: the arena does not lend them memory.
    """
    return _Planner(step, items, apart).run()


class _Planner(Claims):
    def run(self) -> Plan:
        for node in self.step.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.root[node] = node
                self.readers[node] = []
                kind: Any = "input" if node.op == "placeholder" else "constant"
                self.plan.store[node] = Store(kind, len(self.root) - 1 if kind == "input" else -1)
                self.plan.name[node] = variable(node)
        for index, node in enumerate(self.inputs):
            self.plan.store[node] = Store("input", index)
        self._find_constants()
        for item in self.items:
            for node in item.nodes:
                self._find_root(node)
        self._read_outputs()
        for out, into in self.step.signature.mutations.items():
            self._place_mutation(self._peel(self.outputs[out]), into)
        self.parts = find_parts(self.position, self.root, self._is_free)
        for item in self.items:
            for node in item.nodes:
                self._decide(node)
        self._finish()
        return self.plan

    def _decide(self, node: fx.Node) -> None:
        plan, value = self.plan, info(node).value
        if node in self.fixed:
            plan.store[node] = Store("constant")
            plan.name[node], plan.how[node] = variable(node), "call"
            return
        if node in plan.how or (node in plan.store and node.target is GETITEM):
            plan.how.setdefault(node, "pick")
            return
        plan.name[node] = variable(node)
        base = base_of(node)
        if isinstance(value, (int, float)):
            plan.how[node] = "host"
        elif base is not None:
            plan.store[node] = plan.store[self.root[node]]
            skipped: How = "wait" if is_wait(node.target) else "skip"
            plan.how[node] = skipped if skipped == "wait" or self._peel(node) is not node else "view"
            if plan.how[node] != "view":
                plan.name[node] = plan.name[base]
        elif node.target is GETITEM:
            self._decide_leaf(node)
        elif mutable_twin(node.target) is not None and self._decide_mutable(node):
            plan.how[node] = "mutable"
        else:
            self._decide_call(node)
            self._share_with_others(node)

    def _decide_leaf(self, node: fx.Node) -> None:
        owner, path = origin_of(node)
        if path in self._spared(owner):
            old = self._spared(owner)[path]
            self.plan.store[node], self.plan.name[node] = self.plan.store[self.root[old]], self.plan.name[old]
            self.plan.how[node] = "skip"
        elif base_of(owner) is not None:
            self.plan.store[node] = self.plan.store[self.root[node]]
            self.plan.how[node] = "view"
        else:
            self.plan.store.setdefault(node, Store("call"))
            self.plan.how[node] = "pick"

    def _decide_mutable(self, node: fx.Node) -> bool:
        for entry in self._written(node):
            if entry.in_place:
                continue
            root = self.root[entry.old]
            home = self.plan.store.get(root)
            ours = home is not None and home.kind in ("slot", "call") and root not in self.escaping
            alone = sum(self.root[o] is root for o in all_operands(node)) == 1
            if ours and alone and self._dead_before(root, node) and entry.leaf not in self.escaping:
                entry.in_place = True
                if entry.leaf is not None:
                    self._share(entry.leaf, entry.old)
            elif entry.leaf is not None:
                self.plan.store[entry.leaf] = Store("call")
                self.plan.name[entry.leaf] = variable(entry.leaf)
        return True

    def _share(self, node: fx.Node, old: fx.Node) -> None:
        self.plan.store[node] = self.plan.store[self.root[old]]
        self.plan.name[node] = self.plan.name[old]
        if self.plan.store[node].kind == "slot":
            self.members[self.plan.store[node].index].append(node)

    def _is_free(self, value: fx.Node, whole: fx.Node) -> bool:
        """True when a value may be computed in a part of the memory of a later one."""
        placed = value in self.plan.store or whole in self.plan.store or {value, whole} & self.escaping
        return not placed and value not in self.fixed and self._dead_before(value, whole)

    def _slot(self, node: fx.Node) -> int:
        """The slot of a node's own, made when it is first asked for."""
        home = self.plan.store.get(node)
        if home is None:
            value = info(node).value
            self.plan.slots.append(Slot(value.numel() * value.itemsize, 0, 0, str(value.device)))
            home = self.plan.store[node] = Store("slot", len(self.plan.slots) - 1)
            self.members[home.index] = [node]
        return home.index

    def _lend(self, node: fx.Node) -> Store:
        """Memory of the arena for a gradient that the step leaves behind and lets go of before it runs again.

        Beside the arena, it would lie idle while the activations, most of an arena, are alive.
        """
        store = Store("lent", self._slot(node))
        self.plan.slots[store.index].guest = False
        self.plan.store[node] = store
        return store

    def _pack(self, node: fx.Node, part: Part, how: How) -> None:
        index = self._slot(part.whole)
        self.plan.store[node] = Store("slot", index, part.start * info(node).value.itemsize)
        self.plan.how[node] = how
        self.members[index].append(node)

    def _decide_pack(self, node: fx.Node) -> None:
        """A `cat` some of whose operands lie in it already."""
        self.plan.how[node] = "pack"
        home, start, left = self.plan.store[node], 0, []
        for operand in tensor_operands(node):
            value = info(operand).value
            part, place = self.parts.get(self.root[operand]), Store("slot", home.index, start * value.itemsize)
            if part is None or part.whole is not node or self.plan.store[self.root[operand]] != place:
                left.append((operand, start, value.numel()))
            start += value.numel()
        self.plan.unpacked[node] = left

    def _decide_call(self, node: fx.Node) -> None:
        plan, how = self.plan, self._ways(node)
        if node in plan.store and node.target is aten.cat.default:
            return self._decide_pack(node)
        if node in self.parts and how is not None:
            return self._pack(node, self.parts[node], how)
        tiled = self.items[self.item_of[node]].by_pieces
        copied = node.target is aten.copy.default  # whose first operand need not exist any more
        lent = node in self.lendable and recyclable(info(node).value, LEND_FROM)
        into = tiled or copied or (how == "out" and (lent or recyclable(info(node).value)))
        if how is None or (node in self.escaping and not into):
            plan.store[node], plan.how[node] = Store("call"), "call"
            return
        if node in self.escaping:
            plan.store[node], plan.how[node] = self._lend(node) if lent else Store("fresh"), how
            return
        over = next((o for o in tensor_operands(node) if self._reusable(o, node, how)), None)
        if how == "inplace" and (over is None or over is not node.args[0]):
            plan.store[node], plan.how[node] = Store("call"), "call"
            return
        plan.how[node] = how
        if over is not None:
            self._share(node, over)
        elif tiled and is_product(node):
            plan.store[node] = Store("scratch")
            plan.slots.append(Slot(0, 0, 0, str(info(node).value.device)))
            plan.pieces[node] = len(plan.slots) - 1
        elif tiled and self._within_item(node):
            dtypes = plan.scratch.setdefault(self.item_of[node], [])
            plan.store[node] = Store("scratch", len(dtypes))
            dtypes.append(info(node).value.dtype)
        else:
            self._slot(node)

    def _share_with_others(self, node: fx.Node) -> None:
        """Puts what a collective takes where the other ranks can read it."""
        if works_on_shared_memory(node):
            store = self.plan.store[self.root[node if node.target in _IN_PLACE else node.args[0]]]  # type: ignore[index]
            if store.kind == "slot":
                self.plan.slots[store.index].device = SHARED

    def _within_item(self, node: fx.Node) -> bool:
        """True when only the node's own group reads it."""
        return all(self.item_of.get(r) == self.item_of[node] for r in self.readers[node])

    def _reusable(self, operand: fx.Node, node: fx.Node, how: How) -> bool:
        value, root = info(operand).value, self.root[operand]
        home = self.plan.store.get(root)
        # what a kernel has allocated is given back, not kept: it comes on top of the arena
        kinds = ("slot", "scratch", "fresh") if how == "out" else ("slot", "call", "scratch", "fresh")
        if home is None or home.kind not in kinds or root in self.escaping:
            return False
        held = info(root).value
        if not isinstance(value, torch.Tensor) or not isinstance(held, torch.Tensor) or how == "fill":
            return False
        if home.kind == "scratch" and not self._within_item(node):
            return False
        whole = held.numel() == value.numel() and is_dense(value) and is_dense(held)
        return whole and layout(value) == layout(info(node).value) and self._may_write_over(node, root, how)

    def _finish(self) -> None:
        plan = self.plan
        copied: dict[fx.Node, int] = {}
        for item, pairs in plan.copies.items():
            for _, node in pairs:
                copied[self.root[node]] = max(copied.get(self.root[node], 0), item)
        returned = {self.root[n] for kind, n in plan.returned if kind in ("value", "clone")}
        for root, readers in self.readers.items():
            last = [self.item_of[r] for r in readers if r is not self.output]
            made = self.item_of.get(self._owner(root) if root.op == "call_function" else root, 0)
            plan.last_item[root] = max([made, copied.get(root, 0), *last])
            if root in returned:
                plan.last_item[root] = len(self.items)
        for index, (kind, node) in enumerate(plan.returned):
            if kind == "value" and plan.store[self.root[node]].kind not in ("call", "fresh", "lent"):
                plan.returned[index] = ("clone", node)
        for node, index in plan.pieces.items():
            value, item = info(node).value, self.item_of[node]
            size = rows_at_once(value) * value.shape[1] * value.itemsize
            plan.slots[index] = Slot(size, item, item, str(value.device), pieces=[(0, size, item)])
        for index, slot in enumerate(plan.slots):
            if index in self.members:
                self._describe(slot, self.members[index])
        plan.arena = place(plan.slots)
        plan.peak = min(peak(plan.slots), sum(plan.arena.values()))

    def _describe(self, slot: Slot, nodes: list[fx.Node]) -> None:
        """When a slot is written to, and how long it is read."""
        for node in nodes:
            value = info(node).value
            begin = self.item_of[self._owner(node)]
            slot.pieces.append((self.plan.store[node].offset, value.numel() * value.itemsize, begin))
        slot.start = min(begin for _, _, begin in slot.pieces)
        slot.end = max(self.plan.last_item[n] for n in nodes)
        # ranks may place things differently; what they meet over is as the transport saw it when they agreed
        slot.guest &= not any(is_collective(r.target) for n in nodes for r in (n, *self.readers[self.root[n]]))
