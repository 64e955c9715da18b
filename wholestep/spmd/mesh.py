"""Ranks laid out in an array with named axes; each line along an axis is a communication group."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence

from wholestep import comm
from wholestep.errors import PlanError

# Device type -> backends of a default group that is not there yet; None lets `comm` choose.
_BACKENDS: dict[str, str | None] = {"cpu": None, "cuda": "cpu:gloo,cuda:nccl"}


class DeviceMesh:
    """An array of ranks with named axes, as `init_device_mesh` makes it.

    Attributes:
        device_type: "cpu" or "cuda".
        shape: ranks along each axis.
        mesh_dim_names: the axes' names.
        coordinates: this rank's place along each axis.
    """

    def __init__(
        self,
        device_type: str,
        names: tuple[str, ...],
        groups: tuple[comm.ProcessGroup, ...],
    ) -> None:
        self.device_type, self.mesh_dim_names = device_type, names
        self._groups = dict(zip(names, groups, strict=True))
        self.shape = tuple(group.size() for group in groups)
        self.coordinates = tuple(group.rank() for group in groups)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, axis: str | int | None = None) -> int:
        """Ranks along an axis, by name or number; of the whole mesh without one."""
        return math.prod(self.shape) if axis is None else self.get_group(axis).size()

    def get_group(self, axis: str | int | None = None) -> comm.ProcessGroup:
        """The ranks that differ from this one along the axis alone.

        Args:
            axis: a name or a number; None for the one axis of a mesh that has one.

        Raises:
            PlanError: there is no such axis, or it must be said which.
        """
        if axis is None and self.ndim > 1:
            raise PlanError(f"the mesh has axes {self.mesh_dim_names}: say which one's group is meant")
        number = 0 if axis is None else axis
        name = self.mesh_dim_names[number] if isinstance(number, int) and -self.ndim <= number < self.ndim else number
        if name not in self._groups:
            raise PlanError(f"the mesh has no axis {axis!r}: its axes are {', '.join(map(repr, self.mesh_dim_names))}")
        return self._groups[str(name)]

    def get_local_rank(self, axis: str | int | None = None) -> int:
        """This rank's place along an axis."""
        return self.get_group(axis).rank()

    def get_coordinate(self) -> list[int]:
        """This rank's place along each axis."""
        return list(self.coordinates)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh that this rank sees along some of its axes."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        return DeviceMesh(self.device_type, wanted, tuple(self.get_group(name) for name in wanted))

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.mesh_dim_names, self.shape, strict=True))
        return f"DeviceMesh({self.device_type!r}, {axes})"


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Lays out all ranks of the world in an array, the last axis fastest. Every rank calls it alike.

    Starts the default process group from the launcher's environment when there is none; a mesh of one rank
    needs no launcher.

    Args:
        device_type: "cpu" or "cuda".
        mesh_shape: ranks along each axis.
        mesh_dim_names: names for the axes (default ``dim_0``, ``dim_1``, …).

    Raises:
        PlanError: shape and names do not fit each other, or the world.
        ValueError: no default group, and no launcher's environment to make one from.
    """
    shape = tuple(mesh_shape)
    names = tuple(mesh_dim_names) if mesh_dim_names is not None else tuple(f"dim_{i}" for i in range(len(shape)))
    if device_type not in _BACKENDS:
        raise PlanError(f"init_device_mesh: device type {device_type!r} is none of {', '.join(_BACKENDS)}")
    if not shape or any(type(size) is not int or size < 1 for size in shape):
        raise PlanError(f"init_device_mesh: shape {shape} must name one or more axes of at least one rank each")
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise PlanError(f"init_device_mesh: {len(shape)} axes need as many different names, found {names}")
    ranks = math.prod(shape)
    _start_world(device_type, ranks)
    if comm.get_world_size() != ranks:
        raise PlanError(
            f"init_device_mesh: shape {shape} needs {ranks} ranks, the world has {comm.get_world_size()}: "
            f"start with `wholestep run -n {ranks}`, or give another shape"
        )
    return DeviceMesh(device_type, names, tuple(_axis_group(shape, axis) for axis in range(len(shape))))


def _start_world(device_type: str, ranks: int) -> None:
    if comm.is_initialized():
        return
    if ranks == 1 and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        comm.init_process_group("gloo", store=comm.HashStore(), rank=0, world_size=1)
    else:
        comm.init_process_group(_BACKENDS[device_type])


def _axis_group(shape: tuple[int, ...], axis: int) -> comm.ProcessGroup:
    """Makes the groups of all lines along an axis, on every rank alike; gives the one that this rank is in."""
    if shape[axis] == math.prod(shape):
        return comm.get_group()
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    others = [range(size) if i != axis else range(1) for i, size in enumerate(shape)]
    mine: comm.ProcessGroup | None = None
    for corner in itertools.product(*others):
        first = sum(place * stride for place, stride in zip(corner, strides, strict=True))
        group = comm.new_group([first + step * strides[axis] for step in range(shape[axis])])
        if group is not None and group.rank() >= 0:
            mine = group
    assert mine is not None, "every rank is on one line along each axis"
    return mine
