"""Inputs of a step, whole so far, become the parts that the program of this rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from wholestep.deferred_init import become, part_values, record_of
from wholestep.errors import PlanError
from wholestep.ir import Input
from wholestep.tensor_parts import Part, mark_part, narrow_to
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
        if held == part:
            mark_part(tensor, part)
            continue
        before.append(tensor.is_contiguous())
        if record_of(tensor) is not None:
            become(tensor, part_values(tensor, part).clone(memory_format=torch.contiguous_format))
            mark_part(tensor, part)
            continue
        narrow_to(tensor, part, held)  # of a part, when an optimizer's state is shared out after its first step
        if tensor.is_leaf and tensor.grad is not None and tensor.grad.shape == held.size:
            narrow_to(tensor.grad, part, held)
    return ShardedInputs(bool(before), not all(before))
