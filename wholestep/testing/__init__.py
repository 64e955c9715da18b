"""Helpers for tests of programs that run on many ranks."""

from wholestep.testing.ranks import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
