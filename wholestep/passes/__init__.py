"""passes/: rewriting, `StepGraph` -> `StepGraph`.

A `Pass` is a plain function; settings are bound with `functools.partial`. Passes here keep every bit,
except those that say otherwise (`fuse_optimizer`), which the user asks for by name.
May import: errors, inline, ir, torch_compat.
"""

from wholestep.ir import Pass
from wholestep.passes.bucket_parts import bucket_parts
from wholestep.passes.common_subexpressions import same_values
from wholestep.passes.fuse_optimizer import fuse_optimizer
from wholestep.passes.gm_transformation import transformed
