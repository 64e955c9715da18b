"""How values, arguments and calls are spelt in the generated program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.lower.plan.liveness import Plan, variable
from wholestep.lower.plan.operator_facts import OFFSETS, aten, base_name, offset_of, reaches
from wholestep.torch_compat import OpOverload, direct_call

# Operators whose number may be given as a tensor of one element and their operand's dtype: same bits, 1.5 µs less.
NUMBER_AS_TENSOR = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


class Speller:
    """Spells values; collects what the spelling refers to.

    Attributes:
        namespace: globals of the program.
        head: lines at module level that say where its entries come from.
        bound: lines of ``bind``; body: lines of ``run``.
        stable: variables that ``bind`` makes.
        after: lines that follow the one that begins with the key.
        cells: by dtype, numbers that kernels read as tensors and the program writes.
        in_tile: what a variable is called inside the loop over tiles being written.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.namespace: dict[str, Any] = {"torch": torch, "math": math}
        self.head: list[str] = []
        self.bound: list[str] = []
        self.body: list[str] = []
        self.stable: set[str] = set()
        self.numbers: dict[Any, tuple[str, str]] = {}
        self.after: dict[str, list[str]] = {}
        self.cells: dict[torch.dtype, list[float]] = {}
        self.in_tile: dict[str, str] = {}

    def _name(self, node: fx.Node) -> str:
        return self.plan.name.get(node, variable(node))

    def _arg(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            name = self._name(value)
            return self.in_tile.get(name, name)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._arg(v) for v in value)}]"
        if isinstance(value, (torch.Tensor, torch.Generator)):
            name = f"object_{len(self.namespace)}"
            self.namespace[name] = value
            return name
        return literal(value)

    def _arguments(self, node: fx.Node) -> tuple[list[str], list[str]]:
        if node.target in NUMBER_AS_TENSOR and len(node.args) == 2 and not node.kwargs:
            args = [self._arg(node.args[0]), self._number(node, node.args[1])]
        else:
            args = [self._arg(a) for a in node.args[: OFFSETS.get(node.target)]]
            args += self._offset(node, args[0]) if args else []
        return args, [keyword(k, self._arg(v)) for k, v in node.kwargs.items()]

    def _offset(self, node: fx.Node, whole: str) -> list[str]:
        """A view's own offset, counted from the first element of the variable ``whole``; nothing where it is 0."""
        offset = offset_of(node.target, node.args)
        return [f"{whole}.storage_offset() + {literal(offset)}"] if offset else []

    def _values(self, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        def value(n: fx.Node) -> Any:
            return info(n).value

        return list(fx.map_arg(node.args, value)), dict(fx.map_arg(node.kwargs, value))

    def _number(self, node: fx.Node, arg: Any) -> str:
        """A number as an operand: a tensor over a cell that the program writes, where that has the same bits."""
        found = info(arg).value if isinstance(arg, fx.Node) else arg
        value = info(node).value
        self_value = info(node.args[0]).value  # type: ignore[arg-type]
        plain = isinstance(found, (int, float)) and not isinstance(found, bool)
        suits = value.dtype in (torch.float32, torch.float64) and value.device.type == "cpu"
        if not plain or not suits or self_value.dtype is not value.dtype:
            return self._arg(arg)
        key = (value.dtype, arg if isinstance(arg, fx.Node) else repr(arg))  # 0.0 equals -0.0
        if key not in self.numbers:
            cells = self.cells.setdefault(value.dtype, [])
            short = str(value.dtype).removeprefix("torch.")
            name = f"{variable(arg)}_{short}" if isinstance(arg, fx.Node) else f"number_{short}_{len(cells)}"
            self.bound.append(
                f"{name} = tensors_{short}[{len(cells)}]" + ("" if isinstance(arg, fx.Node) else f"  # {arg}")
            )
            self.stable.add(name)
            self.numbers[key] = name, f"{short}_cells[{len(cells)}] = "
            cells.append(0.0 if isinstance(arg, fx.Node) else float(arg))
            if isinstance(arg, fx.Node):
                self._write_cell(arg, self.numbers[key][1])
        return self.numbers[key][0]

    def _write_cell(self, host: fx.Node, cell: str) -> None:
        """Stores a host number in its cell right where it is computed."""
        self.after.setdefault(f"{variable(host)} = ", []).append(f"{cell}{variable(host)}")

    def _with_cells(self) -> Iterator[str]:
        """The body's lines, each host number followed by its cells."""
        for line in self.body:
            yield line
            name, equals, _ = line.partition(" = ")
            yield from self.after.get(name + equals, ())

    def _call(self, node: fx.Node) -> str:
        args, keywords = self._arguments(node)
        op: Any = node.target
        if isinstance(op, OpOverload) and op.namespace == "aten":
            entry = getattr(torch, base_name(op), None)
            values, named = self._values(node)
            if entry is not None and reaches(op, entry, base_name(op), values, named):
                return f"torch.{base_name(op)}({', '.join(args + keywords)})"
            method = getattr(torch.Tensor, base_name(op), None)
            if method is not None and reaches(op, method, base_name(op), values, named):
                return f"{args[0]}.{base_name(op)}({', '.join(args[1:] + keywords)})"
        return f"{self._function(op)}({', '.join(args + keywords)})"

    def _function(self, target: Any) -> str:
        """The variable that holds a function or operator that the program calls."""
        if isinstance(target, OpOverload):
            name = target.name().replace("::", "_").replace(".", "_")
            name = name if name.startswith("aten_") else f"host_{name}"
            if name not in self.namespace:
                self.head.append(f"{name} = torch.ops.{target.namespace}.{base_name(target)}.{target._overloadname}")
                self.namespace[name] = direct_call(target) if target.namespace == "aten" else target
            return name
        if getattr(target, "__module__", None) == "math":
            return f"math.{target.__name__}"
        if getattr(target, "__module__", None) == "builtins" or target in (min, max, abs, round, float, int):
            return str(target.__name__)
        name = f"host_{target.__name__.replace('.', '_').strip('<>')}"
        while self.namespace.setdefault(name, target) != target:
            name += "_"
        return name


def keyword(name: str, text: str) -> str:
    """A keyword argument; ``uniform_`` has one called ``from``."""
    return f"**{{'{name}': {text}}}" if iskeyword(name) else f"{name}={text}"


def one_line(comment: str) -> str:
    """A comment that cannot end its line: sources may hold any key of a user's dict."""
    return " ".join(comment.split())


def literal(value: Any) -> str:
    """Python source of a value."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, complex):  # its own text loses the signs of zeros, and names that are not there
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        return f"({value!r})"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    return repr(value)
