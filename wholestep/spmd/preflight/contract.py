"""Contracts: what all ranks must have equal to run a program, in words: plans, tensors, collectives, the graph."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from wholestep.cached_property import cached_property
from wholestep.ir import LASTING_KINDS, Input, Phase, StepGraph, info, is_communication, is_effectful
from wholestep.tensor_parts import part_of
from wholestep.torch_compat import FakeTensor, OpOverload

SHARED_KINDS = ("parameter", "buffer")
OPTIMIZER: Phase = "optimizer"
_OPTIMIZERS = re.compile(r"\.(param_groups|state)\[")


class Call(NamedTuple):
    """A collective in words.

    Attributes:
        axis: of the ranks that meet; those of other axes may send tensors of another size.
        what: operator and settings.
        of: what is sent, and for which parameters.
    """

    axis: str
    what: str
    of: str

    def for_axis(self, axis: str | None) -> str:
        """What ranks along an axis must have alike; None: all ranks of the mesh."""
        return f"{self.what} of {self.of}" if axis == self.axis else self.what


@dataclass(frozen=True)
class Contract:
    """What all ranks must have equal to run a program, in words.

    Attributes:
        calls: in the global view, those of the whole step, as compressed text: ranks that differ compare them.
        random: whether the program draws random numbers.
        numbers: places among a call's values of numbers that all ranks must have equal.
        lasting: places there of tensors that the ranks of the global view have equal, unless they are parts.
        watched: of these, those that are whole.
    """

    words: tuple[str | Call, ...]
    calls: bytes = field(default=b"", compare=False)
    random: bool = False
    numbers: tuple[tuple[int, Input], ...] = field(default=(), compare=False)
    lasting: tuple[tuple[int, Input], ...] = field(default=(), compare=False)
    watched: tuple[tuple[int, Input], ...] = field(default=(), compare=False)

    def with_random_state(self) -> Contract:
        """With the state of the random generator, for a program that draws from it."""
        return replace(self, words=(f"random generator in state {generator_state():x}", *self.words))

    def for_axis(self, axis: str | None) -> list[str]:
        """The words for the ranks along one axis; None: for all ranks of the mesh."""
        return [word if isinstance(word, str) else word.for_axis(axis) for word in self.words]

    def checksum(self, values: Sequence[Any], others: Sequence[str]) -> int:
        """Of a call's numbers, and of other words."""
        numbers = [values[index] for index, _ in self.numbers]
        numbers = [number.tolist() if isinstance(number, torch.Tensor) else number for number in numbers]
        return zlib.crc32(repr((numbers, others)).encode()) if numbers or others else 0

    @cached_property
    def is_local(self) -> bool:
        """Whether the program has no collectives."""
        return all(isinstance(word, str) for word in self.words)

    @cached_property
    def number(self) -> int:
        """One for the words, at least 0."""
        return int.from_bytes(hashlib.sha256("\n".join(self.for_axis(None)).encode()).digest()[:7], "big")


def contract_of(
    step: StepGraph, inputs: Sequence[Input], tensors: Sequence[Any], axes: Mapping[str, str], plans: str,
    whole: StepGraph, in_global_view: bool,
) -> Contract:  # fmt: skip
    """The contract of a program.

    Args:
        step: the program of this rank, after all passes.
        inputs, tensors: what it was traced with.
        axes: group's name -> axis, for words that are the same on all ranks.
        plans: in words.
        whole: the graph of the step before all passes; in the global view it is one for all ranks, in the local view
            the optimizer's calls are.
        in_global_view: whether the step is in the global view.
    """
    pairs = [(i, t) for i, t in zip(inputs, tensors, strict=True) if isinstance(t, torch.Tensor)]
    words: list[str | Call] = [f"plans {plans}"]
    words += [_describe(i, t) for i, t in pairs if in_global_view and i.kind == "batch"]
    words += [_describe(item, t) for item, t in pairs if item.kind in LASTING_KINDS]
    words += communication(step, axes)
    if not in_global_view:
        calls = [node for node in whole.graph.nodes if node.op == "call_function"]
        updates = sorted(_update(node) for node in calls if info(node).phase == OPTIMIZER)
        return Contract((*words, *([f"setting of an update in {_digest(updates)}"] if updates else [])))
    lines = [_words(node, whole) for node in whole.graph.nodes]
    for name, axis in axes.items():  # of buffers' broadcasts
        lines = [line.replace(repr(name), repr(axis)) for line in lines]
    words.append(f"a program of {_digest([line.split(' at ')[0] for line in lines])}")
    return Contract(tuple(words), zlib.compress("\n".join(lines).encode()), any(map(_draws, whole.graph.nodes)))


