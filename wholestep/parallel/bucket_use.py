"""Uses of gathered parameters by forwards: autograd nodes that reduce their gradients and give them to the parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.parallel.sharded_parameters import Reduction, ShardBucket
from wholestep.torch_compat import backward_reaches, plain_subclasses


class Use:
    """One use of a bucket's whole parameters, and what reduces their gradients.

    Where reductions go on beside the backward, there are two autograd nodes: one begins to reduce, one gives the parts
    their gradients. The second is made before all layers whose backward may go on meanwhile, and so runs after these:
    autograd takes what was made last first.

    Args:
        reduce: begins to reduce the gradients of the bucket's whole parameters.
        deferred: whether there are two.
    """

    def __init__(
        self, bucket: ShardBucket, reduce: Callable[[ShardBucket, list[torch.Tensor | None]], Reduction | None],
        deferred: bool,
    ) -> None:  # fmt: skip
        self.bucket, self.reduce, self.deferred = bucket, reduce, deferred
        self.reduction: Reduction | None = None
        self._whole: list[weakref.ref[torch.Tensor]] = []
        self._parts: Any = bucket.parameters
        if deferred:
            self._parts = _Parts.apply(self, *bucket.parameters)  # type: ignore[no-untyped-call]

    def whole(self) -> tuple[torch.Tensor, ...]:
        """The whole parameters, with the gradients of the parts."""
        made: tuple[torch.Tensor, ...] = _Whole.apply(self, *self._parts)  # type: ignore[no-untyped-call]
        self._whole = [weakref.ref(one) for one in made]
        return made

    def asked_for(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Of the whole parameters' gradients those that they keep themselves."""
        whole = [one() for one in self._whole]
        return [g if w is not None and w.retains_grad else None for g, w in zip(grads, whole, strict=True)]

    def gradients(self) -> list[torch.Tensor | None]:
        """Those of the parts, when they are known."""
        reduction, self.reduction = self.reduction, None
        return reduction.parts() if reduction is not None else [None] * len(self.bucket.members)


def _as_outputs(ctx: Any, given: list[torch.Tensor], parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a node gives of parameters of which some are frozen."""
    ctx.set_materialize_grads(False)
    with plain_subclasses():
        ctx.mark_non_differentiable(*(one for one, part in zip(given, parts, strict=True) if not part.requires_grad))
    return tuple(given)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: Use, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.use = use
        return _as_outputs(ctx, [one.view_as(one) for one in parts], parts)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.use.gradients()


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: Use, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.use = use
        return _as_outputs(ctx, [one.detach() for one in use.bucket.arrived()], parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("fully_shard: gradients have none of their own: create_graph=True cannot be served")
        use = ctx.use
        if all(backward_reaches(node) is False for node, _ in ctx.next_functions if node is not None):
            # backward(inputs=[module.weight]), while that is the whole one
            use.bucket.accumulate(use.reduce(use.bucket, use.asked_for(grads)))
            return (None,) * (1 + len(grads))
        use.reduction = use.reduce(use.bucket, list(grads))
        if not use.deferred or use.reduction is None:
            return None, *use.gradients()
        parts = zip(use.bucket.parameters, use.reduction.used, strict=True)
        return None, *(part.detach() if used else None for part, used in parts)  # in the place of what comes
