"""passes/: rewriting, `StepGraph` -> `StepGraph`.

A `Pass` is a plain function; settings are bound with `functools.partial`. All but `fuse_pointwise` keep every bit.
May import: errors, functional, inline, ir, torch_compat.
"""

from wholestep.ir import Pass
from wholestep.passes.bucket_parts import bucket_parts
from wholestep.passes.canonicalize import same_values
from wholestep.passes.fuse_pointwise import Region, fuse_pointwise
from wholestep.passes.user_functions import transformed
