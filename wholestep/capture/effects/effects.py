"""Effects: what a step changed in the Python world, as values that can be done again without running it.

`differences` describes them. A table of two templates says how each reads and which statement does it: `container`,
`key` and `value` are variables of the code that does them in a later call, around the objects that a binder has just
let pass. That code makes every new value and finds every container before the first is assigned, so that two effects
that exchange values do not disturb each other; what a scheduler sets is read right after its call. Persistent objects
are referred to directly, and their tensors through the binder's list of them, which it keeps up to date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from wholestep.capture.container_access import base_of
from wholestep.capture.effects.recipes import NOTHING, Const, Existing, Made, New, Tree, Value, fill, is_late, nested
from wholestep.capture.guards.code_writer import compiled
from wholestep.capture.guards.compared_values import is_plain
from wholestep.capture.guards.fast_path import FastPath
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.sources import Args, Call, Kwargs, Source
from wholestep.ir import InputKind


class Change(NamedTuple):
    """A kind of change: how it reads, and the statement that does it."""

    text: str
    code: str


SET_ITEM = Change("{source}[{key}] = {value}", "base_of({container}).__setitem__({container}, {key}, {value})")
DEL_ITEM = Change("del {source}[{key}]", "base_of({container}).__delitem__({container}, {key})")
# Attributes, slots, classes, closure cells and ``.requires_grad``; and names in a table.
SET_ATTR = Change("{source}.{name} = {value}", "{container}.{name} = {value}")
DEL_ATTR = Change("del {source}.{name}", "del {container}.{name}")
SET_NAME = Change("{source}.{name} = {value}", "{container}[{name!r}] = {value}")
DEL_NAME = Change("del {source}.{name}", "{container}.pop({name!r}, None)")
SET_GRAD = Change("{source}.grad = {value}", "{container}.grad = {value}")
# All of a list, set or deque, which stays the same object; the key is its kind.
SET_CONTENTS = Change("{source}[:] = {value}", "refill({key}, {container}, {value})")
# A list or deque that the step appends to and does not read.
EXTEND = Change("{source} += {value}", "base_of({container}).extend({container}, {value})")
# A tensor retains its gradient; a learning-rate scheduler moves on.
CALL = Change("{source}.{name}()", "{container}.{name}()")
STEP = Change("{source}.step{value}", "{container}.step(*{value})")


@dataclass(frozen=True, eq=False)
class Effect:
    """One change at ``source``, the container."""

    source: Source
    change: Change
    key: Value = NOTHING
    value: Value = NOTHING

    @property
    def parts(self) -> dict[str, Value]:
        """The key and the value that must be made before the change."""
        return {name: getattr(self, name) for name in ("key", "value") if f"{{{name}}}" in self.change.code}

    @property
    def name(self) -> Any:
        """The key as a name."""
        return self.key.value if isinstance(self.key, Const) else ""

    def statement(self, variables: dict[str, str]) -> str:
        """The statement that does it, given the code's variables by the names that templates have for them."""
        return self.change.code.format(**variables, name=self.name)

    def __str__(self) -> str:
        return self.change.text.format(**vars(self), name=self.name)


def refill(kind: kinds.ContainerKind, container: Any, built: Any) -> None:
    """Makes the contents of a container those of a new one."""
    kind.write(container, dict(enumerate(built)))


# What statements call.
FUNCTIONS: dict[str, Any] = {"base_of": base_of, "refill": refill}


def _values_of(effects: Sequence[Effect], result: Value) -> Iterator[Value]:
    return nested([result, *(value for effect in effects for value in effect.parts.values())])


def new_values(effects: Sequence[Effect], result: Value = NOTHING) -> list[Any]:
    """The distinct tensors and numbers made in the step that effects and result hold, in the order of `New.index`."""
    found = {v.index: v.value for v in _values_of(effects, result) if isinstance(v, New)}
    return [found[index] for index in sorted(found)]


def forget(effects: Sequence[Effect], result: Value = NOTHING) -> None:
    """Lets go of the objects that effects and result were described from; they can be replayed as before."""
    for value in _values_of(effects, result):
        if isinstance(value, (New, Existing)):
            value.value = None


def read_by(effects: Sequence[Effect], result: Value = NOTHING) -> set[str]:
    """The paths of what a replay of effects and result looks at in the call."""
    existing = {value.source.path for value in _values_of(effects, result) if isinstance(value, Existing)}
    return existing | {effect.source.path for effect in effects}


def state_outputs(effects: Sequence[Effect]) -> dict[int, tuple[str, InputKind]]:
    """Where effects leave the gradients and the optimizer state that the step makes: `New.index` -> source, kind.

    Sources are written as those of inputs are, so that a later step finds the same words for what is there then.
    """
    found: dict[int, tuple[str, InputKind]] = {}

    def collect(value: Value, where: str) -> None:
        if isinstance(value, New) and _STATE.search(where):
            found.setdefault(value.index, (where, "state"))
        elif isinstance(value, Made) and value.parts:  # the items of a dict of another class
            collect(value.parts[0], where)
        elif isinstance(value, Tree):
            for key, inner in zip(value.keys, value.values, strict=True):
                collect(inner, f"{where}[{key}]")

    for effect in effects:
        if effect.change is SET_GRAD and isinstance(effect.value, New):
            found[effect.value.index] = f"{effect.source}.grad", "grad"
        elif effect.change is SET_ITEM:
            collect(effect.value, f"{effect.source}[{effect.key}]")
        elif effect.change is SET_CONTENTS:
            collect(effect.value, str(effect.source))
    return found


_STATE = re.compile(r"\.state\[.*\]\[[^\[\]]*\]$")


