"""Sharded state: what a step needs of whole tensors, kept in their place; whole tensors, gathered from such parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from wholestep import comm
from wholestep.comm.api.collectives import all_gather_rows
from wholestep.comm.api.object_collectives import gathered_objects
from wholestep.deferred_init import become, part_values
from wholestep.errors import PlanError
from wholestep.ir import Input
from wholestep.tensor_parts import Part, mark_part, mark_states, narrow_to, part_of
from wholestep.torch_compat import FakeTensor


class ShardedInputs(NamedTuple):
    """What became of the tensors of a step.

    Attributes:
        any: some are parts now, so that other guards hold.
        moved: some were laid out as parts are not, so that the program does not fit them.
    """

    any: bool
    moved: bool


def shard_inputs(
    placements: Sequence[Any], inputs: Sequence[Input], tensors: Sequence[Any], parts: Mapping[int, Part]
) -> ShardedInputs:
    """Cuts whole tensors down to the parts that a program keeps, in place.

    Args:
        placements: of the program's inputs.
        inputs, tensors, parts: as for `PlanExecutor.start`.

    Raises:
        PlanError: a tensor holds another part than the program keeps.
    """
    kept = [
        (part if isinstance(part, Part) else None, parts.get(id(tensor)) or Part.whole(tensor.shape), item, tensor)
        for part, item, tensor in zip(placements[: len(inputs)], inputs, tensors, strict=True)
        if isinstance(tensor, torch.Tensor) and item.kind != "batch"
        and (isinstance(part, Part) or id(tensor) in parts)
    ]
    for part, held, item, _ in kept:
        if (part or Part.whole(held.shape)).inside(held) is None:
            raise PlanError(
                f"{item.source} holds {held}; this step needs {part or 'the whole tensor'}\n"
                "  to do: load ws.full_state_dict(optimizer or model, group), taken before, or compile the step "
                "with the mesh and plan that cut it"
            )
    before: list[bool] = []
    for part, held, _, tensor in kept:
        if part is None or isinstance(tensor, FakeTensor):
            continue
        if held == part:  # all of it, where the other ranks have nothing
            if part_of(tensor) != part:
                before.append(True)
                mark_part(tensor, part)
            continue
        before.append(tensor.is_contiguous())
        local = part.inside(held)  # of a part, when an optimizer's state is shared out after its first step
        assert local is not None
        become(tensor, part_values(tensor, local).clone(memory_format=torch.contiguous_format))
        mark_part(tensor, part)
        if tensor.is_leaf and tensor.grad is not None and tensor.grad.shape == held.size:
            narrow_to(tensor.grad, part, held)
    return ShardedInputs(bool(before), not all(before))


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
