"""When parts of parameters are gathered and let go of, around the forward and the backward of their modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from wholestep import comm
from wholestep.comm.api.object_collectives import first_difference, gathered_objects
from wholestep.comm.api.tracing import is_captured
from wholestep.comm.ops.functional_collectives import cores_are_busy
from wholestep.errors import DistMismatchError, UnsupportedError
from wholestep.marks import set_shard
from wholestep.parallel.bucket_use import Use
from wholestep.parallel.outputs import map_tensors, tensors_in
from wholestep.parallel.sharded_parameters import Policies, Reduction, ShardBucket
from wholestep.torch_compat import (
    HOOK_TABLES,
    at_end_of_backward,
    current_autograd_node,
    innermost_saved_tensor_hooks,
    refresh_flat_weights,
)


class ShardSchedule:
    """All groups under one root: what comes next is begun early, and ranks compare what they did."""

    def __init__(self, root: ParameterGroup, groups: dict[str, ParameterGroup]) -> None:
        self.root, self.groups = root, list(groups.values())
        self.process_group = root.policies.group
        self.overlaps = not cores_are_busy(self.process_group.group_name)  # else there is nothing to be won
        self.events: list[tuple[int, ...]] = []  # collectives since ranks last compared theirs
        self._order: list[ParameterGroup] = []  # of the last forward of the root
        self._seen: list[ParameterGroup] | None = None
        self._in_flight: Reduction | None = None
        self._ending = False
        self._buckets: list[tuple[str, ShardBucket]] = []
        for path, group in groups.items():
            group.schedule = self
            group.say_how()
            for bucket in group.buckets:
                bucket.number = len(self._buckets)
                self._buckets.append((path, bucket))

    def begin(self) -> None:
        """The root's forward begins."""
        self._seen, self._ending = [], False
        if self.overlaps and torch.is_grad_enabled():
            for group in self.groups:  # now, so that reductions are waited for after all layers' backward
                group.uses = self.uses_of(group)

    def uses_of(self, group: ParameterGroup) -> list[Use]:
        """One more use of each of a group's buckets."""
        return [Use(bucket, self.reduce, self.overlaps) for bucket in group.buckets]

    def end(self, backward_follows: bool) -> None:
        """The root's forward has ended."""
        self._order, self._seen = self._seen or [], None
        if not backward_follows:
            self._settle()

    def gathered(self, group: ParameterGroup, backward: bool) -> None:
        """A group was gathered: begins with the next one."""
        if self._seen is not None:
            self._seen.append(group)
        if not self.overlaps or group not in self._order or not (backward or self._seen):
            return
        after = self._order.index(group) + (-1 if backward else 1)
        if 0 <= after < len(self._order) and not (backward and not self._order[after].packed):
            self._order[after].start(async_op=True)

    def reduce(self, bucket: ShardBucket, grads: list[torch.Tensor | None]) -> Reduction | None:
        """Begins to reduce a bucket's gradients, one bucket at a time."""
        self.await_end_of_backward()
        if self._in_flight is not None:
            self._in_flight.wait()
        reduction = bucket.reduce(grads, self.overlaps)
        if reduction is not None:
            self.events.append((1, bucket.number, *reduction.used))
        self._in_flight = reduction
        return reduction

    def await_end_of_backward(self) -> None:
        """Has everything that is still there let go of when the backward ends that runs now."""
        if not self._ending and current_autograd_node() is not None:
            self._ending = True
            at_end_of_backward(self._end_backward)

    def reduce_kept(self) -> None:
        """Reduces what backwards have kept of modules that none that reduces has used; then a collective."""
        if any(bucket.syncs and any(one is not None for one in bucket.kept) for _, bucket in self._buckets):
            with torch.no_grad():
                self._end_backward()

    def _end_backward(self) -> None:
        self._ending, self._in_flight = False, None
        for group in self.groups:
            for bucket in group.buckets:
                if bucket.syncs and any(one is not None for one in bucket.kept):  # not used in the last backward
                    bucket.accumulate(self.reduce(bucket, [None] * len(bucket.kept)))
        self._settle(after_backward=True)

    def _settle(self, after_backward: bool = False) -> None:
        """Lets go of all whole parameters; compares what the ranks gathered and reduced.

        Raises:
            DistMismatchError: on all ranks, where some used other modules or parameters than others.
        """
        for group in self.groups:
            group.reshard(after_backward)
        mine, self.events = self.events, []
        every = torch.empty(self.process_group.size(), dtype=torch.int64)
        comm.all_gather_into_tensor(every, torch.tensor([hash(tuple(mine))]), self.process_group)
        if len(set(every.tolist())) > 1:
            self._explain(mine)

    def _explain(self, mine: list[tuple[int, ...]]) -> None:
        def words(event: tuple[int, ...] | None) -> str:
            if event is None:
                return "nothing more"
            path, bucket = self._buckets[event[1]]
            used = event[2:] or [1] * len(bucket.members)
            names = [f"{path}.{m.name}".lstrip(".") for m, one in zip(bucket.members, used, strict=True) if one]
            return f"{'reduced' if event[0] else 'gathered'} {', '.join(names)}"

        every = gathered_objects(mine, self.process_group)
        rank, _, first, other = first_difference(every) or (0, 0, None, None)
        labels = self.process_group.labels
        raise DistMismatchError(
            f"fully_shard: the ranks did not use the same parameters: rank {labels[0]} {words(first)}, rank "
            f"{labels[rank]} {words(other)}; gradients are wrong: have every rank run the same modules, and use all "
            "they give in its loss"
        )


