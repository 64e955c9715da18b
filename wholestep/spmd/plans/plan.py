"""Plans: what a step does along the axes of a mesh, in the local view (data parallelism) and in the global view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, get_args

import torch

from wholestep.errors import PlanError
from wholestep.ir import Pass, StepGraph, info
from wholestep.spmd.expand.calls import R
from wholestep.spmd.expand.expand import expand
from wholestep.spmd.expand.graph_edits import copy_step
from wholestep.spmd.mesh import AxisGroup, DeviceMesh
from wholestep.spmd.placements import Placement, Replicate, Shard
from wholestep.spmd.plans.data_parallel import data_parallel
from wholestep.spmd.plans.global_view import (
    ParameterPlan,
    check_patterns,
    check_placements,
    matches,
    names_of,
    parameter_path,
    state_placements,
)
from wholestep.spmd.plans.sharding_constraints import (
    cheaper_to_keep,
    constrain_gradients,
    constrain_parameters,
    constrain_results,
    split_batch,
)
from wholestep.spmd.schedule.coalesce import bucket_gradients, pack_broadcasts
from wholestep.spmd.schedule.overlap import wait_late

MIB = 1 << 20


@dataclass(frozen=True)
class DataParallel:
    """Each rank runs the step as written on its own batch; gradients are reduced over an axis (local view).

    With ``reduce="mean"`` this is what DistributedDataParallel does, bit for bit where the transport adds in the
    same order. A parameter's gradient is reduced once a step: after the last `backward()` that adds to it before
    something reads it. A gradient kept from an earlier call counts once. Buffers such as BatchNorm's statistics are
    rank 0's at the start and, as there, once more before each outermost forward of a module that has something to
    train, except where gradients that nobody has read yet are added to (DDP's `no_sync()`), and after a forward without
    gradients.

    Attributes:
        axis: name of the mesh axis.
        reduce: "mean" over the ranks, or "sum".
        bucket_bytes: gradients are reduced together up to so many bytes.
        first_bucket_bytes: the same for the bucket that is ready first, small so that communication starts early.
        broadcast_buffers: False to leave buffers each rank's own, at the start, too.
    """

    axis: str
    reduce: Literal["mean", "sum"] = "mean"
    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = MIB
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.reduce not in ("mean", "sum"):
            raise PlanError(f"{name}: reduce={self.reduce!r}: 'mean' or 'sum' is required")
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise PlanError(f"{name}: buckets of at least one byte are required")

    def passes(self, mesh: DeviceMesh) -> list[Pass]:
        """The passes that this plan adds to the head of the chain.

        Raises:
            PlanError: the mesh has no such axis.
        """
        group, least = mesh.axis_group(self.axis), getattr(self, "min_bytes", None)
        reduce = partial(data_parallel, group=group, reduce=self.reduce, min_bytes=least)
        buckets = partial(bucket_gradients, group=group.name, caps=(self.first_bucket_bytes, self.bucket_bytes))
        return [*([pack_broadcasts] if self.broadcast_buffers else []), reduce, wait_late, buckets]


@dataclass(frozen=True)
class ShardedOptimizer(DataParallel):
    """`DataParallel` in which each rank updates some rows of every large parameter and keeps their state (ZeRO-1).

    Results are those of `DataParallel`. An update that is elementwise, as that of SGD, Adam and their kin, is shared
    out; any other runs whole on every rank. A gradient that somebody else reads, such as `clip_grad_norm_`, or that
    outlives the step, is reduced whole.

    Optimizer state of such a parameter holds this rank's rows: those of `torch.chunk` along dimension 0, wherever
    every rank gets one. State that is whole when the step meets it, from eager steps or `load_state_dict`, is cut
    down then, in place. `wholestep.full_state_dict` gives the whole.

    Attributes:
        min_bytes: smaller parameters are updated on every rank; what is reduced whole is so in buckets.
    """

    min_bytes: int = 1 << 16



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
        names = names_of(parameter_path(source))
        chosen = any(matches(name, pattern) for pattern in self.patterns for name in names)
        return Shard(0) if chosen and value.dim() and value.numel() * value.itemsize >= self.min_bytes else R

    @property
    def patterns(self) -> list[str]:
        """The patterns, as a list."""
        return [self.parameters] if isinstance(self.parameters, str) else list(self.parameters)


def fully_shard(step: StepGraph, *, group: AxisGroup, plan: FullyShard) -> StepGraph:
    """The step of one rank of an axis, by a plan."""
    if group.size == 1:
        return step
    placements = state_placements(step, plan.placement_of, group)
    step = copy_step(step, "fully_shard")
    if plan.batch == R:
        step = split_batch(step)
    gathered = placements.inputs
    if plan.gather == "cheaper":
        gathered = cheaper_to_keep(step, placements=placements.inputs, again=plan.again)
    step = constrain_parameters(step, placements=gathered, again=plan.again)
    step = constrain_gradients(step, placements=placements.inputs)
    return expand(step, group=group, placements=placements, pending=float(gathered != placements.inputs))


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
        path, module = names_of(parameter_path(source))
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
    def patterns(self) -> list[str]:
        """See `ParameterPlan`."""
        return list(self.roles)

    @property
    def sequences(self) -> dict[str, Placement]:
        """Patterns of the modules whose results are split along the sequence, with that placement."""
        return {pattern: Shard(1) for pattern, role in self.roles.items() if "sequence" in _roles(role)}


def tensor_parallel(step: StepGraph, *, group: AxisGroup, plan: TensorParallel) -> StepGraph:
    """The step of one rank of an axis, by a plan.

    Raises:
        PlanError: a pattern of the plan for results matches nothing.
    """
    if not step.signature.of_part:
        modules = {info(node).module for node in step.graph.nodes if node.op == "call_function"}
        check_patterns("TensorParallel, results", list(plan.results), sorted(modules - {""}), "module of the step")
    if group.size == 1:
        return step
    placements = state_placements(step, plan.placement_of, group)
    step = copy_step(step, "tensor_parallel")
    step = constrain_results(step, plan.results)
    step = constrain_results(step, plan.sequences, min_dims=3)  # batch, sequence, features
    return expand(constrain_gradients(step, placements=placements.inputs), group=group, placements=placements)


def _roles(role: Role | Sequence[Role] | Placement) -> Sequence[str]:
    if isinstance(role, str):
        return [role]
    return role if isinstance(role, (list, tuple)) else []