def _digest(calls: Sequence[str]) -> str:
    return f"{len(calls)} calls, {hashlib.sha256(chr(10).join(calls).encode()).hexdigest()[:8]}"


def _update(node: fx.Node) -> str:
    """A call of an optimizer in words that do not depend on a batch's size, which a closure may see."""
    return f"{node.target} {[value for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)]}"


def values_of(item: Input, value: Any) -> str:
    """What an input holds, in a word that is the same wherever it holds the same."""
    kind = "setting" if is_setting(item) else "values of"
    if isinstance(value, torch.Tensor) and part_of(value) is not None:
        return f"{kind} {item.source} in parts"
    if isinstance(value, torch.Tensor):
        return f"{kind} {item.source} with checksum {checksum(value):08x}"
    return f"{kind} {item.source}: {value!r}"


def is_setting(item: Input) -> bool:
    """Whether an input is a number, or a learning rate in a tensor, that an optimizer holds."""
    return bool(_OPTIMIZERS.search(item.source)) and item.kind in ("number", "tensor")


def checksum(tensor: torch.Tensor) -> int:
    """Of a tensor's elements in order."""
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def communication(step: StepGraph, axes: Mapping[str, str]) -> list[Call]:
    """The collectives of a program, in order: what all ranks must have alike.

    Args:
        axes: group's name -> axis, for words that are the same on all ranks.
    """
    return [_collective(node, axes) for node in step.graph.nodes if is_communication(node) and is_effectful(node)]


def _draws(node: fx.Node) -> bool:
    return node.op == "call_function" and is_effectful(node) and not is_communication(node)


def generator_state() -> int:
    """A number for the state of the random generator."""
    return zlib.crc32(torch.get_rng_state().numpy().data)


def _collective(node: fx.Node, axes: Mapping[str, str]) -> Call:
    value, target = info(node).value, node.target
    settings = [axes.get(str(a), str(a)) for a in node.args if not isinstance(a, fx.Node)]
    axis = next((axes[str(a)] for a in node.args if not isinstance(a, fx.Node) and str(a) in axes), "")
    what = f"{target._schema.name}({', '.join(settings)})"  # type: ignore[union-attr]
    return Call(axis, what, f"{_form(value)}: {', '.join(info(node).placement or ())}")


def _form(tensor: torch.Tensor) -> str:
    part = part_of(tensor)  # what is a part now may have been whole when another rank captured its program
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape if part is None else part.shape)}"


def _describe(item: Input, tensor: torch.Tensor) -> str:
    made = " that the step makes" if item.kind == "state" and isinstance(tensor, FakeTensor) else ""
    return f"{item.kind} {item.source}: {_form(tensor)}{made}"


def _words(node: fx.Node, step: StepGraph) -> str:
    """A node in words that are the same in every process, and where it comes from."""
    if node.op == "output":
        return f"{len(node.all_input_nodes)} results"
    record = info(node)
    shape = f" of {_form(record.value)}" if isinstance(record.value, torch.Tensor) else ""
    sources = {item.name: item.source for item in step.signature.inputs} if node.op == "placeholder" else {}
    place = sources.get(str(node.target), record.where)
    where = f" at {place}" if place else ""
    return f"{_call(node, step)}{shape}{where}{f' in {record.module}' if record.module else ''}"


def _call(node: fx.Node, step: StepGraph) -> str:
    if node.op == "placeholder":
        return "an input"
    if node.op == "get_attr":
        return f"a constant with checksum {checksum(getattr(step.gm, str(node.target))):08x}"
    name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "a call")
    return f"{name}({', '.join(map(_operand, (*node.args, *node.kwargs.values())))})"


def _operand(value: Any) -> str:
    if isinstance(value, fx.Node):
        return "·"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_operand, value))}]"
    return repr(value)
