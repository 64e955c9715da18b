"""NumPy arrays: a step bakes what it reads of them, so they are guarded by their contents."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy

from wholestep.errors import UnsupportedError


@dataclass(frozen=True)
class Stamp:
    """What tells the contents of two arrays apart; of 10 MB it takes 3 ms."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    checksum: int

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} with checksum {self.checksum:08x}"


def stamp(array: numpy.ndarray[Any, Any]) -> Stamp:
    """The contents of an array as they are now; of an array of objects, which objects it holds."""
    held = numpy.fromiter(map(id, array.flat), numpy.int64, array.size) if array.dtype.hasobject else array
    checksum = zlib.crc32(numpy.ascontiguousarray(held).view(numpy.uint8).data) if array.size else 0
    return Stamp(str(array.dtype), array.shape, array.strides, checksum)


@dataclass(eq=False)
class Array:
    """An array that a step can see, as it was before."""

    value: numpy.ndarray[Any, Any]
    source: Any
    stamp: Stamp
    copy: numpy.ndarray[Any, Any] | None = None

    def keep(self) -> None:
        """Keeps a copy to restore, where the step could write to it."""
        self.copy = self.value.copy() if self.value.flags.writeable else None

    def restore(self) -> None:
        """Puts the contents back."""
        if self.copy is not None and stamp(self.value) != self.stamp:
            self.value[...] = self.copy
        self.copy = None

    def refuse_changed(self) -> None:
        """Refuses a step that wrote to the array."""
        if stamp(self.value) != self.stamp:
            raise UnsupportedError(
                f"the step writes to {self.source}, a NumPy array", remedy="keep it in a tensor, or write to it outside"
            )


def as_stamped(arrays: list[numpy.ndarray[Any, Any]], stamps: list[Stamp]) -> bool:
    """Whether all arrays have the contents that they had."""
    return list(map(stamp, arrays)) == stamps
