"""Buffer reuse: in which memory each call is carried out, an earlier value's or new, in the order of execution.

A value may overwrite another one when that one's other readers all come earlier, it has the very same layout, and the
operator reads only the elements that it writes. New values of inputs have their places before (`placement`).
Operands of a `cat` (buckets of gradients) are computed in its result.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import fx

from wholestep import comm
from wholestep.functional import is_wait
from wholestep.ir import GETITEM, info
from wholestep.lower.fusion.blocked_matmuls import is_product
from wholestep.lower.plan.arena import alignment
from wholestep.lower.plan.operator_facts import aten, mutable_variant
from wholestep.lower.plan.placement import Placement, Store, may_write_over, way
from wholestep.lower.plan.value_facts import (
    LEND_FROM,
    How,
    all_operands,
    base_of,
    dense,
    layout,
    origin_of,
    recyclable,
    tensor_operands,
    writer,
    writes_anywhere,
)
from wholestep.sizes import has_size


class Part(NamedTuple):
    """Where a value lies in the result of a `cat`: from element ``start`` on."""

    whole: fx.Node
    start: int


def _fills(operand: fx.Node, owner: fx.Node, whole: fx.Node) -> bool:
    """True when an operand is all of its owner's memory, in the order in which it lies."""
    value, held = info(operand).value, info(owner).value
    if owner.op != "call_function" or not isinstance(held, torch.Tensor) or held.dtype != info(whole).value.dtype:
        return False
    return value.stride() == (1,) and value.numel() == held.numel() > 0 and dense(held)


