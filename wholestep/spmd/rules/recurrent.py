"""Recurrent layers: by sequences of the batch, each of which runs on its own."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.expand.calls import Call, holds_on_all
from wholestep.spmd.expand.strategy import Rule, Strategy
from wholestep.spmd.placements import Opaque, Partial, Placement, Shard

_SEQUENCES = ["input", "output", "grad_output"]  # [time, batch, features], whatever `batch_first` says
_STATES = ["hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"]  # [batch, features]


def _by_batch(call: Call) -> tuple[Placement, ...]:
    where = dict.fromkeys(_SEQUENCES, Shard(1)) | dict.fromkeys(_STATES, Shard(0))
    return call.placed(**where, workspace=Opaque())


def _layer(call: Call) -> Iterator[Strategy]:
    if holds_on_all(call, call.values[0].shape[1]):
        yield Strategy(_by_batch(call), (Shard(1), Shard(0), Shard(0), Opaque()))


def _layer_backward(call: Call) -> Iterator[Strategy]:
    if holds_on_all(call, call.values[0].shape[1]):
        yield Strategy(_by_batch(call), (Shard(1), *[Partial()] * 4, Shard(0), Shard(0)))


RULES: dict[str, Rule] = {
    "aten.mkldnn_rnn_layer": _layer,
    "under_grad(aten.mkldnn_rnn_layer)": _layer,
    "aten.mkldnn_rnn_layer_backward": _layer_backward,
}
