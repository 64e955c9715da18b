"""The collectives that move, and the barrier, with the names and arguments of torch.distributed.

They check, start and fail as those of `reduce_collectives.py` do.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from wholestep.comm.api import checks
from wholestep.comm.api.groups import get_group
from wholestep.comm.api.issue import Group, dense, group_root, launch, pairs, staged
from wholestep.comm.api.plan_cache import learn, quick
from wholestep.comm.engines.native_codes import ALL_GATHER, ALL_TO_ALL, BARRIER, BROADCAST, GATHER, SCATTER
from wholestep.comm.ops import tracing
from wholestep.comm.process_group import Options, ProcessGroup
from wholestep.comm.work import All, Work


@quick(BROADCAST, out="tensor", root="src")
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copies the tensor of ``src`` to every rank, in place."""
    pg = get_group(group)
    if checks.outside(pg, "broadcast"):
        return None
    opts = Options(root=group_root(group, src, group_src, "src"), async_op=async_op)
    if tracing.is_traced(tensor):
        return tracing.in_place("broadcast", tensor, pg, async_op, opts.root)
    written = pg.rank() != opts.root
    (checks.output if written else checks.tensor)(tensor, "tensor")
    work = launch(
        pg, "broadcast", tensor, async_op,
        lambda pg: staged([tensor], lambda ready: pg.broadcast(pairs(ready), opts), written=written),
    )  # fmt: skip
    if group_src is None:
        learn(BROADCAST, tensor, tensor, None, group, src, pg, "broadcast", tensor)
    return work


@quick(ALL_GATHER, out="tensor_list", inp="tensor")
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Every rank's ``tensor`` into ``tensor_list``, by rank."""
    pg = get_group(group)
    outs, (inp,) = pairs(checks.outputs(tensor_list, "tensor_list")), pairs([checks.tensor(tensor, "tensor")])
    checks.same_dtype("all_gather", outs, [inp])
    if checks.outside(pg, "all_gather"):
        return None
    checks.length("all_gather", "tensor_list", outs, pg.size())
    for index, out in enumerate(outs):
        checks.elements("all_gather", f"tensor_list[{index}]", out.numel(), inp.numel(), "as many as `tensor` has")
    if tracing.is_traced(tensor):
        return tracing.into("all_gather", outs, inp.reshape(-1), pg, async_op)
    opts, ready = Options(async_op=async_op), dense(inp)
    work = launch(
        pg, "all_gather", tensor, async_op,
        lambda pg: staged(outs, lambda ready_outs: pg.allgather([ready_outs], [ready], opts), tensor_list),
    )  # fmt: skip
    learn(ALL_GATHER, tensor_list, tensor, None, group, None, pg, "all_gather", tensor)
    return work


