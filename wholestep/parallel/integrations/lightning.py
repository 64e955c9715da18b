"""Lightning: ``Trainer(strategy=DDPStrategy())`` with `DDPStrategy` or `FullyShardStrategy` of this file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from wholestep.parallel.comm_hooks.post_local_sgd import PeriodicModelAverager, PostLocalSGDState
from wholestep.parallel.distributed_data_parallel import DistributedDataParallel
from wholestep.parallel.integrations import extra_needed, join_world
from wholestep.parallel.sharded_modules import FSDPModule, fully_shard
from wholestep.parallel.sync_batchnorm import SyncBatchNorm
from wholestep.spmd import full_state_dict
from wholestep.tensor_parts import part_of
from wholestep.torch_compat import BatchNorm

try:
    from lightning.pytorch import callbacks, strategies
    from lightning.pytorch.plugins import LayerSync
    from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision, XLAPrecision
    from lightning.pytorch.strategies.strategy import _ForwardRedirection
except ImportError as missing:
    raise extra_needed("lightning") from missing

_OF_OTHER_STRATEGIES = (DeepSpeedPrecision, FSDPPrecision, XLAPrecision)
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")  # the second is new in Lightning 2.6
_AVERAGING_CALLBACKS = tuple(getattr(callbacks, name) for name in _AVERAGING if hasattr(callbacks, name))


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's strategy of this name, with `wholestep.parallel.DistributedDataParallel` around the module.

    Arguments are those of Lightning's: ``ddp_comm_hook`` and the like, ``model_averaging_period``, and those of the
    wrapper. ``Trainer(sync_batchnorm=True)`` takes `wholestep.parallel.SyncBatchNorm`, on the CPU too.

    Raises:
        ValueError: precision plugins of other strategies, devices that are neither CPU nor CUDA, fewer of them than
            processes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forward_redirection = _WithManualBackwards()

    def setup_environment(self) -> None:
        """Joins the ranks that Lightning has started or found."""
        if isinstance(self.precision_plugin, _OF_OTHER_STRATEGIES):
            raise ValueError(
                f"{type(self.precision_plugin).__name__} is for another strategy than {type(self).__module__}."
                f"{type(self).__name__}: use precision='bf16-mixed' or the like, without a plugin"
            )
        if self.local_rank >= self.num_processes:
            raise ValueError(
                f"this is process {self.local_rank} of its host, and Trainer has devices={self.num_processes}: "
                "devices is the number of processes on each host"
            )
        super().setup_environment()
        join_world(self.root_device, self.world_size)

    def setup(self, trainer: Any) -> None:
        """Wraps the module, and prepares the averaging of weights where the hook leaves that to others."""
        if self._layer_sync:
            self._layer_sync: Any = _SyncBatchNorms()
        super().setup(trainer)
        state = self._ddp_comm_state
        if isinstance(state, PostLocalSGDState):
            if self._model_averaging_period is None:
                raise ValueError("post_localSGD_hook: the strategy's model_averaging_period is required, found None")
            self._model_averager = PeriodicModelAverager(self._model_averaging_period, state.start_localSGD_iter)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        hook, wrapper = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, wrapper(hook) if wrapper else hook)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients are accumulated, nothing is sent."""
        with self.model.no_sync():
            yield

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Manual backwards run within the wrapper's forward, which has awaited none."""
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            self.model.expect_backward(closure_loss)

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's would replace the wrapper's error, which names parameters, by its own."""

    def teardown(self) -> None:
        """Leaves the module unwrapped."""
        self.model = self.lightning_module
        super().teardown()


class FullyShardStrategy(DDPStrategy):
    """Lightning's module under `wholestep.parallel.fully_shard`: as `configure_model` says, else each child.

    Arguments are those of `fully_shard`. Checkpoints are those of one process, with whole tensors, which every rank
    gathers. Values are those that each rank's module has: seed all of them alike.

    Raises:
        ValueError: a parameter that is to be trained is in no module under `fully_shard`; a callback that averages
            weights.
    """

    def setup(self, trainer: Any) -> None:
        """Divides the module, before optimizers are made."""
        averaging = [type(one).__name__ for one in trainer.callbacks if isinstance(one, _AVERAGING_CALLBACKS)]
        if averaging:
            raise ValueError(
                f"{type(self).__module__}.FullyShardStrategy: {averaging[0]} copies the module before it is divided, "
                "so its copy is whole where the module has parts: use DDPStrategy, or average in a hook of the module"
            )
        strategies.Strategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        if not any(isinstance(one, FSDPModule) for one in model.modules()):
            for child in model.children():
                if next(child.parameters(), None) is not None:
                    fully_shard(child, **self._ddp_kwargs)
        left = [name for name, one in model.named_parameters() if one.requires_grad and part_of(one) is None]
        if left:
            raise ValueError(
                f"{type(self).__module__}.FullyShardStrategy: {', '.join(left)} is in no module under fully_shard, so "
                "nothing would reduce its gradients: put it into a module, or call fully_shard in configure_model"
            )
        return model

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients are accumulated, nothing is sent."""
        sharded = [one for one in self.lightning_module.modules() if isinstance(one, FSDPModule)]
        for one in sharded:
            one.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for one in sharded:
                one.set_requires_gradient_sync(True)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Each child is sharded by itself: one that the last of several batches did not use has kept its gradients."""
        for one in self.lightning_module.modules():
            if isinstance(one, FSDPModule):
                one._parameter_group.schedule.reduce_kept()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """With whole tensors."""
        return full_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """With whole tensors."""
        return full_state_dict(optimizer)


class _WithManualBackwards(_ForwardRedirection):
    """A step whose backwards ran within the wrapper's forward awaits none after it."""

    def on_after_inner_forward(self, wrapper_module: Any, original_module: Any) -> None:
        self._before = getattr(wrapper_module, "require_backward_grad_sync", True)
        if not original_module.automatic_optimization:
            wrapper_module.require_backward_grad_sync = False

    def on_after_outer_forward(self, wrapper_module: Any, original_module: Any) -> None:
        wrapper_module.require_backward_grad_sync = self._before


class _SyncBatchNorms(LayerSync):
    """Lightning's way to exchange layers before a fit and to undo that after."""

    def apply(self, model: nn.Module) -> nn.Module:
        self._before = {n: one for n, one in model.named_modules() if isinstance(one, BatchNorm)}
        return SyncBatchNorm.convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        for name, layer in self._before.items():
            model.set_submodule(name, layer)
        return model
