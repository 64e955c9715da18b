"""parallel/: wrappers around a module for loops in eager mode, with the names and the behaviour of torch's.

Takes: a module of which each rank has the same, and each rank's own batches. Gives: gradients that are the mean over
all ranks when the backward ends, by collectives that run beside it; the bits are those of torch's wrapper.
May import: comm, errors, torch_compat.
"""

from wholestep.parallel.buckets import GradBucket
from wholestep.parallel.distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel", "GradBucket"]
