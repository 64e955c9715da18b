"""Code generation: straight-line Python, one line for each kernel, from a plan.

The text defines ``run(inputs)``, the step, and then makes what lasts between calls: views of parameters, of state and
of the arena, lists of them, compiled chains. It is executed, with the inputs and the arena among its globals, when
memory is bound.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.functional import base_name
from wholestep.ir import GETITEM, info
from wholestep.lower.codegen.call_lines import CallWriter
from wholestep.lower.codegen.literals import commas, literal, targets
from wholestep.lower.codegen.program_text import ProgramText
from wholestep.lower.fusion.blocked_matmuls import cut_lists, is_product, rows_at_once
from wholestep.lower.fusion.chains import chain_step
from wholestep.lower.plan.memory_plan import Plan
from wholestep.lower.plan.operator_facts import FILLS
from wholestep.lower.plan.value_facts import KERNELS, fill_number, variable
from wholestep.nested import tensors_of

LEAVING = ("kernel", "fresh", "lent")  # memory that a result takes with it; what lies in other memory is copied
STABLE_KINDS = ("parameter", "buffer", "state", "grad")


@dataclass
class Generated:
    """The program's text and what it refers to.

    Attributes:
        text: Python source; see above.
        of_sizes: that of what is made for each size.
        namespace: globals for it.
        viewed: indices of inputs whose memory is bound ahead.
    """

    text: str
    of_sizes: str
    namespace: dict[str, Any]
    viewed: list[int]


def emit(plan: Plan, moving: Container[int] = ()) -> Generated:
    """Writes the program of a plan.

    Args:
        moving: indices of inputs that are elsewhere at each call.
    """
    source = ProgramText(plan)
    calls = CallWriter(source)
    groups = GroupWriter(calls)
    viewed = _write_inputs(source, moving)
    _write_constants(source)
    freed = _last_uses(source)
    _write_copies(source, -1)
    phase = ""
    for index, item in enumerate(plan.items):
        nodes = [n for n in item.nodes if plan.reuse.how[n] != "skip" and n not in plan.live.fixed]
        if nodes and info(nodes[-1]).phase != phase and any(plan.reuse.how[n] != "view" for n in nodes):
            phase = info(nodes[-1]).phase
            source.phase(phase)
        if nodes and item.kind != "single":
            getattr(groups, item.kind)(index, nodes)
        elif nodes:
            calls.write(nodes[0])
        _write_copies(source, index)
        if names := [name for name in freed.get(index, []) if name in source.assigned]:
            source.line(f"del {targets(names).rstrip(',')}")
    _write_results(calls)
    kernels, total = sum(how in KERNELS for how in plan.reuse.how.values()), sum(plan.arena.values())
    sizes = f"{kernels} kernels, arena {total:,} bytes (most alive at once {plan.peak:,})"
    text = source.text(f"after {plan.step.stage}: {sizes}")
    return Generated(text, source.text_of_sizes(), source.namespace, viewed)


def _write_inputs(source: ProgramText, moving: Container[int]) -> list[int]:
    """Variables for the inputs; gives the indices of those whose memory lasts."""
    signature, viewed = source.plan.step.signature, []
    written = {*signature.mutations.values()}
    for index, (node, item) in enumerate(zip(source.plan.live.inputs, signature.inputs, strict=True)):
        lasts = item.kind in STABLE_KINDS and index not in moving and isinstance(info(node).value, torch.Tensor)
        if lasts:
            viewed.append(index)
        if not node.users and index not in written:
            continue
        if lasts:
            source.bind(variable(node), f"inputs[{index}].detach()", item.source)
        else:
            source.number(node, f"inputs[{index}]", item.source)
    if signature.donated:
        for index in sorted(written):
            source.assign(f"given_{index}", f"inputs[{index}]")
        source.line("del inputs[:]")
    return viewed


def _write_constants(source: ProgramText) -> None:
    for node in source.plan.step.graph.nodes:
        if node.op == "get_attr":
            source.namespace[variable(node)] = operator.attrgetter(str(node.target))(source.plan.step.gm)
            source.lasting.add(variable(node))
    for node in source.plan.live.constants:
        if node.target in FILLS:
            memory = source.new_memory(info(node).value)
            source.bind(variable(node), f"{memory}.fill_({literal(fill_number(node))})")
        else:
            source.bind(variable(node), source.call(node.target, source.arguments(node), node))


def _last_uses(source: ProgramText) -> dict[int, list[str]]:
    """By item, the variables that are read for the last time there, and hold memory that is free then."""
    plan = source.plan
    released = plan.step.signature.donated
    last = {variable(plan.live.inputs[i]): plan.last_use[plan.live.inputs[i]] for i in released}
    for node in plan.live.nodes:
        store = plan.reuse.store.get(node)
        if store is None or node in plan.live.fixed or next(tensors_of(info(node).value), None) is None:
            continue
        if store.kind in ("kernel", "fresh") or (store.kind == "input" and store.index in released):
            name, root = source.name(node), plan.live.root[node]
            items = [plan.live.item_of[user] for user in node.users if user.target is GETITEM]  # which read no memory
            last[name] = max(last.get(name, -1), plan.last_use.get(root, -1), *items)
    freed: dict[int, list[str]] = {}
    for name, index in last.items():
        freed.setdefault(index, []).append(name)
    return freed


def _write_copies(source: ProgramText, index: int) -> None:
    """New values that were computed elsewhere; those that lie in other inputs are read before these are written."""
    plan, pairs = source.plan, []
    for number, (into, node) in enumerate(plan.reuse.copies.get(index, [])):
        name = source.name(node)
        if plan.reuse.store[plan.live.root[node]].kind == "input":
            source.assign(f"new_{number}", f"{name}.clone()")
            name = f"new_{number}"
        pairs.append((into, name))
    for into, name in pairs:
        source.line(f"{variable(plan.live.inputs[into])}.copy_({name})", plan.step.signature.inputs[into].source)


def _write_results(calls: CallWriter) -> None:
    """Clones first, since they may read old values; then the last copies; then the result."""
    source, plan = calls.source, calls.plan
    results = []
    for index, (kind, value) in enumerate(plan.live.returned):
        if kind == "input":
            results.append(f"given_{value}" if plan.step.signature.donated else f"inputs[{value}]")
        elif kind == "clone" or (kind == "value" and plan.reuse.store[plan.live.root[value]].kind not in LEAVING):
            source.assign(f"result_{index}", calls.cloned(value))
            results.append(f"result_{index}")
        else:
            results.append(source.arg(value))
    _write_copies(source, len(plan.items))
    source.line(f"return [{commas(results)}]")


class GroupWriter:
    """Writes groups, by way of what writes their calls."""

    def __init__(self, calls: CallWriter) -> None:
        self.calls, self.source, self.plan, self.reuse = calls, calls.source, calls.plan, calls.reuse

    def chain(self, index: int, nodes: list[fx.Node]) -> None:
        """One call of a compiled kernel; the operators that it runs follow as comments."""
        memory: dict[str, None] = {}  # names, in order
        rows, words = [], []
        product = next((node for node in nodes if is_product(node)), None)
        for node in nodes:
            if node is product:
                continue
            step = chain_step(node)
            assert step is not None
            number = None if step.number is None else self.source.operand(node, step.number)
            if not self.reuse.store[node].in_cache:
                self.calls.destination(node)
            operands = [self.source.name(o) for o in step.operands]
            memory |= {self.source.name(o): None for o in (*step.operands, node) if not self.reuse.store[o].in_cache}
            name = self.source.name(node)
            read = commas(map(repr, operands))
            rows.append(f"({step.kernel!r}, {name!r}, ({read},), {number!r})")
            if number is not None:
                memory[number] = None
                operands.append(number)
            words.append(f"#   {name} = {base_name(node.target)}({', '.join(operands)})")  # type: ignore[arg-type]
        given = [name for name in memory if name not in self.source.lasting]
        parts = f", {self.source.name(product)!r}" if product is not None else ""
        count = info(nodes[-1]).value.numel()
        text = f"chain({count}, [{commas(rows)}], globals(), [{commas(map(repr, given))}]{parts})"
        run, addresses = self.source.bind(f"chain_{index}", text), [f"{name}.data_ptr()" for name in given]
        if product is not None:
            with self._rows(index, product, {}):  # some of which at a time the chain reads from the cache
                self.source.line(f"{run}({commas(['first', 'part', *addresses])})")
        else:
            self.source.line(f"{run}({commas(addresses)})", nodes[-1])
        for word in words:
            self.source.line(word)

    def update(self, index: int, nodes: list[fx.Node]) -> None:
        """A fused optimizer's call on some rows of a parameter at a time, right after these rows of its gradient."""
        product, call = nodes
        copies = self.calls.copies(call)
        names = [copies.get((name, 0)) or self.source.name(node) for name, node in cut_lists(call)]
        rows = rows_at_once(info(product).value)
        with self._rows(index, product, {name: f"{name}.split({rows})" for name in names}):
            self.calls.write_mutable(call, copies)

    @contextmanager
    def _rows(self, index: int, product: fx.Node, beside: dict[str, str]) -> Iterator[None]:
        """A loop that computes some rows of a product at a time, for what is written inside.

        Args:
            beside: variable -> expression for its rows, of what is cut as the product is.
        """
        value, slot, left = info(product).value, self.reuse.store[product].slot, self.source.name(product.args[0])  # type: ignore[arg-type]
        assert slot is not None
        name, shape = self.source.name(product), (rows_at_once(value), value.shape[1])
        spec = f"{self.source.place(slot)}, {shape}, {(shape[1], 1)}, {value.dtype}"
        piece = self.source.bind(f"{name}_rows", f"at(arena['{slot.device}'], {spec})")
        self.calls.made.add(name)
        lasts, parts = self.source.lasting.issuperset([left, *beside]), f"by_rows({left}, {piece})"
        variables = ["first", "some", "part"]
        if beside:
            parts = f"zip({commas([parts, *beside.values()])})"
            variables = [f"({', '.join(variables)})", *(f"{one}_t" for one in beside)]
        if lasts:
            parts = self.source.bind(f"parts_{index}", f"list({parts})")
        self.source.in_rows = {left: "some", name: "part"} | {one: f"{one}_t" for one in beside}
        with self.source.loop(variables, parts, frees=not lasts):
            self.calls.write(product)
            yield
        self.source.in_rows = {}
