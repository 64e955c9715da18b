"""transformers: `Trainer` of this file in the place of transformers', or `TrainerMixin` before another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from wholestep.parallel.integrations import extra_needed
from wholestep.parallel.integrations.accelerate import Accelerator
from wholestep.parallel.sharded_modules import FSDPModule, summon_full_params
from wholestep.spmd import full_state_dict

try:
    import transformers
except ImportError as missing:
    raise extra_needed("transformers") from missing


class TrainerMixin:
    """Has a Trainer's models wrapped by our `DistributedDataParallel`: ``class Mine(TrainerMixin, Trainer): ...``.

    Arguments ``ddp_find_unused_parameters``, ``ddp_bucket_cap_mb`` and the like are the wrapper's. A model under
    `fully_shard` stays as it is; its checkpoints hold whole tensors, which the ranks gather.
    """

    accelerator: Accelerator
    model: Any
    optimizer: Any

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's accelerator, as it has made it, with our way to wrap models."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = Accelerator

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's: every rank calls it."""
        with summon_full_params(self.model, writeback=False):
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        optimizer = self.optimizer
        if isinstance(self.model, FSDPModule):
            whole = full_state_dict(getattr(optimizer, "optimizer", optimizer))
            self.optimizer = SimpleNamespace(state_dict=lambda: whole)
        try:
            super()._save_optimizer_and_scheduler(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.optimizer = optimizer


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' Trainer with the wrapper of `wholestep.parallel`."""
