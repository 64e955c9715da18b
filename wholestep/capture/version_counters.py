"""Version counters of tensors from outside, as a step reads them and leaves them in what it gives or keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wholestep.capture.sources import Child
from wholestep.errors import CaptureError


class Version(Child):
    """The version counter of a tensor, less by ``key`` than it is then."""

    paths, texts = "{0.path}._version - {1}", "{0.text}._version - {1}"
    step = staticmethod(lambda tensor, less: tensor._version - less)


class Count(int):
    """The version counter of a tensor from outside, as a step reads it: another number at each call.

    It may be kept, returned, set again, and moved by constants; a branch on it would hold for one call only.

    Attributes:
        tensor: the tensor whose counter it is.
    """

    tensor: torch.Tensor
    what, remedy = "a version counter", "compare it with another reading of the same tensor's counter"

    def of(self, tensor: torch.Tensor) -> Any:
        """The same number, for a tensor."""
        self.tensor = tensor
        return self

    def __add__(self, other: int) -> Any:
        return Count(int(self) + int(other)).of(self.tensor)

    __radd__ = __add__

    def __sub__(self, other: int) -> Any:
        difference = int(self) - int(other)
        if isinstance(other, Count):
            return difference if other.tensor is self.tensor else self._compare(int.__sub__, other)
        return Count(difference).of(self.tensor)

    def _compare(self, compare: Callable[[int, int], Any], other: Any) -> Any:
        if isinstance(other, Count) and other.tensor is self.tensor:
            return compare(int(self), int(other))
        what = f"Python compares {self.what}, or computes with it, another number at each call"
        raise CaptureError(what, remedy=self.remedy)

    def __bool__(self) -> bool:
        return bool(self._compare(int.__ne__, 0))


def _comparison(compare: Callable[[int, int], Any]) -> Callable[[Count, Any], Any]:
    return lambda count, other: count._compare(compare, other)


for _way in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Count, _way, _comparison(getattr(int, _way)))
