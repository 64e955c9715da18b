"""What the server of `run_ranks` does once, before it forks, so that each rank need not: what torch puts off.

The first optimizer that a process makes imports a third of torch, a second of each rank's time.
"""

from __future__ import annotations

import torch

torch.optim.SGD([torch.zeros(())], lr=0.1)
