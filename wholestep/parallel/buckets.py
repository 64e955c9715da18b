"""Buckets of gradients: which parameters share one, its memory, and what a communication hook sees of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import torch

from wholestep import comm

FIRST_BUCKET_BYTES = 2**20  # small, so that communication begins early in the backward
LARGE_BYTES = 2**20  # a gradient from this size on is reduced where it lies: four copies of its memory less


def bucket_assignment(
    tensors: Sequence[torch.Tensor], limits: Sequence[int], alone: Sequence[bool] | None = None
) -> tuple[list[list[int]], list[int]]:
    """Puts tensors into buckets in their order; a bucket is closed by the tensor with which it reaches its limit.

    Args:
        tensors: in the order in which they are filled in. Those of one bucket have one dtype and device.
        limits: bytes of the first, second, … bucket of each dtype and device; the last holds for all further ones.
        alone: which tensors get a bucket of their own.

    Returns:
        The indices in each bucket, ordered by the first of them; the limit of each bucket.
    """
    buckets: list[tuple[list[int], int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    closed: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for index, tensor in enumerate(tensors):
        if alone is not None and alone[index]:
            buckets.append(([index], 0))
            continue
        kind = tensor.dtype, tensor.device
        members, size = filling.pop(kind, ([], 0))
        size += tensor.numel() * tensor.element_size()
        limit = limits[min(closed[kind], len(limits) - 1)]
        if not members:
            buckets.append((members, limit))
        members.append(index)
        if size >= limit:
            closed[kind] += 1
        else:
            filling[kind] = members, size
    return [members for members, _ in buckets], [limit for _, limit in buckets]


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides of its gradient: its own, if they fill a block of memory."""
    return torch.empty_like(parameter, device="meta").stride()


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One view of a flat tensor for each parameter, with its strides where its memory has no gaps or overlaps."""
    views, offset = [], 0
    for parameter in parameters:
        part = flat.narrow(0, offset, parameter.numel())
        views.append(part.as_strided(parameter.shape, _dense_strides(parameter)))
        offset += parameter.numel()
    return views


def flat_as(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A gradient's elements in the order of `views_of`."""
    if parameter.is_contiguous():
        return grad.reshape(-1)
    flat = grad.new_empty(grad.numel())
    views_of(flat, [parameter])[0].copy_(grad)
    return flat


class GradBucket:
    """What a communication hook is given, with the methods of torch's class of this name."""

    def __init__(self, index: int, last: bool, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self._index, self._last, self._buffer, self._parameters = index, last, buffer, parameters

    def index(self) -> int:
        """The bucket's number: hooks are called in the order of these, on all ranks."""
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """All gradients, flat: [elements of the bucket]. Not yet divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Gives the bucket another tensor: the compressed gradients, in a hook that wraps another."""
        self._buffer = buffer

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the bucket, in the order of their gradients in the buffer."""
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """The gradients as views of the buffer."""
        return views_of(self._buffer, self._parameters)


class Bucket:
    """Some parameters whose gradients are sent together: large ones from where they lie, the others in a flat tensor.

    Attributes:
        members: indices of the parameters.
        large: places, among the members, of those whose gradients are sent by themselves, and these gradients' strides.
        packed: places of those whose gradients are copied into ``flat``.
        pending: how many gradients are still to come in this backward.
        results: for each member, where its reduced gradient will stand.
        sparse: whether it is that of one parameter whose gradients are sparse, and go another way.
        under_way: the collectives that have been started, or a hook's future.
    """

    def __init__(
        self, members: list[int], parameters: list[torch.Tensor], large_bytes: float, sparse: bool = False
    ) -> None:
        self.members, self.parameters, self.pending = members, parameters, len(members)
        self.large = {k: _dense_strides(one) for k, one in enumerate(parameters) if one.nbytes >= large_bytes}
        self.large = {} if sparse else self.large
        self.packed = [] if sparse else [k for k in range(len(parameters)) if k not in self.large]
        self.sparse = sparse
        self.results: list[torch.Tensor] = []
        self.under_way: list[comm.Work | None] | torch.futures.Future = []

    @property
    def nbytes(self) -> int:
        """Of all its gradients."""
        return sum(one.nbytes for one in self.parameters)

    @cached_property
    def flat(self) -> torch.Tensor:
        """Memory for the packed gradients, one after the other."""
        count = sum(self.parameters[k].numel() for k in self.packed)
        return torch.empty(count, dtype=self.parameters[0].dtype, device=self.parameters[0].device)

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """Where each packed gradient stands in ``flat``."""
        return views_of(self.flat, [self.parameters[k] for k in self.packed])

    def reduced(self) -> list[torch.Tensor]:
        """Waits for the communication; gives each member's reduced gradient.

        Raises:
            RuntimeError: a hook's future has something else than one tensor of the buffer's size.
        """
        (results, self.results), (under_way, self.under_way) = (self.results, []), (self.under_way, [])
        if isinstance(under_way, list):
            for work in under_way:
                if work is not None:
                    work.wait()
            return results
        result = under_way.wait()
        result = result[0] if isinstance(result, (list, tuple)) and len(result) == 1 else result
        if not isinstance(result, torch.Tensor) or result.numel() != self.flat.numel():
            found = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise RuntimeError(
                f"communication hook: the future must give one tensor of {self.flat.numel()} elements, the size of "
                f"bucket.buffer(), found {found}: return the reduced gradients of the whole bucket"
            )
        return results if result is self.flat else views_of(result.reshape(-1), self.parameters)
