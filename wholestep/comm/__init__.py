"""Communication between ranks: groups, collectives and the engines that move the bytes.

Takes: tensors of many ranks. Gives: reduced, gathered, moved tensors, and the `wholestep::` operators that a
traced program contains. The names are those of `torch.distributed`.
torch.distributed itself is imported by `engines/c10d.py` and `torch_backend.py` alone.
May import: errors, torch_compat.
"""

from wholestep.comm.api.backends_registry import (
    Backend,
    BackendConfig,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_shm_available,
    is_ucc_available,
)
from wholestep.comm.api.collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from wholestep.comm.api.groups import (
    get_backend,
    get_global_rank,
    get_group,
    get_group_rank,
    get_node_local_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_initialized,
    rank_not_in_group,
)
from wholestep.comm.api.object_collectives import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from wholestep.comm.api.p2p import P2POp, batch_isend_irecv, irecv, isend, monitored_barrier, recv, send
from wholestep.comm.api.rendezvous import default_store, destroy_process_group, init_process_group, new_group
from wholestep.comm.flight_recorder import diagnose, dump
from wholestep.comm.ops.functional_collectives import SCHEMAS as OPERATORS
from wholestep.comm.process_group import (
    DebugLevel,
    Options,
    ProcessGroup,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)
from wholestep.comm.reduce_op import RedOpType, ReduceOp, premul_sum
from wholestep.comm.shared_tensors import empty
from wholestep.comm.stores.file_store import FileStore
from wholestep.comm.stores.store import HashStore, PrefixStore, Store
from wholestep.comm.stores.store_barrier import store_based_barrier
from wholestep.comm.stores.tcp_store import TCPStore
from wholestep.comm.work import Work
from wholestep.errors import (
    DistBackendError,
    DistError,
    DistMismatchError,
    DistNetworkError,
    DistRankError,
    DistStoreError,
    DistTimeoutError,
)
