"""Which parameters' updates are elementwise, so that each rank can update some rows alone.

From a parameter's optimizer states and its gradient on: whatever reads them, or what was made of them, must be an
elementwise call over the parameter's shape in the optimizer, until it is the new value of the parameter or of a state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from wholestep.functional import base_name
from wholestep.ir import GETITEM, StepGraph, ancestors, info, is_effectful
from wholestep.spmd.expand.graph_edits import is_view
from wholestep.spmd.plans.global_view import owner_of
from wholestep.spmd.rules.pointwise import is_on_lists
from wholestep.torch_compat import OpOverload

Readers = Mapping[fx.Node, Sequence[fx.Node]]


class ElementwiseUpdates:
    """The updates of one step."""

    def __init__(self, step: StepGraph) -> None:
        inputs, outputs = list(zip(step.placeholders, step.signature.inputs, strict=True)), step.outputs
        self._states: dict[str, list[fx.Node]] = defaultdict(list)  # by the source of the parameter
        for node, given in inputs:
            if given.kind == "state":
                self._states[owner_of(given)].append(node)
        self._owners: dict[fx.Node, set[str]] = defaultdict(set)  # result of the step -> whose new value or state it is
        for index, value in enumerate(outputs):
            into = step.signature.mutations.get(index)
            item = step.signature.state_outputs.get(index) if into is None else step.signature.inputs[into]
            owner = "" if item is None else item.source if item.kind == "parameter" else owner_of(item)
            kept = item is not None and item.kind in ("parameter", "state")
            if isinstance(value, fx.Node):
                self._owners[value].add(owner if kept else "")
                if item is not None and item.kind == "state" and into is None:  # an input of the next call
                    known = ancestors([value], until=lambda n: _is_from_nothing(n) or info(n).phase == "backward")
                    self._states[owner] += filter(_is_from_nothing, known)
        self._new = {outputs[index]: inputs[into][0] for index, into in step.signature.mutations.items()}

    def of_states(self, source: str, parameter: fx.Node) -> bool:
        """True when an update reads states of the parameter's shape, elementwise."""
        states = self._states_of(source, parameter)
        return bool(states) and self.of(source, parameter, {})

    def of(self, source: str, parameter: fx.Node, gradient: Readers) -> bool:
        """True for an elementwise update.

        Args:
            source: of the parameter.
            gradient: the node that gives it -> those of its readers that count; empty where it need not be split.
        """
        like, updated = info(parameter).value, False
        ahead = [*self._states_of(source, parameter), *gradient]
        seen = set(ahead)
        while ahead:
            node = ahead.pop()
            if self._owners.get(node, {source}) != {source}:  # it is an output, or another parameter's
                return False
            if self._new.get(node) is parameter:
                updated = True
                continue
            for result, call in _results(node, gradient.get(node, list(node.users))):
                count = result is not None and _is_count(result, call)
                if result is None or not (count or _is_elementwise(result, call, like)):
                    return False
                ahead += [] if count or result in seen else [result]
                seen.add(result)
        return updated

    def _states_of(self, source: str, parameter: fx.Node) -> list[fx.Node]:
        return [node for node in self._states[source] if _is_alike(info(node).value, info(parameter).value)]


def _results(node: fx.Node, users: Sequence[fx.Node]) -> Iterator[tuple[fx.Node | None, fx.Node]]:
    """What is made of a value, with the call: of operators on lists, the results at its places; None: not known."""
    for user in users:
        if is_on_lists(user.target):
            lists = [one for one in (*user.args, *user.kwargs.values()) if isinstance(one, (list, tuple))]
            places = {index for one in lists for index, item in enumerate(one) if item is node}
            found = [result for result in _picked(user) if result.args[1] in places]
            yield from ((one, user) for one in found or (None,))
        elif user.op != "output":
            yield user, user


def _picked(call: fx.Node) -> Iterator[fx.Node]:
    """The tensors in the lists that a call gives."""
    for user in call.users:
        if user.target is GETITEM and isinstance(info(user).value, torch.Tensor):
            yield user
        elif user.target is GETITEM:
            yield from _picked(user)


def _is_alike(value: object, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape and value.is_contiguous()


def _is_from_nothing(node: fx.Node) -> bool:
    """Whether a call makes a tensor of numbers and another one's shape."""
    made = isinstance(node.target, OpOverload) and base_name(node.target).endswith(("_like", "zeros", "ones", "full"))
    return made and not is_effectful(node)


def _is_count(node: fx.Node, call: fx.Node) -> bool:
    """Whether a result is the count of steps that a fused optimizer gives back as it was."""
    fused = isinstance(call.target, OpOverload) and base_name(call.target).startswith("_fused_")
    return fused and info(node).value.dim() == 0


def _is_elementwise(node: fx.Node, call: fx.Node, like: torch.Tensor) -> bool:
    """Random numbers of a part are not the part of random numbers; gradients' sums are reduced before that."""
    if is_view(node):
        return True
    if not _is_alike(info(node).value, like) or is_effectful(node):
        return False
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return info(node).phase != "backward" and (pointwise or is_on_lists(call.target))
