"""The collectives that reduce, with the names and arguments of torch.distributed.

Each checks its arguments, brings tensors into the form that backends take (contiguous; bool as bytes, complex as
pairs), starts the collective on the group and, unless ``async_op``, waits. Ranks in arguments are global ones.
Mistakes raise `ValueError` or `TypeError`; failures a `DistError`, as `Work.wait` does.
"""

from __future__ import annotations

import torch

from wholestep.comm import checks, traced
from wholestep.comm.codes import ALL_REDUCE, REDUCE, REDUCE_SCATTER
from wholestep.comm.launching import Group, Op, group_root, launch, reducible, staged, traced_op
from wholestep.comm.process_group import Options
from wholestep.comm.quick import learn, quick
from wholestep.comm.reduce_op import ReduceOp, as_op
from wholestep.comm.work import Finished, Work
from wholestep.comm.world import get_group


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
    if traced.is_traced(tensor):
        scaled, name = traced_op(tensor, kind, factor)
        if scaled is not tensor:
            tensor.copy_(scaled)
        return traced.in_place("all_reduce", tensor, pg, async_op, name)
    plain, kind = reducible(checks.tensor(tensor, "tensor"), kind, "all_reduce")
    opts = Options(kind, factor, async_op=async_op)
    work = launch(
        pg,
        "all_reduce",
        tensor,
        async_op,
        lambda pg: staged([plain], lambda ready: pg.allreduce(ready, opts), [tensor]),
    )
    learn(ALL_REDUCE, tensor, tensor, op, group, None, pg, "all_reduce", tensor)
    return work


def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """`all_reduce` of each tensor of a list, as one call."""
    pg = get_group(group)
    if checks.outside(pg, "all_reduce_coalesced"):
        return None
    kind, factor = as_op(op)
    checks.same_dtype("all_reduce_coalesced", checks.tensors(tensors, "tensors"))
    if tensors and traced.is_traced(tensors[0]):
        return traced.together([all_reduce(one, op, group, async_op=True) for one in tensors], async_op)
    plain = [reducible(one, kind, "all_reduce_coalesced") for one in tensors]
    if not plain:
        return Finished([]) if async_op else None
    opts = Options(plain[0][1], factor, async_op=async_op)
    return launch(
        pg, "all_reduce_coalesced", tensors[0], async_op,
        lambda pg: staged([one for one, _ in plain], lambda ready: pg.allreduce(ready, opts), tensors),
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
    if traced.is_traced(tensor):
        root = group_root(group, dst, group_dst, "dst")
        scaled, name = traced_op(tensor, kind, factor)
        outs = [tensor] if scaled is tensor or pg.rank() == root else []  # the others keep theirs, not scaled
        return traced.into("reduce", outs, scaled, pg, async_op, root, name)
    plain, kind = reducible(checks.tensor(tensor, "tensor"), kind, "reduce")
    opts = Options(kind, factor, group_root(group, dst, group_dst, "dst"), async_op=async_op)
    work = launch(
        pg, "reduce", tensor, async_op, lambda pg: staged([plain], lambda ready: pg.reduce(ready, opts), [tensor])
    )
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
    checks.same_dtype("reduce_scatter", [checks.tensor(output, "output")], checks.tensors(input_list, "input_list"))
    if checks.outside(pg, "reduce_scatter"):
        return None
    checks.length("reduce_scatter", "input_list", input_list, pg.size())
    for index, part in enumerate(input_list):
        checks.elements(
            "reduce_scatter", f"input_list[{index}]", part.numel(), output.numel(), "as many as `output` has"
        )
    kind, factor = as_op(op)
    if traced.is_traced(output):
        scaled, name = traced_op(traced.rows(input_list), kind, factor)
        return traced.into("reduce_scatter", [output], scaled, pg, async_op, name)
    out, plain_kind = reducible(output, kind, "reduce_scatter")
    parts = [reducible(part, kind, "reduce_scatter")[0].contiguous() for part in input_list]
    opts = Options(plain_kind, factor, async_op=async_op)
    work = launch(
        pg, "reduce_scatter", output, async_op,
        lambda pg: staged([out], lambda outs: pg.reduce_scatter(outs, [parts], opts), [output]),
    )  # fmt: skip
    learn(REDUCE_SCATTER, output, input_list, op, group, None, pg, "reduce_scatter", output)
    return work


@quick(REDUCE_SCATTER, out="output", inp="input")
def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """``output`` [n, …] becomes the reduction over ranks of rows rank*n to (rank+1)*n of ``input`` [size*n, …]."""
    pg = get_group(group)
    checks.same_dtype("reduce_scatter_tensor", [checks.tensor(output, "output"), checks.tensor(input, "input")])
    if checks.outside(pg, "reduce_scatter_tensor"):
        return None
    why = f"`output` on {pg.size()} ranks"
    checks.elements("reduce_scatter_tensor", "input", input.numel(), output.numel() * pg.size(), why)
    kind, factor = as_op(op)
    if traced.is_traced(output):
        scaled, name = traced_op(input.reshape(-1), kind, factor)
        return traced.into("reduce_scatter", [output], scaled, pg, async_op, name)
    out, plain_kind = reducible(output, kind, "reduce_scatter_tensor")
    inp = reducible(input, kind, "reduce_scatter_tensor")[0].contiguous()
    opts = Options(plain_kind, factor, async_op=async_op)
    work = launch(
        pg, "reduce_scatter_tensor", output, async_op,
        lambda pg: staged([out], lambda outs: pg._reduce_scatter_base(outs[0], inp, opts), [output]),
    )  # fmt: skip
    learn(REDUCE_SCATTER, output, input, op, group, None, pg, "reduce_scatter_tensor", output)
    return work
