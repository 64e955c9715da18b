"""Collectives of tensors that differ between ranks in size: of rows, and of sparse tensors."""

from __future__ import annotations

import torch

from wholestep.comm.api.collectives import all_gather_into_tensor
from wholestep.comm.api.groups import get_world_size
from wholestep.comm.api.issue import Group
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.work import Finished, Work
from wholestep.errors import DistMismatchError


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


def sparse_all_reduce(
    tensor: torch.Tensor, op: RedOpType = RedOpType.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Sums ``tensor`` over the group, in place: indices and values are gathered and coalesced on every rank.

    Ends before it returns, whether ``async_op`` or not: how many values there are is known only on the way.

    Raises:
        ValueError: another reduction than SUM.
        DistMismatchError: the ranks' shapes or dimensions differ.
    """
    if op is not RedOpType.SUM:
        raise ValueError(f"all_reduce: {op.name} of sparse tensors is not available: SUM is required, or to_dense()")
    mine = tensor.detach().coalesce()
    about = torch.tensor([mine.sparse_dim(), len(mine.shape), *mine.shape])
    if any(not torch.equal(theirs, about) for theirs in all_gather_rows(about, group)):
        raise DistMismatchError(f"all_reduce: ranks have sparse tensors of different shapes; here {list(mine.shape)}")
    all_indices = all_gather_rows(mine.indices().T.contiguous(), group)
    all_values = all_gather_rows(mine.values(), group)
    total = torch.sparse_coo_tensor(torch.cat(all_indices).T, torch.cat(all_values), mine.shape).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return Finished([tensor]) if async_op else None
