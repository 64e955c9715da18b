"""Programs that every rank runs: tensors of which each rank holds a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import wholestep as ws
from wholestep import comm
from wholestep.comm.ops.functional_collectives import piece
from wholestep.errors import PlanError
from wholestep.tensor_parts import Part, mark_part, narrow_to, part_of


def block(shape: tuple[int, ...], dims: list[int]) -> Part:
    """This rank's block of a tensor that the axes of a mesh of two ranks each split along some dimensions."""
    spans = [(0, size) for size in shape]
    for axis, dim in enumerate(dims):
        start, stop = spans[dim]
        first, last = piece(stop - start, 2, comm.get_rank() >> (len(dims) - 1 - axis) & 1)
        spans[dim] = (start + first, start + last)
    return Part.of(shape, spans)


def whole_states() -> dict[str, Any]:
    """Whole states of a model and an optimizer cut in blocks of several kinds, on four ranks."""
    mesh = ws.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.BatchNorm1d(3))
    model.add_module("tied", model[1])
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number, p in enumerate(model.parameters()):  # nothing random: ranks that are threads share a generator
        values = torch.arange(p.numel(), dtype=p.dtype).view(p.shape) + 100 * number
        p.data = values.clone()
        opt.state[p] = {"step": torch.tensor(1.0), "exp_avg": values + 0.25, "exp_avg_sq": values + 0.5}
    model_before = {name: value.clone() for name, value in model.state_dict().items()}
    state_before = [v.clone() for held in opt.state_dict()["state"].values() for v in held.values()]
    for dims, p in zip([[0, 0], [0], [0, 1], [1]], list(model.parameters())[:4], strict=True):
        dims = dims if p.dim() > 1 else [0] * len(dims)
        for tensor in (p, opt.state[p]["exp_avg"], opt.state[p]["exp_avg_sq"]):
            if len(dims) == 2:
                narrow_to(tensor, block(tuple(tensor.shape), dims))
            else:  # the other axis holds the same
                spans = [(0, size) for size in tensor.shape]
                spans[dims[0]] = piece(tensor.shape[dims[0]], 2, comm.get_rank() & 1)
                narrow_to(tensor, Part.of(tensor.shape, spans))
    found: dict[str, Any] = {}
    model_after, state_after = ws.full_state_dict(model), ws.full_state_dict(opt)["state"]
    found["model"] = list(model_after) == list(model_before) and all(
        torch.equal(after := model_after[name], value) and not after.requires_grad and part_of(after) is None
        for name, value in model_before.items()
    )
    after = [v for held in state_after.values() for v in held.values()]
    found["state"] = all(map(torch.equal, after, state_before))
    try:
        ws.full_state_dict(model, mesh.get_group("b"))
    except PlanError as error:
        found["too few"] = str(error)
    if comm.get_rank() == 3:
        mark_part(model[2].weight, Part.rows((6,), 0, 3))
    try:
        ws.full_state_dict(model)
    except PlanError as error:
        found["another"] = str(error)
    return found
