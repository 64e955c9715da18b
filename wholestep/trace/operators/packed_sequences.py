"""Packed sequences: batches whose lengths decide on shapes, which C++ reads past the dispatcher.

The lengths become guards where they are the step's to be given, so that other lengths are another capture. From then on
they are constants: `batch_sizes` is a real tensor, which the recurrent operators and autograd read as they do in eager.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.autograd.graph import increment_version

from wholestep.torch_compat import no_modes
from wholestep.trace.numbers.recorded_numbers import RecordedNumbers

aten = torch.ops.aten

RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def is_packed(args: Any) -> bool:
    """Whether a recurrent operator is given a packed sequence: data, batch sizes, hidden state, parameters."""
    return len(args) > 3 and isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple))


def pack(numbers: RecordedNumbers, tensor: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """`aten::_pack_padded_sequence`: the packed data, and the batch sizes as a real tensor."""
    inputs, builder = numbers.inputs, numbers.builder
    known = known_numbers(numbers, lengths)
    time, batch = (1, 0) if batch_first else (0, 1)
    with no_modes():  # eager's errors, and the sizes: they follow from the lengths alone
        row = torch.empty(tensor.shape[time], tensor.shape[batch], 1)
        rows, sizes = aten._pack_padded_sequence.default(row, known, False)
    with builder.fake_mode:
        data = torch.empty(len(rows), *tensor.shape[2:], dtype=tensor.dtype, device=tensor.device)
    read = inputs.read(tensor), inputs.read(builder.constant(known))
    value = builder.detached(data), inputs.known(sizes)
    node = builder.emit(aten._pack_padded_sequence.default, (*read, batch_first), value=value)
    builder.root(data, builder.emit(getitem, (node, 0)))
    return data, sizes


def known_numbers(numbers: RecordedNumbers, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of integers with its values, which are guards where they are not the same at each call."""
    with no_modes():
        return torch.tensor(numbers.as_list(tensor), dtype=torch.int64)


def with_known_sizes(numbers: RecordedNumbers, args: Any) -> Any:
    """The arguments of a recurrent operator, whose batch sizes C++ may read."""
    return (args[0], known_numbers(numbers, args[1]), *args[2:])


def padded(
    numbers: RecordedNumbers,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float = 0.0,
    total_length: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_pad_packed_sequence`: the sequences one beside the other, and their lengths."""
    sizes = known_numbers(numbers, batch_sizes).tolist()
    steps = len(sizes)
    if 0 < total_length < steps:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={total_length} and max sequence length being {steps}"
        )
    shape = (max(total_length, steps), sizes[0], *data.shape[1:])
    out = torch.full(shape, padding_value, dtype=data.dtype, device=data.device)
    increment_version(out)  # as eager counts the filling
    begin = offset = 0
    for end in range(1, steps + 1):  # as long as the batch is the same, at once
        if end == steps or sizes[end] != sizes[begin]:
            count = sizes[begin] * (end - begin)
            rows = data[offset : offset + count].view(end - begin, sizes[begin], *data.shape[1:])
            out[begin:end, : sizes[begin]].copy_(rows)
            begin, offset = end, offset + count
    lengths = torch.tensor([sum(size > place for size in sizes) for place in range(sizes[0])])
    return (out.transpose(0, 1) if batch_first else out), lengths
