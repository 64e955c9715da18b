"""Batch normalisation over the batches of all ranks, as if they were one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wholestep import comm
from wholestep.torch_compat import BatchNorm


class SyncBatchNorm(BatchNorm):
    """Normalises by the statistics of all ranks' inputs together; torch's class of this name, on the CPU, too.

    Some ranks' inputs may be empty, or have other numbers of rows. In evaluation, and with one rank, it is an ordinary
    BatchNorm. Gradients of weight and bias are those of a rank's own rows, which a data-parallel wrapper reduces.

    Args:
        num_features: C of inputs [N, C, …].
        eps, momentum, affine, track_running_stats: as for `torch.nn.BatchNorm2d`.
        process_group: whose ranks' inputs are one batch; None for all.
        options: ``device``, ``dtype`` and whatever else torch's BatchNorm takes.

    Raises:
        ValueError: of `forward`: an input of fewer than two dimensions, without channels, or, on all ranks together, of
            one value a channel.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: comm.ProcessGroup | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")
        kept = self.running_mean if self.weight is None else self.weight
        if kept is not None and len(kept) != input.shape[1]:
            raise ValueError(f"SyncBatchNorm: {len(kept)} channels (num_features) are required, found {input.shape[1]}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[N, C, …] -> the same shape, dtype and memory format."""
        self._check_input_dim(input)
        if not (self.training and comm.is_initialized() and comm.get_group(self.process_group).size() > 1):
            return super().forward(input)
        group = comm.get_group(self.process_group)
        output, mean, deviations, rows = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, group
        )
        steps, means, variances = self.num_batches_tracked, self.running_mean, self.running_var
        if self.track_running_stats and steps is not None and means is not None and variances is not None:
            steps.add_(1)
            share = 1 / float(steps) if self.momentum is None else self.momentum
            if rows:
                means.lerp_(mean.to(means.dtype), share)
                variances.lerp_((deviations / (rows - 1)).to(variances.dtype), share)
        return output

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: comm.ProcessGroup | None = None) -> nn.Module:
        """Puts a SyncBatchNorm in the place of each BatchNorm: with its parameters, buffers, hooks and mode.

        Returns:
            The module; a new one, if it is a BatchNorm itself.

        Raises:
            TypeError: a class derived from torch's BatchNorm has a forward of its own, which would be lost.
        """
        made: dict[nn.Module, nn.Module] = {}
        for name, one in module.named_modules():
            if not isinstance(one, (BatchNorm, nn.SyncBatchNorm)):
                continue
            if type(one).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward, cls.forward):
                raise TypeError(
                    f"convert_sync_batchnorm: {name or 'the module'} is a {type(one).__name__}, whose forward is not "
                    "torch's BatchNorm's and would be lost: replace it by a BatchNorm and what it does besides"
                )
            made[one] = new = cls.__new__(cls)
            new.__dict__ = vars(one) | {"process_group": process_group}
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child in made:
                    parent._modules[name] = made[child]
        return made.get(module, module)


class _Normalise(torch.autograd.Function):
    """Normalises by statistics of all ranks, which the gradient passes through."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
        group: comm.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:  # fmt: skip
        """
        Returns:
            The output; of all ranks, for each channel, the mean and the sum of squared deviations from it; their rows.
        """
        exact = torch.float64 if x.dtype is torch.float64 else torch.float32
        channels, dims = x.shape[1], [0, *range(2, x.dim())]
        rows = x.numel() // channels
        mine = x.new_zeros(2, channels, dtype=exact)  # the mean and the squared deviations of this rank's rows
        if rows:
            variance, mean = torch.var_mean(x.to(exact), dims, correction=0)
            mine = torch.stack([mean, variance * rows])
        given = torch.cat([mine.flatten(), mine.new_tensor([rows])])
        every = given.new_empty(group.size(), len(given))
        comm.all_gather_into_tensor(every, given, group)
        counts = every[:, -1:]
        total = int(counts.sum())
        if total == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 on all ranks together, here input size "
                f"{x.shape}"
            )
        means, deviations = every[:, :channels], every[:, channels:-1]
        mean = (means * counts).sum(0) / max(total, 1)
        deviation = (deviations + counts * (means - mean) ** 2).sum(0)
        variance = deviation / max(total, 1)
        scale, shift = (None if one is None else one.to(exact) for one in (weight, bias))
        output = torch.empty_like(x)
        if rows:
            output = torch.native_batch_norm(x, scale, shift, mean, variance, False, 0.0, eps)[0]
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps))
        ctx.group, ctx.total, ctx.eps = group, total, eps
        ctx.mark_non_differentiable(mean, deviation)
        return output, mean, deviation, total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("SyncBatchNorm: its gradient has none of its own: create_graph=True cannot be served")
        x, weight, mean, inverse = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        sums = mean.new_zeros(2, len(mean))  # of gradient * normalised input, and of the gradient, over all rows
        if x.numel():
            _, *found = torch.ops.aten.native_batch_norm_backward(
                grad, x, scale, None, None, mean, inverse, True, ctx.eps, [False, True, True]
            )
            sums = torch.stack(found)
        own = [None if weight is None else one.to(weight.dtype) for one in sums.clone()]
        if not ctx.needs_input_grad[0]:
            return None, *own, None, None
        comm.all_reduce(sums, group=ctx.group)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        slope, level, centre, factor = (
            one.view(shape) for one in (sums[0] * inverse / max(ctx.total, 1), sums[1] / max(ctx.total, 1),
                                        mean, scale * inverse)
        )  # fmt: skip
        gradient = ((grad - level) - (x - centre) * slope) * factor
        return gradient.to(x.dtype), *own, None, None
