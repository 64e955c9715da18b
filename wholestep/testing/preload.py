"""What the server of `run_ranks` does once, before it forks, so that each rank need not: what torch puts off.

The first optimizer that a process makes imports some three hundred modules, torch's compiler among them.
"""

from __future__ import annotations

import torch

torch.optim.SGD([torch.zeros(())], lr=0.1)
