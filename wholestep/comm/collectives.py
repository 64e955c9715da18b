"""The collectives, with the names and arguments of torch.distributed.

Each checks its arguments, brings tensors into the form that backends take (contiguous; bool as bytes), starts
the collective on the group and, unless ``async_op``, waits. All raise `DistError`s as `Work.wait` does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from wholestep.comm.process_group import Options, ProcessGroup
from wholestep.comm.reduce_op import RedOpType, ReduceOp, as_op
from wholestep.comm.work import Then, Work
from wholestep.comm.world import get_group, get_group_rank

Group = ProcessGroup | str | None
_BOOL_OPS = {
    RedOpType.SUM: RedOpType.BOR,
    RedOpType.PRODUCT: RedOpType.BAND,
    RedOpType.MIN: RedOpType.BAND,
    RedOpType.MAX: RedOpType.BOR,
}


def _finish(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _staged(tensors: list[torch.Tensor], start: Callable[[list[torch.Tensor]], Work], written: bool = True) -> Work:
    """Runs ``start`` on contiguous twins of ``tensors`` and copies results back when it ends."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return start(tensors)
    twins = [tensor.contiguous() for tensor in tensors]
    work = start(twins)
    if not written:
        return work

    def copy_back() -> None:
        for tensor, twin in zip(tensors, twins, strict=True):
            if twin is not tensor:
                tensor.copy_(twin)

    return Then(work, copy_back, tensors)


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


def all_reduce(
    tensor: torch.Tensor, op: ReduceOp | RedOpType | str = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduces ``tensor`` over the group, in place, alike on every rank.

    Args:
        tensor: any shape, strides and dtype; the same shape and dtype on every rank.
        op: the reduction, or its lower-case name.
    """
    pg = get_group(group)
    kind, factor = as_op(op)

    def start(ready: list[torch.Tensor]) -> Work:
        plain, plain_kind = reducible(ready[0], kind, "all_reduce")
        return pg.allreduce([plain], Options(plain_kind, factor, async_op=async_op))

    return _finish(_staged([tensor], start), async_op)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: Group = None, async_op: bool = False, group_src: int | None = None
) -> Work | None:
    """Copies the tensor of global rank ``src`` (or rank ``group_src`` of the group) to every rank, in place."""
    pg = get_group(group)
    root = get_group_rank(group, src) if group_src is None else group_src
    return _finish(
        _staged([tensor], lambda ready: pg.broadcast(ready, Options(root=root, async_op=async_op))), async_op
    )


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Every rank's input [n, …], one after the other, into ``output_tensor`` [size*n, …] (or [size, n, …])."""
    pg = get_group(group)
    opts = Options(async_op=async_op)
    return _finish(
        _staged([output_tensor], lambda out: pg._allgather_base(out[0], input_tensor.contiguous(), opts)), async_op
    )


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp | RedOpType | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """``output`` [n, …] becomes the reduction over ranks of rows rank*n to (rank+1)*n of ``input`` [size*n, …]."""
    pg = get_group(group)
    kind, factor = as_op(op)

    def start(ready: list[torch.Tensor]) -> Work:
        out, plain_kind = reducible(ready[0], kind, "reduce_scatter_tensor")
        inp, _ = reducible(input.contiguous(), kind, "reduce_scatter_tensor")
        return pg._reduce_scatter_base(out, inp, Options(plain_kind, factor, async_op=async_op))

    return _finish(_staged([output], start), async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Part r of ``input``'s dim 0 goes to rank r; ``output`` holds the parts that came, in rank order."""
    pg = get_group(group)
    opts = Options(out_splits=output_split_sizes or [], in_splits=input_split_sizes or [], async_op=async_op)
    return _finish(_staged([output], lambda out: pg.alltoall_base(out[0], input.contiguous(), opts)), async_op)


def barrier(group: Group = None, async_op: bool = False, timeout: timedelta | None = None) -> Work | None:
    """Returns when every rank of the group has called it."""
    return _finish(get_group(group).barrier(Options(timeout=timeout, async_op=async_op)), async_op)
