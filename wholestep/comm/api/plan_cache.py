"""Plan cache: a repeated collective is issued from C, without the Python checks of its first call.

A public collective under `with_plan_cache` is a callable of `native/cached_call.c`. A call that has a plan, because it
was made before in the same way on a shared-memory group (same reduction, group, root, dtypes and shapes; plain
contiguous CPU tensors, of one shape in a list; no dispatch mode, no profiler), it runs itself. Any other call goes to
the Python function, which leaves a plan by `learn`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from wholestep.comm import flight_recorder
from wholestep.comm.api.backends_registry import DeviceGroup
from wholestep.comm.api.collective_table import Collective
from wholestep.comm.engines.native_codes import ALL_TO_ALL, MEAN, OPS, RECV, SEND, message_error
from wholestep.comm.engines.shm import ShmGroup, ShmWork
from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.reduce_op import RedOpType, as_op
from wholestep.comm.shared_tensors import native
from wholestep.comm.work import Work
from wholestep.errors import DistError
from wholestep.torch_compat import PROFILER, count_dispatch_modes

_PLAIN = ["float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64"]
_DTYPES = {getattr(torch, name) for name in _PLAIN}
Function = TypeVar("Function", bound=Callable[..., Any])


def _set_up() -> bool:
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return type(capsule).__name__ == "PyCapsule" and native.quick_setup(
        capsule, torch.Tensor, count_dispatch_modes, flight_recorder.ring, "started", "completed"
    )


available = _set_up()
native.quick_profiler(*PROFILER)


def with_plan_cache(row: Collective) -> Callable[[Function], Function]:
    """Gives the public collective of a row plans. Calls with one leave all parameters but those that the row names,
    ``op``, ``group`` and ``async_op`` at their defaults."""

    def decorate(python: Function) -> Function:
        if not available:
            return python
        parameters = inspect.signature(python).parameters
        inp = "" if row.inp == row.out else row.inp
        roles = [row.out, inp, "op", "group", row.root, "async_op"]  # numbered from 1 in C
        defaults = tuple(NotImplemented if p.default is p.empty else p.default for p in parameters.values())
        numbers = tuple(roles.index(name) + 1 if name in roles else 0 for name in parameters)
        made = native.quicken(row.code, python, _conclude, tuple(parameters), defaults, numbers)
        functools.update_wrapper(made, python)
        return cast(Function, made)

    return decorate


def _conclude(
    group: ShmGroup,
    outcome: Any,
    entry: flight_recorder.Entry,
    out: torch.Tensor | list[torch.Tensor] | None,
    keep: Any,
) -> Work:
    """What a collective returns that did not end at once: a ticket as a work.

    Raises:
        DistError: it failed.
    """
    if not isinstance(outcome, tuple):
        result = [] if out is None else out if isinstance(out, list) else [out]
        return flight_recorder.under_way(entry, ShmWork(group, outcome, result, (out, keep)), group)
    if len(outcome) == 3:
        status, peer, got = outcome
        op = SEND if entry[flight_recorder.WHAT][1] == OPS[SEND] else RECV
        failure: DistError = message_error(group, op, peer, status, got, keep, group._seconds)
    else:
        failure = group.error(outcome)
    flight_recorder.fail(entry, group, failure)
    raise failure


def learn(
    row: Collective,
    out: torch.Tensor | list[torch.Tensor] | None,
    inp: torch.Tensor | list[torch.Tensor] | None,
    op: Any,
    group: Any,
    root: int | None,
    owner: ProcessGroup,
    like: torch.Tensor | None,
) -> None:
    """After a call that went well: leaves its plan for those like it.

    Args:
        out, inp: what it writes and reads, as the user gave them.
        op, group, root: as the user gave them; the plan is found by their identity.
        owner: the group itself.
        like: the tensor that the flight recorder shows.
    """
    if isinstance(owner, DeviceGroup):
        owner = owner.parts.get("cpu", owner)
    if not available or type(owner) is not ShmGroup or owner.latest is None:
        return
    if type(op) not in (RedOpType, str, type(None)) or (like is not None and like.dtype not in _DTYPES):
        return
    code, dtype, red, group_root, nbytes, shape, in_stride, out_stride, elem = owner.latest
    if op is not None and as_op(op)[1] is not None and red != MEAN:  # multiplied by a factor first, which no plan does
        return
    part = out_stride if code == ALL_TO_ALL else 0
    shown = flight_recorder.shown(owner, row.name, like)
    native.learn(
        row.code, out, inp, op, group, root, owner, shown, owner._handle, code, dtype, red, group_root, nbytes, shape,
        in_stride, out_stride, elem, owner._seconds, part,
    )  # fmt: skip
