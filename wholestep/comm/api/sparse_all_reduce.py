"""All-reduce of sparse COO tensors, as the gradients of ``Embedding(sparse=True)`` are."""

from __future__ import annotations

import torch

from wholestep.comm.api.collectives import all_gather
from wholestep.comm.api.groups import get_world_size
from wholestep.comm.api.issue import Group
from wholestep.comm.dist_errors import DistMismatchError
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.work import Finished, Work


def all_reduce(
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
    indices, values = mine.indices(), mine.values()
    about = torch.tensor([mine.sparse_dim(), len(mine.shape), *mine.shape, *[0] * 64][:64])
    shapes = _gathered(about, group)
    if any(not torch.equal(theirs, about) for theirs in shapes):
        raise DistMismatchError(f"all_reduce: ranks have sparse tensors of different shapes; here {list(mine.shape)}")
    counts = [int(count) for count in _gathered(torch.tensor([values.shape[0]]), group)]
    most = max(counts)
    all_indices = _gathered(_padded(indices.T.contiguous(), most), group)
    all_values = _gathered(_padded(values, most), group)
    total = torch.sparse_coo_tensor(
        torch.cat([one[:count] for one, count in zip(all_indices, counts, strict=True)]).T,
        torch.cat([one[:count] for one, count in zip(all_values, counts, strict=True)]),
        mine.shape,
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return Finished([tensor]) if async_op else None


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(count - rows.shape[0], *rows.shape[1:])])


def _gathered(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Every rank's tensor, by rank."""
    made = [torch.empty_like(tensor) for _ in range(get_world_size(group))]
    all_gather(made, tensor, group)
    return made
