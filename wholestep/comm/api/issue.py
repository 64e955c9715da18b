"""What every public collective does: check its tensors, record or start the collective, wait, and leave a plan."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch

from wholestep.comm import flight_recorder
from wholestep.comm.api import checks, tracing
from wholestep.comm.api.backends_registry import DeviceGroup
from wholestep.comm.api.collective_table import ANY_RANK, RECV, SEND, ArgumentKind, Collective
from wholestep.comm.api.groups import get_group, get_group_rank
from wholestep.comm.api.plan_cache import learn
from wholestep.comm.process_group import Options, ProcessGroup
from wholestep.comm.reduce_op import RedOpType, ReduceOp, as_op
from wholestep.comm.work import All, Work
from wholestep.errors import DistError
from wholestep.torch_compat import PROFILER, begin_profiled_range

Group = ProcessGroup | str | None
Op = ReduceOp | RedOpType | str
FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
_BOOL_OPS = {
    RedOpType.SUM: RedOpType.BOR,
    RedOpType.PRODUCT: RedOpType.BAND,
    RedOpType.MIN: RedOpType.BAND,
    RedOpType.MAX: RedOpType.BOR,
}


def issue(
    row: Collective,
    out: Any,
    inp: Any,
    group: Group,
    async_op: bool,
    *,
    op: Op | None = None,
    root: tuple[int | None, int | None] = (None, None),
    splits: tuple[list[int], list[int]] = ([], []),
    tag: int = 0,
) -> Work | None:
    """A call of the collective that a row of the table describes.

    Args:
        out, inp: what the caller gave for the row's parameters; the same where there is one parameter.
        root: as a global rank and as a rank in the group, of which one is None.
        splits: rows of the output and of the input that belong to each rank; empty for equal parts.
        tag: of a message.
    """
    pg, in_place = get_group(group), row.out == row.inp
    given_outs = checks.tensors_of(out, row.out, row.out_kind, bool(row.root))
    given_ins = given_outs if in_place else checks.tensors_of(inp, row.inp, row.inp_kind, bool(row.root))
    outs, ins = (given_outs, given_ins) if row.reduces else (pairs(given_outs), pairs(given_ins))
    checks.same_dtype(row.name, outs, ins)
    if checks.outside(pg, row.name):
        return None
    if row.out_kind is row.inp_kind is ArgumentKind.ROWS:
        checks.split_sizes(row.name, row.inp, inp, splits[1], pg.size())
        checks.split_sizes(row.name, row.out, out, splits[0], pg.size())
    opts = Options(async_op=async_op, tag=tag, out_splits=splits[0], in_splits=splits[1])
    if row.root:
        opts.root = group_root(group, *root, row.root, row.default_root)
    at_root = opts.root == pg.rank()
    if in_place:
        written = not row.root or at_root == (row.root == "dst")
    else:
        written = not row.root or row.out_kind is ArgumentKind.ONE or at_root
        checks.sizes(row, outs, ins, pg.size(), at_root)
    if written:
        checks.writable(given_outs, row.out, expanded=in_place and not row.root)
    kind, opts.factor = as_op(op) if op is not None else (RedOpType.SUM, None)
    like = (given_ins if row.out_kind in (ArgumentKind.LIST, ArgumentKind.ROWS) else given_outs)[0]
    if tracing.is_traced(like):
        return waited(_record(row, outs, ins, pg, opts, kind, written), async_op)
    if row.reduces:
        opts.op = reduction_of(like.dtype, kind, row.name)
        outs, ins = numbers(outs), numbers(ins)
    ready = outs if in_place else [dense(one) for one in ins]
    apart = row.out_kind is ArgumentKind.SEVERAL
    work = launch(
        pg, row.name, like, async_op,
        lambda pg: staged(outs, lambda copies: row.start(pg, copies, ready, opts), given_outs, apart, written),
    )  # fmt: skip
    if root[1] is None and opts.root != ANY_RANK and not (apart or tag or splits[0] or splits[1]):
        learn(row, out, inp, op, group, root[0], pg, like)
    return work


def _record(
    row: Collective, outs: list[torch.Tensor], ins: list[torch.Tensor], pg: ProcessGroup, opts: Options,
    kind: RedOpType, written: bool,
) -> Work:  # fmt: skip
    """The row's operator in a traced program. A factor that is a tensor is part of the program and multiplies there."""
    arguments: list[Any] = [opts.root] if row.root else []
    if row is SEND or row is RECV:
        if opts.root == ANY_RANK:
            raise ValueError("irecv: a recorded program cannot tell who sent: name the source")
        return tracing.into(row.name, outs if written else [], ins[0], pg, opts.root, opts.tag)
    if isinstance(opts.factor, torch.Tensor):
        scaled = [one * opts.factor for one in ins]
        if row.traced.endswith("_"):
            ins = [one.copy_(by) for one, by in zip(ins, scaled, strict=True)]
        else:
            outs, ins = outs if written else [], scaled  # the others keep theirs, not scaled
        arguments.append(RedOpType.SUM.value)
    elif row.reduces:
        arguments.append(kind.value if opts.factor is None else f"{kind.value}:{float(opts.factor)!r}")
    if row.traced.endswith("_"):
        return tracing.in_place(row.traced, ins, pg, *arguments)
    if row.traced == "scatter":
        return tracing.into("scatter", outs, outs[0], pg, ins, *arguments)
    if row.out_kind is row.inp_kind is ArgumentKind.ROWS:
        return tracing.into(row.traced, outs, ins[0], pg, opts.out_splits, opts.in_splits)
    if row.out_kind is row.inp_kind is ArgumentKind.LIST:
        arguments = [[one.numel() for one in side] for side in (outs, ins)]
    flat = [one.reshape(-1) for one in ins]
    return tracing.into(row.traced, outs, torch.cat(flat) if len(flat) > 1 else flat[0], pg, *arguments)