class BufferReuse:
    """Places all values that have no place yet.

    Attributes:
        parts: values that are computed in the result of a later `cat`.
    """

    def __init__(self, placed: Placement) -> None:
        self.placed, self.live, self.root = placed, placed.live, placed.root
        self.store, self.how, self.name = placed.store, placed.how, placed.name
        self.parts: dict[fx.Node, Part] = {}
        for node in self.live.nodes:
            if node.target is aten.cat.default and info(node).value.dim() == 1 and writer(node) == "out":
                self._find_parts(node)
        for node in self.live.nodes:
            self._place(node)

    def _find_parts(self, whole: fx.Node) -> None:
        """The values that can be written into a `cat` of flat tensors directly, where a kernel gives the same bits."""
        start = 0
        operands: list[fx.Node] = list(whole.args[0])  # type: ignore[arg-type]
        times = Counter(self.root[operand] for operand in operands)
        for operand in operands:
            value, owner = info(operand).value, self.root[operand]
            once = times[owner] == 1 and owner not in self.parts and _fills(operand, owner, whole)
            aligned = start * value.itemsize % alignment(str(value.device)) == 0
            same = once and writer(owner) is not None and (aligned or writes_anywhere(owner))
            if same and self._may_be_part(owner, whole):
                self.parts[owner] = Part(whole, start)
            start += value.numel()

    def _may_be_part(self, value: fx.Node, whole: fx.Node) -> bool:
        """True when a value may be computed in a part of the memory of a later one."""
        placed = value in self.store or whole in self.store or {value, whole} & self.live.escaping
        return not placed and value not in self.live.fixed and self.live.dead_before(value, whole)

    def _place(self, node: fx.Node) -> None:
        if node in self.live.fixed:
            self.store[node], self.how[node] = Store("constant"), "call"
            return
        if node in self.how or (node in self.store and node.target is GETITEM):
            self.how.setdefault(node, "pick")
            return
        base = base_of(node)
        if isinstance(info(node).value, (int, float)):
            self.how[node] = "host"
        elif base is not None:
            self.store[node] = self.store[self.root[node]]
            self.how[node] = "wait" if is_wait(node.target) else "skip" if self.live.peel(node) is not node else "view"
            if self.how[node] != "view":
                self.name[node] = self.name[base]
        elif node.target is GETITEM:
            self._place_result(node)
        elif mutable_variant(node.target) is not None:
            self.how[node] = "mutable"
            self._place_written(node)
        else:
            self._place_call(node)

    def _place_result(self, node: fx.Node) -> None:
        """One of several results of a call."""
        old = self.live.unwritten.get(node)
        if old is not None:
            self.store[node], self.name[node] = self.store[self.root[old]], self.name[old]
            self.how[node] = "skip"
        elif base_of(origin_of(node)[0]) is not None:
            self.store[node] = self.store[self.root[node]]
            self.how[node] = "view"
        else:
            self.placed.new(node, "kernel")
            self.how[node] = "pick"

    def _place_written(self, node: fx.Node) -> None:
        """Decides which arguments of an argument-writing call are written where they are; the others are cloned."""
        for entry in self.live.written[node]:
            if entry.in_place or not entry.writes:
                continue
            root = self.root[entry.old]
            store = self.store.get(root)
            ours = store is not None and store.kind in ("arena", "kernel") and root not in self.live.escaping
            alone = sum(self.root[o] is root for o in all_operands(node)) == 1
            if ours and alone and self.live.dead_before(root, node) and entry.leaf not in self.live.escaping:
                entry.in_place = True
                if entry.leaf is not None:
                    self.placed.share(entry.leaf, entry.old)
            elif entry.leaf is not None:
                self.placed.new(entry.leaf, "kernel")

    def _place_call(self, node: fx.Node) -> None:
        value, how = info(node).value, way(node)
        if node in self.store:  # some of its operands lie in it already
            return self._place_concat(node)
        if node in self.parts and how is not None:
            return self._place_part(node, self.parts[node], how)
        escaping, item = node in self.live.escaping, self.live.item_of[node]
        chained = self.live.items[item].kind == "chain"
        lent = node in self.live.lendable and not has_size(value) and recyclable(value, LEND_FROM)
        # the first operand of a copy need not exist any more
        into = chained or node.target is aten.copy.default or (how == "out" and (lent or recyclable(value)))
        over = None
        if how is not None and not escaping:
            over = next((o for o in tensor_operands(node) if self._reusable(o, node, how)), None)
            if how == "inplace" and (over is None or over is not node.args[0]):
                how = None
        if how is None or (escaping and not into):
            self.placed.new(node, "kernel")
            self.how[node] = "call"
            return
        self.how[node] = how
        if over is not None:
            self.placed.share(node, over)
        elif escaping:
            self.placed.new(node, "lent" if lent else "fresh")
        elif self.live.items[item].kind != "single" and is_product(node):
            self.placed.new(node, "rows")
        elif chained and self.live.within_item(node):
            self.placed.new(node, "scratch")
        elif not self._in_own_rows(node, how):
            self.placed.new(node, "arena")

    def _reusable(self, operand: fx.Node, node: fx.Node, how: How) -> bool:
        """True when a call may write where an operand, read for the last time, lies."""
        value, root = info(operand).value, self.root[operand]
        store = self.store.get(root)
        kinds = ["arena", "scratch", "rows", "fresh"]
        if how != "out":  # what a kernel has allocated is freed rather than kept: it comes on top of the arena
            kinds.append("kernel")
        if store is None or store.kind not in kinds or root in self.live.escaping or how == "fill":
            return False
        held = info(root).value
        if not isinstance(value, torch.Tensor) or not isinstance(held, torch.Tensor):
            return False
        if store.in_cache and not self.live.within_item(node):
            return False
        whole = held.numel() == value.numel() and dense(value) and dense(held)
        return whole and layout(value) == layout(info(node).value) and may_write_over(self.live, node, root, how)

    def _in_own_rows(self, node: fx.Node, how: How | None) -> bool:
        """Has a reduce-scatter write over this rank's rows of its operand, where only the wait for it follows.

        The operand stays until that wait: with memory of its own for each result, the gradients of a step whose waits
        all come at its end would need half as much again.
        """
        if node.target is not torch.ops.wholestep.reduce_scatter.default or how != "out":
            return False
        operand: Any = node.args[0]
        root, value = self.root[operand], info(node).value
        store, held, when = self.store.get(root), info(root).value, self.live.position[node]
        if store is None or store.kind != "arena" or root in self.live.escaping:
            return False
        whole = held.numel() == info(operand).value.numel() and held.dtype == value.dtype and dense(held)
        others = [r for r in self.live.readers[root] if r is not node and not (is_wait(r.target) and r.args[0] is node)]
        if not whole or any(self.live.read_time(reader, root) >= when for reader in others):
            return False
        store.values.append(node)
        rank = comm.get_group(node.args[-1]).rank() if comm.is_initialized() else 0  # type: ignore[arg-type]
        self.store[node] = store
        self.placed.offset[node] = self.placed.offset.get(root, 0) + rank * value.numel() * value.itemsize
        return True

    def _place_part(self, node: fx.Node, part: Part, how: How) -> None:
        """Computes a value where a later `cat` will have it."""
        store = self.store.get(part.whole) or self.placed.new(part.whole, "arena")
        store.values.append(node)
        self.store[node], self.how[node] = store, how
        self.placed.offset[node] = part.start * info(node).value.itemsize

    def _place_concat(self, node: fx.Node) -> None:
        self.how[node] = "concat"
        start, left = 0, []
        for operand in tensor_operands(node):
            value, root = info(operand).value, self.root[operand]
            inside = root in self.parts and self.parts[root].whole is node and self.store[root] is self.store[node]
            if not inside or self.placed.offset.get(root) != start * value.itemsize:
                left.append((operand, start, value.numel()))
            start += value.numel()
        self.placed.unpacked[node] = left
