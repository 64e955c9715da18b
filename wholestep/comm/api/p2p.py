"""Point-to-point communication: `send`, `recv`, their asynchronous forms and `monitored_barrier`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.api import checks
from wholestep.comm.api.backends_registry import DeviceGroup
from wholestep.comm.api.collective_table import RECV, SEND, Collective
from wholestep.comm.api.groups import get_global_rank, get_group
from wholestep.comm.api.issue import Group, group_root, issue
from wholestep.comm.api.plan_cache import with_plan_cache
from wholestep.comm.api.tracing import not_recorded
from wholestep.comm.work import Work, seconds
from wholestep.errors import DistError, DistTimeoutError
from wholestep.torch_compat import is_deferring, no_modes

_MONITOR_TAG = 1 << 30


def isend(
    tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Work | None:
    """Starts sending ``tensor`` to rank ``dst``. It may be changed again after `Work.wait`.

    Raises:
        ValueError: the rank is this one, or not in the group.
    """
    _check("destination", SEND, group, (dst, group_dst), tag)
    return issue(SEND, tensor, tensor, group, True, root=(dst, group_dst), tag=tag)


def irecv(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Work | None:
    """Starts receiving into ``tensor`` from rank ``src``, or from any rank when none is given.

    Raises:
        ValueError: the rank is this one, or not in the group.
    """
    _check("source", RECV, group, (src, group_src), tag)
    if src is None and group_src is None and is_deferring():
        tensor.data_ptr()  # runs what is deferred: who has sent is known when it has come
        with no_modes():
            return issue(RECV, tensor, tensor, group, True, tag=tag)
    return issue(RECV, tensor, tensor, group, True, root=(src, group_src), tag=tag)


def _check(what: str, row: Collective, group: Group, peer: tuple[int | None, int | None], tag: int) -> None:
    if not 0 <= tag < 1 << 31:
        raise ValueError(f"Tag must be nonnegative and below 2**31, found {tag}")
    rank = get_group(group).rank()
    if rank >= 0 and group_root(group, *peer, row.root, row.default_root) == rank:
        raise ValueError(f"Invalid {what} rank: {what} rank should not be the same as the rank of the current process.")


@with_plan_cache(SEND)
def send(
    tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """`isend`, then wait."""
    work = isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


@with_plan_cache(RECV)
def recv(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> int:
    """`irecv`, then wait. Returns the sender's global rank; -1 when this rank is not in the group."""
    work = irecv(tensor, src, group, tag, group_src)
    if work is None:
        return -1
    work.wait()
    if src is not None:
        return src
    return get_global_rank(group, work.source if group_src is None else group_src)


@dataclass
class P2POp:
    """One message of `batch_isend_irecv`: ``op`` is `isend` or `irecv`, ``peer`` a global rank."""

    op: Callable[..., Work | None]
    tensor: torch.Tensor
    peer: int
    group: Any = None
    tag: int = 0

    def __post_init__(self) -> None:
        if self.op not in (isend, irecv):
            raise ValueError(f"P2POp: op is {self.op!r}: isend or irecv is required")


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Starts all messages and returns their works.

    Raises:
        ValueError: the list is empty.
        TypeError: it holds something else than `P2POp`.
    """
    if not p2p_op_list:
        raise ValueError("batch_isend_irecv: at least one P2POp is required")
    for one in p2p_op_list:
        if not isinstance(one, P2POp):
            raise TypeError(f"batch_isend_irecv: P2POp is required, found {type(one)}")
    works = [one.op(one.tensor, one.peer, one.group, one.tag) for one in p2p_op_list]
    return [work for work in works if work is not None]


@not_recorded
def monitored_barrier(group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """A barrier that names, on rank 0, the ranks that did not come.

    Args:
        wait_all_ranks: name all of them; otherwise the first.

    Raises:
        DistTimeoutError: ranks did not come within the time-out.
    """
    pg = get_group(group)
    if checks.outside(pg, "monitored_barrier"):
        return
    if isinstance(pg, DeviceGroup):
        pg = pg.for_device("cpu")
    pg._get_sequence_number_for_group()  # an error in a process that was forked from a rank
    limit = seconds(pg.timeout if timeout is None else timeout)
    token = torch.zeros(1, dtype=torch.uint8)
    if pg.rank() != 0:
        pg.send([token], 0, _MONITOR_TAG).wait(limit)
        try:
            pg.recv([token], 0, _MONITOR_TAG + 1).wait(limit)
        except DistError as failure:
            raise DistTimeoutError(
                f"Rank {pg.rank()} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {failure}"
            ) from failure
        return
    missing = []
    for rank in range(1, pg.size()):
        try:
            pg.recv([token], rank, _MONITOR_TAG).wait(limit)
        except DistError:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing:
        names = ", ".join(str(get_global_rank(group, rank)) for rank in missing)
        raise DistTimeoutError(f"Rank{'s' * wait_all_ranks} {names} failed to pass monitoredBarrier in {limit:g} s")
    for rank in range(1, pg.size()):
        pg.send([token], rank, _MONITOR_TAG + 1).wait(limit)
