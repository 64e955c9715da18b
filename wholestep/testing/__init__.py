"""Helpers for tests: functions run by many ranks, and a backend that counts captures."""

from wholestep.testing.counter import CompileCounter
from wholestep.testing.ranks import RankError, run_ranks

__all__ = ["CompileCounter", "RankError", "run_ranks"]
