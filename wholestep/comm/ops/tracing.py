"""c10d-style calls inside a traced program, as operators.

While a dispatch mode records (or the tensors are fake) a collective does not run: it becomes its ``wholestep::``
operator, and ``work.wait()`` becomes exactly one ``wait``, put before the first use of the result. In-place forms
become ``all_reduce_`` and ``wait_``, which the recorder makes pure as it does any in-place call.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.work import Work
from wholestep.torch_compat import FakeTensor, dispatch_modes_active


def is_traced(tensor: torch.Tensor) -> bool:
    """True when a call on this tensor is to be recorded, not run."""
    return dispatch_modes_active() or isinstance(tensor, FakeTensor)


def is_recording() -> bool:
    """True when a call without a tensor is to be recorded, not run."""
    return dispatch_modes_active()


class TracedWork(Work):
    """A collective in a recorded program: `wait` records the waiting, once."""

    def __init__(self, finish: Callable[[], None], result: list[torch.Tensor]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._result = result

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


def _done(work: TracedWork, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def in_place(name: str, tensor: torch.Tensor, group: ProcessGroup, async_op: bool, *args: Any) -> Work | None:
    """``wholestep::name_`` on the tensor now, or on a contiguous copy, ``wholestep::wait_`` at the wait."""
    ops, dense = torch.ops.wholestep, tensor if tensor.is_contiguous() else tensor.contiguous()
    getattr(ops, f"{name}_")(dense, *args, group.group_name)

    def finish() -> None:
        ops.wait_(dense)
        if dense is not tensor:  # waiting for a copy of what the collective gives would be waiting for nothing
            tensor.copy_(dense)

    return _done(TracedWork(finish, [tensor]), async_op)


def into(
    name: str, outputs: list[torch.Tensor], inputs: Any, group: ProcessGroup, async_op: bool, *args: Any
) -> Work | None:
    """The pure operator now; at the wait its result is cut into the outputs, in order, if there are any."""
    ops = torch.ops.wholestep
    flat = getattr(ops, name)(inputs, *args, group.group_name)

    def finish() -> None:
        whole = ops.wait(flat)
        if not outputs:
            return
        whole = whole.reshape(-1)
        for out, part in zip(outputs, whole.split([out.numel() for out in outputs]), strict=True):
            out.copy_(part.view(out.shape))

    return _done(TracedWork(finish, outputs), async_op)


def rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other, flat."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def together(works: list[Work | None], async_op: bool) -> Work | None:
    """Several recorded collectives as one."""
    started = [work for work in works if work is not None]

    def finish() -> None:
        for work in started:
            work.wait()

    return _done(TracedWork(finish, [one for work in started for one in work._result or []]), async_op)
