"""Buffer reuse: how each call is carried out, and in which memory: an input's, an earlier value's, or new.

A value may overwrite another one when that one's other readers all come earlier, it has the very same layout, and the
operator reads only the elements that it writes. New values of inputs are placed in those inputs' own memory first,
from the last call back; all other values follow in the order of execution.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from wholestep import comm
from wholestep.functional import is_wait
from wholestep.ir import GETITEM, info
from wholestep.lower.fusion.blocked_matmuls import is_product
from wholestep.lower.plan.arena import Slot
from wholestep.lower.plan.concat_buffers import Part, find_parts
from wholestep.lower.plan.in_place import may_write_over, way
from wholestep.lower.plan.liveness import Liveness
from wholestep.lower.plan.operator_facts import (
    aten,
    is_pointwise,
    mutable_variant,
)
from wholestep.lower.plan.value_facts import (
    LEND_FROM,
    How,
    Written,
    all_operands,
    base_of,
    dense,
    layout,
    origin_of,
    recyclable,
    tensor_operands,
    variable,
    writes_anywhere,
)
from wholestep.sizes import has_size


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


class BufferReuse:
    """Decides for each value of a program where it lives and how it gets there.

    Attributes:
        how: the way each call is carried out.
        store: where each value lives; stores: all pieces of memory but inputs, in the order in which they are needed.
        name: the variable that holds each value; values in one place with one layout share it.
        offset: bytes from the start of its store to a value that lies in a part of it: its place in a `cat`, or this
            rank's rows of what a reduce-scatter reduces.
        copies: item index -> (input index, node) copied after that item.
        unpacked: `cat` -> (operand, first element, elements) of what must be copied; the rest is computed in place.
        scratch: for each item that works by pieces, how many scratch buffers it has.
    """

    def __init__(self, live: Liveness) -> None:
        self.live, self.root = live, live.root
        self.how: dict[fx.Node, How] = {}
        self.store: dict[fx.Node, Store] = {}
        self.stores: list[Store] = []
        self.name = _Names()
        self.offset: dict[fx.Node, int] = {}
        self.copies: dict[int, list[tuple[int, fx.Node]]] = {}
        self.unpacked: dict[fx.Node, list[tuple[fx.Node, int, int]]] = {}
        self.scratch: Counter[int] = Counter()
        for node in live.step.graph.nodes:
            if node.op == "get_attr":
                self.store[node] = Store("constant")
        for index, node in enumerate(live.inputs):
            self.store[node] = Store("input", index)
        for out, into in live.step.signature.mutations.items():
            self._place_mutation(live.peel(live.outputs[out]), into)
        self.parts: dict[fx.Node, Part] = find_parts(live.nodes, self.root, self._may_be_part)
        for node in live.nodes:
            self._place(node)

    def _new(self, node: fx.Node, kind: Any, index: int = -1) -> Store:
        """Memory for a value alone."""
        store = self.store[node] = Store(kind, index, [node])
        self.stores.append(store)
        return store

    def _share(self, node: fx.Node, old: fx.Node, name: str = "") -> None:
        """Puts a value where another one lies."""
        root = self.root[old]
        self.store[node], self.name[node] = self.store[root], name or self.name[old]
        self.store[node].values.append(node)
        if root in self.offset:
            self.offset[node] = self.offset[root]

    # New values of inputs

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
            self._share(node, old)
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
        if rows is None or live.readers[new] != [scatter] or not is_pointwise(new.target) or way(new) != "out":
            return False
        readers = [r for r in live.readers[old] if r is not scatter]
        beside = [o for r in readers if live.item_of.get(r) == live.item_of[new] for o in tensor_operands(r)]
        if any(self.root[o] is old and o is not rows for o in beside):
            return False
        late = any(live.read_time(r, old) >= live.position[new] for r in readers if r is not new)
        if late or layout(info(new).value) != layout(info(rows).value):
            return False
        self._share(new, old, variable(rows))
        self.how[new] = "out"
        return True

    # All other values

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
            self._new(node, "kernel")
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
                    self._share(entry.leaf, entry.old)
            elif entry.leaf is not None:
                self._new(entry.leaf, "kernel")

    def _place_call(self, node: fx.Node) -> None:
        value, how = info(node).value, way(node)
        if node in self.store:  # some of its operands lie in it already
            return self._place_concat(node)
        if node in self.parts and how is not None:
            return self._place_part(node, self.parts[node], how)
        escaping, item = node in self.live.escaping, self.live.item_of[node]
        tiled = self.live.items[item].by_pieces
        lent = node in self.live.lendable and not has_size(value) and recyclable(value, LEND_FROM)
        # the first operand of a copy need not exist any more
        into = tiled or node.target is aten.copy.default or (how == "out" and (lent or recyclable(value)))
        over = None
        if how is not None and not escaping:
            over = next((o for o in tensor_operands(node) if self._reusable(o, node, how)), None)
            if how == "inplace" and (over is None or over is not node.args[0]):
                how = None
        if how is None or (escaping and not into):
            self._new(node, "kernel")
            self.how[node] = "call"
            return
        self.how[node] = how
        if over is not None:
            self._share(node, over)
        elif escaping:
            self._new(node, "lent" if lent else "fresh")
        elif self.live.items[item].kind != "single" and is_product(node):
            self._new(node, "rows")
        elif tiled and self.live.within_item(node):
            self._new(node, "scratch", self.scratch[item])
            self.scratch[item] += 1
        elif not self._in_own_rows(node, how):
            self._new(node, "arena")

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
        self.store[node], self.offset[node] = store, self.offset.get(root, 0) + rank * value.numel() * value.itemsize
        return True

    def _place_part(self, node: fx.Node, part: Part, how: How) -> None:
        """Computes a value where a later `cat` will have it."""
        store = self.store.get(part.whole) or self._new(part.whole, "arena")
        store.values.append(node)
        self.store[node], self.how[node] = store, how
        self.offset[node] = part.start * info(node).value.itemsize

    def _place_concat(self, node: fx.Node) -> None:
        self.how[node] = "concat"
        start, left = 0, []
        for operand in tensor_operands(node):
            value, root = info(operand).value, self.root[operand]
            inside = root in self.parts and self.parts[root].whole is node and self.store[root] is self.store[node]
            if not inside or self.offset.get(root) != start * value.itemsize:
                left.append((operand, start, value.numel()))
            start += value.numel()
        self.unpacked[node] = left
