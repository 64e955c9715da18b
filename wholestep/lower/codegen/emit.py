"""Writes the program: straight-line Python, one line for each kernel, from a plan.

The source defines ``bind(inputs, arena, scratch, tile)``, which makes every view of lasting memory once and
returns ``run(inputs)``, the hot path. What the source refers to is in the namespace that comes with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.ir import fake_tensors, info
from wholestep.lower.codegen.bind_memory import cells_of, filled
from wholestep.lower.codegen.group_lines import GroupWriter
from wholestep.lower.codegen.literals import literal, one_line
from wholestep.lower.fusion.execution_order import Item
from wholestep.lower.plan.liveness import Plan, Store, variable
from wholestep.lower.plan.operator_facts import FILLS

STABLE_KINDS = ("parameter", "buffer", "state", "grad")


@dataclass
class Source:
    """The program's text and what it refers to.

    Attributes:
        text: Python source of ``bind``.
        namespace: globals for it.
        viewed: indices of inputs whose memory is bound ahead.
        scratch: number of scratch buffers by dtype.
    """

    text: str
    namespace: dict[str, Any]
    viewed: list[int]
    scratch: dict[torch.dtype, int] = field(default_factory=dict)


def emit(plan: Plan) -> Source:
    """Writes the program of a plan."""
    return _Writer(plan).write()


class _Writer(GroupWriter):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.inputs = plan.step.placeholders
        self.dying: dict[int, list[str]] = {}
        self.phase = ""
        self.assigned: set[str] = set()
        self.scanned = 0
        self.constants = set(plan.constant)
        self.released = plan.step.signature.dying

    def write(self) -> Source:
        kinds = [i.kind for i in self.plan.step.signature.inputs]
        written = set(self.plan.step.signature.mutations.values())
        viewed = []
        for index, node in enumerate(self.inputs):
            if kinds[index] in STABLE_KINDS and isinstance(info(node).value, torch.Tensor):
                self.stable.add(variable(node))
                viewed.append(index)
                if node.users or index in written:
                    self.bound.append(f"{variable(node)} = inputs[{index}].detach()  # {self._source(index)}")
            elif node.users or index in written:
                self.body.append(f"{variable(node)} = inputs[{index}]  # {self._source(index)}")
        if self.released:
            returned = sorted({value for kind, value in self.plan.returned if kind == "input"})
            self.body += [f"given_{i} = inputs[{i}]" for i in returned]
            self.body.append("del inputs[:]")
        for node in self.plan.step.graph.nodes:
            if node.op == "get_attr":
                self.stable.add(variable(node))
                self.namespace[variable(node)] = _constant(plan_owner(self.plan), str(node.target))
        for node in self.plan.constant:
            self._constant(node)
        self._find_deaths()
        self._copies(-1)
        for index, item in enumerate(self.plan.items):
            self._item(index, item)
            self._copies(index)
            self._delete(index)
        self._finish()
        return Source(self._text(), self.namespace, viewed, self.scratch)

    def _source(self, index: int) -> str:
        return one_line(self.plan.step.signature.inputs[index].source)

    # Items

    def _item(self, index: int, item: Item) -> None:
        nodes = [n for n in item.nodes if self.plan.how[n] not in ("skip",) and n not in self.constants]
        if not nodes:
            return
        phase = info(nodes[0]).phase
        if phase != self.phase and not all(self.plan.how[n] == "view" for n in nodes):
            self.body += ["", f"# {phase}"]
            self.phase = phase
        if item.kind == "chain":
            self._chain(index, nodes)
        elif item.kind == "tile":
            self._tile(index, nodes)
        elif item.kind == "batch":
            self._batch(nodes)
        else:
            self._single(nodes[0], self.body)

    def _constant(self, node: fx.Node) -> None:
        self.stable.add(variable(node))
        if node.target in FILLS:
            value, number = info(node).value, FILLS[node.target](*node.args, **node.kwargs)
            self.namespace.setdefault("filled", filled)
            spec = f"{tuple(value.shape)}, {value.stride()}, {value.dtype}, '{value.device}'"
            self.bound.append(f"{variable(node)} = filled({literal(number)}, {spec})")
        else:
            self.bound.append(f"{variable(node)} = {self._call(node)}")

    # Ends

    def _find_deaths(self) -> None:
        last: dict[str, int] = {}
        for index in self.released:
            last[variable(self.inputs[index])] = self.plan.last_item[self.inputs[index]]
        for item in self.plan.items:
            for node in item.nodes:
                kind = self.plan.store.get(node)
                if kind is None or node in self.constants or not self._is_released(kind):
                    continue
                if not any(True for _ in fake_tensors(info(node).value)):
                    continue
                root = self.plan.root[node]
                name = self._name(node)
                last[name] = max(last.get(name, -1), self.plan.last_item.get(root, -1))
        for name, index in last.items():
            self.dying.setdefault(index, []).append(name)

    def _is_released(self, store: Store) -> bool:
        return store.kind in ("call", "fresh") or (store.kind == "input" and store.index in self.released)

    def _delete(self, index: int) -> None:
        assigned = self._scan()
        live = [n for n in self.dying.get(index, []) if n in assigned]
        if live:
            self.body.append(f"del {', '.join(live)}")

    def _scan(self) -> set[str]:
        """Variables that the body has assigned so far."""
        for line in self.body[self.scanned :]:
            head = line.split(" = ", 1)[0] if " = " in line else ""
            self.assigned |= {part.strip(" ()*") for part in head.split(",")}
        self.scanned = len(self.body)
        return self.assigned

    def _copies(self, index: int) -> None:
        for into, node in self.plan.copies.get(index, []):
            self.body.append(f"{variable(self.inputs[into])}.copy_({self._name(node)})  # {self._source(into)}")

    def _finish(self) -> None:
        """Clones first, since they may read old values; then the last copies; then the result."""
        last = len(self.plan.items)
        results = []
        for index, (kind, value) in enumerate(self.plan.returned):
            if kind == "input":
                results.append(f"given_{value}" if self.released else f"inputs[{value}]")
            elif kind == "clone":
                self.body.append(f"result_{index} = {self._cloned(value)}")
                results.append(f"result_{index}")
            else:
                results.append(self._arg(value))
        pairs = self.plan.copies.get(last, [])
        safe = []
        for number, (into, node) in enumerate(pairs):
            name = self._name(node)
            if self.plan.store[self.plan.root[node]].kind == "input":
                self.body.append(f"new_{number} = {name}.clone()")
                name = f"new_{number}"
            safe.append(f"{variable(self.inputs[into])}.copy_({name})  # {self._source(into)}")
        self.body += [*safe, f"return [{', '.join(results)}]"]

    def _text(self) -> str:
        for dtype, cells in self.cells.items():
            short = str(dtype).removeprefix("torch.")
            self.namespace["cells"] = cells_of
            self.bound.insert(0, f"{short}_cells, tensors_{short} = cells([{', '.join(map(literal, cells))}], {dtype})")
        plan, kernels = self.plan, sum(h in _KERNELS for h in self.plan.how.values())
        total = sum(plan.arena.values())
        lines = [
            f"# after {plan.step.stage}: {kernels} kernels, arena {total:,} bytes (most alive at once {plan.peak:,})",
            *self.head,
            "",
            "def bind(inputs, arena, scratch, tile):",
            *("    " + line for line in self.bound),
            "",
            "    def run(inputs):",
            *("        " + line if line else "" for line in self._with_cells()),
            "",
            "    return run",
        ]
        return "\n".join(lines) + "\n"


_KERNELS = ("fill", "copy", "scatter", "collective", "inplace", "out", "call", "mutable", "pack")


def plan_owner(plan: Plan) -> Any:
    """The module that holds a graph's constants."""
    return plan.step.gm


def _constant(owner: Any, target: str) -> Any:
    for part in target.split("."):
        owner = getattr(owner, part)
    return owner
