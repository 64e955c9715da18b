"""Generates the replay of a step's effects, and its result, around the holders that a binder has just let pass.

It does what `replay.replay` does, without following a source for each change: anchored holders are referred to
directly and anchored tensors through the binder's list of them, which it keeps up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wholestep.capture.effects import Effect, SetGrad
from wholestep.capture.facts import is_plain
from wholestep.capture.fastpath import FastPath, compiled
from wholestep.capture.source import Call, Source
from wholestep.capture.values import Const, Existing, New, Record, Tree, Value, assemble, assemble_record, is_late

Apply = Callable[[tuple[Any, ...], Mapping[str, Any], Sequence[Any]], Any]


class Applier:
    """Builds the generated function for one list of effects and one result.

    Attributes:
        code: its text.
        function: ``(args, kwargs, made) -> result``.
        release: lets go of gradients that the step replaces and nobody reads, ahead of the program that makes new ones.
    """

    def __init__(self, effects: Sequence[Effect], result: Value, path: FastPath, call: Call) -> None:
        self.path, self.call = path, call
        self.space: dict[str, Any] = {"LAST": path.anchored.last, "Call": Call, "fn": call.fn,
                                      "replaced": call.replaced,
                                      "assemble": assemble, "assemble_record": assemble_record}
        self.dynamic = False
        self.built: dict[int, str] = {}  # id of a Tree or Record -> the variable that holds it
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.late: list[str] = []
        self.replaced: dict[int, str] = {}  # id of a gradient that nobody reads -> the tensor that has it
        self.kept: set[int] = set()
        outcome = self._value(result)
        for index, effect in enumerate(effects):
            self._effect(index, effect)
        head = ["call = Call(fn, args, kwargs, replaced)"] if self.dynamic else []
        lines = [*head, *self.reads, *self.writes, *self.late, f"return {outcome}"]
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
            held = self.path.anchored_tensors.get(id(value))
            if held is not None:
                return held.replace("t[", "LAST[")
        elif not is_plain(value) and self.path.is_anchored(value):
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
            made = self._record(value) if isinstance(value, Record) else self._tree(value)
            name = self.built[id(value)] = f"n{len(self.built)}"
            (self.late if is_late(value) else self.reads).append(f"{name} = {made}")
        return self.built[id(value)]

    def _tree(self, tree: Tree) -> str:
        items = [self._value(item) for item in tree.values]
        if type(tree.prototype) is list:
            return f"[{', '.join(items)}]"
        if type(tree.prototype) is tuple:
            return f"({''.join(f'{item}, ' for item in items)})"
        keys = [self._value(key) for key in tree.keys]
        if type(tree.prototype) is dict:
            return f"{{{', '.join(f'{k}: {v}' for k, v in zip(keys, items, strict=True))}}}"
        return f"assemble({self._constant(tree.prototype)}, [{', '.join(keys)}], [{', '.join(items)}])"

    def _record(self, record: Record) -> str:
        lists = [f"[{', '.join(map(self._value, values))}]" for values in
                 (record.items.keys, record.items.values, record.attributes.keys, record.attributes.values)]
        return f"assemble_record({self._constant(record.items.prototype)}, {', '.join(lists)})"

    def _replace(self, source: Source) -> None:
        tensor = source.read(self.call)
        held, grad = self.path.anchored_tensors.get(id(tensor)), tensor.grad
        unread = self.path.snap.replaces_gradient_of(tensor)
        if held is not None and (unread or grad is not None) and id(grad) not in self.path.anchored_tensors:
            self.replaced[id(tensor if grad is None else grad)] = held.replace("t[", "LAST[")

    def _effect(self, index: int, effect: Effect) -> None:
        holder = f"h{index}"
        self.reads.append(f"{holder} = {self._read(effect.source)}")
        key, value = f"k{index}", f"v{index}"
        late = any(part is not None and is_late(part) for part in effect.parts)
        for name, part in zip((key, value), effect.parts, strict=True):
            if part is not None:
                expression = self._value(part)
                (self.late if late else self.reads).append(f"{name} = {expression}")
        if isinstance(effect, SetGrad):
            self._replace(effect.source)
        (self.late if late else self.writes).append(effect.statement(holder, key, value, self._constant))
