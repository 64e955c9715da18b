"""Facts about single values and calls of a graph: layout, aliases, ways to write, written arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from wholestep.functional import argument_names, is_view, is_wait
from wholestep.ir import GETITEM, arguments, info, is_dense
from wholestep.lower.plan.operator_facts import (
    COPIES,
    FILLS,
    SCATTERS,
    aten,
    is_in_place_collective,
    is_pointwise,
    mutable_variant,
    offset_of,
    out_variant,
    read_only,
)
from wholestep.torch_compat import OpOverload

# How a call is carried out. "skip", "pick", "view" and "wait" compute nothing; "host" is arithmetic on Python numbers;
# "call" gets memory from the kernel; all others write into memory that they are given.
How = Literal["skip", "pick", "view", "wait", "host", "call", "fill", "copy", "scatter", "collective", "inplace", "out",
              "mutable", "concat"]  # fmt: skip
KERNELS = ("call", "fill", "copy", "scatter", "collective", "inplace", "out", "mutable", "concat")

RECYCLE_FROM = 1 << 20  # bytes
# Bytes from which the arena lends memory for a gradient: below, that costs more than it is worth.
LEND_FROM = 1 << 16
# A backward's gradients die before the next forward's activations are made: kept blocks would stand beside those. glibc
# itself gives the pages of smaller blocks to the next request, and those from here on back to the system.
RECYCLE_GRADIENTS_FROM = 1 << 25


# Names that the generated program uses itself.
_RESERVED = re.compile(
    r"inputs|arena|fresh|loans|Loan|lend_.*|run|direct|torch|math|at|chain|clone_as_it_lies|cells"
    r"|offsets|s\d+|by_rows|parts|first|some|part|(list|chain|parts|result|new|object|given)_\d+|.*_rows|(number|tensors|aten|host)_.*"
    r"|.*_(cells|float32|float64|t)"
)


def variable(node: fx.Node) -> str:
    """The variable of a node's own: its name, unless the program uses that."""
    return node.name + "_" if _RESERVED.fullmatch(node.name) else node.name


@dataclass
class Written:
    """A result of an argument-writing call that its schema calls the new value of an argument.

    Attributes:
        argument, index: which argument, and which tensor of its list.
        old: the tensor that is given for it.
        path: where the new value stands among the call's results.
        writes: whether this call does write it.
        leaf: the getitem that gives the new value, where there is one.
        in_place: whether the tensor is written where it lies; else a clone of it is.
    """

    argument: str
    index: int | None
    old: fx.Node
    path: tuple[int, ...]
    writes: bool
    leaf: fx.Node | None = None
    in_place: bool = False


def layout(value: torch.Tensor) -> tuple[Any, ...]:
    """What two values must share to share memory: shape, strides, dtype, device, signs that reading still changes."""
    signs = value.dtype.is_complex and value.is_conj(), value.is_neg()
    return (tuple(value.shape), value.stride(), value.dtype, value.device, *signs)


def dense(value: torch.Tensor) -> bool:
    """True when the elements fill a block of memory, each one once."""
    return is_dense(value.shape, value.stride())


def recyclable(value: torch.Tensor, least: int = RECYCLE_FROM) -> bool:
    """True for results so big that new pages for each call would cost more than computing them."""
    return value.device.type == "cpu" and value.numel() * value.itemsize >= least


def device_key(value: Any) -> str:
    """The dispatch key of a value's device."""
    return "CUDA" if isinstance(value, torch.Tensor) and value.device.type == "cuda" else "CPU"


def writer(node: fx.Node) -> How | None:
    """How a call can put its one result into memory that it is given; None when it cannot."""
    op, value = node.target, info(node).value
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not dense(value):
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


def writes_anywhere(node: fx.Node) -> bool:
    """True when a call computes the same bits in memory of any alignment; products of MKL and oneDNN do not."""
    return is_pointwise(node.target) or writer(node) in ("fill", "copy", "scatter", "collective")


def _inside(node: fx.Node) -> bool:
    """True for an `as_strided_scatter` that writes to nothing but the elements of its dense base."""
    size, stride = node.args[2:4]
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))  # type: ignore[arg-type, misc, operator]
    begin = offset_of(node.target, node.args)
    return begin >= 0 and begin + last < info(node).value.numel()  # type: ignore[no-any-return]


def fill_number(node: fx.Node) -> Any:
    """The number, or node, with which a call of `FILLS` fills its result."""
    return FILLS[node.target](*node.args, **node.kwargs)


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


def written_results(owner: fx.Node) -> Iterator[Written]:
    """What an argument-writing call gives for the arguments that its schema calls written."""
    mutable = mutable_variant(owner.target)
    if mutable is None:
        return
    bound = arguments(owner)
    unwritten = read_only(mutable.op, bound)
    result = mutable.fresh
    for name in (argument_names(mutable.op)[position] for position in mutable.written):
        old: Any = bound.get(name)
        items = old if isinstance(old, (list, tuple)) else [] if old is None else [old]
        for index, item in enumerate(items):
            path = (result,) if items is not old else (result, index) if mutable.nested else (result + index,)
            yield Written(name, index if items is old else None, item, path, name not in unwritten)
        result += 1 if mutable.nested else len(items)
