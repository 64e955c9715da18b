"""All-gather of tensors that differ between ranks in the size of dim 0."""

from __future__ import annotations

import torch

from wholestep.comm.api.collectives import all_gather_into_tensor
from wholestep.comm.api.groups import get_world_size
from wholestep.comm.api.issue import Group


def all_gather_rows(tensor: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """Every rank's ``tensor`` [n of that rank, …], by rank: padded to the longest one on the way."""
    ranks, rows = get_world_size(group), tensor.shape[0]
    sizes = torch.zeros(ranks, dtype=torch.int64)
    all_gather_into_tensor(sizes, torch.tensor([rows]), group)
    longest = int(sizes.max())
    padded = torch.cat([tensor, tensor.new_zeros(longest - rows, *tensor.shape[1:])])
    found = tensor.new_empty(ranks, *padded.shape)
    all_gather_into_tensor(found, padded, group)
    return [found[rank, :size] for rank, size in enumerate(sizes.tolist())]
