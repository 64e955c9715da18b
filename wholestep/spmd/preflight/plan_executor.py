"""Plan executor: the passes that the plans of one step add, and how its ranks start a program together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from wholestep import comm
from wholestep.capture import InitialState
from wholestep.deferred_init import origin, record_of
from wholestep.errors import PlanError
from wholestep.ir import LASTING_KINDS, WHOLE_KINDS, Input, Pass, StepGraph, info
from wholestep.marks import BUCKET_BYTES
from wholestep.spmd.mesh import AxisGroup, own_mesh
from wholestep.spmd.placements import Replicate
from wholestep.spmd.plans.buffer_broadcast import BufferBroadcast
from wholestep.spmd.plans.data_parallel import data_parallel, refuse_sparse, sparse_gradient
from wholestep.spmd.plans.global_view import GlobalPlan, GlobalView, Plan
from wholestep.spmd.plans.plan import DataParallel
from wholestep.spmd.preflight.contract import Contract, contract_of, is_setting, values_of
from wholestep.spmd.preflight.preflight_check import PreflightCheck
from wholestep.spmd.schedule.coalesce import bucket_gradients, coalesce, pack_broadcasts
from wholestep.spmd.schedule.overlap import start_early, wait_for_decisions, wait_late
from wholestep.tensor_parts import Part
from wholestep.torch_compat import FakeTensor

CPU = torch.device("cpu")


class PlanExecutor:
    """A mesh and its plans, for one compiled step.

    Attributes:
        view: the plans of the global view; None when there are none.
        parts: what tensors that carry no mark are of whole ones; None outside of the global view.
        plain: True without plans: steps stay as they are traced.
        keeps_whole: whether the plans leave every tensor whole on each rank.
        decides_together: whether all ranks take each decision: in the global view.
        reduces: whether gradients are each rank's own before they are reduced: in the local view.
        groups: the ranks that a step is spread over, along each axis of several.
        broadcasting: the ranks to which buffers are broadcast, along the axes of the local view.
        is_distributed: whether the step has ranks that wait for each other.
        preflight: what these tell each other about its calls.
        axes: name of each group of the mesh -> its axis.

    Raises:
        PlanError: plans without a mesh, a mesh without plans, or an axis that the mesh does not have.
    """

    def __init__(self, mesh: Any, plan: Plan | Sequence[Plan] | None) -> None:
        mesh = own_mesh(mesh)
        plans: list[Any] = [] if plan is None else list(plan) if isinstance(plan, (list, tuple)) else [plan]
        if plans and mesh is None:
            raise PlanError(f"ws.compile: plan {plans[0]!r} needs a mesh: pass mesh=ws.init_device_mesh(...)")
        if mesh is not None and not plans:
            raise PlanError(
                f"ws.compile: {mesh!r} without a plan: pass plan=ws.DataParallel({mesh.mesh_dim_names[0]!r})"
            )
        for one in plans:
            if not callable(getattr(one, "passes", None)):
                raise TypeError(f"ws.compile: a plan such as ws.DataParallel is required, found {type(one).__name__}")
            before = next((other for other in plans[: plans.index(one)] if other.axis == one.axis), None)
            if before is not None:
                raise PlanError(
                    f"ws.compile: {type(before).__name__} and {type(one).__name__} both spread the step over axis "
                    f"{one.axis!r}\n  to do: one plan for each axis; a mesh may have several axes"
                )
        self._mesh, self._plans = mesh, plans
        self._names = ", ".join(type(one).__name__ for one in plans)
        self._passes: list[Pass] = [a_pass for one in plans for a_pass in one.passes(mesh)]
        self._groups = [mesh.get_group(one.axis) for one in plans] if mesh else []
        several = [group for group in dict.fromkeys(self._groups) if group.size() > 1]
        spread = tuple(one for one in plans if isinstance(one, GlobalPlan))
        self.view = GlobalView(spread, tuple(mesh.axis_group(one.axis) for one in spread)) if mesh and spread else None
        self.parts = self.view.parts if self.view else None
        self._passes += [wait_late, start_early, coalesce, wait_for_decisions] if self.view else []
        self.plain, self.keeps_whole = not plans, all(type(one) is DataParallel for one in plans)
        self.decides_together = self.view is not None and len(spread) == len(plans)
        self.reduces, self.groups, self.is_distributed = len(spread) < len(plans), several, bool(several)
        self.broadcasting = [group for one, group in zip(plans, self._groups, strict=True)
                             if group in several and getattr(one, "broadcast_buffers", False)]  # fmt: skip
        self.axes = mesh.axes if mesh is not None else {}
        axes = {group.group_name: one.axis for one, group in zip(plans, self._groups, strict=True)}
        self.preflight = PreflightCheck(several, axes, [group.name for group in self.view.groups] if self.view else ())

    def __reduce__(self) -> Any:
        return PlanExecutor, (self._mesh, self._plans)

    def passes_of(self, step: StepGraph) -> list[Pass]:
        """The passes that make of a whole step that of this rank, in order: those of all plans, then the scheduling.

        Without a plan: those that reduce the gradients of which the step itself, by a wrapper in it, wants the mean.
        """
        own = dict.fromkeys(gradient.group for gradient in step.signature.gradients if gradient.group)
        own |= dict.fromkeys(item.shard[0] for item in step.signature.inputs if item.shard)
        if own and not self.plain:
            raise PlanError(
                f"{self._names}: a DistributedDataParallel or fully_shard in the step reduces its gradients already\n"
                "  to do: give the step the module that it wraps (its .module), or leave the plan out"
            )
        if own:
            return own_reductions(step, [*own])
        if self.groups:
            refuse_sparse(step, self._names)
        return self._passes

    def sparse_gradient(self, parameter: str, where: str) -> PlanError:
        """The error of a gradient that no plan can reduce."""
        return sparse_gradient(self._names, parameter, where)

    @property
    def buffer_broadcast(self) -> BufferBroadcast | None:
        """For one capture: what broadcasts buffers along the axes of the local view; None where nothing is to."""
        return BufferBroadcast(self.broadcasting) if self.broadcasting else None

    def reduce(self, gradients: Sequence[torch.Tensor]) -> None:
        """Reduces gradients of each rank's own, in place, along the axes of the local view.

        Raises:
            PlanError: on every rank, when they do not all come here with gradients of the same shapes.
        """
        sizes = [list(gradient.shape) for gradient in gradients]
        self.preflight.meet(f"gradients of shapes {sizes} that are to be reduced")
        for plan, group in zip(self._plans, self._groups, strict=True):
            if not isinstance(plan, GlobalPlan):
                op = comm.premul_sum(1 / group.size()) if plan.reduce == "mean" else comm.ReduceOp.SUM
                for gradient in gradients:
                    comm.all_reduce(gradient, op, group)

    def __str__(self) -> str:
        if self._mesh is None:
            return ""
        plans = ", ".join(f"{type(one).__name__}({one.axis!r})" for one in self._plans)
        return f" on rank {comm.get_rank()} of {self._mesh!r}, under {plans}"

    def key(self, step: StepGraph, fingerprint: str) -> str:
        """What programs must have alike to be one: in the global view the names, too, by which plans place tensors."""
        if self.view is None:
            return fingerprint
        return "\n".join([fingerprint, *(i.source for i in step.signature.inputs),
                          *(f"{o} {i.source}" for o, i in sorted(step.signature.state_outputs.items()))])  # fmt: skip

    def start(
        self, whole: StepGraph, step: Callable[[], StepGraph], inputs: Sequence[Input], tensors: Sequence[Any],
        parts: Mapping[int, Part], initial: InitialState,
    ) -> Contract:  # fmt: skip
        """Brings the ranks together before they run a program for the first time.

        All must issue the same collectives and update the same parameters, by optimizers with the same settings. Then
        rank 0's parameters, buffers and optimizer states go to all others, once for each tensor. In the global view
        they run one program on batches of one shape with one state of the random generator, rank 0's; numbers, and
        batches that no plan splits, are equal. In the local view a rank may recapture alone, for a batch of another
        size.

        Args:
            whole: the graph before all passes.
            step: gives the program of this rank, after them.
            inputs, tensors: what it was traced with: parameters, buffers and states among them are spread.
            initial: the states that were made for this capture.
            parts: id of a tensor -> what the rank holds of it.

        Returns:
            what the ranks have agreed on.

        Raises:
            PlanError: on every rank, when the ranks' programs do not fit each other.
        """
        if not self.groups:
            return Contract(())
        preflight, plans = self.preflight, ", ".join(map(_in_words, self._plans))
        numbers = [(index, item) for index, item in enumerate(inputs)
                   if is_setting(item) or (item.kind == "number" and self.decides_together)]  # fmt: skip
        numbers = [(index, item) for index, item in numbers if getattr(tensors[index], "device", CPU) == CPU]
        lasting = [(index, item) for index, item in enumerate(inputs)
                   if self.view and item.name and item.kind in WHOLE_KINDS and _is_there(tensors[index])]  # fmt: skip
        program = step()
        cut = {item.name for item, node in zip(program.signature.inputs, program.placeholders, strict=False)
               if isinstance(info(node).placement, Part)}  # fmt: skip
        contract = replace(
            contract_of(program, inputs, tensors, preflight.axes, plans, whole, self.view is not None),
            numbers=tuple(numbers),
            lasting=tuple(lasting),
            watched=tuple([(index, item) for index, item in lasting if item.name not in cut]),
        )
        new = self._unsynchronized(inputs, tensors, parts)
        known = contract in preflight.agreed or (contract.is_local and preflight.agreed)  # nothing that others share
        pairs = zip(inputs, tensors, strict=True)  # what is made in parts is not broadcast: it is to be the same
        made = [f"{i.source}{how}" for i, t in pairs if isinstance(t, torch.Tensor) and (how := origin(t))]
        if known and not self.view and not new and not made:
            preflight.check_call(contract, tensors)
            return contract
        preflight.announce_capture(compare=True)
        same_state = preflight.agreed and contract.random  # of the random generator, since the first meeting
        said = contract.with_random_state() if same_state else contract
        words = made + [f"{item.kind} {item.source} to be rank 0's" for item, _ in new]
        alone = not preflight.all_capture  # this rank captures anew, others do not
        held = [(item, tensors[index]) for index, item in lasting] if alone else []
        preflight.compare(said, self._same_values(inputs, tensors, words), held)
        if preflight.all_compared:
            self._broadcast_from_first(new, initial)
        preflight.synchronized.update({id(tensor): tensor for _, tensor in held})
        if self.view and not preflight.agreed:
            state = torch.get_rng_state()  # of rank 0, for all
            for group in self.groups:
                comm.broadcast(state, group=group, group_src=0)
            torch.set_rng_state(state)
        preflight.agreed.add(contract)
        return contract

    def _unsynchronized(
        self, inputs: Sequence[Input], tensors: Sequence[Any], parts: Mapping[int, Part]
    ) -> list[tuple[Input, torch.Tensor]]:
        """What rank 0 gives to the others: parameters, buffers, states, and gradients that are there at the start."""
        first = ("grad",) if self.view and not self.preflight.agreed else ()
        return [
            (item, tensor)
            for item, tensor in zip(inputs, tensors, strict=True)
            if item.kind in (*LASTING_KINDS, *first) and _is_there(tensor)
            if id(tensor) not in parts and self.preflight.synchronized.get(id(tensor)) is not tensor
        ]

    def _broadcast_from_first(self, new: Sequence[tuple[Input, torch.Tensor]], initial: InitialState) -> None:
        self.preflight.synchronized.update({id(tensor): tensor for _, tensor in new})
        there = torch.tensor([any(item.kind == "state" and not initial.owns(tensor) for item, tensor in new)])
        for group in self.groups:
            comm.all_reduce(there, comm.ReduceOp.MAX, group)
        if there:
            initial.fill()
        else:  # no rank has any but such as begins with a number
            new = [(item, tensor) for item, tensor in new if item.kind != "state"]
        for plan, group in zip(self._plans, self._groups, strict=True):
            own = "" if getattr(plan, "broadcast_buffers", True) else "buffer"
            for item, tensor in new:
                if item.kind != own:
                    comm.broadcast(tensor.data, group=group, group_src=0)  # unseen by a backward that waits

    def _same_values(
        self, inputs: Sequence[Input], values: Sequence[Any], words: Sequence[str]
    ) -> dict[str, list[str]]:
        """By group, besides some words: what optimizers are set to; in the global view all numbers, tensors that no
        module has registered, and what of the batch the plan of its axis does not split."""
        pairs = [(i, v) for i, v in zip(inputs, values, strict=True) if not isinstance(v, FakeTensor)]
        settings = [*words] + [values_of(item, value) for item, value in pairs if is_setting(item)]
        found = {group.group_name: settings for group in self.groups}
        for plan, group in zip(self.view.plans, self.view.groups, strict=True) if self.view else ():
            found[group.name] = settings + [
                values_of(item, value)
                for item, value in pairs
                if (item.kind == "number" and not is_setting(item))
                or (item.kind == "tensor" and item.placements is None and _is_there(value))
                or (item.kind == "batch" and plan.placement_of(item, value) == Replicate())
            ]
        return found


def own_reductions(step: StepGraph, groups: Sequence[str]) -> list[Pass]:
    """The passes of a step without a plan, some of whose gradients are to become their mean over groups."""
    passes: list[Pass] = [pack_broadcasts]
    limits = {item.source: item.bucket for item in step.signature.inputs if item.bucket}
    caps = {g.group: limits.get(g.parameter, BUCKET_BYTES) for g in step.signature.gradients}
    for name in groups:
        ranks = AxisGroup(name, comm.get_group(name).size(), comm.get_group(name).rank())
        passes.append(partial(data_parallel, group=ranks, reduce="mean", own=True))
    passes.append(wait_late)
    if any(item.shard for item in step.signature.inputs):
        passes += start_early, coalesce
    return [*passes, *(partial(bucket_gradients, group=name, caps=caps[name]) for name in groups)]


def _is_there(value: Any) -> bool:
    """Whether it is a tensor that has values, or a part of them."""
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return strided and not isinstance(value, FakeTensor) and record_of(value) is None


def _in_words(plan: Any) -> str:
    """A plan in words that are the same on all ranks; of a user's own, its name."""
    return repr(plan) if type(plan).__module__.startswith("wholestep.") else f"{type(plan).__name__}({plan.axis!r})"
