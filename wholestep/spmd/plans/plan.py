"""Plans: what a step does along the axes of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from wholestep.errors import PlanError
from wholestep.ir import Pass
from wholestep.spmd.mesh import DeviceMesh
from wholestep.spmd.plans.data_parallel import data_parallel
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