def all_gather_coalesced(
    output_tensor_lists: list[list[torch.Tensor]],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """`all_gather` of each tensor of a list: ``output_tensor_lists[r][i]`` is rank r's ``input_tensor_list[i]``."""
    inputs = checks.tensors(input_tensor_list, "input_tensor_list")
    checks.same_dtype("all_gather_coalesced", inputs)
    for outs in output_tensor_lists:
        checks.same_dtype("all_gather_coalesced", checks.outputs(outs, "output_tensor_lists"), inputs)
    pg = get_group(group)
    if checks.outside(pg, "all_gather_coalesced"):
        return None
    checks.length("all_gather_coalesced", "output_tensor_lists", output_tensor_lists, pg.size())
    for outs in output_tensor_lists:
        checks.elements(
            "all_gather_coalesced", "a list of outputs", len(outs), len(inputs), "as many as there are inputs"
        )
    works = [
        all_gather([outs[i] for outs in output_tensor_lists], one, group, async_op=True) for i, one in enumerate(inputs)
    ]
    work = All([one for one in works if one is not None], [out for outs in output_tensor_lists for out in outs])
    if async_op:
        return work
    work.wait()
    return None


@quick(ALL_GATHER, out="output_tensor", inp="input_tensor")
def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Every rank's input [n, …], one after the other, into ``output_tensor`` [size*n, …] (or [size, n, …])."""
    pg = get_group(group)
    (out,), (inp,) = pairs([checks.output(output_tensor, "output_tensor")]), pairs([input_tensor])
    checks.same_dtype("all_gather_into_tensor", [out, inp])
    if checks.outside(pg, "all_gather_into_tensor"):
        return None
    why = f"{pg.size()} ranks' inputs"
    checks.elements("all_gather_into_tensor", "output_tensor", out.numel(), inp.numel() * pg.size(), why)
    if tracing.is_traced(input_tensor):
        return tracing.into("all_gather", [out], inp.reshape(-1), pg, async_op)
    opts, ready = Options(async_op=async_op), dense(inp)
    work = launch(
        pg, "all_gather_into_tensor", input_tensor, async_op,
        lambda pg: staged([out], lambda outs: pg._allgather_base(outs[0], ready, opts), [output_tensor]),
    )  # fmt: skip
    learn(ALL_GATHER, output_tensor, input_tensor, None, group, None, pg, "all_gather_into_tensor", input_tensor)
    return work


@quick(GATHER, out="gather_list", inp="tensor", root="dst")
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Every rank's ``tensor`` into ``gather_list`` of rank ``dst`` (default: the first), by rank."""
    pg = get_group(group)
    outs = pairs(checks.outputs(gather_list, "gather_list")) if gather_list else []
    (inp,) = pairs([checks.tensor(tensor, "tensor")])
    checks.same_dtype("gather", outs, [inp])
    if checks.outside(pg, "gather"):
        return None
    root = group_root(group, dst, 0 if dst is None and group_dst is None else group_dst, "dst")
    if (pg.rank() == root) != bool(outs):
        raise ValueError("gather: `gather_list` is required on the destination rank, and on no other")
    if outs:
        checks.length("gather", "gather_list", outs, pg.size())
    for index, out in enumerate(outs):
        checks.elements("gather", f"gather_list[{index}]", out.numel(), inp.numel(), "as many as `tensor` has")
    if tracing.is_traced(tensor):
        return tracing.into("gather", outs, inp.reshape(-1), pg, async_op, root)
    opts, ready = Options(root=root, async_op=async_op), dense(inp)

    def run(pg: ProcessGroup) -> Work:
        return staged(outs, lambda at: pg.gather([at] if outs else [], [ready], opts), gather_list)

    work = launch(pg, "gather", tensor, async_op, run)
    if group_dst is None:
        learn(GATHER, gather_list, tensor, None, group, dst, pg, "gather", tensor)
    return work


@quick(SCATTER, out="tensor", inp="scatter_list", root="src")
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """``tensor`` of rank r becomes ``scatter_list[r]`` of rank ``src`` (default: the first)."""
    pg = get_group(group)
    parts = pairs(checks.tensors(scatter_list, "scatter_list")) if scatter_list else []
    (out,) = pairs([checks.output(tensor, "tensor")])
    checks.same_dtype("scatter", [out], parts)
    if checks.outside(pg, "scatter"):
        return None
    root = group_root(group, src, 0 if src is None and group_src is None else group_src, "src")
    if (pg.rank() == root) != bool(parts):
        raise ValueError("scatter: `scatter_list` is required on the source rank, and on no other")
    if parts:
        checks.length("scatter", "scatter_list", parts, pg.size())
    for index, part in enumerate(parts):
        checks.elements("scatter", f"scatter_list[{index}]", part.numel(), out.numel(), "as many as `tensor` has")
    if tracing.is_traced(tensor):
        return tracing.into("scatter", [out], out, pg, async_op, parts, root)
    opts, ready = Options(root=root, async_op=async_op), [dense(part) for part in parts]
    work = launch(
        pg, "scatter", tensor, async_op,
        lambda pg: staged([out], lambda outs: pg.scatter(outs, [ready] if ready else [], opts), [tensor]),
    )  # fmt: skip
    if group_src is None:
        learn(SCATTER, tensor, scatter_list, None, group, src, pg, "scatter", tensor)
    return work


@quick(ALL_TO_ALL, out="output_tensor_list", inp="input_tensor_list")
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """``input_tensor_list[r]`` goes to rank r; what comes from rank r lands in ``output_tensor_list[r]``."""
    pg = get_group(group)
    outs = pairs(checks.outputs(output_tensor_list, "output_tensor_list"))
    ins = pairs(checks.tensors(input_tensor_list, "input_tensor_list"))
    checks.same_dtype("all_to_all", outs, ins)
    if checks.outside(pg, "all_to_all"):
        return None
    checks.length("all_to_all", "output_tensor_list", outs, pg.size())
    checks.length("all_to_all", "input_tensor_list", ins, pg.size())
    if tracing.is_traced(outs[0]):
        sizes = [[one.numel() for one in side] for side in (outs, ins)]
        return tracing.into("all_to_all", outs, tracing.rows(ins), pg, async_op, *sizes)
    opts, ready = Options(async_op=async_op), [dense(one) for one in ins]
    work = launch(
        pg, "all_to_all", ins[0], async_op,
        lambda pg: staged(outs, lambda ready_outs: pg.alltoall(ready_outs, ready, opts), output_tensor_list),
    )  # fmt: skip
    learn(ALL_TO_ALL, output_tensor_list, input_tensor_list, None, group, None, pg, "all_to_all", ins[0])
    return work


@quick(ALL_TO_ALL, out="output", inp="input")
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
    pg = get_group(group)
    checks.same_dtype("all_to_all_single", [checks.output(output, "output"), checks.tensor(input, "input")])
    if checks.outside(pg, "all_to_all_single"):
        return None
    for name, one, splits in (("input", input, input_split_sizes), ("output", output, output_split_sizes)):
        if one.dim() == 0:
            raise ValueError(f"all_to_all_single: `{name}` is a scalar: at least one dimension is required")
        if not splits and one.shape[0] % pg.size():
            raise ValueError(
                f"all_to_all_single: {one.shape[0]} rows of `{name}` do not divide among {pg.size()} ranks"
            )
        if splits:
            checks.length("all_to_all_single", f"{name}_split_sizes", splits, pg.size())
            checks.elements(
                "all_to_all_single", f"{name}_split_sizes", sum(splits), one.shape[0], f"the rows of `{name}`"
            )
    if tracing.is_traced(output):
        return tracing.into(
            "all_to_all", [output], input, pg, async_op, output_split_sizes or [], input_split_sizes or []
        )
    opts = Options(out_splits=output_split_sizes or [], in_splits=input_split_sizes or [], async_op=async_op)
    (out,), (inp,) = pairs([output]), pairs([dense(input)])
    work = launch(
        pg, "all_to_all_single", input, async_op,
        lambda pg: staged([out], lambda outs: pg.alltoall_base(outs[0], inp, opts), [output]),
    )  # fmt: skip
    if not (output_split_sizes or input_split_sizes):
        learn(ALL_TO_ALL, output, input, None, group, None, pg, "all_to_all_single", input)
    return work


@quick(BARRIER)
def barrier(group: Group = None, async_op: bool = False, timeout: timedelta | None = None) -> Work | None:
    """Returns when every rank of the group has called it."""
    pg = get_group(group)
    if checks.outside(pg, "barrier"):
        return None
    if tracing.is_recording():
        return tracing.into("barrier", [], torch.zeros(1), pg, async_op)
    work = launch(pg, "barrier", None, async_op, lambda pg: pg.barrier(Options(timeout=timeout, async_op=async_op)))
    if timeout is None:
        learn(BARRIER, None, None, None, group, None, pg, "barrier", None)
    return work
