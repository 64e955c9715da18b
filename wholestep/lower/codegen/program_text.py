"""The text of the generated program while it is written: the step, and the binding of the memory that lasts."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from keyword import iskeyword
from typing import Any

import numpy
import torch
from torch import fx

from wholestep.functional import OFFSETS, base_name, clone_as_it_lies
from wholestep.ir import info
from wholestep.lower.codegen.bind_memory import Loan, at, cells
from wholestep.lower.codegen.literals import INDENT, LONGEST, commas, commented, keyword, literal, targets
from wholestep.lower.fusion.blocked_matmuls import by_rows, parts
from wholestep.lower.fusion.chains import Named, chain
from wholestep.lower.fusion.straight_calls import straight
from wholestep.lower.plan.arena import Slot
from wholestep.lower.plan.memory_plan import Plan
from wholestep.lower.plan.operator_facts import aten, offset_of, reaches
from wholestep.lower.plan.value_facts import variable
from wholestep.sizes import Size, plain
from wholestep.torch_compat import OpOverload, direct_call

# Operators whose number may be given as a tensor of one element and their operand's dtype: same bits, 1.5 µs less.
NUMBER_AS_TENSOR = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
_WORDS = re.compile(r"\w+")
_HELPERS = {
    "direct": direct_call, "at": at, "cells": cells, "Loan": Loan,
    "chain": chain, "straight": straight, "by_rows": by_rows, "parts": parts, "clone_as_it_lies": clone_as_it_lies,
}  # fmt: skip


class ProgramText:
    """Takes lines in the order in which they run, and spells what they are made of.

    Attributes:
        namespace: globals of the program.
        lasting: variables that the binding makes.
        sized: those among them that it makes for each size; and the symbols.
        assigned: variables that the step has assigned so far.
        in_rows: what a variable is called inside of the loop over rows being written.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # records of collectives show the module whose line calls them
        self.namespace: dict[str, Any] = {"__name__": "wholestep.program", "torch": torch, "math": math, **_HELPERS}
        self.lasting: set[str] = set()
        self.assigned: set[str] = set()
        self.in_rows: dict[str, str] = {}
        # lines; those that are written later; those of a straight call, and its row
        self._step: list[str | list[str] | tuple[list[str], str]] = []
        self._binding: list[str] = []
        self._binding_of_sizes: list[str] = []
        self._sizes = plan.step.signature.sizes
        self.sized: set[str] = set(self._sizes.names if self._sizes else ())
        self._places = {id(slot): index for index, slot in enumerate(plan.slots)}
        self._indent = ""
        self._lists: dict[str, str] = {}
        self._numbers: dict[Any, str] = {}
        self._cells: dict[torch.dtype, list[float]] = {}
        self._after: dict[fx.Node, list[str]] = defaultdict(list)

    # Lines

    def bind(self, name: str, text: str, comment: str = "") -> str:
        """A variable that lasts between calls."""
        of_sizes = bool(self.sized) and not self.sized.isdisjoint(_WORDS.findall(text))
        if of_sizes:
            self.sized.add(name)
        (self._binding_of_sizes if of_sizes else self._binding).extend(commented(f"{name} = {text}", comment))
        self.lasting.add(name)
        return name

    def line(self, text: str, comment: str | fx.Node = "", row: Named | None = None) -> None:
        """A line of the step, with where a node comes from as its comment.

        Args:
            row: the call as one that may run in a row with others.
        """
        if isinstance(comment, fx.Node):
            record = info(comment)
            comment = "  ".join(part for part in (record.where.rsplit("/", 1)[-1], record.module) if part)
        lines = [self._indent + line for line in commented(text, comment)]
        if row is None:
            self._step += lines
        else:
            self._step.append((lines, f"({row[0]!r}, {row[1]!r}, ({commas(map(repr, row[2]))},), {row[3]!r})"))

    def assign(self, target: str, text: str, comment: str | fx.Node = "", names: Iterable[str] = ()) -> None:
        """A line that gives a variable a value, or several, whose names are given beside the target's text."""
        self.assigned.update(names or [target])
        over = len(target) + text.find("\n") > LONGEST
        self.line(f"{target} = (\n{INDENT}{text})" if over else f"{target} = {text}", comment)

    def number(self, node: fx.Node, text: str, comment: str | fx.Node = "") -> None:
        """Assigns a Python number, and writes it to the cells that kernels read it from."""
        self.assign(variable(node), text, comment)
        self._step.append(self._after[node])

    def phase(self, name: str) -> None:
        """Begins a part of the step."""
        self._step += ["", f"# {name}"]

    @contextmanager
    def loop(self, names: list[str], over: str, comment: str = "", frees: bool = True) -> Iterator[None]:
        """What is written inside is repeated; ``frees``: the loop's variables hold memory that does not last."""
        self.line(f"for {targets(names)} in {over}:", comment)
        self._indent = "    "
        yield
        self._indent = ""
        if frees:
            self.line(f"del {targets(names)}")

    def text(self, head: str) -> str:
        """The whole program."""
        step, made = list(self._in_rows()), []
        for dtype, numbers in self._cells.items():
            short = _short(dtype)
            made.append(f"{short}_cells, tensors_{short} = cells([{commas(map(literal, numbers))}], {dtype})")
        return "\n".join([
            f"# {head}", "def run(inputs):", *("    " + line if line else "" for line in step), "", "",
            "# What lasts between calls: made before the first one, and anew when a parameter has moved.",
            *made, *self._binding, "",
        ])  # fmt: skip

    def _in_rows(self) -> Iterator[str]:
        """The step's lines, with straight calls in a row as one."""
        number = itertools.count()
        for kind, group in itertools.groupby(self._step, type):
            calls: list[Any] = [*group]
            own = calls if kind is str else [line for call in calls for line in (call[0] if kind is tuple else call)]
            if kind is tuple and len(calls) > 1:
                rows = commas(row for _, row in calls)
                name = self.bind(f"straight_{next(number)}", f"straight([{rows}], globals())")
                own = [f"{name}()", *(f"#   {line}" for text in own for line in text.split("\n"))]
            yield from own

    def text_of_sizes(self) -> str:
        """What is made for each size, with the symbols among its globals; "" for a program of one size."""
        if self._sizes is None:
            return ""
        inputs = self.plan.step.signature.inputs
        symbols = [f"{s} is {inputs[i].source}.shape[{dim}]" for s, (i, dim) in self._sizes.places.items()]
        head = f"# What lasts between calls of one size, where {', '.join(symbols)}."
        return "\n".join([head, *self._binding_of_sizes, ""])

    def place(self, slot: Slot, inside: int | None = None) -> str:
        """Where a slot, or something inside of it, lies in the arena."""
        if self._sizes is None:
            return str(slot.offset + (inside or 0))
        return f"offsets[{self._places[id(slot)]}]" + (f" + {inside}" if inside is not None else "")

    # Names and arguments

    def new_memory(self, value: torch.Tensor) -> str:
        """Memory of a value's layout from torch's allocator."""
        layout = f"{tuple(value.shape)}, {value.stride()}"
        return f"torch.empty_strided({layout}, dtype={value.dtype}, device='{value.device}')"

    def name(self, node: fx.Node) -> str:
        """The variable that holds a value."""
        return self.plan.reuse.name[node]

    def arg(self, value: Any) -> str:
        """An argument of a call."""
        if isinstance(value, fx.Node):
            name = self.name(value)
            return self.in_rows.get(name, name)
        if isinstance(value, (list, tuple)):
            return f"[{commas(map(self.arg, value))}]"
        if isinstance(value, (torch.Tensor, torch.Generator, numpy.generic)):
            name = f"object_{len(self.namespace)}"
            self.namespace[name] = value
            return name
        return literal(value)

    def keywords(self, node: fx.Node) -> list[str]:
        """The keyword arguments of a call."""
        return [keyword(name, self.arg(value)) for name, value in node.kwargs.items()]

    def arguments(self, node: fx.Node) -> list[str]:
        """All arguments of a call."""
        leads = bool(node.args) and isinstance(node.args[0], fx.Node)  # else the number comes first: torch.mul(2.0, x)
        if node.target in NUMBER_AS_TENSOR and leads and len(node.args) == 2 and not node.kwargs:
            return [self.arg(node.args[0]), self.operand(node, node.args[1])]
        args = [self.arg(a) for a in node.args[: OFFSETS.get(node.target)]]
        return [*args, *(self.offset(node, args[0]) if args else []), *self.keywords(node)]

    def offset(self, node: fx.Node, whole: str) -> list[str]:
        """A view's own offset, counted from the first element of the variable ``whole``; nothing where it is 0."""
        offset = offset_of(node.target, node.args)
        return [f"{whole}.storage_offset() + {literal(offset)}"] if offset else []

    def operand(self, node: fx.Node, arg: Any) -> str:
        """A number as an operand: a tensor over a cell that the program writes, where that has the same bits."""
        host = isinstance(arg, fx.Node)
        found = info(arg).value if isinstance(arg, fx.Node) else arg
        value, first = info(node).value, info(node.args[0]).value  # type: ignore[arg-type]
        plain_number = isinstance(found, (int, float)) and not isinstance(found, (bool, Size))
        suits = value.dtype in (torch.float32, torch.float64) and value.device.type == "cpu"
        if not plain_number or not suits or first.dtype is not value.dtype:
            return self.arg(arg)
        key = value.dtype, arg if host else repr(arg)  # 0.0 equals -0.0
        if key not in self._numbers:
            numbers, short = self._cells.setdefault(value.dtype, []), _short(value.dtype)
            place = len(numbers)
            name = f"{variable(arg)}_{short}" if host else f"number_{short}_{place}"
            self._numbers[key] = self.bind(name, f"tensors_{short}[{place}]", "" if host else str(arg))
            if host:
                self._after[arg].append(f"{short}_cells[{place}] = {variable(arg)}")
            numbers.append(0.0 if host else float(found))
        return self._numbers[key]

    def list_of(self, names: Iterable[str]) -> str:
        """A list of tensors, made once where all of them last."""
        names = list(names)
        text = f"[{commas(names)}]"
        if not self.lasting.issuperset(names):
            return text
        if text not in self._lists:
            self._lists[text] = self.bind(f"list_{len(self._lists)}", text)
        return self._lists[text]

    # Calls

    def call(self, op: Any, args: list[str], node: fx.Node, given: tuple[Any, ...] = (), **named: Any) -> str:
        """A call of an operator, by the public function that leads to it fastest.

        Args:
            args: as they are written.
            given, named: values of further arguments, after those of the node.
        """
        if isinstance(op, OpOverload) and op.namespace == "aten":
            name = base_name(op)
            args_, kwargs_ = plain(fx.map_arg((node.args, node.kwargs), lambda n: info(n).value))
            values, keywords = [*args_, *given], {**kwargs_, **plain(named)}
            entry, method = getattr(torch, name, None), getattr(torch.Tensor, name, None)
            if entry is not None and not name.endswith("_") and reaches(op, entry, name, values, keywords):
                return f"torch.{name}({commas(args)})"
            if method is not None and not named and reaches(op, method, name, values, keywords):
                return f"{args[0]}.{name}({commas(args[1:])})"
        return f"{self.function(op)}({commas(args)})"

    def function(self, target: Any) -> str:
        """The variable that holds a function or operator that the program calls."""
        if isinstance(target, OpOverload):
            name = target.name().replace("::", "_").replace(".", "_")
            name = name if name.startswith("aten_") else f"host_{name}"
            if name not in self.lasting:
                packet, overload = f"torch.ops.{target.namespace}.{base_name(target)}", target._overloadname
                operator = f"getattr({packet}, {overload!r})" if iskeyword(overload) else f"{packet}.{overload}"
                self.bind(name, f"direct({operator})" if target.namespace == "aten" else operator)
            return name
        if getattr(target, "__module__", None) == "math":
            return f"math.{target.__name__}"
        if getattr(target, "__module__", None) == "builtins":
            return str(target.__name__)
        name = f"host_{target.__name__.replace('.', '_').strip('<>')}"
        while self.namespace.setdefault(name, target) != target:
            name += "_"
        return name


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
