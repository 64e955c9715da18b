"""`fully_shard`: each rank holds a part of every parameter, its gradient and its optimizer state, in eager loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wholestep.comm.api.rendezvous import joined_group
from wholestep.deferred_init import fill
from wholestep.parallel.equal_models import require_equal_models
from wholestep.parallel.shard_optimizers import watch_optimizers
from wholestep.parallel.shard_schedule import ParameterGroup, ShardSchedule
from wholestep.parallel.shard_tensors import become_parts, stay_whole
from wholestep.parallel.sharded_parameters import ALONE_BYTES, Policies, ShardBucket, Sharded
from wholestep.tensor_parts import part_of, say_parts


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Types in which a module computes while its parts, and the optimizer, keep their own. None changes nothing.

    Attributes:
        param_dtype: of whole parameters, and of the module's inputs where ``cast_forward_inputs``.
        reduce_dtype: in which gradients are reduced; None for that of the whole parameters.
        output_dtype: of the module's outputs.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Parts stay on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Parts, their gradients and so the optimizer's state are on the CPU; whole parameters on the device.

    Attributes:
        pin_memory: whether the parts are in memory from which a GPU copies by itself.
    """

    pin_memory: bool = True


class UnshardHandle:
    """Parameters on their way."""

    def __init__(self, group: ParameterGroup | None) -> None:
        self._group = group

    def wait(self) -> None:
        """Puts the whole parameters into the module."""
        if self._group is not None:
            self._group.gather()
            self._group.unshard()
        self._group = None


class FSDPModule:
    """What `fully_shard` adds to a module's class."""

    _parameter_group: ParameterGroup
    _scalars: list[nn.Parameter]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the module's own group of parameters, until `reshard` or the end of its next forward or backward.

        Returns:
            With ``async_op`` what waits for them; they are then used by the next forward without a wait, too.
        """
        handle = UnshardHandle(self._parameter_group)
        if async_op:
            self._parameter_group.start(async_op=True)
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Lets go of the module's whole parameters."""
        self._parameter_group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients; else each rank keeps its own, whole, for the next one that does."""
        for one in _sharded_in(self, recurse):
            one.__dict__["_gradient_sync"] = requires_gradient_sync  # for captured steps to see
            for bucket in one._parameter_group.buckets:
                bucket.syncs = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, *, recurse: bool = True) -> None:
        """Whether whole parameters are let go of after the forward, and gathered anew for the backward."""
        reshard_after_forward = bool(_checked_reshard(reshard_after_forward))
        for one in _sharded_in(self, recurse):
            one.__dict__["_reshard_after_forward"] = reshard_after_forward
            one._parameter_group.reshards = reshard_after_forward
            one._parameter_group.say_how()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether whole parameters are let go of after the backward: if not, the next forward needs no gather, unless
        the parts were changed meanwhile."""
        for group in _groups_in(self, recurse):
            group.stays = not reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients of the module's own group become the sum over the ranks, divided by this; not their mean.

        Raises:
            ValueError: the module has a parameter without a dimension, whose gradient is a mean.
        """
        if self._scalars:
            raise ValueError("fully_shard: gradients of parameters without a dimension are means: leave them out "
                             "(ignored_params), or divide the loss")
        self.__dict__["_gradient_divide_factor"] = factor  # for captured steps to see
        for bucket in self._parameter_group.buckets:
            bucket.divisor = factor

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """For scripts that say it: each backward that reduces waits for its reductions."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """For scripts that say it: what comes next is known from the last forward, and one module is gathered ahead."""

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("a module under fully_shard cannot be copied: copy it before, or by its state dict")


def _sharded_in(module: Any, recurse: bool) -> list[Any]:
    return [one for one in (module.modules() if recurse else [module]) if isinstance(one, FSDPModule)]


def _groups_in(module: Any, recurse: bool) -> list[ParameterGroup]:
    return [one._parameter_group for one in _sharded_in(module, recurse)]


def fully_shard(
    module: nn.Module, *, mesh: Any = None, reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:  # fmt: skip
    """Divides a module's parameters among the ranks, and gathers them around its forward and backward.

    Each parameter object becomes this rank's part of it, along dimension 0; so do its gradient, which is the mean over
    the ranks, and the state of any optimizer. The parameters that are in no module below that was sharded before are
    gathered together: call it on the layers first, then on the model. In `forward` the module has whole parameters.
    Those without a dimension stay whole on all ranks, with gradients that are the mean.

    Arguments and behaviour are those of `torch.distributed.fsdp.fully_shard`.

    Args:
        module: equal on all ranks, with its final values.
        mesh: ours or torch's, of one axis, or of two: copies, and ranks that divide one; None for all ranks.
        reshard_after_forward: whole parameters are let go of after the forward and gathered anew for the backward;
            None for all modules but the outermost. A number above 1, torch's for parts among fewer ranks, is True.
        shard_placement_fn: gives the dimension of a parameter to divide, as a `Shard`; None for 0.
        mp_policy: the types in which the module computes and gradients are reduced.
        offload_policy: where parts are.
        ignored_params: stay as they are, each rank's own.

    Returns:
        The module itself, of a class that has the methods of `FSDPModule`.

    Raises:
        TypeError, ValueError: what is given cannot be divided so.
        DistMismatchError: the ranks' models differ.
    """
    _check_module(module)
    reshard_after_forward = _checked_reshard(reshard_after_forward)
    groups = _groups_of(mesh, module)
    named = _parameters_of(module, {id(one) for one in ignored_params or ()})
    require_equal_models("fully_shard", module, [(name, one) for name, one, _ in named], groups[-1])
    scalars = [one for _, one, _ in named if one.dim() == 0]
    named = [one for one in named if one[1].dim()]
    for one in [*module.buffers(), *scalars, *(ignored_params or ())]:
        fill(one)
    kind = mesh.device_type if mesh is not None else named[0][1].device.type if named else "cpu"
    policies = _policies(groups, kind, mp_policy, offload_policy)
    if kind == "cuda":
        for one in [*module.buffers(), *scalars]:
            one.data = one.data.to(policies.device)
    members = []
    for name, parameter, places in named:
        placement = shard_placement_fn(parameter) if shard_placement_fn is not None else None
        dim = 0 if placement is None else placement.dim % parameter.dim()
        members.append(Sharded(name, parameter, places, dim, policies.group))
    group = ParameterGroup(
        type(module).__name__, _buckets(members, policies), policies, reshard_after_forward,
        mp_policy.param_dtype if mp_policy.cast_forward_inputs else None, mp_policy.output_dtype,
    )  # fmt: skip
    become_parts([one.parameter for one in members], policies.group)
    watch_optimizers()
    stay_whole(scalars, groups, lambda: module.__dict__.get("_gradient_sync", True))
    module.__dict__["_parameter_group"], module.__dict__["_scalars"] = group, scalars
    module.register_forward_pre_hook(group.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(group.after_forward, with_kwargs=True, always_call=True)
    say_parts(owner for one in members for owner, _ in one.places)
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    below = {path: one._parameter_group for path, one in module.named_modules() if isinstance(one, FSDPModule)}
    ShardSchedule(group, below)
    return module


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard expects an nn.Module, found {type(module).__name__}")
    if isinstance(module, FSDPModule):
        raise ValueError(f"fully_shard: this {type(module).__name__} is sharded already")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {type(module).__name__}: shard "
            "the modules in it, and the one that has it"
        )


def _checked_reshard(reshards: Any) -> bool | None:
    if reshards is not None and not (isinstance(reshards, int) and reshards >= 0):
        raise ValueError(
            f"fully_shard: reshard_after_forward is True, False, None or a number of ranks, found {reshards!r}"
        )
    return reshards if reshards is None or isinstance(reshards, bool) else reshards > 1


def _groups_of(mesh: Any, module: nn.Module) -> list[Any]:
    """The groups of a mesh's axes, at most two; of all ranks where there is no mesh."""
    if mesh is None:
        return [joined_group(None, next((one.device.type for one in module.parameters()), "cpu"))]
    if mesh.ndim > 2:
        raise ValueError(f"fully_shard: a mesh of one or two axes is required, found {mesh}")
    return [joined_group(mesh.get_group(axis), mesh.device_type) for axis in range(mesh.ndim)]


