"""spmd/: a `StepGraph`, a mesh and plans -> the `StepGraph` of one rank, with its collectives.

Takes the graph of one step and what a plan says about each mesh axis. Gives the graph that each rank runs, and
`Launch`, which brings the ranks to one start before they run it.
May import: errors, ir, torch_compat, comm, capture, trace. Must not import passes, lower, runtime, api.
"""

from wholestep.spmd.launch import Launch, Plan
from wholestep.spmd.mesh import DeviceMesh, init_device_mesh
from wholestep.spmd.placements import Partial, Replicate, Shard
from wholestep.spmd.plans import DataParallel
from wholestep.spmd.redistribute import bytes_sent, redistribute

__all__ = [
    "DataParallel",
    "DeviceMesh",
    "Launch",
    "Partial",
    "Plan",
    "Replicate",
    "Shard",
    "bytes_sent",
    "init_device_mesh",
    "redistribute",
]
