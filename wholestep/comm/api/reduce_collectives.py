"""The collectives that reduce, with the names and arguments of torch.distributed.

Each checks its arguments, brings tensors into the form that backends take (contiguous; bool as bytes, complex as
pairs), starts the collective on the group and, unless ``async_op``, waits. Ranks in arguments are global ones.
Mistakes raise `ValueError` or `TypeError`; failures a `DistError`, as `Work.wait` does.
"""

from __future__ import annotations

import torch

from wholestep.comm.api import checks
from wholestep.comm.api.groups import get_group
from wholestep.comm.api.issue import Group, Op, dense, group_root, launch, numbers, reduction_of, staged, traced_op
from wholestep.comm.api.plan_cache import learn, quick
from wholestep.comm.engines.native_codes import ALL_REDUCE, REDUCE, REDUCE_SCATTER
from wholestep.comm.ops import tracing
from wholestep.comm.process_group import Options
from wholestep.comm.reduce_op import ReduceOp, as_op
from wholestep.comm.work import Finished, Work


@quick(ALL_REDUCE, out="tensor")
def all_reduce(tensor: torch.Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Work | None:
    """Reduces ``tensor`` over the group, in place, alike on every rank.

    Args:
        tensor: any shape, strides and dtype; the same shape and dtype on every rank.
        op: the reduction, or its lower-case name.
    """
    pg = get_group(group)
    if checks.outside(pg, "all_reduce"):
        return None
    kind, factor = as_op(op)
    if tracing.is_traced(tensor):
        scaled, name = traced_op(tensor, kind, factor)
        if scaled is not tensor:
            tensor.copy_(scaled)
        return tracing.in_place("all_reduce", tensor, pg, async_op, name)
    kind = reduction_of(checks.output(tensor, "tensor", expanded=True).dtype, kind, "all_reduce")
    opts = Options(kind, factor, async_op=async_op)
    work = launch(
        pg, "all_reduce", tensor, async_op,
        lambda pg: staged([tensor], lambda ready: pg.allreduce(numbers(ready), opts)),
    )  # fmt: skip
    learn(ALL_REDUCE, tensor, tensor, op, group, None, pg, "all_reduce", tensor)
    return work


def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """`all_reduce` of each tensor of a list, as one call; of tensors that share memory the last one's result stays."""
    pg = get_group(group)
    if checks.outside(pg, "all_reduce_coalesced"):
        return None
    kind, factor = as_op(op)
    checks.same_dtype("all_reduce_coalesced", [checks.output(one, "tensors", expanded=True) for one in tensors])
    if tensors and tracing.is_traced(tensors[0]):
        return tracing.together([all_reduce(one, op, group, async_op=True) for one in tensors], async_op)
    if not tensors:
        return Finished([]) if async_op else None
    opts = Options(reduction_of(tensors[0].dtype, kind, "all_reduce_coalesced"), factor, async_op=async_op)
    return launch(
        pg, "all_reduce_coalesced", tensors[0], async_op,
        lambda pg: staged(tensors, lambda ready: pg.allreduce(numbers(ready), opts), apart=True),
    )  # fmt: skip


@quick(REDUCE, out="tensor", root="dst")
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduces ``tensor`` over the group into the tensor of ``dst``; the others keep theirs."""
    pg = get_group(group)
    if checks.outside(pg, "reduce"):
        return None
    kind, factor = as_op(op)
    if tracing.is_traced(tensor):
        root = group_root(group, dst, group_dst, "dst")
        scaled, name = traced_op(tensor, kind, factor)
        outs = [tensor] if scaled is tensor or pg.rank() == root else []  # the others keep theirs, not scaled
        return tracing.into("reduce", outs, scaled, pg, async_op, root, name)
    kind = reduction_of(checks.tensor(tensor, "tensor").dtype, kind, "reduce")
    opts = Options(kind, factor, group_root(group, dst, group_dst, "dst"), async_op=async_op)
    if written := pg.rank() == opts.root:
        checks.output(tensor, "tensor")
    work = launch(
        pg, "reduce", tensor, async_op,
        lambda pg: staged([tensor], lambda ready: pg.reduce(numbers(ready), opts), written=written),
    )  # fmt: skip
    if group_dst is None:
        learn(REDUCE, tensor, tensor, op, group, dst, pg, "reduce", tensor)
    return work


@quick(REDUCE_SCATTER, out="output", inp="input_list")
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """``output`` becomes the reduction over ranks of their ``input_list[rank]``."""
    pg = get_group(group)
    checks.same_dtype("reduce_scatter", [checks.output(output, "output")], checks.tensors(input_list, "input_list"))
    if checks.outside(pg, "reduce_scatter"):
        return None
    checks.length("reduce_scatter", "input_list", input_list, pg.size())
    for index, part in enumerate(input_list):
        checks.elements(
            "reduce_scatter", f"input_list[{index}]", part.numel(), output.numel(), "as many as `output` has"
        )
    kind, factor = as_op(op)
    if tracing.is_traced(output):
        scaled, name = traced_op(tracing.rows(input_list), kind, factor)
        return tracing.into("reduce_scatter", [output], scaled, pg, async_op, name)
    opts = Options(reduction_of(output.dtype, kind, "reduce_scatter"), factor, async_op=async_op)
    parts = numbers([dense(part) for part in input_list])
    work = launch(
        pg, "reduce_scatter", output, async_op,
        lambda pg: staged([output], lambda outs: pg.reduce_scatter(numbers(outs), [parts], opts)),
    )  # fmt: skip
    learn(REDUCE_SCATTER, output, input_list, op, group, None, pg, "reduce_scatter", output)
    return work


@quick(REDUCE_SCATTER, out="output", inp="input")
def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """``output`` [n, …] becomes the reduction over ranks of rows rank*n to (rank+1)*n of ``input`` [size*n, …]."""
    pg = get_group(group)
    checks.same_dtype("reduce_scatter_tensor", [checks.output(output, "output"), checks.tensor(input, "input")])
    if checks.outside(pg, "reduce_scatter_tensor"):
        return None
    why = f"`output` on {pg.size()} ranks"
    checks.elements("reduce_scatter_tensor", "input", input.numel(), output.numel() * pg.size(), why)
    kind, factor = as_op(op)
    if tracing.is_traced(output):
        scaled, name = traced_op(input.reshape(-1), kind, factor)
        return tracing.into("reduce_scatter", [output], scaled, pg, async_op, name)
    opts = Options(reduction_of(output.dtype, kind, "reduce_scatter_tensor"), factor, async_op=async_op)
    (inp,) = numbers([dense(input)])
    work = launch(
        pg, "reduce_scatter_tensor", output, async_op,
        lambda pg: staged([output], lambda outs: pg._reduce_scatter_base(numbers(outs)[0], inp, opts)),
    )  # fmt: skip
    learn(REDUCE_SCATTER, output, input, op, group, None, pg, "reduce_scatter_tensor", output)
    return work
