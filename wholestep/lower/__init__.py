"""Graph to callable: `StepGraph` in, ``fn(*inputs) -> outputs`` out.

Takes a checked `StepGraph`; gives `Program` (generated ATen calls over a planned arena), a callable over
Inductor's code, or a user's own backend. All write the new values of mutated inputs into those inputs.
May import `ir`, `errors`, `torch_compat` and `passes/normal`; not capture, trace or runtime.
"""

from wholestep.lower.aten import Program, lower_aten
from wholestep.lower.inductor import lower_callable, lower_inductor
from wholestep.lower.naive import interpret, lower_naive

__all__ = ["Program", "interpret", "lower_aten", "lower_callable", "lower_inductor", "lower_naive"]
