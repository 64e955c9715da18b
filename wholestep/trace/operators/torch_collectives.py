"""Collectives of torch.distributed itself: its functional ones are recorded with their waits, the others refused.

Those on a group of ours never come here: they are `wholestep::` operators.
"""

from __future__ import annotations

from wholestep.errors import UnsupportedError
from wholestep.functional import base_name
from wholestep.torch_compat import OpOverload
from wholestep.trace.record.provenance import user_line

_SHM = 'begin the group with torch.distributed.init_process_group("shm"), after import wholestep.comm.torch_backend'


def is_wait(func: OpOverload) -> bool:
    """Whether an operator waits for a collective, now or at the first use. It gives its argument.

    Raises:
        UnsupportedError: the operator is none that can be recorded.
    """
    name = base_name(func)
    if func.namespace == "c10d":
        what = f"torch.distributed's {name.rstrip('_')} on a group of its own engines, which no graph can show"
        raise UnsupportedError(what, user_line(), f"{_SHM}; or compile without fullgraph=True")
    if name in ("isend", "irecv") or func._schema.is_mutable:
        what = f"torch.distributed's {func}, which works in memory of the step's until it is waited for"
        remedy = "use all_reduce, all_gather_tensor and the like, or compile without fullgraph=True"
        raise UnsupportedError(what, user_line(), remedy)
    return name in ("wait_tensor", "_wrap_tensor_autograd")
