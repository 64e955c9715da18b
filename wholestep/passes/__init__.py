"""Rewriting: graph -> graph, a `StepGraph` in, a `StepGraph` out.

A `Pass` is a plain function; settings are bound with `functools.partial`. Passes here keep every bit,
except those that say otherwise (`fuse_optimizer`), which the user asks for by name.
May import `ir`, `errors` and `torch_compat`; not capture, trace, lower or runtime.
"""

from wholestep.ir import Pass
from wholestep.passes.cleanup import run_passes, same_values
from wholestep.passes.fuse_optimizer import fuse_optimizer
from wholestep.passes.transformed import transformed

__all__ = ["Pass", "fuse_optimizer", "run_passes", "same_values", "transformed"]
