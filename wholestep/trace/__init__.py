"""trace/: a Python step and its snapshot -> `Traced`, a `StepGraph` with everything a replay must do.

Takes a callable, its arguments and what capture knows of the world (where tensors live, which numbers are
inputs). Gives one flat graph of pure ATen calls, results as a template, effects on Python objects,
predicates that must hold and version-counter increments.
May import: errors, ir, torch_compat. Must not import capture, autograd, spmd, passes, lower, runtime.
"""

from wholestep.trace.inputs import ReshapedInput
from wholestep.trace.recorder import Recorder
from wholestep.trace.step import trace_step
from wholestep.trace.traced import ReentrantCheckpoint, SharedMemory, Traced, World
from wholestep.trace.world import gradient_memory

__all__ = [
    "Recorder",
    "ReentrantCheckpoint",
    "ReshapedInput",
    "SharedMemory",
    "Traced",
    "World",
    "gradient_memory",
    "trace_step",
]
