"""Where each value lives: in an input's own memory, in the arena, in a tile's scratch, or fresh.

The graph is pure; here values of disjoint lives come to share memory. Terms:

- the *root* of a value is the node whose memory it is (a view's root is its base's);
- a root's *readers* are the nodes that read it or a view of it, outputs included;
- positions count nodes in the order of execution; those of a batch count as simultaneous.

A value may overwrite another one when that one's other readers all come earlier, it has the very same
layout, and the operator reads only the elements that it writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from wholestep.ir import GETITEM, StepGraph, info, is_effectful
from wholestep.lower.arena import Slot, peak, place
from wholestep.lower.ops import (
    COPIES,
    FILLS,
    SELF_ONLY_INPLACE,
    aten,
    base_name,
    inplace_variant,
    is_collective,
    is_in_place_collective,
    is_pointwise,
    is_view,
    is_wait,
    mutable_twin,
)
from wholestep.lower.order import Item
from wholestep.lower.values import (
    How,
    Written,
    all_operands,
    base_of,
    determined,
    fill_numbers,
    is_dense,
    layout,
    origin_of,
    recyclable,
    spared_arguments,
    tensor_operands,
    writer,
    written_arguments,
)
from wholestep.torch_compat import OpOverload

FLAT_OPS = {"sqrt"}  # elementwise, correctly rounded: the same bits wherever an element lies
CONSTANT_BYTES = 1 << 22  # results of no input are kept between calls up to this size


@dataclass
class Store:
    """A piece of memory that values share over time."""

    kind: Literal["input", "constant", "slot", "scratch", "call", "fresh"]
    index: int = -1  # of the input, slot or scratch buffer
    offset: int = 0  # in bytes, inside of a slot that several values lie in side by side


@dataclass
class Plan:
    """What `emit` needs to write the program.

    Attributes:
        items: the order of execution.
        how: the way each call is carried out.
        store: where each value lives.
        name: the variable that holds each value; values in one place with one layout share it.
        target: for out-like ways, the node itself (its variable is the destination).
        constant: nodes computed once, when memory is bound.
        copies: item index -> (input index, node) copied after that item.
        returned: for each output, ("input", i), ("value", node), ("clone", node) or ("literal", value).
        written: for each argument-writing call: (argument, index in list or None, old, leaf, in place).
        slots, arena: the arena's buffers, and bytes per device.
        flat: slot index -> the values that lie in it side by side, in order.
        scratch: for each tiled item, dtypes of its scratch buffers.
    """

    step: StepGraph
    items: list[Item]
    how: dict[fx.Node, How] = field(default_factory=dict)
    store: dict[fx.Node, Store] = field(default_factory=dict)
    name: dict[fx.Node, str] = field(default_factory=dict)
    constant: list[fx.Node] = field(default_factory=list)
    copies: dict[int, list[tuple[int, fx.Node]]] = field(default_factory=dict)
    returned: list[tuple[str, Any]] = field(default_factory=list)
    written: dict[fx.Node, list[Written]] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    arena: dict[str, int] = field(default_factory=dict)
    flat: dict[int, list[fx.Node]] = field(default_factory=dict)
    peak: int = 0
    scratch: dict[int, list[torch.dtype]] = field(default_factory=dict)
    last_item: dict[fx.Node, int] = field(default_factory=dict)
    root: dict[fx.Node, fx.Node] = field(default_factory=dict)


# Names that the generated program uses itself.
_TAKEN = re.compile(
    r"inputs|arena|scratch|tile|fresh|run|bind|torch|math|at|filled|tiles|pieces|cells|(list|tiles|result|new|object|flat)_\d+"
    r"|(number|tensors|aten|host)_.*|.*_(cells|float32|float64|t)"
)


def variable(node: fx.Node) -> str:
    """The variable of a node's own: its name, unless the program uses that."""
    return node.name + "_" if _TAKEN.fullmatch(node.name) else node.name


def make_plan(step: StepGraph, items: list[Item]) -> Plan:
    """Plans the memory of a program whose order is given."""
    return _Planner(step, items).run()


