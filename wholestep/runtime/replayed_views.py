"""Views made by the operators that make them in eager."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wholestep.trace.outputs.output_records import View


def viewed(base: torch.Tensor, views: Sequence[View]) -> torch.Tensor:
    """A view of a tensor; offsets of `as_strided` count from the tensor's first element."""
    view = base
    for op, args, index in views:
        if op is torch.ops.aten.as_strided.default:
            args = (*args[:2], (args[2] if len(args) > 2 else 0) + view.storage_offset())
        view = op(view, *args) if index is None else op(view, *args)[index]
    return view
