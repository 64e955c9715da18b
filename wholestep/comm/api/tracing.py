"""Collectives called inside a traced program: each becomes its operator.

While a dispatch mode records (or the tensors are fake) a collective does not run: it becomes its ``wholestep::``
operator, and ``work.wait()`` becomes exactly one ``wait``, put before the first use of the result. In-place forms
become ``all_reduce_`` and ``wait_``, which the recorder makes pure as it does any in-place call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.work import All, Work
from wholestep.errors import UnsupportedError
from wholestep.torch_compat import FakeTensor, dispatch_modes_active

Fn = TypeVar("Fn", bound=Callable[..., Any])


def is_traced(tensor: torch.Tensor | None) -> bool:
    """True when a call on this tensor, or on none, is to be recorded, not run."""
    return dispatch_modes_active() or isinstance(tensor, FakeTensor)


def is_captured() -> bool:
    """True where a program is made of what is called, false also where a mode has operators run, sooner or later."""
    return dispatch_modes_active() and isinstance(torch.empty(0), FakeTensor)


def not_recorded(fn: Fn) -> Fn:
    """Decorates what reaches other ranks by Python code and not by operators, so that no program can have it.

    Raises:
        UnsupportedError: inside of a captured step.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_captured():
            raise UnsupportedError(
                f"comm.{fn.__name__} reaches other ranks by Python code, which a replay would not run again",
                remedy="call it before or after the step, send tensors inside of it, or compile without fullgraph=True",
            )
        return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


def in_place(name: str, tensors: list[torch.Tensor], group: ProcessGroup, *args: Any) -> Work:
    """``wholestep::name`` on each tensor now, or on a copy of it, ``wholestep::wait_`` at the wait.

    A copy of what is not contiguous, and of a part of a larger tensor: that one would be made anew from the part before
    the wait."""
    ends = [_in_place(name, tensor, group, *args) for tensor in tensors]
    return All([], tensors, lambda: [end() for end in ends])


def _in_place(name: str, tensor: torch.Tensor, group: ProcessGroup, *args: Any) -> Callable[[], None]:
    ops, dense = torch.ops.wholestep, tensor
    if not tensor.is_contiguous() or tensor.nbytes < tensor.untyped_storage().nbytes():
        dense = tensor.clone(memory_format=torch.contiguous_format)
    getattr(ops, name)(dense, *args, group.group_name)

    def finish() -> None:
        ops.wait_(dense)
        if dense is not tensor:  # waiting for a copy of what the collective gives would be waiting for nothing
            tensor.copy_(dense)

    return finish


def into(name: str, outputs: list[torch.Tensor], inputs: Any, group: ProcessGroup, *args: Any) -> Work:
    """The pure operator now; at the wait its result is cut into the outputs, in order, if there are any."""
    ops = torch.ops.wholestep
    flat = getattr(ops, name)(inputs, *args, group.group_name)

    def finish() -> None:
        whole = ops.wait(flat)
        if outputs:
            parts = whole.reshape(-1).split([out.numel() for out in outputs])
            for out, part in zip(outputs, parts, strict=True):
                out.copy_(part.view(out.shape))

    return All([], outputs, finish)
