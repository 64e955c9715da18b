"""Sharding rules: one table, operator -> rule. What has no row here runs whole on every rank.

`register_sharding` adds a row, also a user's for an operator of their own: docs/spmd.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from wholestep.functional import Functionalized, UnderGrad, is_view
from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import Rule, Strategy
from wholestep.spmd.placements import Shard, fills, splits
from wholestep.spmd.rules import indexing, layers, losses, pointwise, reductions, views
from wholestep.spmd.rules.pointwise import is_on_lists
from wholestep.torch_compat import OpOverload

_FILES = (reductions, layers, losses, indexing, views, pointwise)
TABLE: dict[str, Rule] = {name: rule for file in _FILES for name, rule in file.RULES.items()}
_OF_ANY_STRIDES = {name for file in _FILES if file is not layers for name in file.RULES}


def name_of(target: object) -> str:
    """An operator's name in the table: ``aten.mm``; overloads share a row. ``functional(aten.x_)`` for pure forms."""
    if isinstance(target, OpOverload):
        return str(target._overloadpacket)
    if isinstance(target, Functionalized):
        return f"functional({target.op._overloadpacket})"
    if isinstance(target, UnderGrad):
        return f"under_grad({target.op._overloadpacket})"
    return str(target)


def rule_of(target: object) -> Rule | None:
    """The rule of a call; None when it has none."""
    found = TABLE.get(name_of(target))
    if found is None and isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or is_on_lists(target)):
        return pointwise.pointwise
    return found


def reads_flat_memory(target: object) -> bool:
    """True where a kernel may go through memory in order, whatever the strides: autograd gives it no gaps.

    Fused optimizers do, gradients of normalisations, recurrent layers, and, for all that is known, users' operators.
    """
    if is_on_lists(target):
        return "::_fused_" in target._schema.name  # type: ignore[attr-defined]
    name = name_of(target)
    return name in TABLE and name not in _OF_ANY_STRIDES


def register_sharding(*targets: OpOverload) -> Callable[[Rule], Rule]:
    """A decorator that gives operators a sharding rule: a function from a `Call` to its strategies.

    What a rule gives for a call may be used for others with operands of equal shapes and dtypes, and equal arguments.
    """

    def decorate(rule: Rule) -> Rule:
        TABLE.update({name_of(target): rule for target in targets})
        return rule

    return decorate


def strategies(call: Call) -> Iterable[Strategy]:
    """The ways in which a call can run on parts, as the axis may split its tensors.

    Of parts of which a rank has none only elementwise calls and views are made: some kernels refuse tensors without
    elements, and so few are gathered at once.
    """
    rule = rule_of(call.target)
    found = () if rule is None else rule(call)
    named = name_of(call.target) in pointwise.RULES
    may_be_none = named or rule is pointwise.pointwise or is_view(call.target)
    return [one for one in found if _is_served(one, call, may_be_none)]


def _is_served(strategy: Strategy, call: Call, may_be_none: bool) -> bool:
    pairs = (*zip(strategy.ins, call.values, strict=True), *zip(strategy.outs, call.results, strict=True))
    split = [(placement, value.shape) for placement, value in pairs if isinstance(placement, Shard)]
    return all(splits(*one, call.group) and (may_be_none or fills(*one, call.group)) for one in split)
