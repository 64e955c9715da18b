"""The collectives of tensors, with the names and arguments of torch.distributed.

Each is a row of `collective_table.py`. A call checks its arguments, brings tensors into the form that backends take
(contiguous; bool as bytes, complex as pairs), starts the collective on the group and, unless ``async_op``, waits. Ranks
in arguments are global ones. Mistakes raise `ValueError` or `TypeError`; failures a `DistError`, as `Work.wait` does.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from wholestep.comm.api import checks, tracing
from wholestep.comm.api import collective_table as table
from wholestep.comm.api.groups import get_group, get_world_size
from wholestep.comm.api.issue import Group, Op, issue, launch, waited
from wholestep.comm.api.plan_cache import learn, with_plan_cache
from wholestep.comm.process_group import Options
from wholestep.comm.reduce_op import RedOpType, ReduceOp
from wholestep.comm.work import All, Work
from wholestep.errors import DistMismatchError

# Reductions -------------------------------------------------------------------------------------------------------


@with_plan_cache(table.ALL_REDUCE)
def all_reduce(tensor: torch.Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Work | None:
    """Reduces ``tensor`` over the group, in place, to equal bits on every rank.

    Args:
        tensor: any shape, strides and dtype; the same shape and dtype on every rank.
        op: the reduction, or its lower-case name.
    """
    return issue(table.ALL_REDUCE, tensor, tensor, group, async_op, op=op)


def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """`all_reduce` of each tensor of a list, as one call; of tensors that share memory the last one's result stays."""
    if not tensors:
        return waited(Work([]), async_op)
    return issue(table.ALL_REDUCE_COALESCED, tensors, tensors, group, async_op, op=op)


@with_plan_cache(table.REDUCE)
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduces ``tensor`` over the group into the tensor of ``dst``; the others keep theirs."""
    return issue(table.REDUCE, tensor, tensor, group, async_op, op=op, root=(dst, group_dst))


@with_plan_cache(table.REDUCE_SCATTER)
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """``output`` becomes the reduction over ranks of their ``input_list[rank]``, whose sizes may differ by rank."""
    if len({one.numel() for one in checks.tensors(input_list, "input_list")}) > 1:
        return _reduce_scatter_uneven(output, input_list, op, group, async_op)
    return issue(table.REDUCE_SCATTER, output, input_list, group, async_op, op=op)


def _reduce_scatter_uneven(
    output: torch.Tensor, inputs: list[torch.Tensor], op: Op, group: Group, async_op: bool
) -> Work | None:
    """A `reduce` to each rank, so that ranks whose sizes differ from one another's get an error."""
    what, pg = "reduce_scatter", get_group(group)
    if checks.outside(pg, what):
        return None
    checks.length(what, "input_list", inputs, pg.size())
    checks.same_dtype(what, inputs, [output])
    checks.elements(what, "output", output.numel(), inputs[pg.rank()].numel(), f"those of `input_list[{pg.rank()}]`")
    own = inputs[pg.rank()].detach().clone()
    parts = [own if rank == pg.rank() else one for rank, one in enumerate(inputs)]
    works = [reduce(one, None, op, group, True, rank) for rank, one in enumerate(parts)]
    done = [one for one in works if one is not None]
    return waited(All(done, [output], lambda: output.detach().copy_(own.view_as(output))), async_op)


@with_plan_cache(table.REDUCE_SCATTER_TENSOR)
def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """``output`` [n, …] becomes the reduction over ranks of rows rank*n to (rank+1)*n of ``input`` [size*n, …]."""
    return issue(table.REDUCE_SCATTER_TENSOR, output, input, group, async_op, op=op)


# Moves ------------------------------------------------------------------------------------------------------------


@with_plan_cache(table.BROADCAST)
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copies the tensor of ``src`` to every rank, in place."""
    return issue(table.BROADCAST, tensor, tensor, group, async_op, root=(src, group_src))


@with_plan_cache(table.ALL_GATHER)
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Every rank's ``tensor`` into ``tensor_list``, by rank."""
    return issue(table.ALL_GATHER, tensor_list, tensor, group, async_op)


