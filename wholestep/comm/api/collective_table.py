"""The table of collectives: all that tells one from another.

`collectives.py` has the public function of each row, with its signature, and `issue.py` what all of them do: check the
tensors as the row says, record the row's operator in a traced program, or call the group's method and leave a plan.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from wholestep.comm.engines.native_codes import OPS

Tensors = list[torch.Tensor]
ANY_RANK = -1  # as the source of a message


class ArgumentKind(enum.Enum):
    """How a parameter holds what the ranks contribute or receive."""

    ONE = enum.auto()  # a tensor: one rank's part
    LIST = enum.auto()  # a list of tensors, one for each rank
    ROWS = enum.auto()  # a tensor: the parts of all ranks, one after the other
    SEVERAL = enum.auto()  # a list of tensors that are reduced in one call


@dataclass(frozen=True)
class Collective:
    """One row.

    Attributes:
        name: of the public function.
        start: calls the method of a group, ours or torch's, with contiguous outputs and inputs, and its options.
        out, inp: the parameters that are written and read; one name where a tensor is both.
        out_kind, inp_kind: what they hold.
        operator: ``wholestep::…`` in a traced program, if not of that name; with an underscore it works in place.
        root: the parameter with the root's global rank, if there is a root: ``src`` or ``dst``.
        default_root: rank in the group that is the root where none is given.
        reduces: whether there is a reduction operator.
    """

    name: str
    start: Callable[[Any, Tensors, Tensors, Any], Any]
    out: str = "tensor"
    inp: str = "tensor"
    out_kind: ArgumentKind = ArgumentKind.ONE
    inp_kind: ArgumentKind = ArgumentKind.ONE
    operator: str = ""
    root: str = ""
    default_root: int | None = None
    reduces: bool = False

    @property
    def traced(self) -> str:
        """Name of the operator."""
        return self.operator or self.name

    @property
    def code(self) -> int:
        """Number of its plan in the compiled engine."""
        return OPS.index(self.traced.removesuffix("_"))


ONE, LIST, ROWS, SEVERAL = ArgumentKind.ONE, ArgumentKind.LIST, ArgumentKind.ROWS, ArgumentKind.SEVERAL

ALL_REDUCE = Collective(
    "all_reduce", lambda pg, outs, ins, opts: pg.allreduce(outs, opts), operator="all_reduce_", reduces=True
)
ALL_REDUCE_COALESCED = replace(
    ALL_REDUCE, name="all_reduce_coalesced", out="tensors", inp="tensors", out_kind=SEVERAL, inp_kind=SEVERAL
)
REDUCE = Collective("reduce", lambda pg, outs, ins, opts: pg.reduce(outs, opts), root="dst", reduces=True)
REDUCE_SCATTER = Collective(
    "reduce_scatter", lambda pg, outs, ins, opts: pg.reduce_scatter(outs, [ins], opts),
    "output", "input_list", ONE, LIST, reduces=True,
)  # fmt: skip
REDUCE_SCATTER_TENSOR = Collective(
    "reduce_scatter_tensor", lambda pg, outs, ins, opts: pg._reduce_scatter_base(outs[0], ins[0], opts),
    "output", "input", ONE, ROWS, "reduce_scatter", reduces=True,
)  # fmt: skip
BROADCAST = Collective(
    "broadcast", lambda pg, outs, ins, opts: pg.broadcast(outs, opts), operator="broadcast_", root="src"
)
ALL_GATHER = Collective(
    "all_gather", lambda pg, outs, ins, opts: pg.allgather([outs], ins, opts), "tensor_list", "tensor", LIST
)
ALL_GATHER_INTO_TENSOR = Collective(
    "all_gather_into_tensor", lambda pg, outs, ins, opts: pg._allgather_base(outs[0], ins[0], opts),
    "output_tensor", "input_tensor", ROWS, ONE, "all_gather",
)  # fmt: skip
GATHER = Collective(
    "gather", lambda pg, outs, ins, opts: pg.gather([outs] if outs else [], ins, opts),
    "gather_list", "tensor", LIST, root="dst", default_root=0,
)  # fmt: skip
SCATTER = Collective(
    "scatter", lambda pg, outs, ins, opts: pg.scatter(outs, [ins] if ins else [], opts),
    "tensor", "scatter_list", ONE, LIST, root="src", default_root=0,
)  # fmt: skip
ALL_TO_ALL = Collective(
    "all_to_all", lambda pg, outs, ins, opts: pg.alltoall(outs, ins, opts),
    "output_tensor_list", "input_tensor_list", LIST, LIST,
)  # fmt: skip
ALL_TO_ALL_SINGLE = Collective(
    "all_to_all_single", lambda pg, outs, ins, opts: pg.alltoall_base(outs[0], ins[0], opts),
    "output", "input", ROWS, ROWS, "all_to_all",
)  # fmt: skip
BARRIER = Collective("barrier", lambda pg, outs, ins, opts: pg.barrier(opts), out="", inp="")
SEND = Collective("send", lambda pg, outs, ins, opts: pg.send(outs, opts.root, opts.tag), root="dst")
RECV = Collective(
    "recv", lambda pg, outs, ins, opts: pg.recv(outs, opts.root, opts.tag), root="src", default_root=ANY_RANK
)
