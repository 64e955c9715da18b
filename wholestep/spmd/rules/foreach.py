"""Operators on lists of tensors: each column of the lists is a call of its own kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call
from wholestep.torch_compat import OpOverload

_PREFIXES = ("_foreach_", "_fused_")


def is_on_lists(target: object) -> bool:
    """True for an operator whose results at i depend on the operands at i alone."""
    return isinstance(target, OpOverload) and target._schema.name.split("::")[-1].startswith(_PREFIXES)


@dataclass(frozen=True)
class Column:
    """What an operator on lists does at one place of the lists, as a call on single tensors."""

    index: int
    call: Call


def columns_of(call: Call) -> Iterator[Column]:
    """The columns of a call on lists."""
    count = next(len(argument) for argument in call.args if isinstance(argument, (list, tuple)))
    ends = zip(*map(columns_of, call.ends), strict=True) if call.ends is not None else None
    for index in range(count):
        most_and_least = None if ends is None else tuple(column.call for column in next(ends))
        args = tuple(_at(argument, index) for argument in call.args)
        kwargs = {name: _at(argument, index) for name, argument in call.kwargs.items()}
        operands = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, fx.Node) and _is_tensor(a))
        values = tuple(info(node).value for node in operands)
        yield Column(
            index, replace(call, args=args, kwargs=kwargs, operands=operands, values=values,
                           result=result_at(call.result, index), ends=most_and_least)
        )  # fmt: skip


def result_at(result: Any, index: int) -> Any:
    """The result of one column: of a list of results, or of several lists."""
    if result and isinstance(result[0], (list, tuple)):
        return tuple(one[index] for one in result if one)
    return result[index]


def _at(argument: Any, index: int) -> Any:
    if not isinstance(argument, (list, tuple)):
        return argument
    return argument[index] if index < len(argument) else None  # an empty list: an option that is not used


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(info(node).value, torch.Tensor)
