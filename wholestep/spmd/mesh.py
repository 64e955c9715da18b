"""Ranks laid out in an array with named axes; the ranks along an axis are a process group."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep import comm
from wholestep.comm.api.object_collectives import gathered_objects
from wholestep.comm.api.rendezvous import joined_group
from wholestep.errors import PlanError

# Device type -> backends of a default group that is not there yet; None lets `comm` choose.
_BACKENDS: dict[str, str | None] = {"cpu": None, "cuda": "cpu:gloo,cuda:nccl"}

_Groups = tuple[comm.ProcessGroup | None, ...]


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis of a mesh, seen from one of them: all that a graph needs to know of a mesh.

    Attributes:
        name: of their process group.
        size: how many they are.
        rank: this rank's place among them.
        even: whether only dimensions are split that it divides: where there are other axes, which are to see equal
            sizes on all ranks, so that all ranks' graphs have the same calls in the same order.
    """

    name: str
    size: int
    rank: int
    even: bool = False


class DeviceMesh:
    """An array of ranks with named axes. Every rank of the world makes it alike, also one that is not in it.

    Args:
        device_type: "cpu" or "cuda".
        mesh: the ranks, as a tensor of integers or nested lists; each at most once.
        mesh_dim_names: the axes' names (default ``dim_0``, ``dim_1``, …).

    Attributes:
        device_type: as given.
        mesh: the ranks, int64.
        shape: ranks along each axis.
        mesh_dim_names: as given.
        coordinates: this rank's place along each axis; None when it is not in the mesh.

    Raises:
        PlanError: names or ranks do not fit the array, or the world.
    """

    def __init__(self, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None) -> None:
        ranks = torch.as_tensor(mesh, dtype=torch.int64).clone()
        names = _names(tuple(ranks.shape), mesh_dim_names)
        _check(device_type, tuple(ranks.shape), names)
        flat = ranks.flatten().tolist()
        _start_world(device_type, len(flat))
        world = comm.get_world_size()
        if len(set(flat)) != len(flat) or not all(0 <= rank < world for rank in flat):
            raise PlanError(f"DeviceMesh: ranks {flat}: each of 0 to {world - 1} at most once is required")
        _agree(ranks, names)
        self._lay_out(device_type, ranks, names, tuple(_axis_group(ranks, axis) for axis in range(ranks.dim())))

    def __deepcopy__(self, memo: Any) -> DeviceMesh:
        return self  # its groups are shared with other ranks

    def _lay_out(self, device_type: str, ranks: torch.Tensor, names: tuple[str, ...], groups: _Groups) -> None:
        self.device_type, self.mesh, self.mesh_dim_names = device_type, ranks, names
        self.shape = tuple(ranks.shape)
        self._groups = dict(zip(names, groups, strict=True))
        mine = (ranks == comm.get_rank()).nonzero()
        self.coordinates: tuple[int, ...] | None = tuple(mine[0].tolist()) if len(mine) else None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, axis: str | int | None = None) -> int:
        """Ranks along an axis, by name or number; of the whole mesh without one."""
        return math.prod(self.shape) if axis is None else self.shape[self._number(axis)]

    def get_group(self, axis: str | int | None = None) -> comm.ProcessGroup:
        """The ranks that differ from this one along the axis alone.

        Args:
            axis: a name or a number; None for the one axis of a mesh that has one.

        Raises:
            PlanError: there is no such axis, it must be said which, or this rank is not in the mesh.
        """
        if axis is None and self.ndim > 1:
            raise PlanError(f"the mesh has axes {self.mesh_dim_names}: say which one's group is meant")
        group = self._groups[self.mesh_dim_names[self._number(0 if axis is None else axis)]]
        if group is None:
            raise PlanError(f"rank {comm.get_rank()} is not in {self!r} of ranks {self.mesh.tolist()}")
        return group

    def get_all_groups(self) -> list[comm.ProcessGroup]:
        """The group along each axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    @property
    def axes(self) -> dict[str, str]:
        """Name of each group that this rank is in along an axis -> the axis."""
        return {group.group_name: axis for axis, group in self._groups.items() if group is not None}

    def axis_group(self, axis: str | int | None = None) -> AxisGroup:
        """The ranks along an axis, as graphs name them."""
        group = self.get_group(axis)
        return AxisGroup(group.group_name, group.size(), group.rank(), sum(size > 1 for size in self.shape) > 1)

    def get_rank(self) -> int:
        """This rank's number in the world."""
        return comm.get_rank()

    def get_local_rank(self, axis: str | int | None = None) -> int:
        """This rank's place along an axis."""
        return self.get_group(axis).rank()

    def get_coordinate(self) -> list[int] | None:
        """This rank's place along each axis; None when it is not in the mesh."""
        return None if self.coordinates is None else list(self.coordinates)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh that this rank sees along some of its axes, in the order given; no new groups.

        Raises:
            PlanError: no such axis, one named twice, or this rank is not in the mesh.
        """
        wanted = names if isinstance(names, tuple) else (names,)
        groups = tuple(self.get_group(name) for name in wanted)
        numbers = [self._number(name) for name in wanted]
        if len(set(numbers)) != len(numbers):
            raise PlanError(f"mesh[{', '.join(map(repr, wanted))}]: each axis once is required")
        assert self.coordinates is not None
        place = tuple(slice(None) if i in numbers else at for i, at in enumerate(self.coordinates))
        kept = sorted(numbers)
        ranks = self.mesh[place].permute([kept.index(number) for number in numbers])
        part = object.__new__(DeviceMesh)
        part._lay_out(self.device_type, ranks, tuple(self.mesh_dim_names[i] for i in numbers), groups)
        return part

    def _number(self, axis: str | int) -> int:
        if axis in self.mesh_dim_names:
            return self.mesh_dim_names.index(axis)
        if isinstance(axis, int) and -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise PlanError(f"the mesh has no axis {axis!r}: its axes are {', '.join(map(repr, self.mesh_dim_names))}")

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.mesh_dim_names, self.shape, strict=True))
        return f"DeviceMesh({self.device_type!r}, {axes})"


def own_mesh(mesh: Any) -> DeviceMesh | None:
    """The mesh itself, if it is one of ours; of torch's one of the same ranks and names, over groups of ours.

    Raises:
        PlanError: it is neither, or this rank is not in it.
    """
    if mesh is None or isinstance(mesh, DeviceMesh):
        return mesh
    if not (isinstance(getattr(mesh, "mesh", None), torch.Tensor) and hasattr(mesh, "mesh_dim_names")):
        raise PlanError(f"a DeviceMesh is required, found {mesh!r}: make one with ws.init_device_mesh(...)")
    if mesh.get_coordinate() is None:
        raise PlanError(f"this rank is not in {mesh!r}")
    groups = tuple(joined_group(mesh.get_group(axis), mesh.device_type) for axis in range(mesh.mesh.dim()))
    made = object.__new__(DeviceMesh)
    made._lay_out(mesh.device_type, mesh.mesh.cpu(), _names(tuple(mesh.mesh.shape), mesh.mesh_dim_names), groups)
    return made


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
    names = _names(shape, mesh_dim_names)
    _check(device_type, shape, names)
    ranks = math.prod(shape)
    _start_world(device_type, ranks)
    if comm.get_world_size() != ranks:
        raise PlanError(
            f"init_device_mesh: shape {shape} needs {ranks} ranks, the world has {comm.get_world_size()}: "
            f"start with `wholestep run -n {ranks}`, or give another shape"
        )
    return DeviceMesh(device_type, torch.arange(ranks).view(shape), mesh_dim_names=names)


def _names(shape: tuple[int, ...], names: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(names) if names is not None else tuple(f"dim_{i}" for i in range(len(shape)))


def _check(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    if device_type not in _BACKENDS:
        raise PlanError(f"a mesh's device type {device_type!r} is none of {', '.join(_BACKENDS)}")
    if not shape or any(type(size) is not int or size < 1 for size in shape):
        raise PlanError(f"a mesh of shape {shape}: one or more axes of at least one rank each are required")
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise PlanError(f"a mesh's {len(shape)} axes need as many different names, found {names}")


def _start_world(device_type: str, ranks: int) -> None:
    if comm.is_initialized():
        return
    if ranks == 1 and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        comm.init_process_group("gloo", store=comm.HashStore(), rank=0, world_size=1)
    else:
        comm.init_process_group(_BACKENDS[device_type])


def _agree(ranks: torch.Tensor, names: tuple[str, ...]) -> None:
    """Every rank is to make the same mesh: with others, its groups would wait for ranks that never come."""
    said = gathered_objects((ranks.tolist(), names))
    for rank, other in enumerate(said):
        if other != said[0]:
            raise PlanError(
                f"DeviceMesh: rank 0 makes a mesh of ranks {said[0][0]} with axes {said[0][1]}, rank {rank} one of "
                f"{other[0]} with {other[1]}\n  to do: make the same mesh on every rank of the world"
            )


def _axis_group(ranks: torch.Tensor, axis: int) -> comm.ProcessGroup | None:
    """Makes the group along an axis that this rank is in, if it is in one."""
    lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    mine = next((members for members in lines if comm.get_rank() in members), None)
    if mine is None:
        return None
    is_world = mine == list(range(comm.get_world_size()))
    return comm.get_group() if is_world else comm.new_group(mine, use_local_synchronization=True)
