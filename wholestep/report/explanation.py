"""The report on one compiled step, before it runs; and what each pass made of its graph, as text."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep.aot_autograd.min_cut_partition import is_free, seconds
from wholestep.functional import Decided
from wholestep.ir import StepGraph, info
from wholestep.report.traffic_and_memory import (
    KINDS,
    Memory,
    MissingRule,
    Traffic,
    collective_traffic,
    memory_of,
    missing_rules,
    per_axis,
)

PLACES = 12  # places shown for each axis; the data has all


@dataclass(frozen=True)
class Explanation:
    """What a step does on this rank: `print` it, or read its fields.

    Attributes:
        title: the step, the rank, the mesh and the plans.
        calls: calls of operators, by phase.
        collectives: in the order in which they begin, equal ones together.
        memory: at the fullest moment.
        missing_rules: operators that run whole on every rank for want of a sharding rule; None in the local view, where
            everything runs as written.
        captures: how many captures serve calls now.
        recompiles: why calls needed other programs.
        eager_calls: how many calls ran in eager, since their sizes had not come before.
        breaks: why the step's Python runs at each call; empty for one that is replayed.
        segments: of such a step, those that were compiled so far, in order: the number of operators, the bytes of
            results that outlive it, the line that ends it.
        eager: why such a step runs in eager; empty where it does not.
        parts: graphs that a replay runs, with ``split="buckets"``; else one.
        decisions: values that Python goes on with, in words, where the program may end and another one serve the call.
        recomputed: what the backward makes again to meet a memory budget: module -> calls, and the part that they add
            to the step's predicted time; the most first.
    """

    title: str
    calls: dict[str, int]
    collectives: list[Traffic]
    memory: Memory | None
    missing_rules: list[MissingRule] | None
    captures: int
    recompiles: list[str] = field(default_factory=list)
    eager_calls: int = 0
    breaks: list[str] = field(default_factory=list)
    segments: list[tuple[int, int, str]] = field(default_factory=list)
    eager: str = ""
    decisions: list[str] = field(default_factory=list)
    parts: int = 1
    recomputed: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def graph_count(self) -> int:
        """Graphs that a call runs: the parts of a step that is replayed, else the segments compiled so far."""
        return len(self.segments) if self.breaks else self.parts

    @property
    def graph_break_count(self) -> int:
        """Places between these graphs: where Python reads a value, or a bucket ends."""
        return max(0, self.graph_count - 1)

    @property
    def op_count(self) -> int:
        """Operators in these graphs."""
        return sum(calls for calls, *_ in self.segments) if self.breaks else sum(self.calls.values())

    @property
    def bytes_sent(self) -> float:
        """By this rank in one step, over all axes."""
        return sum(one.nbytes for one in self.collectives)

    def __str__(self) -> str:
        if self.memory is None:
            return "\n".join([self.title, "", *self._segments()])
        parts = [self.title, "", _calls(self.calls), *self._decisions(), "", *self._traffic(), "", *_held(self.memory)]
        parts += self._recomputed()
        if self.missing_rules is not None:
            parts += ["", *_without_rule(self.missing_rules)]
        return "\n".join([*parts, "", *self._captures()])

    def _decisions(self) -> list[str]:
        rows = [f"  {decision}" for decision in self.decisions]
        return [f"decisions: {len(rows)}", *rows] if rows else []

    def _recomputed(self) -> list[str]:
        calls, part = (sum(column) for column in zip((0, 0.0), *self.recomputed.values(), strict=True))
        rows = [f"  {count:>5} calls, +{more:.1%}  {module}" for module, (count, more) in self.recomputed.items()]
        head = f"computed again in the backward: {calls} calls, +{part:.1%} of the predicted time"
        return ["", head, *rows] if rows else []

    def _traffic(self) -> list[str]:
        if not self.collectives:
            return ["collectives: none"]
        lines = [f"collectives: {_size(self.bytes_sent)} sent by this rank in a step"]
        for axis, kinds in per_axis(self.collectives).items():
            lines.append(f"  axis {axis}, {kinds[0].ranks} ranks")
            lines += [f"    {kind.kind:<16}{kind.count:>7} x {_size(kind.nbytes):>12}" for kind in kinds]
            places = sorted((one for one in self.collectives if one.axis == axis), key=lambda one: -one.nbytes)
            lines += [
                f"      {one.kind:<14}{one.count:>7} x {_size(one.nbytes):>12}  {one.phase:<10}"
                f"{place_of(one.module, one.where)}"
                for one in places[:PLACES]
            ]
            if len(places) > PLACES:
                rest = sum(one.nbytes for one in places[PLACES:])
                lines.append(f"      from {len(places) - PLACES} more places: {_size(rest)}")
        return lines

    def _segments(self) -> list[str]:
        why = [f"  because: {line}" for reason in self.breaks for line in reason.splitlines()]
        if self.eager:
            return [f"runs in eager: {self.eager}", *why]
        rows = [f"  {calls:>6,} operators, {_size(kept)} kept{_at(where)}" for calls, kept, where in self.segments]
        return ["its Python runs at each call, its operators as compiled segments", *why, "",
                f"segments compiled so far: {len(rows)}", *rows]  # fmt: skip

    def _captures(self) -> list[str]:
        if not self.captures:
            return ["captures: none yet"]
        new = [f"  in eager: {self.eager_calls} calls of sizes that had not come before"] if self.eager_calls else []
        return [f"captures: {self.captures}", *(f"  again: {reason}" for reason in self.recompiles), *new]


def explain(
    title: str,
    step: StepGraph,
    whole: StepGraph | None,
    axes: Mapping[str, str],
    captures: int,
    recompiles: Sequence[str],
    eager_calls: int = 0,
) -> Explanation:
    """Reads a report off a graph.

    Args:
        step: of one rank, after all passes.
        whole: of the whole step, in the global view.
        axes: group's name -> axis of the mesh.
    """
    calls: Counter[str] = Counter(info(node).phase for node in step.graph.nodes if node.op == "call_function")
    lacking = missing_rules(whole) if whole is not None else None
    return Explanation(
        title, dict(calls), collective_traffic(step, axes), memory_of(step), lacking, captures, list(recompiles),
        eager_calls, decisions=[n.target.in_words for n in step.graph.nodes if isinstance(n.target, Decided)],
        parts=len({info(node).part for node in step.graph.nodes if node.op == "call_function"}) or 1,
        recomputed=_recomputed(step),
    )  # fmt: skip


def _recomputed(step: StepGraph) -> dict[str, tuple[int, float]]:
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    again = [node for node in calls if info(node).recomputed and not is_free(node)]
    once = sum(map(seconds, calls)) - sum(map(seconds, again))
    found: dict[str, tuple[int, float]] = {}
    for node in again:
        count, part = found.get(info(node).module, (0, 0.0))
        found[info(node).module] = count + 1, part + seconds(node) / once
    return dict(sorted(found.items(), key=lambda entry: -entry[1][1]))


def explain_segments(
    title: str, segments: Sequence[tuple[int, int, str]], eager: str, breaks: Sequence[str]
) -> Explanation:
    """A report on a step whose Python runs at each call."""
    return Explanation(title, {}, [], None, None, 0, breaks=list(breaks), segments=list(segments), eager=eager)


def _calls(calls: Mapping[str, int]) -> str:
    each = ", ".join(f"{calls.get(phase, 0):,} {phase}" for phase in ("forward", "backward", "optimizer"))
    return f"{sum(calls.values()):,} calls: {each}"


def _held(memory: Memory) -> list[str]:
    when = f"in the {memory.phase}" + (f" of {memory.module}" if memory.module else "")
    lines = [f"memory: {_size(memory.total)} at the peak, {when}{_at(memory.where)}"]
    lines += [f"  {kind:<12}{_size(memory.by_class[kind]):>12}" for kind in KINDS if memory.by_class[kind]]
    return [*lines, f"  (the arena for intermediate values takes {_size(memory.arena)})"]


def _without_rule(operators: Sequence[MissingRule]) -> list[str]:
    if not operators:
        return ["operators without a sharding rule: none"]
    head = "operators without a sharding rule, which run whole on every rank, and bytes of their operands:"
    rows = [f"  {one.operator:<40}{one.count:>5} x {_size(one.nbytes):>12}" for one in operators]
    return [head, *(f"{row}  {one.module}{_at(one.where)}" for row, one in zip(rows, operators, strict=True))]


def place_of(module: str, where: str) -> str:
    """A module's path and a ``file:line``, those that there are."""
    return f"{module}{_at(where)}".strip()


def _at(where: str) -> str:
    return f" at {os.path.relpath(where)}" if where.startswith(os.getcwd()) else f" at {where}" if where else ""


def _size(nbytes: float) -> str:
    """Bytes for people: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


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
