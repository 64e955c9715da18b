"""Communication between ranks: groups, collectives and the engines that move the bytes.

Takes: tensors of many ranks. Gives: reduced, gathered, moved tensors, and the `wholestep::` operators that a
traced program contains. The names are those of `torch.distributed`.
May import `errors` and `torch_compat` alone; `torch.distributed` only in `c10d.py` and `torch_backend.py`.
"""

from wholestep.comm.collectives import (
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    reduce_scatter_tensor,
)
from wholestep.comm.errors import (
    DistBackendError,
    DistError,
    DistMismatchError,
    DistNetworkError,
    DistRankError,
    DistStoreError,
    DistTimeoutError,
)
from wholestep.comm.ops import SCHEMAS as OPERATORS
from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.memory import empty
from wholestep.comm.reduce_op import ReduceOp
from wholestep.comm.rendezvous import destroy_process_group, init_process_group
from wholestep.comm.work import Work
from wholestep.comm.world import (
    get_backend,
    get_global_rank,
    get_group,
    get_group_rank,
    get_node_local_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_initialized,
)

__all__ = [
    "OPERATORS",
    "DistBackendError",
    "DistError",
    "DistMismatchError",
    "DistNetworkError",
    "DistRankError",
    "DistStoreError",
    "DistTimeoutError",
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "get_backend",
    "get_global_rank",
    "get_group",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "reduce_scatter_tensor",
]
