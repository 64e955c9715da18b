"""Wholestep: an ordinary PyTorch training step, captured whole, as one readable graph."""

from wholestep import autograd, checkpoint, parallel
from wholestep.api import compile, trace
from wholestep.checkpoint import load, save
from wholestep.compiled import Compiled
from wholestep.override import Override
from wholestep.spmd import (
    DataParallel,
    DeviceMesh,
    FullyShard,
    Partial,
    Replicate,
    Shard,
    ShardedOptimizer,
    TensorParallel,
    full_state_dict,
    init_device_mesh,
    register_sharding,
)
from wholestep.step_functions import disable, graph_break, is_compiling
from wholestep.step_log import log

__version__ = "0.1.0"

__all__ = [
    "Compiled", "DataParallel", "DeviceMesh", "FullyShard", "Override", "Partial", "Replicate", "Shard",
    "ShardedOptimizer", "TensorParallel", "__version__", "autograd", "checkpoint", "compile", "disable",
    "full_state_dict", "graph_break", "init_device_mesh", "is_compiling", "load", "log", "parallel",
    "register_sharding", "save", "trace",
]
