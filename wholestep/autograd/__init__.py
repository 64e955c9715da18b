"""autograd/: a traced function -> a joint graph of forward and backward -> one graph for each.

Takes what trace recorded of a function, with the gradients that PyTorch's own autograd engine made of it in the same
trace. Gives a `Joint` graph and, by a partition, a forward graph, a backward graph and the names of the values that
the first saves for the second.
May import: errors, ir, torch_compat, capture, trace. Must not import spmd, passes, lower, runtime, api.
Its public functions `aot_function`, `aot_module` and `export_joint` stand above the pipeline, in `wholestep.aot`, and
are given out here when they are asked for.
"""

import importlib
from typing import Any

from wholestep.autograd.compiled_backward import CompiledBackward, compiled_backward
from wholestep.autograd.joint import Joint, Partition, Partitioned
from wholestep.autograd.min_cut import min_cut_partition
from wholestep.autograd.partition import default_partition, split

__all__ = [
    "CompiledBackward",
    "Joint",
    "Partition",
    "Partitioned",
    "compiled_backward",
    "default_partition",
    "min_cut_partition",
    "split",
]

# Name -> the module above the pipeline that has it.
ABOVE = {"aot_function": "wholestep.aot", "aot_module": "wholestep.aot", "export_joint": "wholestep.aot"}


def __getattr__(name: str) -> Any:
    if name not in ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(ABOVE[name]), name)
