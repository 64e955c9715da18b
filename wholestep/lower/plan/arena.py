"""Arena allocation: an offset in one block of memory for each buffer, from sizes and lifetimes.

Greedy by size (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020): the
biggest buffer first, each at the lowest gap free during its whole lifetime that fits it tightest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

SHARED = "shared"  # the arena of buffers on which the shared-memory transport works in place


def alignment(device: str) -> int:
    """Bytes at whose multiples torch's own allocators begin tensors: a GPU's libraries choose kernels by it."""
    return 64 if device in ("cpu", SHARED) else 512


@dataclass
class Slot:
    """One buffer of the arena.

    Attributes:
        nbytes: size in bytes.
        start, end: first and last position at which its content matters, both included.
        device: name of the device whose arena it lies in, or `SHARED`.
        offset: in bytes, set by `place`.
        guest: whether it may lie in the transport's arena.
        pieces: (offset inside, bytes, start) of what is written to it, where all of it does not begin at once.
    """

    nbytes: int
    start: int
    end: int
    device: str = "cpu"
    offset: int = -1
    guest: bool = True
    pieces: list[tuple[int, int, int]] = field(default_factory=list)

    def parts(self) -> list[Slot]:
        """Its pieces as slots that are placed."""
        pieces = self.pieces or [(0, self.nbytes, self.start)]
        return [Slot(size, start, self.end, self.device, self.offset + offset) for offset, size, start in pieces]


def place(slots: Sequence[Slot]) -> dict[str, int]:
    """Sets every slot's offset; slots whose lifetimes overlap never overlap in memory.

    The arena of the transport comes first. The CPU's slots lie there, too, before gradients take their places in it,
    one after another.

    Returns:
        Bytes of the arena of each device.
    """
    sizes: dict[str, int] = {}
    for device in sorted({slot.device for slot in slots}, key=lambda name: (name != SHARED, name)):
        mine = [slot for slot in slots if slot.device == device]
        host = [part for slot in slots if slot.device == SHARED for part in slot.parts()] if device == "cpu" else []
        wall = sizes.get(SHARED, 0) if host else 0
        sizes[device] = _place_all(mine, host, wall, alignment(device)) - wall
        for slot in mine if host else ():
            if slot.offset < wall:
                slot.device = SHARED
            else:
                slot.offset -= wall
    return sizes


def _place_all(slots: list[Slot], host: list[Slot], wall: int, align: int) -> int:
    """Places slots above a wall, or below it beside those that are there already; gives the end of all."""
    by_size = [*host, *sorted(slots, key=lambda s: (-s.nbytes, s.start))]
    starts, ends, lows, highs = (np.zeros(len(by_size), dtype=np.int64) for _ in range(4))
    total = wall
    for count, slot in enumerate(by_size):
        size = max(align, -(-slot.nbytes // align) * align)
        if count >= len(host):
            alive = (starts[:count] <= slot.end) & (ends[:count] >= slot.start)
            taken = (wall if slot.guest else 0, wall)  # what lies on both sides of the wall lies in no arena
            low, high = np.append(lows[:count][alive], taken[0]), np.append(highs[:count][alive], taken[1])
            slot.offset = _lowest_tight_gap(low, high, size, align)
        starts[count], ends[count] = slot.start, slot.end
        lows[count], highs[count] = slot.offset, slot.offset + size
        total = max(total, slot.offset + size)
    return total


def _lowest_tight_gap(lows: np.ndarray, highs: np.ndarray, size: int, align: int) -> int:
    """The aligned start of the smallest gap of at least ``size`` between occupied ranges, else after their end.

    The ranges are pieces of a bucket, too, which end anywhere.
    """
    order = np.argsort(lows, kind="stable")
    lows = lows[order]
    reached = -(-np.maximum.accumulate(highs[order]) // align) * align
    begins = np.concatenate(([0], reached[:-1]))
    gaps = lows - begins
    fits = np.flatnonzero(gaps >= size)
    if len(fits):
        return int(begins[fits[np.argmin(gaps[fits])]])
    return int(reached[-1])


def grow(slots: Sequence[Slot], needed: Sequence[int]) -> dict[str, int] | None:
    """Places slots anew where they need more than they have: the places for the largest so far do for smaller ones.

    Args:
        needed: bytes of each.

    Returns:
        Bytes of the arena of each device; None where all stay.
    """
    if all(nbytes <= slot.nbytes for slot, nbytes in zip(slots, needed, strict=True)):
        return None
    for slot, nbytes in zip(slots, needed, strict=True):
        if nbytes > slot.nbytes:  # with room for larger ones yet: what is not written takes no pages
            slot.nbytes = nbytes + nbytes // (1 if slot.device == "cpu" else 4)
    return place(slots)


def peak(slots: Sequence[Slot]) -> tuple[int, int]:
    """The most bytes alive at one position, which no arena can go below, and the first such position."""
    changes: dict[int, int] = {}
    for slot in slots:
        changes[slot.start] = changes.get(slot.start, 0) + slot.nbytes
        changes[slot.end + 1] = changes.get(slot.end + 1, 0) - slot.nbytes
    places = sorted(changes)
    levels = [*accumulate(changes[place] for place in places)] or [0]
    return max(levels), places[levels.index(max(levels))] if places else 0
