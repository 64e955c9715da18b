"""The module wrapper whose gradients are, after each backward, the mean over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from wholestep import comm
from wholestep.comm.api.tracing import is_captured
from wholestep.parallel.buckets import FIRST_BUCKET_BYTES
from wholestep.parallel.comm_hooks.ordered import Hook
from wholestep.parallel.equal_models import require_equal_models
from wholestep.parallel.outputs import joined_in_one_node
from wholestep.parallel.reducer import GradientReducer
from wholestep.torch_compat import tree_map_only

IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's attribute of a module: names that ranks keep for themselves


class DistributedDataParallel(nn.Module):
    """Each rank runs the module on its own batch; gradients are reduced while the backward runs.

    Arguments and behaviour are those of torch's class of this name; gradients and weights have its bits on two ranks.

    Args:
        module: has parameters that require gradients; of equal names, shapes and dtypes on all ranks.
        device_ids: the one GPU of this rank, to which tensors of the inputs are moved; None for a module on the CPU.
        forward_sync_buffers: rank 0's buffers become all ranks' before a forward; None for True.
        broadcast_buffers: the same; if it is False, ranks begin with their own buffers, too.
        init_sync: models are compared, and rank 0's parameters and buffers become all ranks' now.
        process_group: whose ranks take part; None for all.
        bucket_cap_mb: MiB of gradients that are sent together; None for 1 at first, then 25.
        find_unused_parameters: parameters that a forward's outputs do not depend on may be left without a gradient.
        gradient_as_bucket_view: gradients live in the memory that is sent.
        static_graph: each backward uses the same parameters equally often.
        device_mesh: of one axis, in the place of ``process_group``.

    Raises:
        RuntimeError: no parameter requires a gradient.
        ValueError: parameters are on several types of devices, on ``meta``, or not where ``device_ids`` says.
        DistMismatchError: the ranks' models differ.
    """

    def __init__(
        self, module: nn.Module, device_ids: list[Any] | None = None, *, broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None, init_sync: bool = True,
        process_group: comm.ProcessGroup | None = None, bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False, gradient_as_bucket_view: bool = False, static_graph: bool = False,
        device_mesh: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if device_mesh is not None:
            if process_group is not None:
                raise RuntimeError(
                    "DistributedDataParallel: one of process_group and device_mesh is required, found both"
                )
            process_group = device_mesh.get_group()
        self.module = module
        self.process_group = comm.get_group(process_group)
        init_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
        self.forward_sync_buffers = init_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view, self.static_graph = gradient_as_bucket_view, static_graph
        self.require_backward_grad_sync = self._buffers_due = True
        ignored = set(getattr(module, IGNORED, ()))
        own = [(name, one) for name, one in module.named_parameters() if name not in ignored]
        named = [(name, one) for name, one in own if one.requires_grad]
        self._named_buffers = [
            (owner, name)
            for prefix, owner in module.named_modules()
            for name in owner._buffers
            if f"{prefix}.{name}".lstrip(".") not in ignored
        ]
        self.device_ids = [torch.device("cuda", d) if isinstance(d, int) else d for d in device_ids or []]
        _check(named, self.device_ids)
        if init_sync:
            require_equal_models("DistributedDataParallel", named, self.process_group)
            self._broadcast([*(one for _, one in own), *(self._buffers_now() if init_buffers else [])], 0)
        cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * 2**20)
        limits = (FIRST_BUCKET_BYTES if bucket_cap_mb is None else cap, cap)
        self.reducer = GradientReducer(
            named, self.process_group, limits, gradient_as_bucket_view, find_unused_parameters, static_graph
        )
        self.backward_state = self.reducer.backward
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, after which the next backward reduces, unless within `no_sync`."""
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self.reducer.rebuild()
        if self._buffers_due and self.forward_sync_buffers:
            self._broadcast(self._buffers_now(), 0)
        if self.device_ids:
            device = self.device_ids[0]
            inputs, kwargs = tree_map_only(torch.Tensor, lambda one: one.to(device), (inputs, kwargs))
        outputs = self.module(*inputs, **kwargs)
        self._buffers_due = syncs
        if not syncs:
            return outputs
        self.reducer.prepare(outputs)
        if (self.find_unused_parameters or self.static_graph) and not is_captured():
            outputs = joined_in_one_node(outputs, self.reducer.backward_begun)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards within are accumulated on each rank, and reduced by the next backward outside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

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
        self.reducer.hook = hook, state
        self.comm_hook = hook, state, getattr(state, "__dict__", None)  # for captured steps to see

    def _buffers_now(self) -> list[torch.Tensor]:
        found = [owner._buffers[name] for owner, name in self._named_buffers]
        return [one for one in found if one is not None]

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


def _check(named: list[tuple[str, nn.Parameter]], device_ids: list[Any]) -> None:
    if not named:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient."
        )
    devices = {str(p.device): name for name, p in reversed(named)}
    if "meta" in devices:
        raise ValueError(
            f"DistributedDataParallel: parameter {devices['meta']} is on the meta device; to do: give the module "
            "memory (module.to_empty, then its values) before it is wrapped"
        )
    if len({p.device.type for _, p in named}) > 1:
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
