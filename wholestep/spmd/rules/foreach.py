"""Operators on lists of tensors: each column of the lists is a call of its own kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, exchanged
from wholestep.spmd.expand.strategy import Build
from wholestep.torch_compat import OpOverload

_PREFIXES = ("_foreach_", "_fused_")


def is_on_lists(target: object) -> bool:
    """True for an operator whose results at i depend on the operands at i alone."""
    return isinstance(target, OpOverload) and target._schema.name.split("::")[-1].startswith(_PREFIXES)


def columns_of(call: Call) -> Iterator[Call]:
    """What an operator on lists does at each place of the lists, as calls on single tensors."""
    count = next(len(argument) for argument in call.args if isinstance(argument, (list, tuple)))
    for index in range(count):
        args = tuple(_at(argument, index) for argument in call.args)
        kwargs = {name: _at(argument, index) for name, argument in call.kwargs.items()}
        operands = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, fx.Node) and _is_tensor(a))
        values, result = tuple(info(node).value for node in operands), call.result
        several = bool(result) and isinstance(result[0], (list, tuple))
        result = tuple(one[index] for one in result if one) if several else result[index]
        yield replace(call, args=args, kwargs=kwargs, operands=operands, values=values, result=result)


def _at(argument: Any, index: int) -> Any:
    if not isinstance(argument, (list, tuple)):
        return argument
    return argument[index] if index < len(argument) else None  # an empty list: an option that is not used


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(info(node).value, torch.Tensor)


def of_columns(
    build: Build, whole: Call, columns: Sequence[Call], local: Sequence[Sequence[fx.Node]]
) -> list[list[fx.Node]]:
    """An operator on lists, on some of its columns.

    Args:
        whole: the call on all of them.
        columns, local: these columns, and the local operands of each.

    Returns:
        The results of each column.
    """
    if not columns:
        return []
    each = [exchanged(c.args, c.kwargs, nodes, build.number_of) for c, nodes in zip(columns, local, strict=True)]

    def joined(old: Any, found: Sequence[Any]) -> Any:
        if not isinstance(old, (list, tuple)):
            return found[0]
        return list(found) if old else []

    args = tuple(joined(old, found) for old, *found in zip(whole.args, *(args for args, _ in each), strict=True))
    kwargs = {name: joined(old, [given[name] for _, given in each]) for name, old in whole.kwargs.items()}
    made = build.as_recorded(whole.target, args, kwargs)
    value = info(made).value
    if value and isinstance(value[0], (list, tuple)):
        rows = [build.pick(made, i) for i, one in enumerate(value) if one]
        return [[build.pick(row, place) for row in rows] for place in range(len(columns))]
    return [[build.pick(made, place)] if value is not None else [] for place in range(len(columns))]
