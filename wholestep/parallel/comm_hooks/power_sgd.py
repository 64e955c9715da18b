"""PowerSGD: gradients are sent as two thin matrices whose product is near them.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, 2019.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from wholestep import comm
from wholestep.parallel.comm_hooks.mean import allreduce_hook, communication_hook, in_order, mean

HALVES = torch.float16, torch.bfloat16


class PowerSGDState:
    """What PowerSGD keeps from one backward to the next. It pickles without its group, which is then all ranks.

    Args:
        process_group: whose ranks take part; None for all.
        matrix_approximation_rank: columns of the thin matrices.
        start_powerSGD_iter: backwards before it are reduced as they are.
        min_compression_rate: a gradient is sent whole where two thin matrices are not smaller by this factor.
        use_error_feedback: what was lost in one backward is added to the next one's gradients.
        warm_start: each backward goes on from the thin matrices of the last one.
        orthogonalization_epsilon: added to the norms that columns are divided by.
        random_seed: of the thin matrices' first values; the same on all ranks.
        batch_tensors_with_same_shape: gradients of one shape are multiplied together.

    Raises:
        ValueError: compression would start before buckets have their final form, which is after two backwards.
    """

    def __init__(
        self, process_group: comm.ProcessGroup | None, matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000, min_compression_rate: float = 2, use_error_feedback: bool = True,
        warm_start: bool = True, orthogonalization_epsilon: float = 0, random_seed: int = 0,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:  # fmt: skip
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                "because PowerSGD can only be applied after the first two iterations in DDP."
            )
        self.process_group = process_group
        self.matrix_approximation_rank, self.min_compression_rate = matrix_approximation_rank, min_compression_rate
        self.start_powerSGD_iter, self.use_error_feedback = start_powerSGD_iter, use_error_feedback
        self.warm_start, self.orthogonalization_epsilon = warm_start, orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.rng = np.random.RandomState(random_seed)
        self.error_dict: dict[int, torch.Tensor] = {}
        self.p_memory_dict: dict[int, torch.Tensor] = {}
        self.q_memory_dict: dict[int, torch.Tensor] = {}
        self.iter = self.total_numel_before_compression = self.total_numel_after_compression = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"process_group": None}

    def maybe_increase_iter(self, bucket: Any) -> None:
        """Counts a backward with its last bucket."""
        self.iter += bucket.is_last()

    def compression_stats(self) -> tuple[float, int, int]:
        """The rate of compression, and the numbers of elements before and after it, of all backwards so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after else 0, before, after


@communication_hook
def powerSGD_hook(state: PowerSGDState, bucket: Any) -> torch.futures.Future:
    """PowerSGD on each gradient of the bucket, as a matrix of its first dimension by all others."""
    return _hook(state, bucket, False)


@communication_hook
def batched_powerSGD_hook(state: PowerSGDState, bucket: Any) -> torch.futures.Future:
    """PowerSGD on the bucket as one square matrix: less to compute, and less exact."""
    return _hook(state, bucket, True)


def _hook(state: PowerSGDState, bucket: Any, square: bool) -> torch.futures.Future:
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(state.process_group, bucket)
    group, buffer, gradients = comm.get_group(state.process_group), bucket.buffer(), bucket.gradients()

    def reduced() -> torch.Tensor:
        if square:
            side = math.ceil(math.sqrt(buffer.numel()))
            padded = torch.nn.functional.pad(buffer, (0, side**2 - buffer.numel()))
            _approximated_mean(state, bucket.index(), padded, [padded.view(side, side)], group)
            buffer.copy_(padded[: buffer.numel()])
        else:
            _approximated_mean(state, bucket.index(), buffer, gradients, group)
        state.maybe_increase_iter(bucket)
        return buffer

    return in_order(group, reduced)


