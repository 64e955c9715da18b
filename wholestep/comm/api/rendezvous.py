"""How ranks meet and split: `init_process_group`, `new_group`, `destroy_process_group`."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from urllib.parse import urlparse

from wholestep.comm.api.backends_registry import BackendConfig, create_group
from wholestep.comm.api.groups import DEFAULT_GROUP, NonMember, get_group, is_initialized, world
from wholestep.comm.api.tracing import not_recorded
from wholestep.comm.engines import c10d
from wholestep.comm.process_group import DEFAULT_TIMEOUT, ProcessGroup
from wholestep.comm.stores.file_store import FileStore
from wholestep.comm.stores.store import HashStore, PrefixStore, Store
from wholestep.comm.stores.store_barrier import store_based_barrier
from wholestep.comm.stores.tcp_store import TCPStore
from wholestep.errors import DistError

# Launchers' names for rank and size: torchrun, Open MPI, PMI (MPICH, Intel MPI), SLURM.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")

_alone = False  # see `alone`


def _from_environment(names: Sequence[str], what: str) -> str:
    for name in names:
        if name in os.environ:
            return os.environ[name]
    raise ValueError(
        f"init_process_group: {what} is not given and {names[0]} is not in the environment: start with "
        "`wholestep run` or torchrun, or pass rank, world_size and init_method"
    )


def rendezvous(init_method: str | None, rank: int, size: int, timeout: timedelta) -> Store:
    """The store that an address names.

    Args:
        init_method: ``env://`` (MASTER_ADDR and MASTER_PORT), ``tcp://host:port``, ``file:///path``.

    Raises:
        ValueError: not such an address, or the environment lacks the master's.
        DistNetworkError: the master does not answer, or its port is taken.
    """
    if init_method in (None, "", "env://"):
        host = _from_environment(["MASTER_ADDR"], "the master's address")
        port = int(_from_environment(["MASTER_PORT"], "the master's port"))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return c10d.agent_store(host, port, timeout)
        return TCPStore(host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    url = urlparse(str(init_method))
    if url.scheme == "file" and url.path and not url.netloc:
        store = FileStore(url.path, size, timeout)
        while store.has_ended():  # its ranks close it while we begin again
            store = FileStore(url.path, size, timeout)
        return store
    if url.scheme == "tcp" and url.hostname and url.port is not None:
        return TCPStore(url.hostname, url.port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    raise ValueError(
        f"init_process_group: {init_method!r} is not an address: env://, tcp://host:port or file:///path is required"
    )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, whatever default group is asked for, it is of the null transport: one process plays a rank of many."""
    global _alone
    _alone = True
    try:
        yield
    finally:
        _alone = False


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
) -> None:
    """Makes the default group of all ranks.

    Args:
        backend: "shm", "gloo", "nccl", …, one for each device as in ``"cpu:shm,cuda:nccl"``; None for shm where it
            is built. A shm group whose ranks are on several hosts uses Gloo between them. "null" plays one rank of a
            world of any size, alone.
        init_method: ``env://`` (torchrun's MASTER_ADDR and MASTER_PORT), ``tcp://host:port``, ``file:///path``. Without
            it, ranks meet over the store of torch.distributed's process group where there is one, else by ``env://``.
        timeout: for meeting, and for each collective.
        world_size, rank: taken from the launcher's environment when negative.
        store: a store that all ranks share, in place of ``init_method``.

    Raises:
        ValueError: a second call, or rank and size that are missing or do not fit.
        DistNetworkError: the store cannot be reached.
        DistStoreError: not all ranks came within the time-out.
    """
    known = world()
    if DEFAULT_GROUP in known.groups:
        raise ValueError("trying to initialize the default process group twice: call destroy_process_group first")
    if store is not None and init_method is not None:
        raise ValueError("init_process_group: give init_method or store, not both")
    if _alone:
        backend, init_method, store = "null", None, None
    elif store is None and init_method is None and max(rank, world_size) < 0 and (torchs := c10d.torch_world()):
        rank, world_size, store = torchs
    rank = rank if rank >= 0 else int(_from_environment(_RANKS, "rank"))
    size = world_size if world_size > 0 else int(_from_environment(_SIZES, "world_size"))
    if not 0 <= rank < size:
        raise ValueError(f"init_process_group: rank {rank} is outside a world of {size}")
    config = BackendConfig(backend or "shm")
    made_here = store is None
    if config.device_backend_map.get("cpu") == "null" and init_method is None:
        store = store or HashStore()  # nobody else is to be met
    store = store or rendezvous(init_method, rank, size, timeout)
    try:
        store.set_timeout(timeout)
        found = store.compare_set("world_size", "", str(size)).decode()
        if found != str(size):
            raise ValueError(f"init_process_group: rank {rank} says world_size {size}, another rank says {found}")
        known.store, known.config, known.timeout = store, config, timeout
        epoch = known.unique("epoch")  # a store may serve one world after another
        group = create_group(config, PrefixStore(epoch, store), rank, size, timeout)
        if group.backend_name not in ("shm", "shm+gloo", "thread", "null"):
            store_based_barrier(rank, PrefixStore(epoch, store), DEFAULT_GROUP, size, timeout)
    except BaseException:
        known.store = None
        if made_here:
            store.close()
        raise
    known.owns_store = made_here
    atexit.unregister(_leave)
    atexit.register(_leave, os.getpid())
    known.add(DEFAULT_GROUP, group, list(range(size)))


