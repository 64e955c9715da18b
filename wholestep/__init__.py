"""Wholestep: an ordinary PyTorch training step, captured whole, as one readable graph."""

from wholestep.api import Compiled, compile, trace
from wholestep.override import Override
from wholestep.spmd import (
    DataParallel,
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    ShardedOptimizer,
    full_state_dict,
    init_device_mesh,
)

__version__ = "0.1.0"

__all__ = [
    "Compiled",
    "DataParallel",
    "DeviceMesh",
    "Override",
    "Partial",
    "Replicate",
    "Shard",
    "ShardedOptimizer",
    "__version__",
    "compile",
    "full_state_dict",
    "init_device_mesh",
    "trace",
]
