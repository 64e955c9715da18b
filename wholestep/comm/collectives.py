"""The collectives, with the names and arguments of torch.distributed.

Each checks its arguments, brings tensors into the form that backends take (contiguous; bool as bytes, complex as
pairs), starts the collective on the group and, unless ``async_op``, waits. Ranks in arguments are global ones.
Mistakes raise `ValueError` or `TypeError`; failures a `DistError`, as `Work.wait` does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from wholestep.comm import checks, recorder, traced
from wholestep.comm.backend import DeviceGroup
from wholestep.comm.errors import DistError
from wholestep.comm.process_group import Options, ProcessGroup
from wholestep.comm.reduce_op import RedOpType, ReduceOp, as_op
from wholestep.comm.work import All, Finished, Then, Work
from wholestep.comm.world import get_group, get_group_rank

Group = ProcessGroup | str | None
Op = ReduceOp | RedOpType | str
_BOOL_OPS = {
    RedOpType.SUM: RedOpType.BOR,
    RedOpType.PRODUCT: RedOpType.BAND,
    RedOpType.MIN: RedOpType.BAND,
    RedOpType.MAX: RedOpType.BOR,
}


def _launch(
    group: ProcessGroup, what: str, like: torch.Tensor | None, async_op: bool, start: Callable[[ProcessGroup], Work]
) -> Work | None:
    """Starts a collective on the group's backend for the tensor's device, records it and, unless async, waits."""
    if isinstance(group, DeviceGroup) and like is not None:
        group.for_device(like.device.type).group_name = group.group_name
        group = group.for_device(like.device.type)
    entry = recorder.begin(group, what, like)
    try:
        work = start(group)
        if async_op:
            entry.work = recorder.weakref.ref(work)
            return work
        work.wait()
    except DistError as failure:
        recorder.fail(entry, failure, group.rank())
        raise
    entry.state = "completed"
    return None


def _staged(
    outputs: list[torch.Tensor], start: Callable[[list[torch.Tensor]], Work], result: list[torch.Tensor] | None = None
) -> Work:
    """Runs ``start`` on contiguous twins of ``outputs`` and copies results back when it ends."""
    if all(out.is_contiguous() for out in outputs):
        return start(outputs)
    twins = [out.contiguous() for out in outputs]
    work = start(twins)

    def copy_back() -> None:
        for out, twin in zip(outputs, twins, strict=True):
            if twin is not out:
                out.copy_(twin)

    return Then(work, copy_back, outputs if result is None else result)


def reducible(tensor: torch.Tensor, kind: RedOpType, what: str) -> tuple[torch.Tensor, RedOpType]:
    """The tensor and kind as numbers that every backend reduces: bool as bytes, complex as pairs.

    Raises:
        TypeError: the reduction means nothing for this dtype.
    """
    if tensor.dtype is torch.bool:
        if kind in (RedOpType.AVG, RedOpType.PREMUL_SUM):
            raise TypeError(f"{what}: {kind.name} of bool tensors is not defined: convert to a number first")
        return tensor.view(torch.uint8), _BOOL_OPS.get(kind, kind)
    if tensor.is_complex():
        if kind not in (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM):
            raise TypeError(
                f"{what}: {kind.name} of complex tensors is not defined: SUM, AVG or PREMUL_SUM is required"
            )
        return torch.view_as_real(tensor), kind
    if tensor.is_floating_point() and kind in (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR):
        raise TypeError(f"{what}: {kind.name} of {tensor.dtype} is not defined: an integer tensor is required")
    return tensor, kind


def _pairs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Complex tensors as pairs of reals, so that they can be moved into real ones and back."""
    return [torch.view_as_real(one) if one.is_complex() else one for one in tensors]


def _root(group: Group, rank: int | None, group_rank: int | None, name: str) -> int:
    """Rank in the group, given as a global rank or as ``group_…``.

    Raises:
        ValueError: neither or both are given, or the rank is not in the group.
    """
    if (rank is None) == (group_rank is None):
        raise ValueError(f"exactly one of {name} (a global rank) and group_{name} (a rank of the group) is required")
    if group_rank is not None:
        size = get_group(group).size()
        if not 0 <= group_rank < size:
            raise ValueError(f"group_{name} {group_rank} is not in a group of {size}")
        return group_rank
    return get_group_rank(group, rank)  # type: ignore[arg-type]


def _name(kind: RedOpType, what: str) -> str:
    """The reduction's name in an operator.

    Raises:
        ValueError: PREMUL_SUM, whose factor an operator does not carry.
    """
    if kind is RedOpType.PREMUL_SUM:
        raise ValueError(f"{what}: PREMUL_SUM cannot be traced: multiply the tensor, then SUM")
    return kind.value


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
        return traced.in_place("all_reduce", tensor, pg, async_op, _name(kind, "all_reduce"))
    plain, kind = reducible(checks.tensor(tensor, "tensor"), kind, "all_reduce")
    opts = Options(kind, factor, async_op=async_op)
    return _launch(
        pg,
        "all_reduce",
        tensor,
        async_op,
        lambda pg: _staged([plain], lambda ready: pg.allreduce(ready, opts), [tensor]),
    )


