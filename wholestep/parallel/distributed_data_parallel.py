"""The module wrapper whose gradients are, after each backward, the mean over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from wholestep import comm
from wholestep.comm.api.rendezvous import joined_group
from wholestep.comm.api.tracing import is_captured
from wholestep.deferred_init import materialize
from wholestep.errors import UnsupportedError
from wholestep.marks import set_bucket
from wholestep.parallel.buckets import FIRST_BUCKET_BYTES
from wholestep.parallel.comm_hooks.mean import BUILTIN_HOOKS, Hook
from wholestep.parallel.equal_models import noted, require_equal_models
from wholestep.parallel.join import WITHOUT_JOIN, Join, Joinable, JoinHook
from wholestep.parallel.logging_data import logging_data
from wholestep.parallel.outputs import joined_in_one_node
from wholestep.parallel.reducer import GradientReducer
from wholestep.tensor_parts import part_of
from wholestep.torch_compat import skipped_by_dynamo, tree_map_only

IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's attribute of a module: names that ranks keep for themselves


class DistributedDataParallel(nn.Module, Joinable):
    """Each rank runs the module on its own batch; gradients are reduced while the backward runs.

    Arguments and behaviour are those of torch's class of this name; gradients and weights have its bits on two ranks.

    Args:
        module: has parameters that require gradients; of equal names, shapes and dtypes on all ranks.
        device_ids: the one GPU of this rank, to which tensors of the inputs are moved; None for a module on the CPU.
        output_device, dim, check_reduction: torch's, which do nothing with one GPU a rank.
        forward_sync_buffers: rank 0's buffers become all ranks' before a forward; None for True.
        broadcast_buffers: the same; if it is False, ranks begin with their own buffers, too.
        init_sync: models are compared, and rank 0's parameters and buffers become all ranks' now.
        process_group: whose ranks take part; None for all.
        bucket_cap_mb: MiB of gradients that are sent together; None for 1 at first, then 25.
        bucket_cap_mb_list: the same for the first, second, … bucket, the last for all further ones.
        find_unused_parameters: parameters that a forward's outputs do not depend on may be left without a gradient.
        gradient_as_bucket_view: gradients live in the memory that is sent.
        static_graph: each backward uses the same parameters equally often.
        device_mesh: of one axis, in the place of ``process_group``.
        batched_grad_copy, skip_all_reduce_unused_params: torch's, which change nothing: gradients are always copied
            together, and those that no rank used are known after the reduction.

    Raises:
        UnsupportedError: torch's ``mixed_precision``, ``delay_all_reduce_named_params``, ``param_to_hook_all_reduce``.
        RuntimeError: no parameter requires a gradient.
        ValueError: parameters are on several types of devices, on ``meta``, not where ``device_ids`` says, or parts.
        DistMismatchError: the ranks' models differ.
    """

    def __init__(
        self, module: nn.Module, device_ids: list[Any] | None = None, output_device: Any = None, dim: int = 0,
        broadcast_buffers: bool | None = None, init_sync: bool = True,
        process_group: comm.ProcessGroup | None = None, bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False, check_reduction: bool = False, gradient_as_bucket_view: bool = False,
        static_graph: bool = False, delay_all_reduce_named_params: Any = None, param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None, device_mesh: Any = None, skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None, batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        Joinable.__init__(self)
        _refuse_unsupported(mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce)
        if device_mesh is not None:
            if process_group is not None:
                raise RuntimeError(
                    "DistributedDataParallel: one of process_group and device_mesh is required, found both"
                )
            process_group = device_mesh.get_group()
        self.module = materialize(module)
        self.process_group = joined_group(process_group, _device_type(module))
        init_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
        self.forward_sync_buffers = init_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view, self.static_graph = gradient_as_bucket_view, static_graph
        self.require_backward_grad_sync = True
        self.has_joined = False
        self._ignored = frozenset(getattr(module, IGNORED, ()))
        own = [(name, one) for name, one in module.named_parameters() if name not in self._ignored]
        self._own = [one for _, one in own]
        self._named = named = [(name, one) for name, one in own if one.requires_grad]
        self._syncs_buffers = self._buffers_due = self.forward_sync_buffers and bool(self._buffers_now())
        self.device_ids = [torch.device("cuda", d) if isinstance(d, int) else d for d in device_ids or []]
        _check(named, self.device_ids)
        if init_sync:
            require_equal_models("DistributedDataParallel", module, named, self.process_group)
            self._broadcast([*self._own, *(self._buffers_now() if init_buffers else [])], 0)
        caps = [25.0 if bucket_cap_mb is None else bucket_cap_mb] if not bucket_cap_mb_list else bucket_cap_mb_list
        first = [FIRST_BUCKET_BYTES] * (bucket_cap_mb is None and not bucket_cap_mb_list)
        self._limits = (*first, *(int(cap * 2**20) for cap in caps))
        self._make_reducer()
        self.register_load_state_dict_pre_hook(_with_prefix)

    def _make_reducer(self) -> None:
        first, cap = min(FIRST_BUCKET_BYTES, self._limits[0]), self._limits[-1]
        for one in self.module.parameters():
            set_bucket(one, (first, cap) if any(one is p for _, p in self._named) else None)
        tables = (one for one in self.module.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)))
        weights = {id(one.weight) for one in tables if one.sparse}
        sparse = {i for i, (_, one) in enumerate(self._named) if id(one) in weights}
        self._frozen = [(name, one) for name, one in self.module.named_parameters() if not one.requires_grad]
        self.reducer = GradientReducer(
            self._named, self.process_group, self._limits, self.gradient_as_bucket_view, self.find_unused_parameters,
            self.static_graph, sparse,
        )  # fmt: skip
        self.backward_state = self.reducer.backward

    def __getstate__(self) -> dict[str, Any]:
        """For `copy` and `pickle`: the loaded wrapper has the default group, and no communication hook.

        Raises:
            RuntimeError: this one has another group.
        """
        if self.process_group is not joined_group(None, _device_type(self.module)):
            raise RuntimeError("DistributedDataParallel: only a wrapper of the default process group can be saved")
        made = {"process_group", "reducer", "backward_state", "comm_hook", "hook_name"}
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = joined_group(None, _device_type(self.module))
        self._make_reducer()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, after which the next backward reduces, unless within `no_sync`."""
        others, inputs, kwargs = self._begin_forward(inputs, kwargs)
        return self._end_forward(self.module(*inputs, **kwargs), others)

    @property
    def _syncs(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    @skipped_by_dynamo
    def _begin_forward(self, inputs: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Gives the work of telling ranks that have no more batches, and the inputs on the module's device."""
        if self._syncs and not is_captured():
            self.reducer.times.begin_iteration()
        if self._join_config.enable and is_captured():
            raise UnsupportedError(
                "DistributedDataParallel inside of Join, which asks the ranks at each call",
                remedy="compile without fullgraph=True",
            )
        others = Join.notify_join_context(self)
        self._begin_iteration(self._syncs)
        if self.device_ids:
            device = self.device_ids[0]
            inputs, kwargs = tree_map_only(torch.Tensor, lambda one: one.to(device), (inputs, kwargs))
        return others, inputs, kwargs

    @skipped_by_dynamo
    def _end_forward(self, outputs: Any, others: Any) -> Any:
        """Awaits a backward from these outputs, if there is to be one."""
        self._buffers_due = self._syncs and self._syncs_buffers
        if not self._syncs:
            return outputs
        if self.reducer.divisor is not None:
            self.reducer.divisor = None
        if others is not None and not self._divides_by_initial_world_size:
            others.wait()
            self.reducer.divisor = int(others.result()[0])
        if self.reducer.backward.expected and not is_captured():  # the last backward has not reduced
            self._require_reduced(self.module.named_parameters())
        joins = (self.find_unused_parameters or self.static_graph) and not is_captured()
        if joins:
            outputs = joined_in_one_node(outputs, self.reducer.backward_begun)
        self.reducer.prepare(outputs, joins)
        named: Iterable[tuple[str, nn.Parameter]] = self._frozen
        if self.find_unused_parameters:  # of the reducer's own, the backward tells
            named = ((name, one) for name, one in self.module.named_parameters() if not self.reducer.knows(one))
        self._require_reduced(named)
        return outputs

    def _require_reduced(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Compares parameters with those that the module had; see `GradientReducer.require_reduced`."""
        self.reducer.require_reduced((n, p) for n, p in named if isinstance(p, nn.Parameter) and n not in self._ignored)

    @noted(WITHOUT_JOIN)
    def _begin_iteration(self, syncs: bool, joined: bool = False) -> bool:
        """Sends what a forward does before the module's own.

        Args:
            syncs: whether the backward will reduce.
            joined: this rank has no more batches, and follows the others.

        Returns:
            Whether the backward of some rank will reduce.
        """
        joins = joined or self._join_config.enable
        if joins:
            syncs = self._largest(syncs) == 1
        if self._buffers_due and (buffers := self._buffers_now()):
            self._broadcast(buffers, self._largest(-1 if joined else self.process_group.rank()) if joins else 0)
        return syncs

    def _largest(self, mine: int) -> int:
        """The largest of the ranks' numbers."""
        number = torch.tensor(int(mine), device=self.join_device)
        comm.all_reduce(number, "max", group=self.process_group)
        return int(number)

    def expect_backward(self, outputs: Any) -> None:
        """Has the next backward reduce as if a forward had just ended with these outputs: for frameworks whose backward
        runs within the wrapper's forward, or after one within `no_sync`."""
        if self._syncs:
            self.reducer.prepare(outputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards within are accumulated on each rank, and reduced by the next backward outside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Context manager of a loop in which some ranks have fewer batches than others.

        Ranks that have no more send zeros; at the end all have the parameters and buffers of one that was last to end.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of ranks, else by that of those that still
                have batches.
            enable: False does nothing.
            throw_on_early_termination: all ranks raise when the first has no more batches.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `Join`; the keyword ``divide_by_initial_world_size`` is as for `join`."""
        self.has_joined = True
        self._divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _FollowOthers(self)

    @property
    def join_device(self) -> torch.device:
        """The parameters'."""
        return self.reducer.parameters[0].device

    @property
    def join_process_group(self) -> comm.ProcessGroup:
        """The wrapper's."""
        return self.process_group

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Has ``hook(state, bucket)`` reduce each bucket, in the place of an all-reduce.

        Args:
            hook: gives a `torch.futures.Future` of one tensor of the bucket's size: what becomes of the gradients.

        Raises:
            TypeError: the hook cannot be called.
            RuntimeError: there is a hook already.
        """
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, found {type(hook).__name__}")
        if self.reducer.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.reducer.set_hook(hook, state)
        self.hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self.comm_hook = hook, state, getattr(state, "__dict__", None)  # for captured steps to see

    def register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Registers one of torch's built-in hooks, which have no state: ``BuiltinCommHookType`` or its name.

        Raises:
            ValueError: there is no such hook.
            RuntimeError: there is a hook already.
        """
        name = getattr(comm_hook_type, "name", comm_hook_type)
        if name not in BUILTIN_HOOKS:
            raise ValueError(f"register_builtin_comm_hook: one of {', '.join(BUILTIN_HOOKS)} is required, found {name}")
        self.register_comm_hook(self.process_group, BUILTIN_HOOKS[name])
        self.hook_name = f"BuiltinCommHookType.{name}"

    def logging_data(self) -> dict[str, Any]:
        """Settings, buckets and times, by torch's names (`logging_data.py`)."""
        return logging_data(self)

    def _set_static_graph(self) -> None:
        """As ``static_graph=True``, by a name of torch's that scripts call after the wrapping.

        Raises:
            RuntimeError: there was a forward already.
        """
        if self.reducer.backward.expected or self.reducer.times.iterations:
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts; to do: pass static_graph=True"
            )
        self.static_graph = self.reducer.static = True
        self.reducer.find_unused = False

    _register_builtin_comm_hook, _get_ddp_logging_data = register_builtin_comm_hook, logging_data  # torch's names

    def _buffers_now(self) -> list[torch.Tensor]:
        """The buffers that the module has now; some may have been registered since it was wrapped."""
        return [one for name, one in self.module.named_buffers() if name not in self._ignored]

    def _broadcast(self, tensors: list[torch.Tensor], source: int) -> None:
        """The tensors of a rank of the group become all ranks'."""
        works = [
            comm.broadcast(one.detach(), group=self.process_group, group_src=source, async_op=True) for one in tensors
        ]
        for work in works:
            if work is not None:
                work.wait()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: list[str]) -> None:
        """Has a wrapper that is made later leave alone the parameters and buffers of these names."""
        setattr(module, IGNORED, names)


class _FollowOthers(JoinHook):
    """Sends what forward and backward of the other ranks' wrappers send."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        wrapper = self._wrapper
        follows = wrapper._begin_iteration(False, joined=True)
        wrapper._buffers_due = follows and wrapper._syncs_buffers
        if follows:
            wrapper.reducer.divisor = None if wrapper._divides_by_initial_world_size else 1
            wrapper.reducer.follow()

    def post_hook(self, is_last_joiner: bool) -> None:
        wrapper = self._wrapper
        source = wrapper._largest(wrapper.process_group.rank() if is_last_joiner else -1)
        buffers = wrapper._buffers_now() if wrapper.forward_sync_buffers else []
        wrapper._broadcast([*wrapper._own, *buffers], source)


def _device_type(module: nn.Module) -> str:
    return next((p.device.type for p in module.parameters()), "cpu")


def _refuse_unsupported(mixed_precision: Any, delayed: Any, hooked: Any) -> None:
    if mixed_precision is not None:
        raise UnsupportedError(
            "DistributedDataParallel with mixed_precision",
            remedy="torch.autocast around forward and loss, bf16_compress_hook for what is sent, or "
            "fully_shard(mp_policy=MixedPrecisionPolicy(…))",
        )
    if delayed is not None or hooked is not None:
        raise UnsupportedError(
            "DistributedDataParallel with delay_all_reduce_named_params and param_to_hook_all_reduce",
            remedy="leave them out: buckets are sent in the order in which their gradients come",
        )


def _check(named: list[tuple[str, nn.Parameter]], device_ids: list[Any]) -> None:
    if not named:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient."
        )
    parts = [name for name, p in named if part_of(p) is not None]
    if parts:
        raise ValueError(
            f"DistributedDataParallel: each rank has a part of its own of {', '.join(parts)}: fully_shard reduces the "
            "gradients itself; to do: leave the wrapper out"
        )
    devices = {str(p.device): name for name, p in reversed(named) if not p.is_meta}  # of others all ranks are told
    if len({p.device.type for _, p in named if not p.is_meta}) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but its module parameters are "
            f"on {', '.join(f'{device} ({name})' for device, name in devices.items())}"
        )
    if device_ids and (len(device_ids) > 1 or devices.keys() != {str(device_ids[0])}):
        raise ValueError(
            "DistributedDataParallel device_ids only work with a module on one GPU, but got device_ids "
            f"{[str(device) for device in device_ids]} and module parameters on {sorted(devices)}: pass the one device "
            "that has them, or None"
        )


def _with_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Loads what the module itself has saved, too."""
    if any(key.startswith(f"{prefix}module.") for key in state):
        return
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)