class _Saved(partial[torch.Tensor]):
    """What autograd saves in the place of a view of a whole parameter: how to get it."""


class ParameterGroup:
    """The parameters of a module that are gathered together.

    Args:
        name: the module's class, for messages.
        reshards: whether they are let go of after the forward; None for that of all but the root.
        cast_inputs, cast_outputs: what numbers are converted to that come into and out of the module.

    Attributes:
        schedule: of the outermost module that has this one.
        packed: whether a backward needs them whole.
        unsharded: whether the modules show them whole.
        stays: whether they stay after a backward, unseen.
        uses: made before this forward.
    """

    schedule: ShardSchedule

    def __init__(
        self, name: str, buckets: list[ShardBucket], policies: Policies, reshards: bool | None,
        cast_inputs: torch.dtype | None, cast_outputs: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.name, self.buckets, self.policies, self.reshards = name, buckets, policies, reshards
        self.cast_inputs, self.cast_outputs = cast_inputs, cast_outputs
        self.packed = self.unsharded = self.stays = False
        self.uses: list[Use] = []
        self._packing: list[AbstractContextManager[Any]] = []
        self._places = [place for bucket in buckets for one in bucket.members for place in one.places]
        self._rnns = {owner for owner, _ in self._places if isinstance(owner, nn.RNNBase)}

    def start(self, async_op: bool) -> None:
        """Begins to gather."""
        for bucket in self.buckets:
            if bucket.start(async_op):
                self.schedule.events.append((0, bucket.number))

    def gather(self, backward: bool = False) -> None:
        """Gathers, and begins with the next group."""
        self.start(async_op=False)
        for bucket in self.buckets:
            bucket.arrived()
        self.schedule.gathered(self, backward)

    def unshard(self) -> None:
        """Puts the whole parameters into the modules, in front of the parts."""
        uses, self.uses = self.uses or self.schedule.uses_of(self), []
        for bucket, use in zip(self.buckets, uses, strict=True):
            bucket.shown = use.whole()
            for one, whole in zip(bucket.members, bucket.shown, strict=True):
                for owner, name in one.places:
                    owner.__dict__[name] = whole
        self.unsharded = True
        self._tell_rnns()

    def reshard(self, after_backward: bool = False) -> None:
        """Lets go of the whole parameters, at least in the modules."""
        if self.unsharded:
            self._hide_whole()
            self.unsharded = False
            self._tell_rnns()
        for bucket in self.buckets if not (after_backward and self.stays) else ():
            bucket.drop()

    def _tell_rnns(self) -> None:
        for owner in self._rnns:
            refresh_flat_weights(owner)

    # Hooks

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gathers; casts the inputs."""
        if is_captured():
            self._show_whole()
        else:
            if self.schedule.root is self and current_autograd_node() is None:
                self.schedule.begin()
            self.gather()
            self.unshard()
        if self._reshards and torch.is_grad_enabled() and not is_captured():
            self._packing.append(self._saving_hooks())
            self._packing[-1].__enter__()
        return (args, kwargs) if self.cast_inputs is None else _cast((args, kwargs), self.cast_inputs)

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Lets go of the parameters, or awaits the backward; casts the outputs."""
        if self._packing:
            self._packing.pop().__exit__(None, None, None)
        if self.cast_outputs is not None:
            output = _cast(output, self.cast_outputs)
        if is_captured():
            self._hide_whole()
            return output
        outputs = _differentiable(output) if torch.is_grad_enabled() else []
        if current_autograd_node() is None:  # else a checkpoint computes again what the backward is about to need
            if self._reshards or not outputs:
                self.reshard()
            if output is None and sys.exc_info()[0]:  # which goes to the user, now
                self.schedule.events.clear()
            elif self.schedule.root is self:
                self.schedule.end(bool(outputs))
        if outputs:
            register_multi_grad_hook(outputs, self._before_backward, mode="any")
            if inputs := _differentiable((args, kwargs)):
                register_multi_grad_hook(inputs, self._after_backward)
        return output

    def _show_whole(self) -> None:
        """In a step that is captured, parameters are whole, and passes gather and reduce; here they are cast.

        Raises:
            UnsupportedError: what passes do not do.
        """
        buckets, policies = self.buckets, self.policies
        kept = any(not bucket.syncs or any(one is not None for one in bucket.kept) for bucket in buckets)
        self.reshard()  # where an eager forward, or unshard(), has left them
        parameters = [one for bucket in buckets for one in bucket.parameters]
        other = any((policies.reduce_dtype or policies.computes(one)) is not one.dtype for one in parameters)
        for what, found in (
            ("gradients that are kept, not reduced", kept),
            ("gradients that are divided by a factor", any(bucket.divisor is not None for bucket in buckets)),
            ("gradients that are reduced in another dtype than the parameter's", other),
            ("hooks on parameters, which get the reduced gradients of parts", any(map(_has_hooks, parameters))),
            ("a mesh of copies", policies.replicas is not None),
            ("offload to the CPU", policies.home != policies.device),
        ):  # fmt: skip
            if found:
                raise UnsupportedError(f"fully_shard with {what}", remedy="compile without fullgraph=True")
        for one in (one for bucket in buckets for one in bucket.members):
            if policies.computes(one.parameter) is not one.parameter.dtype:
                cast = one.parameter.to(policies.computes(one.parameter))
                for owner, name in one.places:
                    owner.__dict__[name] = cast

    def say_how(self) -> None:
        """Tells of each parameter how it is divided, for steps that are captured."""
        for one in (one for bucket in self.buckets for one in bucket.members):
            set_shard(one.parameter, self.policies.group.group_name, one.dim, self._reshards, one.name)

    def _hide_whole(self) -> None:
        for owner, name in self._places:
            owner.__dict__.pop(name, None)

    def _before_backward(self, grad: torch.Tensor) -> None:
        self.schedule.await_end_of_backward()
        if not self.unsharded:
            self.gather(backward=True)
            with torch.enable_grad():  # for checkpoints within the module
                self.unshard()

    def _after_backward(self, grads: Sequence[torch.Tensor | None]) -> None:
        self.reshard(after_backward=True)

    @property
    def _reshards(self) -> bool:
        return self.schedule.root is not self if self.reshards is None else self.reshards

    def _saving_hooks(self) -> AbstractContextManager[Any]:
        """Has autograd save, in the place of a view of a whole parameter, where to find it."""
        owners = {
            whole.untyped_storage().data_ptr(): (bucket, index)
            for bucket in self.buckets
            for index, whole in enumerate(bucket.arrived())
        }
        owners.pop(0, None)  # of tensors without elements
        pack_others, unpack_others = innermost_saved_tensor_hooks() or (_same, _same)

        def pack(tensor: torch.Tensor) -> Any:
            found = owners.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
            if found is None or tensor.dtype is not found[0].arrived()[found[1]].dtype or tensor.is_conj():
                return pack_others(tensor)
            self.packed, layout = True, (tensor.size(), tensor.stride(), tensor.storage_offset())
            return _Saved(self._saved, *found, found[0].stamp, layout)

        return saved_tensors_hooks(pack, lambda one: one() if isinstance(one, _Saved) else unpack_others(one))

    def _saved(self, bucket: ShardBucket, index: int, stamp: list[int], layout: tuple[Any, ...]) -> torch.Tensor:
        """A view of a whole parameter, of that size, stride and offset.

        Raises:
            RuntimeError: the parameters have changed since the forward.
        """
        if stamp != bucket.stamp_now():
            raise RuntimeError(
                f"fully_shard: parameters of {self.name} changed between forward and backward, which needs them as "
                "they were: step the optimizer after the backward"
            )
        if bucket.whole is None:
            self.gather(backward=True)
        return bucket.arrived()[index].as_strided(*layout)


def _same(value: Any) -> Any:
    return value


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether it has any besides that of parts."""
    return sum(len(getattr(parameter, table) or ()) for table in HOOK_TABLES) > 1


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [one for one in tensors_in(value) if one.requires_grad]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, value)