def replaced_containers(effects: Sequence[Effect]) -> frozenset[tuple[str, Any]]:
    """Path and key of the places where effects put a container that they make."""
    return frozenset((effect.source.path, effect.key.value) for effect in effects
                     if isinstance(effect.value, (Made, Tree)) and isinstance(effect.key, Const))  # fmt: skip


Apply = Callable[[Args, Kwargs, Sequence[Any]], Any]


class Replay:
    """Builds the generated function for one list of effects and one result.

    Attributes:
        code: its text.
        function: ``(args, kwargs, made) -> result``.
        release: lets go of gradients that the step replaces and nobody reads, ahead of the program that makes new ones.
    """

    def __init__(self, effects: Sequence[Effect], result: Value, path: FastPath) -> None:
        self.path, self.call = path, path.snap.call
        call = self.call
        self.space: dict[str, Any] = {"LAST": path.last.last, "Call": Call, "fn": call.fn,
                                      "replaced": call.replaced, "fill": fill, **FUNCTIONS}
        path.writer.spaces.append(self.space)
        self.dynamic = False
        self.built: dict[int, str] = {}  # id of a Tree or what is Made -> the variable that holds it
        self.reads: list[str] = []
        self.writes: list[list[str]] = [[]]  # behind each call of a scheduler what is read then, and what follows
        self.replaced: dict[int, str] = {}  # id of a gradient that nobody reads -> the tensor that has it
        self.kept: set[int] = set()
        for index, effect in enumerate(effects):
            self._effect(index, effect)
        outcome = self._value(result)
        head = ["call = Call(fn, args, kwargs, replaced)"] if self.dynamic else []
        if path.writer.weak:  # what the step replaces lives until it is done
            self.space["WEAK"] = path.writer.weak
            head.append("kept = [reference() for reference in WEAK]")
        self.space["let_go"] = path.last.let_go
        writes = [line for lines in self.writes for line in lines]
        lines = [*head, *self.reads, *writes, f"result = {outcome}", "let_go()", "return result"]
        self.code = "def apply(args, kwargs, made):\n    " + "\n    ".join(lines) + "\n"
        exec(compiled(self.code), self.space)
        self.function: Apply = self.space["apply"]
        dropped = [tensor for grad, tensor in self.replaced.items() if grad not in self.kept]
        exec(compiled("def release():\n    " + "\n    ".join([f"{t}.grad = None" for t in dropped] or ["pass"]) + "\n"),
             self.space)
        self.release: Callable[[], None] = self.space["release"]

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.space)}"
        self.space[name] = value
        return name

    def _read(self, source: Source) -> str:
        """An expression for what is at a source: direct when it cannot change under the binder's eyes."""
        value = source.read(self.call)
        if isinstance(value, torch.Tensor):
            held = self.path.writer.tensors.get(id(value))
            if held is not None:
                return held.replace("t[", "LAST[")
        elif not is_plain(value) and self.path.is_persistent(value):
            return self._constant(value)
        self.dynamic = True
        return f"{self._constant(source)}.read(call)"

    def _value(self, value: Value) -> str:
        if isinstance(value, New):
            return f"made[{value.index}]"
        if isinstance(value, Const):
            return self._constant(value.value)
        if isinstance(value, Existing) and value.after is not None:
            self.dynamic = True
            source = self._constant(value.source)
            self.writes[2 * value.after + 1].append(f"p{source} = {source}.read(call)")
            return f"p{source}"
        if isinstance(value, Existing):
            self.kept.add(id(value.source.read(self.call)))
            return self._read(value.source)
        if id(value) not in self.built:
            lines = self.writes[-1] if is_late(value) else self.reads
            made = self._made(value) if isinstance(value, Made) else self._tree(value)
            name = self.built[id(value)] = f"n{len(self.built)}"
            lines.append(f"{name} = {made}")
            if isinstance(value, Made) and value.parts:
                lines.append(f"fill({', '.join([name, *map(self._value, value.parts)])})")
        return self.built[id(value)]

    def _tree(self, tree: Tree) -> str:
        items = [self._value(item) for item in tree.values]
        if tree.kind is list:
            return f"[{', '.join(items)}]"
        if tree.kind is tuple:
            return f"({''.join(f'{item}, ' for item in items)})"
        if tree.kind is dict:
            keys = [self._value(key) for key in tree.keys]
            return f"{{{', '.join(f'{k}: {v}' for k, v in zip(keys, items, strict=True))}}}"
        return f"{tree.kind.__name__}([{', '.join(items)}])"

    def _made(self, made: Made) -> str:
        return f"{self._constant(made.make)}({', '.join(map(self._value, made.args))})"

    def _replace(self, source: Source) -> None:
        tensor = source.read(self.call)
        held, grad = self.path.writer.tensors.get(id(tensor)), tensor.grad
        unread = self.path.snap.replaces_gradient_of(tensor)
        if held is not None and (unread or grad is not None) and id(grad) not in self.path.writer.tensors:
            self.replaced[id(tensor if grad is None else grad)] = held.replace("t[", "LAST[")

    def _effect(self, index: int, effect: Effect) -> None:
        variables = {"container": f"h{index}", "key": f"k{index}", "value": f"v{index}"}
        self.reads.append(f"h{index} = {self._read(effect.source)}")
        for name, part in effect.parts.items():
            expression = self._value(part)
            (self.writes[-1] if is_late(part) else self.reads).append(f"{variables[name]} = {expression}")
        if effect.change is SET_GRAD:
            self._replace(effect.source)
        self.writes[-1].append(effect.statement(variables))
        if effect.change is STEP:
            self.writes += [], []
