"""What every public collective does: bring tensors into the form that backends take, start, record, wait."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wholestep.comm.api.backends_registry import DeviceGroup
from wholestep.comm.api.groups import get_group, get_group_rank
from wholestep.comm.diagnostics import flight_recorder
from wholestep.comm.dist_errors import DistError
from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.reduce_op import RedOpType, ReduceOp
from wholestep.comm.work import Then, Work

Group = ProcessGroup | str | None
Op = ReduceOp | RedOpType | str
FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
_BOOL_OPS = {
    RedOpType.SUM: RedOpType.BOR,
    RedOpType.PRODUCT: RedOpType.BAND,
    RedOpType.MIN: RedOpType.BAND,
    RedOpType.MAX: RedOpType.BOR,
}


def launch(
    group: ProcessGroup, what: str, like: torch.Tensor | None, async_op: bool, start: Callable[[ProcessGroup], Work]
) -> Work | None:
    """Starts a collective on the group's backend for the tensor's device, records it and, unless async, waits."""
    if isinstance(group, DeviceGroup) and like is not None:
        group = group.for_device(like.device.type)
    entry = flight_recorder.begin(group, what, like)
    try:
        work = start(group)
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
    return Then(work, lambda: _copy_back(back), work._result) if back else work


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
    """Contiguous tensors as numbers that every backend reduces: bool as bytes, complex as pairs."""
    return [one.view(torch.uint8) if one.dtype is torch.bool else one for one in pairs(tensors)]


def group_root(group: Group, rank: int | None, group_rank: int | None, name: str) -> int:
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


def traced_op(tensor: torch.Tensor, kind: RedOpType, factor: float | torch.Tensor | None) -> tuple[torch.Tensor, str]:
    """A reduction in an operator: the tensor to reduce and the reduction's name, with its factor if it has one.

    A factor that is a tensor is part of the program: it multiplies the tensor there.
    """
    if isinstance(factor, torch.Tensor):
        return tensor * factor, RedOpType.SUM.value
    return tensor, kind.value if factor is None else f"{kind.value}:{float(factor)!r}"
