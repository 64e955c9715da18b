"""Fully sharded parameters, a plan of the global view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from wholestep.errors import PlanError
from wholestep.ir import Pass, StepGraph
from wholestep.spmd.expand.expand import expand
from wholestep.spmd.expand.graph_edits import copy_step
from wholestep.spmd.mesh import AxisGroup, DeviceMesh
from wholestep.spmd.placements import Placement, Replicate, Shard
from wholestep.spmd.plans.global_view import ParameterPlan, check_placements
from wholestep.spmd.plans.patterns import check_patterns, matches, parameter_path, paths_of
from wholestep.spmd.plans.sharding_constraints import (
    cheaper_to_keep,
    constrain_gradients,
    constrain_inputs,
    constrain_parameters,
)
from wholestep.spmd.plans.state_placements import state_placements

R = Replicate()


@dataclass(frozen=True)
class FullyShard(ParameterPlan):
    """Parameters, gradients and optimizer state are split over an axis; the batch is, too (ZeRO-3, FSDP).

    A parameter is gathered right before a forward or backward computes with it, and freed after; one that is far larger
    than all that meets it stays where it is, and each rank computes with its part on all rows. Gradients are
    reduce-scattered; the optimizer updates its part. Each rank is given its own part of the batch, rows of every
    tensor among the step's arguments; the step means what it means on one device with all of them.

    After Rajbhandari et al., "ZeRO" (2020), and Zhao et al., "PyTorch FSDP" (2023).

    Attributes:
        axis: name of the mesh axis.
        parameters: patterns (`fnmatch`) of the paths of the parameters, or of modules, that are split.
        batch: `Shard(dim)`: each rank is given its part of the batch; `Replicate()`: the whole of it. Or pattern ->
            placement, for tensors apart by their paths in the arguments: ``{"batch.mask": Replicate()}``; the others
            are `Shard(0)`.
        gather: "always": where a forward or backward computes with a parameter, it is gathered; "cheaper": it stays
            where it is if what it meets is far smaller, as in large layers on small batches.
        again: gather once more in the backward, rather than keep what the forward gathered.
        min_bytes: smaller parameters stay whole on every rank.
    """

    axis: str
    parameters: str | Sequence[str] = "*"
    batch: Placement | Mapping[str, Placement] = Shard(0)
    gather: Literal["always", "cheaper"] = "cheaper"
    again: bool = True
    min_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        if self.gather not in ("always", "cheaper"):
            raise PlanError(f"FullyShard: gather={self.gather!r}: 'always' or 'cheaper' is required")
        check_placements("FullyShard", "batch", self.batch)

    def passes(self, mesh: DeviceMesh) -> list[Pass]:
        """The passes that this plan adds to the head of the chain.

        Raises:
            PlanError: the mesh has no such axis.
        """
        return [partial(fully_shard, group=mesh.axis_group(self.axis), plan=self)]

    def place(self, source: str, value: torch.Tensor) -> Placement:
        """Where a parameter is."""
        path = parameter_path(source)
        chosen = any(matches(path, pattern) for pattern in self.patterns)
        return Shard(0) if chosen and value.dim() and value.numel() * value.itemsize >= self.min_bytes else R

    @property
    def patterns(self) -> list[str]:
        """The patterns, as a list."""
        return [self.parameters] if isinstance(self.parameters, str) else list(self.parameters)


def fully_shard(step: StepGraph, *, group: AxisGroup, plan: FullyShard) -> StepGraph:
    """The step of one rank of an axis, by a plan.

    Raises:
        PlanError: a pattern of the plan matches nothing.
    """
    if not step.signature.of_part:
        check_patterns("FullyShard", plan.patterns, paths_of(step, "parameter"))
    if group.size == 1:
        return step
    placements = state_placements(step, plan.placement_of, group)
    step = copy_step(step, "fully_shard")
    if plan.batch == R:
        step = constrain_inputs(step, kind="batch", placement=Shard(0))
    gathered = placements.inputs
    if plan.gather == "cheaper":
        gathered = cheaper_to_keep(step, placements=placements.inputs, again=plan.again)
    step = constrain_parameters(step, placements=gathered, again=plan.again)
    step = constrain_gradients(step, placements=placements.inputs)
    return expand(step, group=group, placements=placements, pending=float(gathered != placements.inputs))
