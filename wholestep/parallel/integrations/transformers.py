"""transformers: `Trainer` of this file in the place of transformers', or `TrainerMixin` before another one."""

from __future__ import annotations

from wholestep.parallel.integrations import extra_needed

try:
    import transformers

    from wholestep.parallel.integrations.accelerate import Accelerator
except ImportError as missing:
    raise extra_needed("transformers") from missing


class _Accelerator(Accelerator):
    serves_parts = False  # a Trainer writes what rank 0 has


class TrainerMixin:
    """Has a Trainer's models wrapped by our `DistributedDataParallel`: ``class Mine(TrainerMixin, Trainer): ...``.

    Arguments ``ddp_find_unused_parameters``, ``ddp_bucket_cap_mb`` and the like are the wrapper's.
    """

    accelerator: Accelerator

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's accelerator, as it has made it, with our way to wrap models."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = _Accelerator


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' Trainer with the wrapper of `wholestep.parallel`."""
