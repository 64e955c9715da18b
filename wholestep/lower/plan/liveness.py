"""Liveness: which values are views of one another, who reads each piece of memory, and when for the last time.

- The *root* of a value is the node whose memory it is: a view's root is its base's.
- A root's *readers* are the nodes that read it or a view of it, the output node included.
- Positions count nodes in the order of execution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.functional import Decided, base_name, is_wait
from wholestep.ir import GETITEM, StepGraph, info, is_effectful
from wholestep.lower.fusion.blocked_matmuls import is_product
from wholestep.lower.fusion.execution_order import Item
from wholestep.lower.plan.operator_facts import COPIES, FILLS, aten, is_in_place_collective
from wholestep.lower.plan.value_facts import Written, base_of, fill_number, layout, origin_of, writer, written_results
from wholestep.torch_compat import OpOverload

CONSTANT_BYTES = 1 << 22  # results of no input are kept between calls up to this size


class Liveness:
    """Aliases and lifetimes of a program whose order is given; nothing is placed yet.

    Args:
        held: names of gradients that somebody holds when the program runs again.

    Attributes:
        root, readers: see above.
        parts: sparse tensor -> the roots of what it is made of.
        fixed: values that depend on no input; constants: those of them that are computed once, when memory is bound.
        written: argument-writing call -> the results that are new values of its arguments.
        unwritten: result that is an argument left as it is -> that argument.
        returned: for each output, ("input", i), ("value", node), ("clone", node) or ("literal", value).
        escaping: roots that leave the program.
        lendable: those among them that may lie in the arena, as gradients that the next call replaces unread.
    """

    def __init__(self, step: StepGraph, items: list[Item], held: frozenset[str] = frozenset()) -> None:
        self.step, self.items = step, items
        self.inputs, self.outputs = step.placeholders, step.outputs
        (self.output,) = (n for n in step.graph.nodes if n.op == "output")
        self.nodes = [node for item in items for node in item.nodes]
        self.position = {node: index for index, node in enumerate([*self.nodes, self.output])}
        self.item_of = {node: index for index, item in enumerate(items) for node in item.nodes}
        self.root = {node: node for node in step.graph.nodes if node.op in ("placeholder", "get_attr")}
        self.readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.root}
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.written: dict[fx.Node, list[Written]] = {}
        self.unwritten: dict[fx.Node, fx.Node] = {}
        self.returned: list[tuple[str, Any]] = []
        self.escaping: set[fx.Node] = set()
        self.lendable: set[fx.Node] = set()
        self.fixed = {node for node in self.root if node.op == "get_attr"}
        for node in self.nodes:
            if self._is_constant(node):
                self.fixed.add(node)
        self.constants = [node for node in self.nodes if node in self.fixed]
        for node in self.nodes:
            self._add(node)
        self._read_outputs(held)

    def _is_constant(self, node: fx.Node) -> bool:
        value = info(node).value
        if not isinstance(node.target, OpOverload) or not isinstance(value, torch.Tensor) or is_effectful(node):
            return False
        if self.items[self.item_of[node]].kind != "single" or base_name(node.target).startswith(("empty", "new_empty")):
            return False
        if node.target in FILLS:
            fixed = not isinstance(fill_number(node), fx.Node)
        else:
            fixed = node.target is not aten.copy.default and all(one in self.fixed for one in node.all_input_nodes)
        return fixed and value.numel() * value.itemsize <= CONSTANT_BYTES

    def _add(self, node: fx.Node) -> None:
        value, base = info(node).value, base_of(node)
        if node.target is GETITEM:
            owner, path = origin_of(node)
            for entry in self.written[owner]:
                if entry.path == path and entry.writes:
                    entry.leaf = node
                elif entry.path == path:
                    self.unwritten[node] = entry.old
            base = base_of(owner) or self.unwritten.get(node)
        else:
            self.written[node] = list(written_results(node))
        alone = base is None or isinstance(value, (int, float)) or value is None
        root = self.root[node] = node if alone else self.root[base]
        self.readers.setdefault(root, [])
        if node.target is not GETITEM and not (node in self.fixed and node.target in FILLS):
            for operand in node.all_input_nodes:
                if node.target is aten.copy.default and operand is node.args[0] is not node.args[1] and writer(node):
                    continue  # a copy does not read what it replaces
                self._read(operand, node)
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:  # its indices and values are its operands
            roots = [self.root[operand] for operand in node.all_input_nodes]
            self.parts[root] = [*roots, *(inner for r in roots for inner in self.parts.get(r, ()))]
        if isinstance(node.target, Decided):  # where the program may end: nothing is written before
            for into in self.step.signature.mutations.values():
                self._read(self.inputs[into], node)
        if is_wait(node.target) and not is_in_place_collective(root.target):  # until now it reads what it was given
            for operand in root.all_input_nodes:
                self.readers[self.root[operand]].append(node)

    def _read(self, operand: fx.Node, reader: fx.Node) -> None:
        root = self.root[operand]
        for read in (root, *self.parts.get(root, ())):
            self.readers[read].append(reader)

    def peel(self, node: Any) -> Any:
        """The value that a clone, detach or alias repeats."""
        while isinstance(node, fx.Node) and node.op == "call_function" and node not in self.fixed:
            op = node.target
            named = isinstance(op, OpOverload) and base_name(op) in ("detach", "alias", "lift_fresh")
            base = base_of(node) if named or op in COPIES else None
            if base is None or layout(info(base).value) != layout(info(node).value):
                return node
            node = base
        return node

    def _read_outputs(self, held: frozenset[str]) -> None:
        signature = self.step.signature
        # in a backward, an arena that lent would lie idle beside the forward's activations
        lends = {i for i, kept in signature.state_outputs.items() if kept.kind == "grad" and not signature.donated}
        for index, node in enumerate(self.outputs):
            if index in signature.mutations:
                self.returned.append(("input", signature.mutations[index]))
            elif not isinstance(node, fx.Node) or not isinstance(info(node).value, torch.Tensor):
                self.returned.append(("literal", node))
            else:
                self.returned.append(("value" if self._is_own(node) else "clone", node))
                root = self.root[node]
                self._read(node, self.output)
                self.escaping |= {r for r in self.parts.get(root, ()) if r.op == "call_function"} - self.fixed
                if self.returned[-1][0] == "value":
                    self.escaping.add(root)
                    if index in lends and root not in self.parts and root.name not in held:
                        self.lendable.add(root)
        for index, into in signature.mutations.items():
            node = self.peel(self.outputs[index])
            if isinstance(node, fx.Node) and node is not self.inputs[into]:
                self.readers[self.root[node]].append(self.output)

    def _is_own(self, node: fx.Node) -> bool:
        """True for an output that is all of a memory that no output before it has taken."""
        root = self.root[node]
        whole = info(root).value
        if root.op != "call_function" or root in self.fixed or root in self.escaping:
            return False
        return isinstance(whole, torch.Tensor) and whole.numel() == info(node).value.numel()

    def within_item(self, node: fx.Node) -> bool:
        """True when only the node's own group reads it."""
        return all(self.item_of.get(reader) == self.item_of[node] for reader in self.readers[node])

    def read_time(self, reader: fx.Node, root: fx.Node) -> int:
        """The position up to which a reader reads; a chain's single numbers are read by every block."""
        item = self.items[self.item_of[reader]] if reader is not self.output else None
        if item is None or item.kind == "single":
            return self.position[reader]
        if item.kind == "chain" and not is_product(reader):
            shape = info(reader).value.shape
            if all(info(o).value.shape == shape for o in reader.all_input_nodes if self.root[o] is root):
                return self.position[reader]
        return self.position[item.nodes[-1]]

    def dead_before(self, root: fx.Node, node: fx.Node) -> bool:
        """True when every reader of ``root`` but ``node`` has read it before ``node`` writes."""
        when = self.position[node]
        return all(self.read_time(reader, root) < when for reader in self.readers[root] if reader is not node)
