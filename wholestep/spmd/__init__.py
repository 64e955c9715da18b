"""spmd/: a `StepGraph`, a mesh and plans -> the `StepGraph` of one rank, with its collectives.

Takes the graph of one step and what a plan says about each mesh axis. Gives the graph that each rank runs, and
`Launch`, which brings the ranks to one start before they run it.
May import: errors, ir, torch_compat, comm, capture, trace. Must not import passes, lower, runtime, api.
"""

from wholestep.comm import row_ops as _row_ops  # noqa: F401 - makes its operators known
from wholestep.spmd.buffers import BufferSync
from wholestep.spmd.calls import Call
from wholestep.spmd.fully_shard import FullyShard
from wholestep.spmd.global_view import AtRest, GlobalPlan, View
from wholestep.spmd.launch import Launch, Plan
from wholestep.spmd.mesh import DeviceMesh, init_device_mesh
from wholestep.spmd.placements import Partial, Replicate, Shard
from wholestep.spmd.plan_file import load_plan, save_plan
from wholestep.spmd.plans import DataParallel, ShardedOptimizer
from wholestep.spmd.redistribute import bytes_sent, redistribute
from wholestep.spmd.rules import register_sharding
from wholestep.spmd.sharding import Build, Dims, Row
from wholestep.spmd.tensor_parallel import TensorParallel
from wholestep.spmd.whole_state import full_state_dict

__all__ = [
    "AtRest",
    "BufferSync",
    "Build",
    "Call",
    "DataParallel",
    "DeviceMesh",
    "Dims",
    "FullyShard",
    "GlobalPlan",
    "Launch",
    "Partial",
    "Plan",
    "Replicate",
    "Row",
    "Shard",
    "ShardedOptimizer",
    "TensorParallel",
    "View",
    "bytes_sent",
    "full_state_dict",
    "init_device_mesh",
    "load_plan",
    "redistribute",
    "register_sharding",
    "save_plan",
]
