"""Process groups after `fork`: in the child, each call raises.

The memory, the sockets and the locks of a group are its ranks' alone: a child that used them would publish rounds in
its parent's name. Stores see to themselves.
"""

from __future__ import annotations

import ctypes
import os

import torch

from wholestep.comm import shared_tensors
from wholestep.comm.process_group import Options, ProcessGroup, alive
from wholestep.comm.work import Work
from wholestep.errors import DistBackendError


class ForkedGroup(ProcessGroup):
    """A group in a process that was forked from one of its ranks. It tells ranks, and ends without a word."""

    def _live(self, what: str) -> int:
        raise DistBackendError(
            f"{what}: this process was forked from rank {self.labels[self._rank]} of group {self.group_name!r} and is "
            "no rank of it: start it by spawn or forkserver, or call destroy_process_group and init_process_group "
            "here, for a group of its own"
        )

    def _run(self, op: str, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options) -> Work:
        self._live(op)
        raise AssertionError

    def _get_sequence_number_for_group(self) -> int:
        return self._live("a collective")  # where each begins, before the flight recorder notes it


def _in_child() -> None:
    if shared_tensors.native is not None:
        shared_tensors.native.after_fork()
    shared_tensors.renew_pool()
    for group in list(alive):
        if group.ends_with_fork:
            engine = vars(group).get("_engine")
            if engine is not None:  # its destructor would wait for threads that only the parent has
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
            vars(group)["_handle"] = 0
            group.__class__ = ForkedGroup


os.register_at_fork(after_in_child=_in_child)
