"""Softmax, log-softmax and logsumexp: along a sharded dimension by decomposition."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.decompositions import can_decompose
from wholestep.spmd.expand.strategy import Decomposed, Dims, Rule, Strategy, beside, linear
from wholestep.spmd.placements import Shard
from wholestep.spmd.rules.reductions import names_of


def _along(call: Call) -> Iterator[Strategy]:
    """Rows beside a dimension ``dim``, and along it by other calls."""
    if call.values[0].dim() == 0:
        return
    dim = int(call.argument("dim")) % call.values[0].dim()
    yield from beside(call, dim)
    if can_decompose(call):
        yield Strategy((Shard(dim),) * len(call.values), (Shard(dim),), Decomposed())


def _logsumexp(call: Call) -> Iterator[Strategy]:
    letters, result, gone = names_of(call)
    yield from Dims([letters], [result]).strategies(call)
    for letter in gone if can_decompose(call) else ():
        yield Strategy((Shard(letters.index(letter)),), (R,), Decomposed())


RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten._softmax", "aten._safe_softmax", "aten._log_softmax"], _along),
    **dict.fromkeys(["aten._softmax_backward_data", "aten._log_softmax_backward_data"], linear(_along)),
    "aten.logsumexp": _logsumexp,
}
