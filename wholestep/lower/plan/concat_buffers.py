"""Concatenation without copies: the operands of a `cat` (buckets of gradients) are computed in its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import fx

from wholestep.ir import info
from wholestep.lower.plan.arena import ALIGN
from wholestep.lower.plan.operator_facts import aten
from wholestep.lower.plan.value_facts import dense, writer, writes_anywhere


class Part(NamedTuple):
    """Where a value lies in the result of a `cat`: from element ``start`` on."""

    whole: fx.Node
    start: int


def find_parts(
    nodes: Iterable[fx.Node], root: dict[fx.Node, fx.Node], free: Callable[[fx.Node, fx.Node], bool]
) -> dict[fx.Node, Part]:
    """The values that can be written into a `cat` of flat tensors directly, where a kernel gives the same bits.

    Args:
        nodes: in order of execution.
        root: node -> the node whose memory it is.
        free: whether a value may lie in a given `cat`'s result: nobody reads it afterwards, nor is it placed yet.

    Returns:
        Value (a root) -> its place.
    """
    parts: dict[fx.Node, Part] = {}
    for whole in nodes:
        if whole.target is not aten.cat.default or info(whole).value.dim() != 1 or writer(whole) != "out":
            continue
        start = 0
        operands: list[fx.Node] = list(whole.args[0])  # type: ignore[arg-type]
        roots = [root[operand] for operand in operands]
        times = Counter(roots)
        for operand, owner in zip(operands, roots, strict=True):
            value = info(operand).value
            once = times[owner] == 1 and owner not in parts and _fills(operand, owner, whole)
            aligned = start * value.itemsize % ALIGN == 0
            if once and writer(owner) is not None and (aligned or writes_anywhere(owner)) and free(owner, whole):
                parts[owner] = Part(whole, start)
            start += value.numel()
    return parts


def _fills(operand: fx.Node, owner: fx.Node, whole: fx.Node) -> bool:
    """True when an operand is all of its owner's memory, in the order in which it lies."""
    value, held = info(operand).value, info(owner).value
    if owner.op != "call_function" or not isinstance(held, torch.Tensor) or held.dtype != info(whole).value.dtype:
        return False
    return value.stride() == (1,) and value.numel() == held.numel() > 0 and dense(held)
