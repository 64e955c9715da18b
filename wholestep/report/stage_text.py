"""What each pass made of a graph, as text: a graph as Python, and the difference between two."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep.ir import StepGraph, info
from wholestep.report.explanation import place_of

_ASSIGNMENT = re.compile(r"\s+(\w+)(?: : [^=]+)? = ")


@dataclass(frozen=True)
class Stage:
    """One step of the way from the traced graph to the one that a rank runs; `print` shows the difference.

    Attributes:
        name: of the pass; "trace" for the first.
        code: the graph that it gave, as Python.
        calls: how many that graph makes.
        before: the stage before; None for the first.
    """

    name: str
    code: str
    calls: int
    before: Stage | None = field(default=None, repr=False)

    @classmethod
    def of(cls, name: str, step: StepGraph, before: Stage | None) -> Stage:
        """The stage of a graph, as it is now: a later pass may change it."""
        return cls(name, code(step), sum(node.op == "call_function" for node in step.graph.nodes), before)

    def __str__(self) -> str:
        if self.before is None:
            return f"# {self.name}: {self.calls} calls\n{self.code}"
        old, new = self.before.code.splitlines(), self.code.splitlines()
        changes = list(difflib.unified_diff(old, new, lineterm="", n=2))[2:]
        return "\n".join([f"# {self.name}: {self.before.calls} calls -> {self.calls}", *(changes or ["# no change"])])


def code(step: StepGraph) -> str:
    """A graph as runnable Python; behind each call what it gives, and the module and line of yours that it is from."""
    records = {node.name: info(node) for node in step.graph.nodes if node.op == "call_function"}
    lines = []
    for line in step.gm.code.strip().splitlines():
        line = line.split(";  ")[0]  # without fx's `x = None`
        found = _ASSIGNMENT.match(line)
        record = records.get(found[1]) if found else None
        if record is not None:
            words = [_value(record.value), place_of(record.module, record.where)]
            line = f"{line}  # {'  '.join(word for word in words if word)}"
        lines.append(line)
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"({', '.join(map(_value, value))})" if isinstance(value, (list, tuple)) else type(value).__name__