class _Planner:
    def __init__(self, step: StepGraph, items: list[Item]) -> None:
        self.step, self.items = step, items
        self.inputs, self.outputs = step.placeholders, step.outputs
        self.plan = Plan(step, items)
        self.position: dict[fx.Node, int] = {}
        self.item_of: dict[fx.Node, int] = {}
        self.bounds: list[tuple[int, int]] = []
        self.root = self.plan.root
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.members: dict[int, list[fx.Node]] = {}
        self.escaping: set[fx.Node] = set()
        self.leaves: dict[fx.Node, dict[tuple[int, ...], fx.Node]] = {}
        self.spared: dict[fx.Node, dict[tuple[int, ...], fx.Node]] = {}
        for index, item in enumerate(items):
            start = len(self.position)
            for node in item.nodes:
                self.position[node] = len(self.position)
                self.item_of[node] = index
            self.bounds.append((start, len(self.position) - 1))
        self.end = len(self.position)
        (self.output,) = (n for n in step.graph.nodes if n.op == "output")
        self.position[self.output] = self.end

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
        for item in self.items:
            if item.kind == "batch":
                self._decide_flat(item.nodes)
            for node in item.nodes:
                self._decide(node)
        self._finish()
        return self.plan

    # Aliases and lives

    def _find_constants(self) -> None:
        fixed = {n for n in self.step.graph.nodes if n.op == "get_attr"}
        for item in self.items:
            for node in item.nodes:
                value = info(node).value
                if is_effectful(node) or not isinstance(node.target, OpOverload) or item.kind != "single":
                    continue
                if is_collective(node.target) or is_wait(node.target):
                    continue
                if not isinstance(value, torch.Tensor) or value.numel() * value.itemsize > CONSTANT_BYTES:
                    continue
                operands = [] if node.target in FILLS else node.all_input_nodes
                filled = node.target in FILLS and not any(isinstance(o, fx.Node) for o in fill_numbers(node))
                if (filled or node.target not in FILLS) and all(o in fixed for o in operands) and determined(node):
                    fixed.add(node)
                    self.plan.constant.append(node)
        self.fixed = fixed

    def _find_root(self, node: fx.Node) -> None:
        value = info(node).value
        base = base_of(node)
        if isinstance(value, (int, float)) or value is None:
            self.root[node] = node
        elif base is not None:
            self.root[node] = self.root[base]
        elif node.target is GETITEM:
            owner, path = origin_of(node)
            viewed = base_of(owner) or self._spared(owner).get(path)
            self.root[node] = self.root[viewed] if viewed is not None else node
            self.leaves.setdefault(owner, {})[path] = node
        else:
            self.root[node] = node
        self.readers.setdefault(self.root[node], [])
        if node.target is not GETITEM and not (node in self.fixed and node.target in FILLS):
            for operand in node.all_input_nodes:
                if node.target is aten.copy.default and operand is node.args[0] is not node.args[1] and writer(node):
                    continue  # a copy does not read what it replaces
                self.readers[self.root[operand]].append(node)
        started = self.root[node].target
        if is_wait(node.target) and not is_in_place_collective(started):  # until now it reads what it was given
            for operand in self.root[node].all_input_nodes:
                self.readers[self.root[operand]].append(node)

    def _spared(self, owner: fx.Node) -> dict[tuple[int, ...], fx.Node]:
        """Results of an argument-writing call that are an argument left as it was."""
        if owner not in self.spared:
            self.spared[owner] = spared_arguments(owner)
        return self.spared[owner]

    def _peel(self, node: Any) -> Any:
        """The value that a clone, detach or alias repeats."""
        while isinstance(node, fx.Node) and node.op == "call_function" and node not in self.fixed:
            base = base_of(node)
            if base is None or not all(isinstance(info(n).value, torch.Tensor) for n in (base, node)):
                return node
            if layout(info(base).value) != layout(info(node).value):
                return node
            if not (node.target in COPIES or base_name(node.target) in ("detach", "alias", "lift_fresh")):  # type: ignore[arg-type]
                return node
            node = base
        return node

    def _read_outputs(self) -> None:
        taken: set[fx.Node] = set()
        mutations = self.step.signature.mutations
        for index, node in enumerate(self.outputs):
            if index in mutations:
                self.plan.returned.append(("input", mutations[index]))
                continue
            if not isinstance(node, fx.Node) or not isinstance(info(node).value, torch.Tensor):
                self.plan.returned.append(("literal", node))
                continue
            root, value = self.root[node], info(node).value
            self.readers[root].append(self.output)
            held = info(root).value
            own = root.op == "call_function" and root not in self.fixed and root not in taken
            if own and isinstance(held, torch.Tensor) and held.numel() == value.numel():
                taken.add(root)
                self.escaping.add(root)
                self.plan.returned.append(("value", node))
            else:
                self.plan.returned.append(("clone", node))
        for index in mutations:
            node = self._peel(self.outputs[index])
            if isinstance(node, fx.Node) and node is not self.inputs[mutations[index]]:
                self.readers[self.root[node]].append(self.output)

    def _write_time(self, node: fx.Node) -> int:
        item = self.item_of[node]
        return self.bounds[item][0] if self.items[item].kind == "batch" else self.position[node]

    def _read_time(self, reader: fx.Node, root: fx.Node, value: Any) -> int:
        """When a reader reads for the last time; a tile's single numbers are read by every tile."""
        if reader is self.output:
            return self.end
        item = self.item_of[reader]
        kind = self.items[item].kind
        if kind == "single":
            return self.position[reader]
        if kind == "tile":
            shape = info(reader).value.shape
            if all(info(o).value.shape == shape for o in reader.all_input_nodes if self.root[o] is root):
                return self.position[reader]
        return self.bounds[item][1]

    def _dead_before(self, root: fx.Node, node: fx.Node) -> bool:
        """True when every reader of ``root`` but ``node`` comes before ``node`` writes."""
        when = self._write_time(node)
        return all(self._read_time(r, root, None) < when for r in self.readers[root] if r is not node)

    # In place

    def _may_write_over(self, node: fx.Node, root: fx.Node, how: How) -> bool:
        """True when ``node`` may write where ``root`` lies although it reads it (or does not)."""
        if not self._dead_before(root, node):
            return False
        mine = [o for o in tensor_operands(node) if self.root[o] is root]
        if not mine:
            return True
        if any(layout(info(o).value) != layout(info(node).value) for o in mine):
            return False
        if how in ("scatter", "collective") or (how == "inplace" and not is_pointwise(node.target)):
            return len(mine) == 1 and mine[0] is node.args[0]
        item = self.items[self.item_of[node]]
        if item.kind == "tile" and self._read_time(node, root, None) != self.position[node]:
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
        if isinstance(made, fx.Node) and made.op == "call_function" and self._claim(made, into):
            return
        item = self.item_of.get(node, -1)
        for reader in self.readers[placeholder]:
            item = max(item, len(self.items) if reader is self.output else self.item_of[reader])
        if self.plan.store.get(self.root[node], Store("call")).kind == "input":
            item = len(self.items)
        self.plan.copies.setdefault(item, []).append((into, node))

    def _owner(self, node: fx.Node) -> fx.Node:
        return origin_of(node)[0] if node.target is GETITEM else node

    def _claim(self, node: fx.Node, into: int) -> bool:
        """Makes input ``into``'s memory the home of ``node`` and of the dying values it is made from."""
        placeholder = self.inputs[into]
        if self.root[node] is not node or node in self.plan.store or node in self.fixed:
            return False
        old = info(placeholder).value
        if layout(info(node).value) != layout(old) or not is_dense(old):
            return False
        if node.target is GETITEM:
            return self._claim_written(node, into)
        how = self._ways(node)
        if how is None or not self._may_write_over(node, placeholder, how):
            return False
        operands = tensor_operands(node)
        if how in ("inplace", "scatter"):
            first = operands[0]
            if self.root[first] is not placeholder and not self._claim_dying(first, node, into):
                return False
        self.plan.store[node] = self.plan.store[placeholder]
        self.plan.name[node] = self.plan.name[placeholder]
        self.plan.how[node] = how
        if is_pointwise(node.target) and not any(self.root[o] is placeholder for o in operands):
            any(self._claim_dying(o, node, into) for o in operands)
        return True

    def _claim_dying(self, operand: fx.Node, node: fx.Node, into: int) -> bool:
        if operand.op != "call_function" or not isinstance(info(operand).value, torch.Tensor):
            return False
        same = layout(info(operand).value) == layout(info(node).value)
        alone = self._may_write_over(node, self.root[operand], self._ways(node) or "call")
        return same and alone and self._claim(operand, into)

    def _claim_written(self, leaf: fx.Node, into: int) -> bool:
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
            if not self._dead_before(placeholder, owner) or not self._claim(entry.old, into):
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

    # Every other value

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

    def _decide_call(self, node: fx.Node) -> None:
        plan, how = self.plan, self._ways(node)
        tiled = self.items[self.item_of[node]].kind == "tile"
        copied = node.target is aten.copy.default  # whose first operand need not exist any more
        into = tiled or copied or (how == "out" and recyclable(info(node).value))
        if how is None or (node in self.escaping and not into):
            plan.store[node], plan.how[node] = Store("call"), "call"
            return
        if node in self.escaping:
            plan.store[node], plan.how[node] = Store("fresh"), how
            return
        over = next((o for o in tensor_operands(node) if self._reusable(o, node, how)), None)
        if how == "inplace" and (over is None or over is not node.args[0]):
            plan.store[node], plan.how[node] = Store("call"), "call"
            return
        plan.how[node] = how
        if over is not None:
            self._share(node, over)
        elif tiled and self._within_item(node):
            dtypes = plan.scratch.setdefault(self.item_of[node], [])
            plan.store[node] = Store("scratch", len(dtypes))
            dtypes.append(info(node).value.dtype)
        else:
            plan.store[node] = Store("slot", len(plan.slots))
            value = info(node).value
            plan.slots.append(Slot(value.numel() * value.itemsize, 0, 0, str(value.device)))
            self.members[len(plan.slots) - 1] = [node]

    def _decide_flat(self, nodes: list[fx.Node]) -> None:
        """Lays the results of a batch side by side, where they are new, so that one call serves all of them."""
        values = [info(n).value for n in nodes]
        if base_name(nodes[0].target) not in FLAT_OPS or any(n in self.plan.how or n in self.escaping for n in nodes):  # type: ignore[arg-type]
            return
        operands = [o for n in nodes for o in tensor_operands(n)]
        if not all(v.is_contiguous() for v in [*values, *(info(o).value for o in operands)]):
            return
        if any(self._ways(n) != "out" or self._reusable(n.args[0], n, "out") for n in nodes):  # type: ignore[arg-type]
            return
        index, offset = len(self.plan.slots), 0
        for node, value in zip(nodes, values, strict=True):
            self.plan.store[node], self.plan.how[node] = Store("slot", index, offset), "out"
            self.plan.name[node] = variable(node)
            offset += value.numel() * value.itemsize
        self.plan.slots.append(Slot(offset, 0, 0, str(values[0].device)))
        self.members[index], self.plan.flat[index] = list(nodes), list(nodes)

    def _within_item(self, node: fx.Node) -> bool:
        """True when only the node's own group reads it."""
        return all(self.item_of.get(r) == self.item_of[node] for r in self.readers[node])

    def _reusable(self, operand: fx.Node, node: fx.Node, how: How) -> bool:
        value, root = info(operand).value, self.root[operand]
        home = self.plan.store.get(root)
        if home is None or home.kind not in ("slot", "call", "scratch", "fresh") or root in self.escaping:
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
            if kind == "value" and plan.store[self.root[node]].kind not in ("call", "fresh"):
                plan.returned[index] = ("clone", node)
        for index, slot in enumerate(plan.slots):
            nodes = self.members[index]
            slot.start = min(self.item_of[self._owner(n)] for n in nodes)
            slot.end = max(plan.last_item[n] for n in nodes)
        plan.arena = place(plan.slots)
        plan.peak = peak(plan.slots)
