"""Lazy initialisation of torch that the fork server of `run_ranks` does once, so that no rank has to.

The first optimizer that a process makes imports some three hundred modules, torch's compiler among them.
"""

from __future__ import annotations

import torch

torch.optim.SGD([torch.zeros(())], lr=0.1)