def waited(work: Work, async_op: bool) -> Work | None:
    """The work, or None after its end."""
    if async_op:
        return work
    work.wait()
    return None


def launch(
    group: ProcessGroup, what: str, like: torch.Tensor | None, async_op: bool, start: Callable[[ProcessGroup], Work]
) -> Work | None:
    """Starts a collective on the group's backend for the tensor's device, records it and, unless async, waits.

    In profiles it is a range, which ends when the collective has been waited for.
    """
    if isinstance(group, DeviceGroup) and like is not None:
        group = group.for_device(like.device.type)
    entry, end = flight_recorder.begin(group, what, like), None
    if getitem(*PROFILER) and not group.in_profiles:
        end = begin_profiled_range(f"{group.name()}:{what}", *([] if like is None else [like]))
    try:
        work = start(group)
        if end is not None:
            work = All([work], work._result or [], end)
        if async_op:
            return flight_recorder.under_way(entry, work, group)
        work.wait()
    except DistError as failure:
        flight_recorder.fail(entry, group, failure)
        raise
    flight_recorder.done(entry)
    return None


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its memory holds its elements in order, else a copy that does."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def staged(
    outputs: list[torch.Tensor],
    start: Callable[[list[torch.Tensor]], Work],
    result: list[torch.Tensor] | None = None,
    apart: bool = False,
    written: bool = True,
) -> Work:
    """Runs ``start`` on contiguous copies of those ``outputs`` that need one, and copies results back when it ends.

    Args:
        result: what the work gives as its result; None for the outputs.
        written: False on a rank whose tensors stay as they are.
        apart: the outputs may share memory, and need a copy each if they do.
    """
    overlapping = apart and len({out.untyped_storage().data_ptr() for out in outputs}) < len(outputs)
    copies = [dense(out).clone() if overlapping else dense(out) for out in outputs]
    work = start(copies)
    work._result = outputs if result is None else result
    back = [(out, copy) for out, copy in zip(outputs, copies, strict=True) if written and copy is not out]
    return All([work], work._result, lambda: _copy_back(back)) if back else work


@torch.inference_mode()  # as collectives write: whatever autograd says of the tensors
def _copy_back(pairs_of: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for out, copy in pairs_of:
        for dim, stride in enumerate(out.stride()):
            if stride == 0 and out.shape[dim]:  # expanded: all its elements have become equal
                out, copy = out.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
        out.copy_(copy)


def reduction_of(dtype: torch.dtype, kind: RedOpType, what: str) -> RedOpType:
    """The reduction of `numbers` that means this one of tensors of this dtype.

    Raises:
        TypeError: the reduction means nothing for this dtype.
    """
    if dtype in FLOAT8:
        raise TypeError(f"{what}: {dtype} has too few bits to add up in: convert to bfloat16 or float32 first")
    if dtype is torch.bool:
        if kind in (RedOpType.AVG, RedOpType.PREMUL_SUM):
            raise TypeError(f"{what}: {kind.name} of bool tensors is not defined: convert to a number first")
        return _BOOL_OPS.get(kind, kind)
    if dtype.is_complex and kind not in (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM):
        raise TypeError(f"{what}: {kind.name} of complex tensors is not defined: SUM, AVG or PREMUL_SUM is required")
    if dtype.is_floating_point and kind in (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR):
        raise TypeError(f"{what}: {kind.name} of {dtype} is not defined: an integer tensor is required")
    return kind


def pairs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Complex tensors as pairs of reals, so that they can be moved into real ones and back."""
    return [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in tensors]


def numbers(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors as numbers that every backend reduces: bool as bytes, complex as pairs."""
    return [one.view(torch.uint8) if one.dtype is torch.bool else one for one in pairs(tensors)]


def group_root(group: Group, rank: int | None, group_rank: int | None, name: str, default: int | None = None) -> int:
    """Rank in the group, given as a global rank or as ``group_…``.

    Args:
        default: the rank in the group where neither is given.

    Raises:
        ValueError: neither or both are given, or the rank is not in the group.
    """
    if rank is None and group_rank is None and default is not None:
        return default
    if (rank is None) == (group_rank is None):
        raise ValueError(f"exactly one of {name} (a global rank) and group_{name} (a rank of the group) is required")
    if group_rank is None:
        return get_group_rank(group, int(rank or 0))
    size = get_group(group).size()
    if not 0 <= group_rank < size:
        raise ValueError(f"group_{name} {group_rank} is not in a group of {size}")
    return group_rank
