"""Plans: what a step does along the axes of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from wholestep.errors import PlanError
from wholestep.ir import StepGraph
from wholestep.spmd.data_parallel import reduce_gradients
from wholestep.spmd.mesh import DeviceMesh

MIB = 1 << 20


@dataclass(frozen=True)
class DataParallel:
    """Each rank runs the step as written on its own batch; gradients are reduced over an axis (local view).

    With ``reduce="mean"`` this is what DistributedDataParallel does, bit for bit where the transport adds in the
    same order. A parameter's gradient is reduced once a step: after the last `backward()` that adds to it before
    something reads it. A gradient kept from an earlier call counts once. Buffers such as BatchNorm's statistics
    stay each rank's own; rank 0's are taken at the start.

    Attributes:
        axis: name of the mesh axis.
        reduce: "mean" over the ranks, or "sum".
        bucket_bytes: gradients are reduced together up to so many bytes.
        first_bucket_bytes: the same for the bucket that is ready first, small so that communication starts early.
    """

    axis: str
    reduce: Literal["mean", "sum"] = "mean"
    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = MIB

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum"):
            raise PlanError(f"DataParallel: reduce={self.reduce!r}: 'mean' or 'sum' is required")
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise PlanError("DataParallel: buckets of at least one byte are required")

    def passes(self, mesh: DeviceMesh) -> list[Callable[[StepGraph], StepGraph]]:
        """The passes that this plan adds to the head of the chain.

        Raises:
            PlanError: the mesh has no such axis.
        """
        group = mesh.get_group(self.axis)
        caps = (self.first_bucket_bytes, self.bucket_bytes)
        return [partial(reduce_gradients, group=group.group_name, ranks=group.size(), reduce=self.reduce, caps=caps)]
