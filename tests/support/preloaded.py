"""What most ranks import, and a first capture: the server that they are forked from does both once, for all of them.

Nothing here may run a backward, after which autograd refuses to run in a forked process.
"""

import hypothesis  # noqa: F401 - as files of tests do, whose functions ranks run
import pytest  # noqa: F401 - likewise
import scipy.optimize  # noqa: F401 - by which is planned what a backward keeps
import torch
import torch._dynamo  # noqa: F401 - an optimizer's first step imports it
import torch.distributed.optim  # noqa: F401 - torch's wrappers, which ours are compared with

import tests.support.spmd_equal  # noqa: F401 - with transformers
import wholestep as ws

torch.set_num_threads(1)  # a pool of threads would not be there in a forked process


@ws.compile
def _step(x: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.linear(x, _weight).relu().sum()
    _optimizer.step()
    return loss.detach()


_weight = torch.nn.Parameter(torch.ones(4, 4))
_weight.grad = torch.ones(4, 4)
_optimizer = torch.optim.AdamW([_weight], lr=0.1)
_step(torch.ones(2, 4))