def joined_group(group: ProcessGroup | str | None, device_type: str) -> ProcessGroup:
    """As `get_group`; of torch.distributed's groups ours of the same ranks, made when one is first given.

    The default group is made where torch.distributed has a process group and comm has none.
    """
    known, ranks = world(), c10d.ranks_of(group)
    has_default = DEFAULT_GROUP in known.groups | known.guests
    if not has_default and (group is None or ranks is not None) and c10d.torch_world() is not None:
        init_process_group("cpu:shm,cuda:nccl" if device_type == "cuda" else None)
    if ranks is None or hasattr(group, "shm_group"):
        return get_group(group)
    if ranks == list(range(get_group().size())):
        return get_group()
    name = known.joined.get(group.group_name, "")  # type: ignore[union-attr]
    if name not in known.groups:
        made = new_group(ranks, use_local_synchronization=True)
        name = known.joined[group.group_name] = made.group_name  # type: ignore[union-attr]
    return get_group(name)


@not_recorded
def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> ProcessGroup | None:
    """Makes a group of some ranks of the world.

    Every rank of the world calls it, in the same order; with ``use_local_synchronization`` only the members do.

    Args:
        ranks: global ranks (default: all). They are numbered in the group in ascending order.

    Returns:
        The group; for a rank that is not in it a placeholder that only translates ranks, or None with
        ``use_local_synchronization``.

    Raises:
        ValueError: a rank outside the world, or named twice.
    """
    known, whole = world(), get_group()
    whole._get_sequence_number_for_group()  # an error in a process that was forked from a rank
    me = whole.rank()
    members = sorted(range(whole.size()) if ranks is None else ranks)
    if len(set(members)) != len(members):
        raise ValueError(f"new_group: ranks {members} name a rank twice")
    outside = [rank for rank in members if not 0 <= rank < whole.size()]
    if outside or not members:
        raise ValueError(f"new_group: ranks {outside or members} are not in a world of {whole.size()}")
    if use_local_synchronization:
        if me not in members:
            return None
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
        name = known.unique(f"local.{digest}")
    else:
        name = known.unique("group")
    if me not in members:
        return known.add(name, NonMember(), members)
    config = BackendConfig(backend) if backend else known.config
    limit = timeout or known.timeout
    prefix = f"{known.made['epoch']}/{name}"
    try:
        group = create_group(config, PrefixStore(prefix, known.store), members.index(me), len(members), limit)
    except DistError as failure:
        failure.add_note(f"ranks 0 to {len(members) - 1} of the group are ranks {members} of the world")
        raise
    return known.add(name, group, members)


def destroy_process_group(group: ProcessGroup | str | None = None) -> None:
    """Ends one group, or with the default group (or none given) all of them. Work under way is lost.

    Raises:
        ValueError: the group is not known: never made, or ended before.
        DistError: a collective that this rank had gone on from has failed. The group has ended all the same.
    """
    known, ending = world(), get_group(group)
    whole = ending.group_name == DEFAULT_GROUP
    failure: DistError | None = None
    for name in reversed(list(known.groups)) if whole else [ending.group_name]:
        try:
            known.groups[name].shutdown()
        except DistError as late:
            failure = late
        finally:
            del known.groups[name]
    if whole:
        if known.owns_store:
            known.store.close()
        epoch = known.made.get("epoch", 0)
        known.store = None
        known.made = {"epoch": epoch}
    if failure:
        raise failure


def _leave(pid: int) -> None:
    """At the end of a program that did not destroy its groups: engines that are dropped while they run abort it."""
    if is_initialized() and os.getpid() == pid:  # not in a fork, which shares the groups with its parent
        with contextlib.suppress(DistError):
            destroy_process_group()


def default_store() -> Store:
    """The store that the default group met over.

    Raises:
        ValueError: there is no default group.
    """
    get_group()
    return world().store  # type: ignore[no-any-return]
