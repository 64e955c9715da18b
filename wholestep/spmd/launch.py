"""Plans put to work: the passes that they add, and one start for all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from wholestep import comm
from wholestep.errors import PlanError
from wholestep.ir import Input, StepGraph, info, is_effectful
from wholestep.parts import narrow_to, part_of
from wholestep.spmd.mesh import DeviceMesh
from wholestep.torch_compat import FakeTensor, OpOverload

SHARED_KINDS = ("parameter", "buffer")


class Plan(Protocol):
    """What a step does along one axis of a mesh."""

    @property
    def axis(self) -> str: ...
    def passes(self, mesh: DeviceMesh) -> list[Callable[[StepGraph], StepGraph]]: ...


class Launch:
    """A mesh and its plans, for one compiled step.

    Attributes:
        passes: those of all plans, in order.

    Raises:
        PlanError: plans without a mesh, a mesh without plans, or an axis that the mesh does not have.
    """

    def __init__(self, mesh: DeviceMesh | None, plan: Plan | Sequence[Plan] | None) -> None:
        plans: list[Any] = [] if plan is None else list(plan) if isinstance(plan, (list, tuple)) else [plan]
        if plans and mesh is None:
            raise PlanError(f"ws.compile: plan {plans[0]!r} needs a mesh: pass mesh=ws.init_device_mesh(...)")
        if mesh is not None and not plans:
            raise PlanError(
                f"ws.compile: {mesh!r} without a plan: pass plan=ws.DataParallel({mesh.mesh_dim_names[0]!r})"
            )
        self.passes: list[Callable[[StepGraph], StepGraph]] = []
        self._groups: list[comm.ProcessGroup] = []
        for one in plans:
            if not callable(getattr(one, "passes", None)):
                raise TypeError(f"ws.compile: a plan such as ws.DataParallel is required, found {type(one).__name__}")
            assert mesh is not None
            self.passes += one.passes(mesh)
            self._groups.append(mesh.get_group(one.axis))
        self._axes = {group.group_name: one.axis for one, group in zip(plans, self._groups, strict=True)}
        self._agreed: set[tuple[str, ...]] = set()
        self._spread: dict[int, weakref.ref[torch.Tensor]] = {}
        self._met = False

    def start(self, step: StepGraph, inputs: Sequence[Input], tensors: Sequence[Any]) -> None:
        """Brings the ranks together before they run a program for the first time.

        All must issue the same collectives and update the same parameters. Then rank 0's parameters and buffers
        go to all others, once for each tensor. A later program that communicates alike needs no meeting: a rank
        may recapture alone, for a batch of another size.

        Args:
            step: the program of this rank, after all passes.
            inputs, tensors: what it was traced with: parameters and buffers among them are spread.

        Raises:
            PlanError: on every rank, when the ranks' programs do not fit each other.
        """
        words = (
            *communication(step, self._axes),
            *(_describe(i, t) for i, t in zip(inputs, tensors, strict=True) if _shared(i, t)),
        )
        if not self._groups or words in self._agreed:
            return
        trouble = self._meet(words, "")
        if trouble:
            raise PlanError(trouble)
        new = [t for i, t in zip(inputs, tensors, strict=True) if _shared(i, t) and not self._is_spread(t)]
        for group in self._groups:
            for tensor in new:
                comm.broadcast(tensor.detach(), group=group, group_src=0)
        self._spread |= {id(tensor): weakref.ref(tensor) for tensor in new}
        self._agreed.add(words)

    def cut(self, step: StepGraph, inputs: Sequence[Input], tensors: Sequence[Any]) -> bool:
        """Cuts whole state tensors down to the rows that a program keeps, in place; True when there were any.

        Args:
            step, inputs, tensors: as for `start`.

        Raises:
            PlanError: a tensor holds other rows than the program keeps.
        """
        wanted = [info(node).placement for node in step.placeholders[: len(inputs)]]
        triples = [(w, i, t) for w, i, t in zip(wanted, inputs, tensors, strict=True) if isinstance(t, torch.Tensor)]
        for part, item, tensor in triples:
            if part_of(tensor) not in (None, part):
                raise PlanError(
                    f"{item.source} holds {part_of(tensor)} of a sharded optimizer; this step needs "
                    f"{part or 'the whole tensor'}\n  to do: load ws.full_state_dict(optimizer, group), taken before, "
                    "into the optimizer, or compile the step with the mesh and plan that sharded it"
                )
        whole = [(part, t) for part, _, t in triples if part and part_of(t) is None and not isinstance(t, FakeTensor)]
        for part, tensor in whole:
            narrow_to(tensor, part)
        return bool(whole)

    def withdraw(self, error: Exception) -> None:
        """This rank could not capture its first program: the others, which wait for it to start, are told why."""
        if self._groups and not self._met:
            rank = comm.get_rank()
            self._meet((), f"rank {rank} could not capture the step: {type(error).__name__}: {error}")

    def _meet(self, words: tuple[str, ...], trouble: str) -> str:
        """Compares the ranks' words along every axis; gives what is wrong, the same on all ranks, or nothing."""
        self._met = True
        for group in self._groups:
            everybody: list[Any] = [None] * group.size()
            comm.all_gather_object(everybody, (words, trouble), group)
            trouble = next((text for _, text in everybody if text), "") or _compare([said for said, _ in everybody])
        return trouble

    def _is_spread(self, tensor: torch.Tensor) -> bool:
        known = self._spread.get(id(tensor))
        return known is not None and known() is tensor


def communication(step: StepGraph, axes: Mapping[str, str]) -> list[str]:
    """The collectives of a program, in order: what all ranks must have alike.

    Args:
        axes: group's name -> axis, for words that are the same on all ranks.
    """
    return [_collective(node, axes) for node in step.graph.nodes if _is_collective(node)]


def _is_collective(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "wholestep" and is_effectful(node)


def _collective(node: fx.Node, axes: Mapping[str, str]) -> str:
    value, target = info(node).value, node.target
    settings = ", ".join(axes.get(str(a), str(a)) for a in node.args if not isinstance(a, fx.Node))
    names = ", ".join(info(node).placement or ())
    return f"{target._schema.name}({settings}) of {_form(value)}: {names}"  # type: ignore[union-attr]


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _shared(item: Input, tensor: Any) -> bool:
    return item.kind in SHARED_KINDS and isinstance(tensor, torch.Tensor)


def _describe(item: Input, tensor: torch.Tensor) -> str:
    return f"{item.kind} {item.source}: {_form(tensor)}"


def _compare(everybody: Sequence[Sequence[str]]) -> str:
    """Says where one rank's words differ from rank 0's; nothing when none do."""
    first = everybody[0]
    for rank, words in enumerate(everybody):
        if words == first:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(first, words, strict=False)) if a != b), min(len(first), len(words))
        )
        here, there = (w[place] if place < len(w) else "nothing more" for w in (first, words))
        return (
            f"the ranks' programs do not fit each other: rank 0 has {here}; rank {rank} has {there}\n"
            "  to do: build the same model, optimizer and step on every rank; only the data may differ"
        )
    return ""