def all_gather_coalesced(
    output_tensor_lists: list[list[torch.Tensor]],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """`all_gather` of each tensor of a list: ``output_tensor_lists[r][i]`` is rank r's ``input_tensor_list[i]``."""
    what, inputs, pg = "all_gather_coalesced", checks.tensors(input_tensor_list, "input_tensor_list"), get_group(group)
    lists = [checks.tensors(outs, "output_tensor_lists") for outs in output_tensor_lists]
    checks.same_dtype(what, inputs, *lists)
    if checks.outside(pg, what):
        return None
    checks.length(what, "output_tensor_lists", lists, pg.size())
    for outs in lists:
        checks.elements(what, "a list of outputs", len(outs), len(inputs), "as many as there are inputs")
    works = [all_gather([outs[i] for outs in lists], one, group, async_op=True) for i, one in enumerate(inputs)]
    return waited(All([one for one in works if one is not None], [out for outs in lists for out in outs]), async_op)


@with_plan_cache(table.ALL_GATHER_INTO_TENSOR)
def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Every rank's input [n, …], one after the other, into ``output_tensor`` [size*n, …] (or [size, n, …])."""
    return issue(table.ALL_GATHER_INTO_TENSOR, output_tensor, input_tensor, group, async_op)


@with_plan_cache(table.GATHER)
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Every rank's ``tensor`` into ``gather_list`` of rank ``dst`` (default: the first), by rank."""
    return issue(table.GATHER, gather_list, tensor, group, async_op, root=(dst, group_dst))


@with_plan_cache(table.SCATTER)
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """``tensor`` of rank r becomes ``scatter_list[r]`` of rank ``src`` (default: the first)."""
    return issue(table.SCATTER, tensor, scatter_list, group, async_op, root=(src, group_src))


@with_plan_cache(table.ALL_TO_ALL)
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """``input_tensor_list[r]`` goes to rank r; what comes from rank r lands in ``output_tensor_list[r]``."""
    return issue(table.ALL_TO_ALL, output_tensor_list, input_tensor_list, group, async_op)


@with_plan_cache(table.ALL_TO_ALL_SINGLE)
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Part r of ``input``'s dim 0 goes to rank r; ``output`` holds the parts that came, in rank order.

    Args:
        output_split_sizes, input_split_sizes: rows from and to each rank; None or empty for equal parts.
    """
    splits = output_split_sizes or [], input_split_sizes or []
    return issue(table.ALL_TO_ALL_SINGLE, output, input, group, async_op, splits=splits)


@with_plan_cache(table.BARRIER)
def barrier(group: Group = None, async_op: bool = False, timeout: timedelta | None = None) -> Work | None:
    """Returns when every rank of the group has called it."""
    pg = get_group(group)
    if checks.outside(pg, "barrier"):
        return None
    if tracing.is_traced(None):
        return waited(tracing.into("barrier", [], torch.zeros(1), pg), async_op)
    work = launch(pg, "barrier", None, async_op, lambda pg: pg.barrier(Options(timeout=timeout, async_op=async_op)))
    if timeout is None:
        learn(table.BARRIER, None, None, None, group, None, pg, None)
    return work


# Of tensors whose sizes differ between ranks: rows, and sparse tensors ---------------------------------------------


def all_gather_rows(tensor: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """Every rank's ``tensor`` [n of that rank, …], by rank: padded to the longest one on the way."""
    ranks, rows = get_world_size(group), tensor.shape[0]
    sizes = torch.zeros(ranks, dtype=torch.int64)
    all_gather_into_tensor(sizes, torch.tensor([rows]), group)
    longest = int(sizes.max())
    padded = torch.cat([tensor, tensor.new_zeros(longest - rows, *tensor.shape[1:])])
    found = tensor.new_empty(ranks, *padded.shape)
    all_gather_into_tensor(found, padded, group)
    return [found[rank, :size] for rank, size in enumerate(sizes.tolist())]


def sparse_all_reduce(
    tensor: torch.Tensor, op: RedOpType = RedOpType.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Sums ``tensor`` over the group, in place: indices and values are gathered and coalesced on every rank.

    Ends before it returns, whether ``async_op`` or not: how many values there are is known only on the way.

    Raises:
        ValueError: another reduction than SUM.
        DistMismatchError: the ranks' shapes or dimensions differ.
    """
    if op is not RedOpType.SUM:
        raise ValueError(f"all_reduce: {op.name} of sparse tensors is not available: SUM is required, or to_dense()")
    mine = tensor.detach().coalesce()
    about = torch.tensor([mine.sparse_dim(), len(mine.shape), *mine.shape])
    if any(not torch.equal(theirs, about) for theirs in all_gather_rows(about, group)):
        raise DistMismatchError(f"all_reduce: ranks have sparse tensors of different shapes; here {list(mine.shape)}")
    all_indices = all_gather_rows(mine.indices().T.contiguous(), group)
    all_values = all_gather_rows(mine.values(), group)
    total = torch.sparse_coo_tensor(torch.cat(all_indices).T, torch.cat(all_values), mine.shape).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return Work([tensor]) if async_op else None
