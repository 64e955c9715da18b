"""`full_state_dict`: gathers the sharded state of an optimizer or a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep import comm
from wholestep.comm.api.collectives import all_gather_rows
from wholestep.comm.api.object_collectives import gathered_objects
from wholestep.errors import PlanError
from wholestep.tensor_parts import Part, mark_states, part_of


def full_state_dict(
    holder: torch.optim.Optimizer | torch.nn.Module, group: comm.ProcessGroup | None = None
) -> dict[str, Any]:
    """A copy of `holder.state_dict()`, with whole tensors where an optimizer or a model has parts of them.

    A collective: every rank of the group calls it, and gets the same. `load_state_dict` takes it on any number of
    ranks, and without this library.

    Args:
        group: ranks that together hold every tensor, such as `mesh.get_group(axis)` (default: all).

    Raises:
        PlanError: the ranks of the group do not hold all of a tensor, or hold other tensors than one another.
    """
    if isinstance(holder, torch.nn.Module):
        found = holder.state_dict(keep_vars=True)  # detached, parameters do not say which part they are
        unsharded = _unsharded([(name, value) for name, value in found.items()], group)
        for name, value in found.items():
            found[name] = _copy(value, unsharded)
        return found
    mark_states(holder)
    found = holder.state_dict()
    held = [(f"state[{key}][{name!r}]", v) for key, of in found["state"].items() for name, v in of.items()]
    unsharded = _unsharded(held, group)
    found["state"] = {key: {name: _copy(v, unsharded) for name, v in of.items()} for key, of in found["state"].items()}
    return found


def _copy(value: Any, unsharded: dict[int, torch.Tensor]) -> Any:
    if id(value) in unsharded:
        return unsharded[id(value)]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _unsharded(held: list[tuple[str, Any]], group: comm.ProcessGroup | None) -> dict[int, torch.Tensor]:
    """id of a tensor that is a part -> the whole one."""
    named = {id(v): (name, v) for name, v in held if isinstance(v, torch.Tensor) and part_of(v) is not None}
    parts = [part_of(tensor) for _, tensor in named.values()]
    everybody = gathered_objects(parts, group)
    if any([part.shape for part in one] != [part.shape for part in everybody[0]] for one in everybody):
        raise PlanError(
            "full_state_dict: the ranks of the group hold parts of different tensors\n"
            "  to do: call it with the same model or optimizer on every rank, after the same steps"
        )
    return {
        key: _whole(name, tensor, [one[index] for one in everybody], group)
        for index, (key, (name, tensor)) in enumerate(named.items())
    }


def _whole(name: str, tensor: torch.Tensor, parts: list[Part], group: comm.ProcessGroup | None) -> torch.Tensor:
    there, needed = sum(part.numel for part in set(parts)), torch.Size(parts[0].shape).numel()
    if there < needed:
        raise PlanError(
            f"full_state_dict: the ranks of the group hold {there} of the {needed} elements of {name}\n"
            "  to do: give it the group of all ranks that share the tensor out among them (default: all ranks)"
        )
    return gather_parts(tensor, parts, group)[0]


def gather_parts(
    local: torch.Tensor, parts: Sequence[Part], group: comm.ProcessGroup | None
) -> tuple[torch.Tensor, Part]:
    """What the ranks of a group hold together of a tensor, and which block of it that is; a collective.

    Args:
        parts: what each rank of the group holds of it, blocks that leave no gap.
    """
    rows = all_gather_rows(local.detach().flatten(), group)
    dims = zip(*(part.spans for part in parts), strict=True)
    spans = [(min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in dims]
    together = Part.of(parts[0].shape, spans)
    found = local.new_empty(together.size)
    for row, part in zip(rows, parts, strict=True):
        inside = part.inside(together)
        assert inside is not None
        found[inside.slices] = row.view(part.size)
    return found, together