def _approximated_mean(
    state: PowerSGDState, index: int, flat: torch.Tensor, gradients: list[torch.Tensor], group: comm.ProcessGroup
) -> None:
    """Replaces the gradients, which are views of ``flat``, by an approximation of their mean over the ranks."""
    if state.use_error_feedback:
        if index in state.error_dict:
            flat.add_(state.error_dict[index])
        exact = flat.clone()
    low_rank, whole = _sorted_by_worth(state, gradients)
    if whole:
        averaged = mean(torch.cat([one.reshape(-1) for one in whole]), group)
        for one, new in zip(whole, averaged.split([one.numel() for one in whole]), strict=True):
            one.copy_(new.view(one.shape))
    batches = [torch.stack(same) for same in low_rank]
    ps, qs = _thin_matrices(state, index, batches)
    for batch, p, q in zip(batches, ps, qs, strict=True):
        torch.bmm(batch, q, out=p)
    comm.all_reduce(state.p_memory_dict[index], group=group)
    for batch, p, q in zip(batches, ps, qs, strict=True):
        orthogonalize(p, state.orthogonalization_epsilon)
        torch.bmm(batch.transpose(1, 2), p, out=q)
    q_memory = state.q_memory_dict[index]
    comm.all_reduce(q_memory, group=group)
    q_memory.div_(group.size())
    for same, p, q in zip(low_rank, ps, qs, strict=True):
        for one, new in zip(same, torch.bmm(p, q.transpose(1, 2)), strict=True):
            one.copy_(new)
    if state.use_error_feedback:
        state.error_dict[index] = exact - flat
    if not state.warm_start:
        state.p_memory_dict.clear()
        state.q_memory_dict.clear()


def _rank(state: PowerSGDState, rows: int, columns: int) -> int:
    return min(rows, columns, state.matrix_approximation_rank)


def _sorted_by_worth(
    state: PowerSGDState, gradients: list[torch.Tensor]
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Gradients to approximate, as matrices in batches of one shape, and those to send whole."""
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    whole = []
    for gradient in gradients:
        rows = gradient.shape[0] if gradient.dim() else 1
        matrix = gradient.view(rows, -1)
        count, thin = matrix.numel(), sum(matrix.shape) * _rank(state, *matrix.shape)
        worth = thin * state.min_compression_rate < count
        state.total_numel_before_compression += count
        state.total_numel_after_compression += thin if worth else count
        if worth:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        else:
            whole.append(gradient)
    batches = list(by_shape.values())
    return batches if state.batch_tensors_with_same_shape else [[one] for same in batches for one in same], whole


def _thin_matrices(
    state: PowerSGDState, index: int, batches: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """P and Q of each batch, views of the bucket's; the columns of Q are orthonormal."""
    shapes = [
        [(batch.shape[0], batch.shape[dim], _rank(state, *batch.shape[1:])) for batch in batches] for dim in (1, 2)
    ]
    fresh = index not in state.p_memory_dict
    if fresh:
        for memory, sizes in zip((state.p_memory_dict, state.q_memory_dict), shapes, strict=True):
            total = sum(math.prod(size) for size in sizes)
            memory[index] = batches[0].new_empty(total) if batches else torch.empty(0)
    ps, qs = (
        [part.view(size) for part, size in zip(memory.split([math.prod(s) for s in sizes]), sizes, strict=True)]
        for memory, sizes in zip((state.p_memory_dict[index], state.q_memory_dict[index]), shapes, strict=True)
    )
    if fresh:
        generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    for q in qs:
        if fresh:
            q.copy_(torch.randn(q.shape, dtype=q.dtype, generator=generator))
        orthogonalize(q, state.orthogonalization_epsilon)
    return ps, qs


def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
    """Makes the columns of each matrix orthonormal, in place; a column of zeros stays one.

    Args:
        matrices: [matrices, rows, columns], not fewer rows than columns.
    """
    columns = matrices.shape[2]
    if columns > 2 and matrices.dtype not in HALVES:
        matrices.copy_(torch.linalg.qr(matrices).Q)
        return
    for i in range(columns):
        column, others = matrices[:, :, i : i + 1], matrices[:, :, i + 1 :]
        norm = column.norm(dim=1, keepdim=True) + epsilon
        column.div_(norm.masked_fill(norm == 0, 1))
        others.sub_(column * (column * others).sum(dim=1, keepdim=True))
