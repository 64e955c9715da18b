"""What can go wrong between ranks.

DistError (wholestep.errors)
├── DistStoreError       a key-value store did not answer in time
├── DistNetworkError     a connection could not be made, or ended
├── DistBackendError     a backend cannot do what was asked
├── DistMismatchError    ranks called different collectives, or the same one on different tensors
├── DistTimeoutError     a collective did not end within its time-out
└── DistRankError        another rank has exited, was killed, or cannot go on
"""

from __future__ import annotations

from wholestep.errors import DistError

__all__ = [
    "DistBackendError",
    "DistError",
    "DistMismatchError",
    "DistNetworkError",
    "DistRankError",
    "DistStoreError",
    "DistTimeoutError",
]


class DistStoreError(DistError):
    """A store did not answer, or a key did not appear, within the time-out."""


class DistNetworkError(DistError):
    """A connection could not be made, was refused, or ended."""


class DistBackendError(DistError):
    """A backend cannot do what was asked, or its engine reported a failure."""


class DistMismatchError(DistError):
    """Ranks of a group called different collectives, or the same one with different tensors."""


class DistTimeoutError(DistError):
    """A collective did not end within its time-out."""


class DistRankError(DistError):
    """A rank of the group has exited, was killed, or said that it cannot go on."""
