"""Unsharded views: what a rank holds as a part has the shape of the whole tensor while a step is traced.

The user's Python reads `x.shape` and `weight.numel()`, and autograd's C++ reads the sizes of leaves and of gradients,
so the objects themselves must have whole shapes. Their data is exchanged for memory of the whole size that nobody
touches (a kernel gives pages when they are written), and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from wholestep.capture.snapshot.reachable import TensorInput
from wholestep.errors import UnsupportedError
from wholestep.tensor_parts import Part, give_data, part_of

# What tensors hold, by the plans, where they carry no mark that says so.
PartsOf = Callable[[Sequence[TensorInput]], Sequence[Part | None]]


class UnshardedViews:
    """The tensors of one snapshot that stand for whole ones.

    Attributes:
        parts: id of a tensor -> what it holds.
        exchanged: the tensors that have their whole shapes now, with their own data.
    """

    def __init__(self, tensors: Iterable[TensorInput], parts: PartsOf | None) -> None:
        known = list(tensors)
        meant = parts(known) if parts is not None else [None] * len(known)
        self.parts: dict[int, Part] = {}
        self.exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._classes: list[tuple[torch.Tensor, type]] = []  # of those whose class is another as long as they are whole
        for found, part in zip(known, meant, strict=True):
            mark = part_of(found.tensor) or part
            if mark is not None:
                self.parts[id(found.tensor)] = mark
                if found.tensor.is_leaf and found.tensor.grad is not None:  # of the same part as its tensor
                    self.parts[id(found.tensor.grad)] = mark
        self._held = [(found, self.parts[id(found.tensor)]) for found in known if id(found.tensor) in self.parts]

    def put(self) -> None:
        """Gives the tensors their whole shapes, until `back`."""
        for found, part in self._held:
            tensor = found.tensor
            if tensor.is_inference():
                raise UnsupportedError(
                    f"{found.source}, of which each rank holds a part, is an inference tensor",
                    remedy="make batches outside of torch.inference_mode()",
                )
            kind = type(tensor)
            if hasattr(kind, "of_whole"):
                self._classes.append((tensor, kind))
                tensor.__class__ = kind.of_whole
            mine = tensor.detach()
            self.exchanged.append((tensor, mine))
            give_data(tensor, _untouched(tensor, part))

    def back(self) -> None:
        """Gives the tensors their own data back."""
        while self.exchanged:
            give_data(*self.exchanged.pop())
        self.give_classes()

    def give_classes(self) -> None:
        """Gives the tensors their own classes back."""
        while self._classes:
            tensor, kind = self._classes.pop()
            tensor.__class__ = kind


def _untouched(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A tensor of the whole shape, laid out as the part is, in memory that nobody has written."""
    strides = whole_strides(tensor, part)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, strides, strict=True))
    memory = torch.UntypedStorage(reach * tensor.element_size() if part.shape and 0 not in part.shape else 0,
                                  device=tensor.device)  # fmt: skip
    with torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, 0, part.shape, strides)


def whole_strides(tensor: torch.Tensor, part: Part) -> tuple[int, ...]:
    """Strides of the whole tensor that a part would be cut from: the same order of dimensions, the same gaps."""
    if tensor.is_contiguous():
        return torch.empty(part.shape, device="meta").stride()
    strides = list(tensor.stride())
    for dim, (own, whole) in enumerate(zip(part.size, part.shape, strict=True)):
        inner = tensor.stride(dim)
        for other, stride in enumerate(tensor.stride()):
            if own and own != whole and 0 < inner < stride:
                strides[other] = strides[other] * whole // own
    return tuple(strides)
