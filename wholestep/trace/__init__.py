"""trace/: a Python step and its snapshot -> `Traced`, a `StepGraph` with everything a replay must do.

Takes a callable, its arguments and capture's snapshot (where tensors are found, which numbers are inputs). Gives one
flat graph of pure ATen calls, results as a template, effects on Python objects, predicates that must hold and
version-counter increments.
May import: capture, errors, fake_evaluate, fake_layouts, functional, ir, marks, nested, patches, sizes, torch_compat.
"""

from wholestep.trace.patches.python_patches import gradient_memory, note_gradient
from wholestep.trace.record.finish import ReentrantCheckpoint, SharedMemory, Traced
from wholestep.trace.record.recorder import Recorder
from wholestep.trace.record.trace_step import trace_step
from wholestep.trace.record.user_line import UnmetCode
