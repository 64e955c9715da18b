"""Communication hooks that average a bucket: as it is, in 16 or 8 bits, or not at all; and wrappers of other hooks.

A hook is a function of a state and a bucket, ours or torch's, that gives a future of the reduced gradients. What it
sends in several steps is sent beside the backward, in the same order on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wholestep import comm
from wholestep.comm.api.groups import in_this_world
from wholestep.comm.api.tracing import is_captured
from wholestep.comm.work import WorkQueue

Hook = Callable[[Any, Any], torch.futures.Future]
Group = comm.ProcessGroup | None

_queues: weakref.WeakKeyDictionary[comm.ProcessGroup, WorkQueue] = weakref.WeakKeyDictionary()


def communication_hook(hook: Hook) -> Hook:
    """Decorator: torch's wrapper, too, takes the hook, as it does those whose arguments have no annotations."""
    hook.__annotations__.clear()
    return hook


def in_order(group: comm.ProcessGroup, function: Callable[[], torch.Tensor]) -> torch.futures.Future:
    """Calls the function on a thread of the group's, after those that were given before.

    What the functions send is so in one order on all ranks, however long each takes.

    Returns:
        A future of the result; of the exception that the function raised, where it does.
    """
    work: comm.Work
    if is_captured():  # a program has one order
        work = comm.Work([function()])
    else:
        called, result = in_this_world(function), list[torch.Tensor]()
        queue = _queues.setdefault(group, WorkQueue())
        work = queue.start("communication hook", lambda: result.append(called()), result, async_op=True)
    return work.get_future().then(value_of)


def value_of(future: torch.futures.Future) -> Any:
    """The one tensor that a future of a hook or of a collective has.

    Raises:
        Exception: what the communication failed with.
    """
    value = future.value()
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def mean(tensor: torch.Tensor, group: comm.ProcessGroup) -> torch.Tensor:
    """The mean over the ranks, in place."""
    comm.all_reduce(tensor.div_(group.size()), group=group)
    return tensor


@communication_hook
def allreduce_hook(process_group: Group, bucket: Any) -> torch.futures.Future:
    """The mean over the ranks of the group; of all where it is None."""
    group, buffer = comm.get_group(process_group), bucket.buffer()
    return in_order(group, lambda: mean(buffer, group))


def _compressed(dtype: torch.dtype, process_group: Group, bucket: Any) -> torch.futures.Future:
    group, buffer = comm.get_group(process_group), bucket.buffer()
    return in_order(group, lambda: buffer.copy_(mean(buffer.to(dtype), group)))


@communication_hook
def fp16_compress_hook(process_group: Group, bucket: Any) -> torch.futures.Future:
    """The mean of the gradients as float16, in the buffer's dtype again."""
    return _compressed(torch.float16, process_group, bucket)


@communication_hook
def bf16_compress_hook(process_group: Group, bucket: Any) -> torch.futures.Future:
    """The mean of the gradients as bfloat16, in the buffer's dtype again."""
    return _compressed(torch.bfloat16, process_group, bucket)


BUILTIN_HOOKS: dict[str, Hook] = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}  # torch's names


@communication_hook
def noop_hook(_: Any, bucket: Any) -> torch.futures.Future:
    """Leaves gradients as they are on each rank: for measuring what communication costs."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _wrapper(dtype: torch.dtype, hook: Hook) -> Hook:
    @communication_hook
    def wrapped(state: Any, bucket: Any) -> torch.futures.Future:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype))
        return hook(state, bucket).then(lambda future: buffer.copy_(value_of(future)))

    return wrapped


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """The hook, on the bucket as float16."""
    return _wrapper(torch.float16, hook)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """The hook, on the bucket as bfloat16."""
    return _wrapper(torch.bfloat16, hook)


# Of gradients in eight bits, with a scale and a zero point for each channel. Every rank sends its numbers to all, which
# then add up what they stand for: for few ranks and slow connections.
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
    return in_order(group, partial(_mean_of_codes, buffer, padded, group))


def _mean_of_codes(buffer: torch.Tensor, channels: torch.Tensor, group: comm.ProcessGroup) -> torch.Tensor:
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
