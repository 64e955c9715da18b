"""Which values share memory, who reads each of them and when: the facts that `plan` rests on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from wholestep.ir import GETITEM, StepGraph, info, is_effectful
from wholestep.lower.fusion.blocked_matmuls import is_product
from wholestep.lower.fusion.execution_order import Item
from wholestep.lower.plan.arena import Slot
from wholestep.lower.plan.concat_buffers import Part
from wholestep.lower.plan.operator_facts import (
    COPIES,
    FILLS,
    aten,
    base_name,
    is_collective,
    is_in_place_collective,
    is_wait,
)
from wholestep.lower.plan.value_facts import (
    How,
    Written,
    base_of,
    determined,
    fill_numbers,
    layout,
    origin_of,
    spared_arguments,
    writer,
)
from wholestep.torch_compat import OpOverload

CONSTANT_BYTES = 1 << 22  # results of no input are kept between calls up to this size


@dataclass
class Store:
    """A piece of memory that values share over time."""

    kind: Literal["input", "constant", "slot", "scratch", "call", "fresh", "lent"]
    index: int = -1  # of the input, slot (also of what is lent) or scratch buffer
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
        unpacked: `cat` -> (operand, first element, elements) of what must be copied; the rest is computed in place.
        slots, arena: the arena's buffers, and bytes per device.
        scratch: for each item that runs by pieces, dtypes of its scratch buffers.
        pieces: product that is computed by rows -> the slot for some of them.
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
    unpacked: dict[fx.Node, list[tuple[fx.Node, int, int]]] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    arena: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    scratch: dict[int, list[torch.dtype]] = field(default_factory=dict)
    pieces: dict[fx.Node, int] = field(default_factory=dict)
    last_item: dict[fx.Node, int] = field(default_factory=dict)
    root: dict[fx.Node, fx.Node] = field(default_factory=dict)


# Names that the generated program uses itself.
_TAKEN = re.compile(
    r"inputs|arena|scratch|tile|fresh|loans|lend_.*|run|bind|torch|math|at|chain|clone_as_it_lies|filled|tiles|pieces|cells|by_rows|parts|first|some|part"
    r"|(list|tiles|chain|parts|result|new|object)_\d+|.*_rows"
    r"|(number|tensors|aten|host)_.*|.*_(cells|float32|float64|t)"
)


def variable(node: fx.Node) -> str:
    """The variable of a node's own: its name, unless the program uses that."""
    return node.name + "_" if _TAKEN.fullmatch(node.name) else node.name


class Lives:
    """Aliases and lives: each value's root, who reads it and when, what leaves the program."""

    def __init__(self, step: StepGraph, items: list[Item], apart: frozenset[str] = frozenset()) -> None:
        self.step, self.items, self.apart = step, items, apart
        self.inputs, self.outputs = step.placeholders, step.outputs
        self.plan = Plan(step, items)
        self.position: dict[fx.Node, int] = {}
        self.item_of: dict[fx.Node, int] = {}
        self.bounds: list[tuple[int, int]] = []
        self.root = self.plan.root
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.held: dict[fx.Node, list[fx.Node]] = {}  # sparse tensor -> the roots of what it is made of
        self.members: dict[int, list[fx.Node]] = {}
        self.escaping: set[fx.Node] = set()
        self.lendable: set[fx.Node] = set()
        self.leaves: dict[fx.Node, dict[tuple[int, ...], fx.Node]] = {}
        self.spared: dict[fx.Node, dict[tuple[int, ...], fx.Node]] = {}
        for index, item in enumerate(items):
            start = len(self.position)
            for node in item.nodes:
                self.position[node] = len(self.position)
                self.item_of[node] = index
            self.bounds.append((start, len(self.position) - 1))
        self.parts: dict[fx.Node, Part] = {}
        self.end = len(self.position)
        (self.output,) = (n for n in step.graph.nodes if n.op == "output")
        self.position[self.output] = self.end

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
                self._read(operand, node)
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:  # its indices and values are its operands
            roots = [self.root[operand] for operand in node.all_input_nodes]
            self.held[self.root[node]] = [*roots, *(inner for r in roots for inner in self.held.get(r, ()))]
        started = self.root[node].target
        if is_wait(node.target) and not is_in_place_collective(started):  # until now it reads what it was given
            for operand in self.root[node].all_input_nodes:
                self.readers[self.root[operand]].append(node)

    def _read(self, operand: fx.Node, reader: fx.Node) -> None:
        root = self.root[operand]
        for read in (root, *self.held.get(root, ())):
            self.readers[read].append(reader)

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
        mutations, homes = self.step.signature.mutations, self.step.signature.homes
        whole = not self.step.signature.dying  # else an arena that lent would lie idle beside the forward's activations
        for index, node in enumerate(self.outputs):
            if index in mutations:
                self.plan.returned.append(("input", mutations[index]))
                continue
            if not isinstance(node, fx.Node) or not isinstance(info(node).value, torch.Tensor):
                self.plan.returned.append(("literal", node))
                continue
            root, value = self.root[node], info(node).value
            self._read(node, self.output)
            self.escaping.update(r for r in self.held.get(root, ()) if r.op == "call_function" and r not in self.fixed)
            held = info(root).value
            own = root.op == "call_function" and root not in self.fixed and root not in taken
            if own and isinstance(held, torch.Tensor) and held.numel() == value.numel():
                taken.add(root)
                self.escaping.add(root)
                self.plan.returned.append(("value", node))
                lent = whole and index in homes and homes[index].kind == "grad" and root not in self.held
                if lent and root.name not in self.apart:
                    self.lendable.add(root)
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
        if self.items[item].kind == "single":
            return self.position[reader]
        if self.items[item].by_pieces and not is_product(reader):
            shape = info(reader).value.shape
            if all(info(o).value.shape == shape for o in reader.all_input_nodes if self.root[o] is root):
                return self.position[reader]
        return self.bounds[item][1]

    def _dead_before(self, root: fx.Node, node: fx.Node) -> bool:
        """True when every reader of ``root`` but ``node`` comes before ``node`` writes."""
        when = self._write_time(node)
        return all(self._read_time(r, root, None) < when for r in self.readers[root] if r is not node)
