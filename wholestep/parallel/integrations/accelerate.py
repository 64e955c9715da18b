"""Accelerate: `Accelerator` of this file in the place of Accelerate's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from wholestep.checkpoint.load import load
from wholestep.checkpoint.save import save
from wholestep.parallel.distributed_data_parallel import DistributedDataParallel
from wholestep.parallel.integrations import extra_needed, join_world
from wholestep.parallel.join import Join
from wholestep.parallel.sharded_modules import FSDPModule, summon_full_params

try:
    import accelerate
    from accelerate.utils import DistributedType
except ImportError as missing:
    raise extra_needed("accelerate") from missing


class Accelerator(accelerate.Accelerator):
    """Accelerate's class of this name, whose `prepare` puts `wholestep.parallel.DistributedDataParallel` around models.

    Arguments are those of Accelerate's, ``kwargs_handlers`` with its ``DistributedDataParallelKwargs`` among them.
    On one process, nothing is put around a model. One under `wholestep.parallel.fully_shard` stays as it is, and
    `save_state` has the ranks write their parts.
    """

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model on its device, within autocast and compiled as the accelerator says, then wrapped.

        Raises:
            ValueError: the accelerator is set up for FSDP, DeepSpeed or the like; or see `join_world`.
        """
        kind = self.distributed_type
        if evaluation_mode or kind is DistributedType.NO or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if kind not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            raise ValueError(
                f"{__name__}.Accelerator serves data parallelism on CPUs and CUDA, found {kind}: "
                "use accelerate.Accelerator, or leave its plugin out"
            )
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if isinstance(model, FSDPModule) or not any(one.requires_grad for one in prepared.parameters()):
            return prepared
        join_world(self.device, self.num_processes)
        settings = self.ddp_handler.to_kwargs() if self.ddp_handler else {}
        devices = [self.local_process_index] if self.device.type == "cuda" else None
        wrapped: Any = DistributedDataParallel(prepared, devices, **settings)
        if self.ddp_handler:
            self.ddp_handler.register_comm_hook(wrapped)
        wrapped._is_accelerate_prepared = True
        return wrapped

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The module that was prepared."""
        return super().unwrap_model(_inside(model), *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Of a model under `fully_shard` the whole tensors: every rank calls it."""
        with summon_full_params(model, writeback=False):
            return super().get_state_dict(model, unwrap)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; models under `fully_shard` and their optimizers are in directories of `ws.save`."""
        with self._without_parts() as sharded:
            folder = super().save_state(*args, **kwargs)
        for name, model, optimizer in sharded:
            save(Path(folder) / name, model, optimizer)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's, on any number of ranks.

        Raises:
            ValueError: models are under `fully_shard` and no directory is named.
        """
        with self._without_parts() as sharded:
            if sharded and input_dir is None:
                raise ValueError(f"{__name__}.Accelerator.load_state: name the directory, for models under fully_shard")
            super().load_state(input_dir, *args, **kwargs)
        for name, model, optimizer in sharded:
            load(Path(str(input_dir)) / name, model, optimizer)

    @contextmanager
    def _without_parts(self) -> Iterator[list[tuple[str, Any, Any]]]:
        """Hides from Accelerate what is sharded: names, models, and the optimizer of the same place or None."""
        models, optimizers = vars(self)["_models"], vars(self)["_optimizers"]
        sharded = [i for i, one in enumerate(models) if isinstance(one, FSDPModule)]
        self._models = [one for i, one in enumerate(models) if i not in sharded]
        self._optimizers = [one for i, one in enumerate(optimizers) if i not in sharded]
        try:
            inner = {i: getattr(one, "optimizer", one) for i, one in enumerate(optimizers)}
            yield [(f"sharded_{i}", models[i], inner.get(i)) for i in sharded]
        finally:
            self._models, self._optimizers = models, optimizers

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """The next backward reduces, though its forward ran within `no_sync`."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
        try:
            model.expect_backward([])
            yield
        finally:
            model.require_backward_grad_sync = before

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Where batches are uneven, ranks that have no more follow the others (`Join`); on the CPU, too."""
        samplers = [one.batch_sampler for one in self._dataloaders if hasattr(one.batch_sampler, "even_batches")]
        before = [one.even_batches for one in samplers]
        for sampler in samplers if even_batches is not None else []:
            sampler.even_batches = even_batches
        even = self.even_batches if even_batches is None else even_batches
        try:
            with Join([one for one in joinables if isinstance(one, DistributedDataParallel)], enable=not even):
                yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value


def _inside(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
