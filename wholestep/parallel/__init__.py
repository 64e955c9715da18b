"""parallel/: wrappers around a module for loops in eager mode, with the names and the behaviour of torch's.

Takes: a module of which each rank has the same, and each rank's own batches. Gives: gradients that are the mean over
all ranks when the backward ends, by collectives that run beside it; the bits are those of torch's wrapper.
May import: cached_property, checkpoint, comm, deferred_init, errors, marks, spmd, tensor_parts, torch_compat.
"""

from wholestep.deferred_init import deferred, materialize
from wholestep.parallel.buckets import GradBucket
from wholestep.parallel.checkpointer import Checkpointer
from wholestep.parallel.comm_hooks.mean import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from wholestep.parallel.comm_hooks.post_local_sgd import PeriodicModelAverager, PostLocalSGDState, post_localSGD_hook
from wholestep.parallel.comm_hooks.power_sgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from wholestep.parallel.distributed_data_parallel import DistributedDataParallel
from wholestep.parallel.join import Join, Joinable, JoinHook
from wholestep.parallel.sharded_modules import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    summon_full_params,
)
from wholestep.parallel.sync_batchnorm import SyncBatchNorm