def _policies(groups: list[Any], kind: str, mixed: MixedPrecisionPolicy, offload: OffloadPolicy) -> Policies:
    """How a module computes and where its parts are; ``kind`` is the device's."""
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    copies = groups[0] if len(groups) > 1 else None
    home, pinned = device, False
    if isinstance(offload, CPUOffloadPolicy):
        home, pinned = torch.device("cpu"), offload.pin_memory and kind == "cuda"
    return Policies(groups[-1], copies, mixed.param_dtype, mixed.reduce_dtype, device, home, pinned)


_Named = list[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]


def _parameters_of(module: nn.Module, ignored: set[int]) -> _Named:
    """Names, parameters and places of those that are in no group yet.

    Raises:
        ValueError: one cannot be divided, is no plain one, or is in a group that does not have all its places.
    """
    below = {id(one.parameter): {(id(o), n) for o, n in one.places}
             for group in _groups_in(module, True) for bucket in group.buckets for one in bucket.members}  # fmt: skip
    ignored |= {id(scalar) for one in _sharded_in(module, True) for scalar in one._scalars}
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, owner in module.named_modules():
        for last, parameter in owner._parameters.items():
            name = f"{prefix}.{last}".lstrip(".")
            if parameter is None or id(parameter) in ignored:
                continue
            if hasattr(parameter, "__tensor_flatten__"):
                raise ValueError(
                    f"fully_shard: {name} is a {type(parameter).__name__}, which holds other tensors: a plain one is "
                    "required; of layers that are split, too, compile the plain model with plans (ws.TensorParallel)"
                )
            if id(parameter) in below:
                if (id(owner), last) not in below[id(parameter)]:
                    raise ValueError(
                        f"fully_shard: {name} is tied to a parameter of a module that is sharded already, without it: "
                        "shard a module that has both, and not the one below"
                    )
            elif part_of(parameter) is not None:
                raise ValueError(
                    f"fully_shard: {name} is a part already, of another plan or group, or tied to one of a module that "
                    "is sharded by itself: shard a module that has both"
                )
            else:
                found.setdefault(id(parameter), (name, parameter, []))[2].append((owner, last))
    return list(found.values())


def _buckets(members: list[Sharded], policies: Policies) -> list[ShardBucket]:
    """Large parameters alone, small ones of one dtype together."""
    together: dict[Any, list[Sharded]] = {}
    for one in members:
        large = one.parameter.nbytes >= ALONE_BYTES
        together.setdefault(one.name if large else one.parameter.dtype, []).append(one)
    return [ShardBucket(some, policies) for some in together.values()]


@contextmanager
def summon_full_params(module: nn.Module, *, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
    """Within, each parameter object of the sharded modules is whole, on every rank; not for a forward or a backward.

    Args:
        recurse: of the modules below, too.
        writeback: what was changed within is kept: of each rank, its part.
    """
    buckets = [bucket for group in _groups_in(module, recurse) for bucket in group.buckets]
    for bucket in buckets:
        bucket.give_whole()
    try:
        yield
    finally:
        for bucket in buckets:
            bucket.take_back(writeback)
