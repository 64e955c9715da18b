"""Recurrent layers: by sequences of the batch, each of which runs on its own."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import Rule, Strategy, nonempty
from wholestep.spmd.placements import Opaque, Partial, Placement, Shard

_SEQUENCES = ["input", "output", "grad_output"]  # [time, batch, features], whatever `batch_first` says
_STATES = ["hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"]  # [batch, features]


def _layer(call: Call) -> Iterator[Strategy]:
    """Forward and backward."""
    ins = call.placed(**dict.fromkeys(_SEQUENCES, Shard(1)), **dict.fromkeys(_STATES, Shard(0)), workspace=Opaque())
    weights: list[Placement] = [Partial()] * 4 if "grad_output" in call.by_name(ins) else []
    last = (Shard(0), Shard(0)) if weights else (Shard(0), Shard(0), Opaque())
    yield Strategy(ins, (Shard(1), *weights, *last))


RULES: dict[str, Rule] = dict.fromkeys(
    ["aten.mkldnn_rnn_layer", "under_grad(aten.mkldnn_rnn_layer)", "aten.mkldnn_rnn_layer_backward"], nonempty(_layer)
)
