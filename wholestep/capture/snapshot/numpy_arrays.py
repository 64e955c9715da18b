"""NumPy arrays and other memory (`bytearray`, `array.array`, ctypes): a step bakes what it reads of it.

So it is guarded by its contents.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import zlib
from dataclasses import dataclass
from typing import Any

import numpy

from wholestep.errors import UnsupportedError

# All that lets its memory be read as a buffer and is no tensor: numbers and arrays of C, and arrays of Python.
BUFFERS: tuple[type, ...] = (
    bytearray, array.array, memoryview, mmap.mmap, ctypes.Array, ctypes.Structure, ctypes.Union,
    ctypes.c_int.__mro__[1],  # the base of all single numbers
)  # fmt: skip


@dataclass(frozen=True)
class Stamp:
    """What tells the contents of two arrays apart; of 10 MB it takes 3 ms."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    checksum: int

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} with checksum {self.checksum:08x}"


def stamp(value: Any) -> Stamp:
    """The contents of an array as they are now; of an array of objects, which objects it holds."""
    if not isinstance(value, numpy.ndarray):
        with memoryview(value) as view:
            return Stamp(view.format, view.shape or (), (), zlib.crc32(view.tobytes()))
    held = numpy.fromiter(map(id, value.flat), numpy.int64, value.size) if value.dtype.hasobject else value
    checksum = zlib.crc32(numpy.ascontiguousarray(held).view(numpy.uint8).data) if value.size else 0
    return Stamp(str(value.dtype), value.shape, value.strides, checksum)


@dataclass(eq=False)
class Array:
    """An array that a step can see, as it was before."""

    value: Any
    source: Any
    stamp: Stamp
    copy: Any = None

    def keep(self) -> None:
        """Keeps a copy to restore, where the step could write to it."""
        if isinstance(self.value, numpy.ndarray):
            self.copy = self.value.copy() if self.value.flags.writeable else None
        else:
            with memoryview(self.value) as view:
                self.copy = None if view.readonly else view.tobytes()

    def restore(self) -> None:
        """Puts the contents back."""
        if self.copy is not None and stamp(self.value) != self.stamp:
            if isinstance(self.value, numpy.ndarray):
                self.value[...] = self.copy
            elif isinstance(self.value, array.array):
                self.value[:] = array.array(self.value.typecode, self.copy)
            elif isinstance(self.value, bytearray):
                self.value[:] = self.copy
            else:
                with memoryview(self.value) as view:
                    view.cast("B")[:] = self.copy
        self.copy = None

    def refuse_changed(self) -> None:
        """Refuses a step that wrote to the array."""
        if stamp(self.value) != self.stamp:
            kind = "NumPy array" if isinstance(self.value, numpy.ndarray) else type(self.value).__name__
            raise UnsupportedError(
                f"the step writes to {self.source}, a {kind}", remedy="keep it in a tensor, or write to it outside"
            )


def as_stamped(arrays: list[Any], stamps: list[Stamp]) -> bool:
    """Whether all arrays have the contents that they had."""
    return list(map(stamp, arrays)) == stamps
