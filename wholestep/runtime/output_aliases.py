"""Slots: the tensors that outlive a step, made of what its program gave, as eager would leave them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch

from wholestep.runtime.backward_programs import viewed
from wholestep.runtime.second_derivatives import NOT_KEPT, NotDifferentiable
from wholestep.torch_compat import refusing_backward, set_versions
from wholestep.trace.outputs.output_records import NO_GRADIENT, SECOND_TIME, OutputAlias, View

NEVER = 1 << 30  # a version that no count comes to


def remade(
    alias: OutputAlias,
    outputs: Sequence[Any],
    values: list[Any],
    made: dict[int, torch.Tensor],
    handle: torch.Tensor | None,
) -> torch.Tensor:
    """One tensor that outlives the step.

    Args:
        outputs, values: outputs and inputs of the program.
        made: the aliases that are made already, by index.
        handle: what a history that only refuses begins at; None for a tensor without history.
    """
    base: torch.Tensor = values[alias.input] if alias.output is None else outputs[alias.output]  # type: ignore[index]
    tensor = base
    if alias.views is not None:
        if alias.base is not None:
            base = made[alias.base]
        # a view made without gradients could not be written later where eager's can
        with torch.set_grad_enabled(handle is not None and (not alias.state.leaf or not base.requires_grad)):
            tensor = _viewed(base, alias.views, alias.state.outdated and not alias.by_strides)
        tensor = tensor if alias.state.is_view else tensor.data if alias.counter == "own" else tensor.detach()
    if alias.state.parameter:
        return torch.nn.Parameter(tensor, alias.state.requires_grad)
    if handle is not None and alias.state.requires_grad and not tensor.requires_grad:
        if alias.state.leaf:
            return tensor.requires_grad_()
        with torch.enable_grad():
            return NotDifferentiable.of([tensor], _behind(alias.refusal, values, handle), alias.refusal)[0]
    return tensor


# Gives a result of a graph that is not kept its history; for memory that no other result has, nor its version counter.
spent = refusing_backward(NOT_KEPT)


def are_spent(aliases: Sequence[OutputAlias]) -> set[int]:
    """Which aliases are made by `spent`."""
    times = Counter(alias.output for alias in aliases)
    return {
        i
        for i, alias in enumerate(aliases)
        if alias.output is not None and times[alias.output] == 1 and alias.views is None
        and alias.refusal.startswith(SECOND_TIME) and alias.state.requires_grad
        and not (alias.state.leaf or alias.state.parameter or alias.state.inference)
    }  # fmt: skip


def _viewed(base: torch.Tensor, views: Sequence[View], outdated: bool) -> torch.Tensor:
    """A view made by the operators that make it in eager, so that autograd knows it by these.

    Args:
        outdated: it was made before the base was written last.
    """
    if not outdated:
        return viewed(base, views)
    version = base._version
    set_versions((base,), (NEVER,))
    view = viewed(base, views)
    set_versions((base,), (version,))
    return view


def as_inference(outputs: Sequence[Any], places: Container[int]) -> list[Any]:
    """The outputs, those at some places, which eager leaves as inference tensors, copied into such."""
    with torch.inference_mode():
        return [out.clone() if i in places else out for i, out in enumerate(outputs)]


def _behind(why: str, values: list[Any], handle: torch.Tensor) -> list[torch.Tensor]:
    """The inputs of the node that refuses a result's backward: those whose gradients the engine may be asked for."""
    if why == NO_GRADIENT or why.startswith(SECOND_TIME):
        return [handle]
    return [handle, *(v for v in values if isinstance(v, torch.Tensor) and v.requires_grad)]
