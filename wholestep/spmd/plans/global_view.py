"""The global view: a step means what it means on one device with the whole batch.

A plan of the global view says where each tensor lies when no step runs (`placement_of`), and its passes make of the
graph of the whole step the graph of one rank. Capture, launch and the passes all ask the same plan. Patterns name
parameters and modules.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import fx

from wholestep.capture import TensorInput
from wholestep.errors import PlanError
from wholestep.ir import Input, Pass, StepGraph, info
from wholestep.spmd.expand.calls import R
from wholestep.spmd.mesh import AxisGroup, DeviceMesh
from wholestep.spmd.placements import Placement, Replicate, Shard, cut, normal, split_evenly
from wholestep.tensor_parts import Part

_GRAD = re.compile(r"(?P<owner>.+)\.grad")
_STATE = re.compile(r".+?\.state\[(?P<owner>.*)\]\[[^\[\]]*\]")


class Plan(Protocol):
    """What a step does along one axis of a mesh."""

    @property
    def axis(self) -> str: ...
    def passes(self, mesh: DeviceMesh) -> list[Pass]: ...


@runtime_checkable
class GlobalPlan(Plan, Protocol):
    """The same, in the global view."""

    def placement_of(self, item: Input, value: torch.Tensor) -> Placement:
        """Where a tensor lies along the axis when no step runs, `Shard` or `Replicate`.

        Args:
            item: its kind and source. "batch": a tensor that the step is called with; each rank gives its own rows
                where the answer is `Shard(0)`, all of them where it is `Replicate()`.
            value: a tensor of the whole shape; of a batch, possibly of this rank's.
        """
        ...


class ParameterPlan(ABC):
    """For plans that place parameters: the rest follows.

    Gradients and optimizer state lie as their parameter does, where they have as many dimensions; all other tensors
    are on every rank.

    Attributes:
        batch: of the tensors that the step is called with, those without dimensions excepted; or of some, by patterns
            of their paths (``batch.mask`` for ``batch["mask"]``), of which the first that fits counts.
        unnamed: of those that fit no pattern.
    """

    batch: Placement | Mapping[str, Placement] = Shard(0)
    unnamed: ClassVar[Placement] = Shard(0)

    @abstractmethod
    def place(self, source: str, value: torch.Tensor) -> Placement:
        """Where a parameter lies."""

    def place_buffer(self, source: str, value: torch.Tensor) -> Placement:
        """Where a module's buffer lies."""
        return Replicate()

    def place_argument(self, source: str) -> Placement:
        """Where a tensor that the step is called with lies."""
        if not isinstance(self.batch, Mapping):
            return self.batch
        path = argument_path(source)
        return next((one for pattern, one in self.batch.items() if matches(path, pattern)), self.unnamed)

    @property
    def patterns(self) -> Sequence[str]:
        """The patterns that name parameters, buffers or modules."""
        return ()

    def check(self, tensors: Sequence[TensorInput]) -> None:
        """Refuses a pattern that fits nothing that the step can see, used or not.

        Raises:
            PlanError: naming the nearest paths.
        """
        name = type(self).__name__
        paths = [parameter_path(one.source.text) for one in tensors if one.kind in ("parameter", "buffer")]
        check_patterns(name, self.patterns, [name for path in paths for name in names_of(path)])
        arguments = [argument_path(one.source.text) for one in tensors if one.kind == "batch"]
        patterns = list(self.batch) if isinstance(self.batch, Mapping) else []
        check_patterns(f"{name}, batch", patterns, arguments, "tensor that the step is called with")

    def placement_of(self, item: Input, value: torch.Tensor) -> Placement:
        """See `GlobalPlan`."""
        if not value.dim():
            return Replicate()
        if item.kind == "batch":
            return self.place_argument(item.source)
        if item.kind == "buffer":
            return self.place_buffer(item.source, value)
        source = item.source if item.kind == "parameter" else owner_of(item)
        placement = self.place(source, value) if source and not source.startswith("memory of ") else Replicate()
        if isinstance(placement, Shard) and item.kind in ("grad", "state") and placement.dim >= value.dim():
            return Replicate()
        return placement


def check_placements(plan: str, field: str, found: Any) -> None:
    """Refuses what is not a placement of a tensor between calls, nor a mapping of patterns to such.

    Raises:
        PlanError: naming what was found.
    """
    for pattern, one in found.items() if isinstance(found, Mapping) else [("", found)]:
        if not isinstance(one, (Shard, Replicate)):
            at = f"[{pattern!r}]" if pattern else ""
            raise PlanError(f"{plan}: {field}{at}={one!r}: Shard(dim) or Replicate() is required")


def owner_of(item: Input) -> str:
    """The source of the parameter that a gradient or an optimizer's state belongs to; "" for anything else."""
    found = _GRAD.fullmatch(item.source) or _STATE.fullmatch(item.source) if item.kind in ("grad", "state") else None
    return found["owner"] if found else ""


