"""spmd/: a `StepGraph`, a mesh and plans -> the `StepGraph` of one rank, with its collectives.

Takes the graph of one step and what a plan says about each mesh axis. Gives the graph that each rank runs, and
`PlanExecutor`, which brings the ranks to one start before they run it.
May import: cached_property, capture, comm, deferred_init, errors, fake_evaluate, fake_layouts, functional, inline, ir,
marks, nested, tensor_parts, torch_compat, trace.
"""

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.redistribute import redistribute
from wholestep.spmd.expand.strategy import Build, Dims, Strategy
from wholestep.spmd.mesh import DeviceMesh, init_device_mesh
from wholestep.spmd.placements import Partial, Replicate, Shard
from wholestep.spmd.plans.buffer_broadcast import BufferBroadcast
from wholestep.spmd.plans.global_view import GlobalPlan, GlobalView, ParameterPlan, Plan
from wholestep.spmd.plans.plan import DataParallel, FullyShard, ShardedOptimizer, TensorParallel
from wholestep.spmd.preflight.plan_executor import PlanExecutor
from wholestep.spmd.rules import register_sharding
from wholestep.spmd.sharded_state import full_state_dict, gather_parts, shard_inputs
