"""How the rows of a tensor are chunked over the ranks of a group."""

from __future__ import annotations


def piece_size(length: int, ranks: int) -> int:
    """Rows of all pieces but the last ones."""
    return -(-length // ranks)


def piece(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where one rank's rows start and stop: those of `torch.chunk`, so that the last ranks have less, or nothing."""
    step = piece_size(length, ranks)
    return min(rank * step, length), min((rank + 1) * step, length)
