"""Tensor parallelism, a plan of the global view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, get_args

import torch

from wholestep.errors import PlanError
from wholestep.ir import Pass, StepGraph, info
from wholestep.spmd.expand.expand import expand
from wholestep.spmd.expand.graph_edits import copy_step
from wholestep.spmd.mesh import AxisGroup, DeviceMesh
from wholestep.spmd.placements import Placement, Replicate, Shard
from wholestep.spmd.plans.global_view import ParameterPlan, check_placements
from wholestep.spmd.plans.patterns import check_patterns, matches, parameter_path, paths_of
from wholestep.spmd.plans.sharding_constraints import constrain_gradients, constrain_results
from wholestep.spmd.plans.state_placements import state_placements

R = Replicate()

Role = Literal["column", "row", "embedding", "sequence"]

# role -> the dimension of a weight that it splits
_SPLITS: dict[str, Shard] = {"column": Shard(0), "row": Shard(1), "embedding": Shard(0)}


@dataclass(frozen=True)
class TensorParallel(ParameterPlan):
    """Parameters and the computation with them are split over an axis; every rank is given the same batch.

    Roles of modules, by patterns (`fnmatch`) of their paths: "column" splits a linear layer's outputs, "row" its
    inputs, "embedding" the rows of a table; "sequence" splits what a module gives along its sequence, dimension 1,
    until somebody needs the whole of it. A loss over split classes is computed on the parts. A placement, by the
    pattern of a parameter's or a buffer's path, says for that one.

    After Shoeybi et al., "Megatron-LM" (2019), and Korthikanti et al., "Reducing Activation Recomputation" (2022).

    Attributes:
        axis: name of the mesh axis.
        roles: pattern -> role, several roles, or placement. The first that fits counts.
        results: pattern of modules -> placement of what they give in a forward, for those who read it outside.
        batch: `Replicate()`: every rank is given the same; `Shard(dim)`: each its part. Or pattern -> placement, for
            tensors apart by their paths in the arguments: ``{"batch.x": Shard(1)}``; the others are `Replicate()`.
    """

    axis: str
    roles: Mapping[str, Role | Sequence[Role] | Placement] = field(default_factory=dict)
    results: Mapping[str, Placement] = field(default_factory=dict)
    batch: Placement | Mapping[str, Placement] = R
    unnamed: ClassVar[Placement] = R

    def __post_init__(self) -> None:
        check_placements("TensorParallel", "batch", self.batch)
        check_placements("TensorParallel", "results", self.results)
        for pattern, role in self.roles.items():
            known = all(one in get_args(Role) for one in _roles(role)) and bool(_roles(role))
            if not known and not isinstance(role, (Shard, Replicate)):
                raise PlanError(
                    f"TensorParallel: {pattern!r}: {role!r}: one or several of {', '.join(get_args(Role))}, or "
                    "Shard(dim) or Replicate() is required"
                )

    def passes(self, mesh: DeviceMesh) -> list[Pass]:
        """The passes that this plan adds to the head of the chain.

        Raises:
            PlanError: the mesh has no such axis.
        """
        return [partial(tensor_parallel, group=mesh.axis_group(self.axis), plan=self)]

    def place_buffer(self, source: str, value: torch.Tensor) -> Placement:
        """Where a buffer is: by its own path alone."""
        path = parameter_path(source)
        placements = ((pattern, role) for pattern, role in self.roles.items() if isinstance(role, (Shard, Replicate)))
        return next((one for pattern, one in placements if matches(path, pattern)), R)

    def place(self, source: str, value: torch.Tensor) -> Placement:
        """Where a parameter is."""
        path = parameter_path(source)
        module = path.rpartition(".")[0]
        for pattern, role in self.roles.items():
            if isinstance(role, (Shard, Replicate)):
                if matches(path, pattern):
                    return role
            elif matches(module, pattern):
                # the bias of a layer whose inputs are split is added to whole results
                splits = (_SPLITS[one] for one in _roles(role) if one in _SPLITS)
                return next((split for split in splits if value.dim() > split.dim), R)
        return R

    @property
    def sequences(self) -> dict[str, Placement]:
        """Patterns of the modules whose results are split along the sequence, with that placement."""
        return {pattern: Shard(1) for pattern, role in self.roles.items() if "sequence" in _roles(role)}


def tensor_parallel(step: StepGraph, *, group: AxisGroup, plan: TensorParallel) -> StepGraph:
    """The step of one rank of an axis, by a plan.

    Raises:
        PlanError: a pattern of the plan matches nothing.
    """
    if not step.signature.of_part:
        _check_patterns(step, plan)
    if group.size == 1:
        return step
    placements = state_placements(step, plan.placement_of, group)
    step = copy_step(step, "tensor_parallel")
    step = constrain_results(step, plan.results)
    step = constrain_results(step, plan.sequences, min_dims=3)  # batch, sequence, features
    return expand(constrain_gradients(step, placements=placements.inputs), group=group, placements=placements)


def _check_patterns(step: StepGraph, plan: TensorParallel) -> None:
    paths = paths_of(step, "parameter", "buffer")
    modules = {info(node).module for node in step.graph.nodes if node.op == "call_function"}
    check_patterns("TensorParallel", list(plan.roles), [*paths, *(path.rpartition(".")[0] for path in paths)])
    check_patterns("TensorParallel, results", list(plan.results), sorted(modules - {""}), "module of the step")


def _roles(role: Role | Sequence[Role] | Placement) -> Sequence[str]:
    if isinstance(role, str):
        return [role]
    return role if isinstance(role, (list, tuple)) else []
