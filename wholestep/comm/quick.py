"""Calls like an earlier one: the way past Python for collectives that a training loop makes again and again.

A public collective first asks `again`. What has been called before in the same way on a shared-memory group (same
reduction, group, root, dtypes and shapes; plain contiguous CPU tensors; nothing recording) is run by `native/quick.c`.
All else gives NEW, goes through the checks, and is taught to it by `learn`.
"""

from __future__ import annotations

from typing import Any

import torch

from wholestep.comm import recorder
from wholestep.comm.backend import DeviceGroup
from wholestep.comm.codes import ALL_TO_ALL
from wholestep.comm.jobs import ShmWork
from wholestep.comm.memory import native
from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.reduce_op import RedOpType, as_op
from wholestep.comm.shm import ShmGroup
from wholestep.comm.work import Work
from wholestep.torch_compat import count_dispatch_modes

NEW = NotImplemented
_PLAIN = ["float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64"]
_QUICK = {getattr(torch, name) for name in _PLAIN}


def _nothing(*_: Any) -> Any:
    return NEW


def _set_up() -> bool:
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return (
        native is not None
        and type(capsule).__name__ == "PyCapsule"
        and native.quick_setup(
            capsule, torch.Tensor, count_dispatch_modes, recorder.ring, recorder.numbers, "started", "completed"
        )
    )


available = _set_up()
again = native.again if available else _nothing


def conclude(found: Any, result: list[torch.Tensor], keep: Any = None) -> Work | None:
    """What `again` gave, as what the collective returns.

    Raises:
        DistError: it failed.
    """
    if found is None:
        return None
    group, outcome, entry = found
    if isinstance(outcome, int):
        return recorder.under_way(entry, ShmWork(group, outcome, result, keep), group)
    failure = group._error(outcome)
    recorder.fail(entry, group, failure)
    raise failure


def learn(
    what: int,
    out: torch.Tensor | None,
    inp: torch.Tensor | None,
    op: Any,
    group: Any,
    root: int | None,
    owner: ProcessGroup,
    name: str,
) -> None:
    """After a call that went well: leaves its plan for those like it.

    Args:
        op, group, root: as the user gave them; the plan is found by their identity.
        owner: the group itself.
        name: for the flight recorder.
    """
    if isinstance(owner, DeviceGroup):
        owner = owner.parts.get("cpu", owner)
    if not available or type(owner) is not ShmGroup or owner.latest is None:
        return
    if type(op) not in (RedOpType, str, type(None)) or (inp is not None and inp.dtype not in _QUICK):
        return
    if op is not None and as_op(op)[1] is not None:  # multiplied by a factor first, which no plan does
        return
    code, dtype, red, group_root, nbytes, shape, in_stride, out_stride, elem = owner.latest
    part = out_stride if code == ALL_TO_ALL else 0
    shown = recorder.shown(owner, name, inp)
    native.learn(
        what, out, inp, op, group, root, owner, shown, owner._handle, code, dtype, red, group_root, nbytes, shape,
        in_stride, out_stride, elem, owner._seconds, part,
    )  # fmt: skip