def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """`all_reduce` of each tensor of a list, as one call."""
    pg = get_group(group)
    if checks.outside(pg, "all_reduce_coalesced"):
        return None
    kind, factor = as_op(op)
    checks.same_dtype("all_reduce_coalesced", checks.tensors(tensors, "tensors"))
    plain = [reducible(one, kind, "all_reduce_coalesced") for one in tensors]
    if not plain:
        return Finished([]) if async_op else None
    opts = Options(plain[0][1], factor, async_op=async_op)
    return _launch(
        pg, "all_reduce_coalesced", tensors[0], async_op,
        lambda pg: _staged([one for one, _ in plain], lambda ready: pg.allreduce(ready, opts), tensors),
    )  # fmt: skip


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
        root = _root(group, dst, group_dst, "dst")
        return traced.into("reduce", [tensor], tensor, pg, async_op, root, _name(kind, "reduce"))
    plain, kind = reducible(checks.tensor(tensor, "tensor"), kind, "reduce")
    opts = Options(kind, factor, _root(group, dst, group_dst, "dst"), async_op=async_op)
    return _launch(
        pg, "reduce", tensor, async_op, lambda pg: _staged([plain], lambda ready: pg.reduce(ready, opts), [tensor])
    )


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
    opts = Options(root=_root(group, src, group_src, "src"), async_op=async_op)
    if traced.is_traced(tensor):
        return traced.in_place("broadcast", tensor, pg, async_op, opts.root)
    plain = _pairs([checks.tensor(tensor, "tensor")])
    return _launch(
        pg, "broadcast", tensor, async_op, lambda pg: _staged(plain, lambda ready: pg.broadcast(ready, opts), [tensor])
    )


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Every rank's ``tensor`` into ``tensor_list``, by rank."""
    pg = get_group(group)
    outs, (inp,) = checks.tensors(tensor_list, "tensor_list"), _pairs([checks.tensor(tensor, "tensor")])
    outs = _pairs(outs)
    checks.same_dtype("all_gather", outs, [inp])
    if checks.outside(pg, "all_gather"):
        return None
    checks.length("all_gather", "tensor_list", outs, pg.size())
    for index, out in enumerate(outs):
        checks.elements("all_gather", f"tensor_list[{index}]", out.numel(), inp.numel(), "as many as `tensor` has")
    if traced.is_traced(tensor):
        return traced.into("all_gather", outs, inp.reshape(-1), pg, async_op)
    opts, ready = Options(async_op=async_op), inp.contiguous()
    return _launch(
        pg, "all_gather", tensor, async_op,
        lambda pg: _staged(outs, lambda ready_outs: pg.allgather([ready_outs], [ready], opts), tensor_list),
    )  # fmt: skip


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
        checks.same_dtype("all_gather_coalesced", checks.tensors(outs, "output_tensor_lists"), inputs)
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


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Every rank's input [n, …], one after the other, into ``output_tensor`` [size*n, …] (or [size, n, …])."""
    pg = get_group(group)
    (out,), (inp,) = _pairs([checks.tensor(output_tensor, "output_tensor")]), _pairs([input_tensor])
    checks.same_dtype("all_gather_into_tensor", [out, inp])
    if checks.outside(pg, "all_gather_into_tensor"):
        return None
    why = f"{pg.size()} ranks' inputs"
    checks.elements("all_gather_into_tensor", "output_tensor", out.numel(), inp.numel() * pg.size(), why)
    if traced.is_traced(input_tensor):
        return traced.into("all_gather", [out], inp.reshape(-1), pg, async_op)
    opts, ready = Options(async_op=async_op), inp.contiguous()
    return _launch(
        pg, "all_gather_into_tensor", input_tensor, async_op,
        lambda pg: _staged([out], lambda outs: pg._allgather_base(outs[0], ready, opts), [output_tensor]),
    )  # fmt: skip


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
        name = _name(kind, "reduce_scatter")
        return traced.into("reduce_scatter", [output], traced.rows(input_list), pg, async_op, name)
    out, plain_kind = reducible(output, kind, "reduce_scatter")
    parts = [reducible(part, kind, "reduce_scatter")[0].contiguous() for part in input_list]
    opts = Options(plain_kind, factor, async_op=async_op)
    return _launch(
        pg, "reduce_scatter", output, async_op,
        lambda pg: _staged([out], lambda outs: pg.reduce_scatter(outs, [parts], opts), [output]),
    )  # fmt: skip


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
        name = _name(kind, "reduce_scatter_tensor")
        return traced.into("reduce_scatter", [output], input.reshape(-1), pg, async_op, name)
    out, plain_kind = reducible(output, kind, "reduce_scatter_tensor")
    inp = reducible(input, kind, "reduce_scatter_tensor")[0].contiguous()
    opts = Options(plain_kind, factor, async_op=async_op)
    return _launch(
        pg, "reduce_scatter_tensor", output, async_op,
        lambda pg: _staged([out], lambda outs: pg._reduce_scatter_base(outs[0], inp, opts), [output]),
    )  # fmt: skip


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
    outs = _pairs(checks.tensors(gather_list, "gather_list")) if gather_list else []
    (inp,) = _pairs([checks.tensor(tensor, "tensor")])
    checks.same_dtype("gather", outs, [inp])
    if checks.outside(pg, "gather"):
        return None
    root = _root(group, dst, 0 if dst is None and group_dst is None else group_dst, "dst")
    if (pg.rank() == root) != bool(outs):
        raise ValueError("gather: `gather_list` is required on the destination rank, and on no other")
    if outs:
        checks.length("gather", "gather_list", outs, pg.size())
    for index, out in enumerate(outs):
        checks.elements("gather", f"gather_list[{index}]", out.numel(), inp.numel(), "as many as `tensor` has")
    if traced.is_traced(tensor):
        return traced.into("gather", outs, inp.reshape(-1), pg, async_op, root)
    opts, ready = Options(root=root, async_op=async_op), inp.contiguous()

    def run(pg: ProcessGroup) -> Work:
        return _staged(outs, lambda at: pg.gather([at] if outs else [], [ready], opts), gather_list)

    return _launch(pg, "gather", tensor, async_op, run)


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
    parts = _pairs(checks.tensors(scatter_list, "scatter_list")) if scatter_list else []
    (out,) = _pairs([checks.tensor(tensor, "tensor")])
    checks.same_dtype("scatter", [out], parts)
    if checks.outside(pg, "scatter"):
        return None
    root = _root(group, src, 0 if src is None and group_src is None else group_src, "src")
    if (pg.rank() == root) != bool(parts):
        raise ValueError("scatter: `scatter_list` is required on the source rank, and on no other")
    if parts:
        checks.length("scatter", "scatter_list", parts, pg.size())
    for index, part in enumerate(parts):
        checks.elements("scatter", f"scatter_list[{index}]", part.numel(), out.numel(), "as many as `tensor` has")
    if traced.is_traced(tensor):
        return traced.into("scatter", [out], out, pg, async_op, parts, root)
    opts, ready = Options(root=root, async_op=async_op), [part.contiguous() for part in parts]
    return _launch(
        pg, "scatter", tensor, async_op,
        lambda pg: _staged([out], lambda outs: pg.scatter(outs, [ready] if ready else [], opts), [tensor]),
    )  # fmt: skip


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """``input_tensor_list[r]`` goes to rank r; what comes from rank r lands in ``output_tensor_list[r]``."""
    pg = get_group(group)
    outs = _pairs(checks.tensors(output_tensor_list, "output_tensor_list"))
    ins = _pairs(checks.tensors(input_tensor_list, "input_tensor_list"))
    checks.same_dtype("all_to_all", outs, ins)
    if checks.outside(pg, "all_to_all"):
        return None
    checks.length("all_to_all", "output_tensor_list", outs, pg.size())
    checks.length("all_to_all", "input_tensor_list", ins, pg.size())
    if traced.is_traced(outs[0]):
        sizes = [[one.numel() for one in side] for side in (outs, ins)]
        return traced.into("all_to_all", outs, traced.rows(ins), pg, async_op, *sizes)
    opts, ready = Options(async_op=async_op), [one.contiguous() for one in ins]
    return _launch(
        pg, "all_to_all", ins[0], async_op,
        lambda pg: _staged(outs, lambda ready_outs: pg.alltoall(ready_outs, ready, opts), output_tensor_list),
    )  # fmt: skip


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
    checks.same_dtype("all_to_all_single", [checks.tensor(output, "output"), checks.tensor(input, "input")])
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
    if traced.is_traced(output):
        return traced.into(
            "all_to_all", [output], input, pg, async_op, output_split_sizes or [], input_split_sizes or []
        )
    opts = Options(out_splits=output_split_sizes or [], in_splits=input_split_sizes or [], async_op=async_op)
    (out,), (inp,) = _pairs([output]), _pairs([input.contiguous()])
    return _launch(
        pg, "all_to_all_single", input, async_op,
        lambda pg: _staged([out], lambda outs: pg.alltoall_base(outs[0], inp, opts), [output]),
    )  # fmt: skip


def barrier(group: Group = None, async_op: bool = False, timeout: timedelta | None = None) -> Work | None:
    """Returns when every rank of the group has called it."""
    pg = get_group(group)
    if checks.outside(pg, "barrier"):
        return None
    return _launch(pg, "barrier", None, async_op, lambda pg: pg.barrier(Options(timeout=timeout, async_op=async_op)))