@dataclass(frozen=True)
class GlobalView:
    """Plans of the global view with the ranks that each spreads the step over.

    Attributes:
        plans, groups: one of each for an axis of the mesh, in its order.
    """

    plans: tuple[GlobalPlan, ...]
    groups: tuple[AxisGroup, ...]

    def placements(self, item: Input, value: torch.Tensor) -> tuple[Placement, ...]:
        """Where a tensor lies when no step runs, along each axis.

        Raises:
            PlanError: a plan names a dimension that the tensor does not have, or leaves it in addends.
        """
        found = [normal(plan.placement_of(item, value), value.shape, item.source) for plan in self.plans]
        for plan, placement in zip(self.plans, found, strict=True):
            if not isinstance(placement, (Shard, Replicate)):
                raise PlanError(f"{plan!r} places {item.source} as {placement}: Shard or Replicate() is required")
        return tuple(found)

    def parts(self, tensors: Sequence[TensorInput]) -> list[Part | None]:
        """What tensors that carry no mark are of whole ones: this rank's of the batch, each an equal piece.

        Raises:
            PlanError: a pattern of a plan fits none.
        """
        for plan in self.plans:
            if isinstance(plan, ParameterPlan):
                plan.check(tensors)
        return [self._part(found) for found in tensors]

    def _part(self, found: TensorInput) -> Part | None:
        if found.kind != "batch":
            return None
        shape, item = list(found.tensor.shape), Input("", found.source.text, found.kind)
        placements = self.placements(item, found.tensor) if shape else ()
        for placement, group in zip(placements, self.groups, strict=False):
            if isinstance(placement, Shard):
                shape[placement.dim] *= group.size
        return None if shape == list(found.tensor.shape) else cut(shape, placements, self.groups)


def parameter_path(source: str) -> str:
    """A parameter's path in its model: ``L['model'].layers.0.weight`` -> ``layers.0.weight``."""
    return source.rpartition("]")[2].removeprefix(".") or source


def argument_path(source: str) -> str:
    """An argument's path in the step: ``L['batch']['mask']`` -> ``batch.mask``."""
    return ".".join(re.findall(r"[^\[\]'\".]+", source.removeprefix("L")))


def names_of(path: str) -> tuple[str, str]:
    """A parameter's path, and its module's."""
    return path, path.rpartition(".")[0]


def matches(path: str, pattern: str) -> bool:
    """True when a path, or the end of it after a dot, fits a pattern; ``*`` stands for dots, too."""
    return any(fnmatch.fnmatchcase(path, form) for form in (pattern, f"*.{pattern}"))


def check_patterns(
    plan: str, patterns: Sequence[str], names: Sequence[str], what: str = "parameter or module of the step"
) -> None:
    """Refuses a pattern that matches nothing.

    Args:
        what: the names are of.

    Raises:
        PlanError: naming the nearest names.
    """
    names = list(dict.fromkeys(names))
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or names[:3]
            found = f"such as {', '.join(map(repr, near))}" if near else "none"
            raise PlanError(
                f"{plan}: the pattern {pattern!r} matches no {what}\n  found: {found}\n"
                "  to do: correct the pattern; * stands for any text, dots included"
            )


PlacementOf = Callable[[Input, torch.Tensor], Placement]


@dataclass(frozen=True)
class StatePlacements:
    """The placements of tensors along one axis between steps.

    Attributes:
        inputs: of each input of the step.
        outputs: of those outputs that stay: new contents of inputs, gradients and states that the step makes; None
            for values that the next graph of the step takes as they are.
    """

    inputs: Sequence[Placement]
    outputs: Mapping[int, Placement | None]


def state_placements(step: StepGraph, placement_of: PlacementOf, group: AxisGroup) -> StatePlacements:
    """Asks a plan for all inputs and outputs of a step, by their whole shapes."""

    def ask(item: Input, node: fx.Node) -> Placement:
        value, part = info(node).value, info(node).placement
        if not isinstance(value, torch.Tensor):
            return R
        if isinstance(part, Part):
            with value.fake_mode:  # type: ignore[attr-defined]
                value = value.new_empty(part.shape)
        wanted = normal(placement_of(item, value), value.shape, item.source)
        return split_evenly(wanted, info(node).value.shape, group)

    pairs = zip(step.signature.inputs, step.placeholders, strict=True)
    inputs = [ask(i, node) if i.placements is None else i.placements[0] for i, node in pairs]
    kept = {index: ask(item, step.outputs[index]) if item.placements is None else None
            for index, item in step.signature.state_outputs.items()}  # fmt: skip
    return StatePlacements(inputs, kept | {index: inputs[into] for index, into in step.signature.mutations.items()})
