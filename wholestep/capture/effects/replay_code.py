"""Generates the replay of a step's effects, and its result, around the objects that a binder has just let pass.

It makes every new value and finds every container before the first is assigned, so that two effects that exchange
values do not disturb each other; those that are read late come last. Persistent objects are referred to directly, and
their tensors through the binder's list of them, which it keeps up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.capture.effects.effects import FUNCTIONS, SET_GRAD, Effect
from wholestep.capture.effects.recipes import Const, Existing, Made, New, Tree, Value, fill, is_late
from wholestep.capture.guards.code_writer import compiled
from wholestep.capture.guards.compared_values import is_plain
from wholestep.capture.guards.fast_path import FastPath
from wholestep.capture.sources import Args, Call, Kwargs, Source

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
        self.writes: list[str] = []
        self.late: list[str] = []
        self.replaced: dict[int, str] = {}  # id of a gradient that nobody reads -> the tensor that has it
        self.kept: set[int] = set()
        outcome = self._value(result)
        for index, effect in enumerate(effects):
            self._effect(index, effect)
        head = ["call = Call(fn, args, kwargs, replaced)"] if self.dynamic else []
        if path.writer.weak:  # what the step replaces lives until it is done
            self.space["WEAK"] = path.writer.weak
            head.append("kept = [reference() for reference in WEAK]")
        self.space["let_go"] = path.last.let_go
        lines = [*head, *self.reads, *self.writes, *self.late, f"result = {outcome}", "let_go()", "return result"]
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
        if isinstance(value, Existing) and value.late:
            self.dynamic = True
            return f"{self._constant(value.source)}.read(call)"
        if isinstance(value, Existing):
            self.kept.add(id(value.source.read(self.call)))
            return self._read(value.source)
        if id(value) not in self.built:
            lines = self.late if is_late(value) else self.reads
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
        late = is_late(*effect.parts.values())
        for name, part in effect.parts.items():
            expression = self._value(part)
            (self.late if late else self.reads).append(f"{variables[name]} = {expression}")
        if effect.change is SET_GRAD:
            self._replace(effect.source)
        (self.late if late else self.writes).append(effect.statement(variables))
