"""Communication hooks that average a bucket: as it is, in 16 bits, or not at all; and wrappers of other hooks.

A hook is a function of a state and a bucket, ours or torch's, that gives a future of the reduced gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from wholestep import comm
from wholestep.parallel.comm_hooks.ordered import Hook, communication_hook, in_order, value_of

Group = comm.ProcessGroup | None


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
