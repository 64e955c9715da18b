"""Results of a compiled function whose whole gradient nothing outside can see, and who asks for it all the same.

A program is one autograd node for all of its results, so that nothing leads from one result to another that is made
of it, and what a hook inside does to a result's gradient comes after what sees it outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from wholestep.errors import UnsupportedError
from wholestep.torch_compat import behind
from wholestep.trace.patches.engine_hook import watch
from wholestep.trace.record.user_line import user_line

# A result, and the positions of those through which a gradient reaches it that nothing outside sees.
Between = list[tuple[weakref.ref[torch.Tensor], frozenset[int]]]

# Whose hooks on results say no more than that a backward has begun.
WRAPPERS = "torch.distributed.", "wholestep."


_noted: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id


def note(node: Any, results: Iterable[tuple[torch.Tensor, frozenset[int]]]) -> None:
    """Notes such results at the node that they come from."""
    node.wholestep_between = []
    for result, through in results:
        _noted[id(result)] = result
        node.wholestep_between.append((weakref.ref(result), through))
    watch(_refuse_inputs)


def refuse_hooks(between: Between, tangents: Sequence[torch.Tensor | None]) -> None:
    """A result that is to keep its gradient, or show it to a hook, would do so with a part."""
    for result, through in between:
        kept = result()
        if kept is None or all(tangents[k] is None for k in through):
            continue
        hooks = [getattr(hook, "func", hook) for hook in (kept._backward_hooks or {}).values()]
        looks = any(not str(getattr(hook, "__module__", "")).startswith(WRAPPERS) for hook in hooks)
        if kept.retains_grad or looks:
            raise _refusal("retain_grad() on" if kept.retains_grad else "a hook on")


def _refuse_inputs(roots: Sequence[Any], inputs: Sequence[Any]) -> None:
    """The engine is asked for gradients of tensors, such results among them."""
    asked = {edge for edge in map(_edge, inputs) if edge[0] is not None}
    noted = list(_noted.values()) if asked else []
    if asked.isdisjoint(map(_edge, noted)):  # a walk of the graph takes long
        return
    nodes = list(behind(roots))
    reached = {*map(_edge, roots), *(edge for node in nodes for edge in node.next_functions)}
    for node in nodes:
        for result, through in getattr(node, "wholestep_between", ()):
            kept = result()
            if kept is not None and _edge(kept) in asked and any((node, k) in reached for k in through):
                raise _refusal("the gradient of")


def _edge(of: Any) -> tuple[Any, int]:
    return (of.node, of.output_nr) if isinstance(of, GradientEdge) else (of.grad_fn, of.output_nr)


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} a result of a compiled function that other results of it are made of, or that has a hook inside",
        "call backward() inside of the function, or make the others, and add the hook, outside of it",
        where=user_line(),
    )
