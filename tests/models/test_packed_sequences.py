"""Packed sequences: their shapes are in their lengths, so that Python runs at each call, with eager's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import wholestep as ws
from tests.support.equal import Make, World, assert_refused, assert_same_failure, assert_same_run
from wholestep.errors import DataDependentError

LENGTHS = ([3, 2], [3, 2], [3, 1])
UNSORTED = ([2, 3], [2, 3], [1, 3])


def packed(
    kind: type[nn.RNNBase], given: str, lengths: Any = LENGTHS, total: int | None = None, ordered: bool | None = None,
    **settings: Any,
) -> Make:  # fmt: skip
    """A world that trains a recurrent model on sequences of several lengths.

    Args:
        given: the step is given lengths as a "list" or a "tensor", or a "packed" sequence.
    """

    ordered = lengths is LENGTHS if ordered is None else ordered

    def make(seed: int) -> World:
        first = settings.get("batch_first", False)
        rnn = kind(3, 4, 2, **settings)
        model = nn.ModuleList([rnn, nn.Linear(8 if rnn.bidirectional else 4, 1)])
        opt = torch.optim.AdamW(model.parameters())

        def pack(x: Tensor, n: Any) -> PackedSequence:
            return pack_padded_sequence(x, n, batch_first=first, enforce_sorted=ordered)

        def step(x: Any, n: Any) -> Any:
            out, hidden = rnn(x if given == "packed" else pack(x, n))
            y, counts = pad_packed_sequence(out, batch_first=first, total_length=total)
            loss = model[1](y).pow(2).sum() / counts.sum() + (hidden[0] if kind is nn.LSTM else hidden).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss, counts, y.detach(), out.batch_sizes

        batches = []
        for i, n in enumerate(lengths):
            x = torch.randn((2, 3, 3) if first else (3, 2, 3), generator=torch.Generator().manual_seed(i))
            sizes = n if given == "list" else torch.tensor(n)
            batches.append((pack(x, sizes), None) if given == "packed" else (x, sizes))
        # eager counts the filling of what it pads into
        return World(step, batches, {"model": model, "opt": opt}, changing=True, versions=False)

    return make


SEQUENCES = {
    "list": packed(nn.LSTM, "list", batch_first=True),
    "tensor": packed(nn.GRU, "tensor"),
    "unsorted": packed(nn.LSTM, "tensor", UNSORTED, batch_first=True),
    "unsorted list": packed(nn.RNN, "list", UNSORTED),
    "packed before": packed(nn.GRU, "packed"),
    "both ways, dropout": packed(nn.LSTM, "packed", UNSORTED, total=5, dropout=0.3, bidirectional=True),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_packed_sequences(name: str) -> None:
    run = assert_same_run(SEQUENCES[name], steps=5, compile=ws.compile)
    assert "test_packed_sequences.py:" in run.step.breaks[0]
    error = assert_refused(SEQUENCES[name], DataDependentError)
    read = "Tensor.__int__" if name == "packed before" else "packed sequence"
    assert read in error.what and "test_packed_sequences.py:" in error.where
    assert "without fullgraph=True" in error.remedy


def test_lengths_in_wrong_order_are_an_error_as_in_eager() -> None:
    assert_same_failure(packed(nn.LSTM, "list", UNSORTED, ordered=True), compile=ws.compile)
