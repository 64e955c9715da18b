"""The backend ``shm``: shared memory on one host, the hierarchical group on several."""

from __future__ import annotations

from datetime import timedelta

from wholestep.comm.engines.hierarchical import HierarchicalGroup
from wholestep.comm.engines.hosts import Topology, host_identity
from wholestep.comm.engines.shm import ShmGroup
from wholestep.comm.process_group import DEFAULT_TIMEOUT, ProcessGroup
from wholestep.comm.shared_tensors import need_native
from wholestep.comm.stores.store import Store
from wholestep.comm.stores.store_barrier import exchange, forget


def create_shared(store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> ProcessGroup:
    """A group over shared memory: `ShmGroup` where all ranks are on one host, else `HierarchicalGroup`.

    Raises:
        DistBackendError: the engine is not built, or cannot be started.
        DistStoreError: not all ranks came within the time-out.
    """
    need_native()
    topology = Topology(exchange(rank, store, "hosts", size, timeout, host_identity()))
    if len(topology.hosts) == 1:
        group: ProcessGroup = ShmGroup(store, rank, size, timeout)
    else:
        group = HierarchicalGroup(store, rank, topology, timeout)
    forget(store, "hosts", size)
    return group
