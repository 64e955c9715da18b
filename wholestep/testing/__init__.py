"""Helpers for tests: functions run by many ranks, and a backend that counts captures.

May import: comm.
"""

from wholestep.testing.compile_counter import CompileCounter
from wholestep.testing.run_ranks import RankError, run_ranks
