"""Communication hooks that send gradients in eight bits, with a scale and a zero point for each channel.

Every rank sends its numbers to all, which then add up what they stand for: for few ranks and slow connections.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from wholestep import comm
from wholestep.parallel.comm_hooks.mean import Group
from wholestep.parallel.comm_hooks.ordered import communication_hook, in_order

LEVELS = 255


@communication_hook
def quantization_pertensor_hook(process_group: Group, bucket: Any) -> torch.futures.Future:
    """The mean of the gradients in eight bits, with one scale and zero point for the bucket."""
    return _quantized(process_group, bucket, bucket.buffer().numel())


@communication_hook
def quantization_perchannel_hook(process_group: Group, bucket: Any, bucket_size: int = 512) -> torch.futures.Future:
    """The same with a scale and a zero point for each ``bucket_size`` elements."""
    return _quantized(process_group, bucket, bucket_size)


def _quantized(process_group: Group, bucket: Any, channel: int) -> torch.futures.Future:
    group, buffer = comm.get_group(process_group), bucket.buffer()
    padded = torch.nn.functional.pad(buffer, (0, -len(buffer) % channel)).view(-1, channel)
    return in_order(group, partial(_mean, buffer, padded, group))


def _mean(buffer: torch.Tensor, channels: torch.Tensor, group: comm.ProcessGroup) -> torch.Tensor:
    """The buffer becomes the mean of all ranks' channels: [channels, elements of a channel]."""
    low, high = channels.amin(1, keepdim=True).clamp(max=0), channels.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / LEVELS).float().clamp(min=torch.finfo(torch.float32).eps)
    zero = (-(low / scale).round()).clamp(0, LEVELS).float()
    codes = ((channels / scale).round() + zero).clamp(0, LEVELS).to(torch.uint8)
    about = torch.stack([scale, zero])
    all_about, all_codes = about.new_empty(group.size(), *about.shape), codes.new_empty(group.size(), *codes.shape)
    comm.all_gather_into_tensor(all_about, about, group)
    comm.all_gather_into_tensor(all_codes, codes, group)
    total = torch.zeros_like(channels, dtype=torch.float32)
    for (scale, zero), codes in zip(all_about, all_codes, strict=True):
        total += scale * (codes.float() - zero)
    return buffer.copy_(total.view(-1)[: len(buffer)] / group.size())
