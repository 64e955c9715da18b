"""Facts about single values and calls of a graph: layout, aliases, ways to write, written arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from wholestep.ir import GETITEM, info
from wholestep.lower.plan.operator_facts import (
    COPIES,
    FILLS,
    SCATTERS,
    Mutable,
    aten,
    base_name,
    is_in_place_collective,
    is_view,
    is_wait,
    mutable_twin,
    offset_of,
    out_variant,
    read_only,
)
from wholestep.torch_compat import OpOverload

How = Literal[
    "skip",
    "host",
    "view",
    "wait",
    "collective",
    "fill",
    "copy",
    "scatter",
    "inplace",
    "out",
    "call",
    "mutable",
    "pick",
    "pack",
]


RECYCLE_FROM = 1 << 20  # bytes
# Bytes from which the arena lends memory for a gradient: below, that costs more than it is worth.
LEND_FROM = 1 << 16
# A backward's gradients die before the next forward's activations are made: kept blocks would stand beside those. glibc
# itself gives the pages of smaller blocks to the next request, and those from here on back to the system.
RECYCLE_GRADIENTS_FROM = 1 << 25


@dataclass
class Written:
    """One tensor that an argument-writing call changes."""

    argument: str
    index: int | None
    old: fx.Node
    leaf: fx.Node | None
    in_place: bool = False


def layout(value: torch.Tensor) -> tuple[Any, ...]:
    """What two values must share to share memory: shape, strides, dtype, device, signs that reading still changes."""
    signs = value.dtype.is_complex and value.is_conj(), value.is_neg()
    return (tuple(value.shape), value.stride(), value.dtype, value.device, *signs)


def is_dense(value: torch.Tensor) -> bool:
    """True when the elements fill a block of memory, each one once."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(value.stride(), value.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def recyclable(value: torch.Tensor, least: int = RECYCLE_FROM) -> bool:
    """True for results so big that new pages for each call would cost more than computing them."""
    return value.device.type == "cpu" and value.numel() * value.itemsize >= least


def device_key(value: Any) -> str:
    """The dispatch key of a value's device."""
    return "CUDA" if isinstance(value, torch.Tensor) and value.device.type == "cuda" else "CPU"


def writer(node: fx.Node) -> How | None:
    """How a call can put its one result into memory that it is given; None when it cannot."""
    op, value = node.target, info(node).value
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not is_dense(value):
        return None
    if op in FILLS:
        return "fill"
    if op in COPIES or op is aten.copy.default:
        return "copy"
    if op in SCATTERS:
        return "scatter" if op is not aten.as_strided_scatter.default or _inside(node) else None
    if is_in_place_collective(op):
        return "collective"
    if not isinstance(op, OpOverload) or len(op._schema.returns) != 1 or is_view(op):
        return None
    found = out_variant(op, device_key(value))
    return "out" if found is not None and len(found[2]) == 1 else None


def _inside(node: fx.Node) -> bool:
    """True for an `as_strided_scatter` that writes to nothing but the elements of its dense base."""
    size, stride = node.args[2:4]
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))  # type: ignore[arg-type, misc, operator]
    begin = offset_of(node.target, node.args)
    return begin >= 0 and begin + last < info(node).value.numel()  # type: ignore[no-any-return]


def fill_numbers(node: fx.Node) -> list[Any]:
    """The number that a fill writes, as a list."""
    return [FILLS[node.target](*node.args, **node.kwargs)]


def determined(node: fx.Node) -> bool:
    """True for calls that give the same result whenever they run; `empty` does not."""
    return not base_name(node.target).startswith(("empty", "new_empty")) and node.target is not aten.copy.default  # type: ignore[arg-type]


def base_of(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result shares (a copy of equal layout counts), or None."""
    if node.target in COPIES:
        operand = node.args[0]
        same = isinstance(operand, fx.Node) and layout(info(operand).value) == layout(info(node).value)
        return operand if same else None  # type: ignore[return-value]
    if not is_view(node.target) and not is_wait(node.target):
        return None
    return next((a for a in node.args if isinstance(a, fx.Node)), None)


def origin_of(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]]:
    """The call a getitem picks from, and the indices down to it."""
    path: tuple[int, ...] = ()
    while node.target is GETITEM:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        node, path = source, (index, *path)
    return node, path


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Operands that hold tensors, each time they occur, without what a copy replaces."""
    found = [n for n in all_operands(node) if isinstance(info(n).value, torch.Tensor)]
    if node.target is aten.copy.default:
        return found[1:]
    return [] if node.target in FILLS else found


def all_operands(node: fx.Node) -> list[fx.Node]:
    """Every node among the arguments, each time it occurs."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def results_of_arguments(owner: fx.Node, twin: Mutable) -> list[tuple[str, int | None, fx.Node, tuple[int, ...]]]:
    """For each tensor that a schema calls written: argument, index in its list, node, path among the results."""
    schema = twin.op._schema.arguments
    bound = dict(zip((a.name for a in schema), owner.args, strict=False)) | dict(owner.kwargs)
    found: list[tuple[str, int | None, fx.Node, tuple[int, ...]]] = []
    result = twin.fresh
    for argument in twin.written:
        name = schema[argument].name
        old: Any = bound.get(name)
        if isinstance(old, (list, tuple)):
            for index, item in enumerate(old):
                found.append((name, index, item, (result, index) if twin.nested else (result + index,)))
            result += 1 if twin.nested else len(old)
        elif isinstance(old, fx.Node):
            found.append((name, None, old, (result,)))
            result += 1
        elif twin.nested:
            result += 1
    return found


def written_arguments(owner: fx.Node, twin: Mutable, leaves: Any) -> list[Written]:
    """The tensors that an argument-writing call changes; ``leaves`` gives the getitems of each call by path."""
    spared = spared_arguments(owner)
    mine = leaves.get(owner, {})
    results = results_of_arguments(owner, twin)
    return [Written(name, index, old, mine.get(path)) for name, index, old, path in results if path not in spared]


def spared_arguments(owner: fx.Node) -> dict[tuple[int, ...], fx.Node]:
    """By path, results that are an argument which the schema calls written and this call leaves alone."""
    twin = mutable_twin(owner.target)
    if twin is None:
        return {}
    schema = twin.op._schema.arguments
    bound = dict(zip((a.name for a in schema), owner.args, strict=False)) | dict(owner.kwargs)
    spared = read_only(twin.op, bound)
    return {path: old for name, _, old, path in results_of_arguments(owner, twin) if name in spared}
