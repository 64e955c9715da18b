"""Buckets of gradients: which parameters share one, its memory, and what a communication hook sees of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from contextlib import suppress
from itertools import compress
from typing import Any

import torch

from wholestep import comm
from wholestep.cached_property import cached_property
from wholestep.comm.shared_tensors import native
from wholestep.parallel.comm_hooks.mean import value_of
from wholestep.torch_compat import storage_uses

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


def memory_for(group: comm.ProcessGroup, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory on which the group's collectives work in place, if there is room; freed blocks of it are used again."""
    if device.type == "cpu" and comm.get_backend(group) == "shm":
        with suppress(comm.DistBackendError):  # /dev/shm is small: the transport copies out of private memory instead
            return comm.empty(elements, dtype=dtype, shared=True)
    return torch.empty(elements, dtype=dtype, device=device)


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
        self, members: list[int], parameters: list[torch.Tensor], group: comm.ProcessGroup, large_bytes: float,
        sparse: bool,
    ) -> None:  # fmt: skip
        self.group = group
        self.members, self.parameters, self.pending = members, parameters, len(members)
        dense = [] if sparse else list(enumerate(parameters))
        self.large = {k: _dense_strides(one) for k, one in dense if one.nbytes >= large_bytes}
        self.packed = [k for k, _ in dense if k not in self.large]
        self._packed_parameters = [parameters[k] for k in self.packed]
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
        count = sum(one.numel() for one in self._packed_parameters)
        return memory_for(self.group, count, self.parameters[0].dtype, self.parameters[0].device)

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """Where each packed gradient stands in ``flat``."""
        return views_of(self.flat, self._packed_parameters)

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
        under_way.wait()
        result = value_of(under_way)
        if not isinstance(result, torch.Tensor) or result.numel() != self.flat.numel():
            found = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise RuntimeError(
                f"communication hook: the future must give one tensor of {self.flat.numel()} elements, the size of "
                f"bucket.buffer(), found {found}: return the reduced gradients of the whole bucket"
            )
        return results if result is self.flat else views_of(result.reshape(-1), self.parameters)

    def fill(self, as_view: bool, unused: Set[int], owners: int) -> list[torch.Tensor]:
        """Has the gradients where they will be reduced, in place.

        Args:
            as_view: packed gradients become views of the flat tensor.
            unused: parameters whose gradients may have to stay as they are.
            owners: what a gradient's memory has, if nothing else has it.

        Returns:
            Flat memory to reduce: of each large gradient, then of the packed ones.
        """
        self._pack(as_view)
        sent = {k: self._large(k, unused, owners) for k in self.large}
        memory = [one.as_strided((one.numel(),), (1,)) for one in sent.values()]
        sent |= zip(self.packed, self.views, strict=True)
        self.results = [sent[k] for k in range(len(self.members))]
        return memory + [self.flat] * bool(self.packed)

    def _pack(self, as_view: bool) -> None:
        """Copies gradients into the flat tensor, except those that lie there."""
        grads = [one.grad for one in self._packed_parameters]
        for parameter, view, grad in zip(self._packed_parameters, self.views, grads, strict=True):
            if grad is None:
                view.zero_()
            elif as_view:
                parameter.grad = view
        _copy(self.views, grads)

    def _large(self, k: int, unused: Set[int], owners: int) -> torch.Tensor:
        """A large gradient itself where nothing else has its memory, or keeps it as it is; else a copy."""
        parameter = self.parameters[k]
        grad = parameter.grad
        if (
            grad is not None
            and not grad.requires_grad
            and (grad.dtype, grad.stride()) == (parameter.dtype, self.large[k])
            and self.members[k] not in unused
            and storage_uses(grad.untyped_storage()) <= owners
        ):
            return grad
        copied = torch.zeros_like(parameter)
        return copied if grad is None else copied.copy_(grad)

    def give(self, reduced: list[torch.Tensor], as_view: bool, untouched: Set[int]) -> None:
        """Gives the parameters their reduced gradients, except the untouched ones."""
        grads: list[Any] = [one.grad for one in self.parameters]
        for k, parameter in enumerate(self.parameters):
            if (grads[k] is None or self.sparse) and self.members[k] not in untouched:
                made = self.views[k] if as_view and not self.sparse else reduced[k]
                parameter.grad = grads[k] = torch.empty_like(made) if k in self.packed and not as_view else made
        if untouched:
            touched = [k not in untouched for k in self.members]
            grads, reduced = [*compress(grads, touched)], [*compress(reduced, touched)]
        _copy(grads, reduced)
        torch.autograd.graph.increment_version(grads)


def _copy(to: list[torch.Tensor], sources: list[Any]) -> None:
    """Copies tensors, except those that are missing and those that are there already. Counts no writes."""
    left = [i for i in native.copy_small(to, sources) if sources[i] is not None and sources[i] is not to[i]]
    if left:
        torch._foreach_copy_([to[i] for i in left], [sources[i] for i in left])
