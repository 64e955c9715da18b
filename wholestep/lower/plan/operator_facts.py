"""Facts about ATen overloads that lowering rests on, all derived from schemas or kept in tables.

Which operators are views, which have an ``out=`` kernel or an in-place variant, which write their arguments,
and by which public name an overload can be called fastest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from wholestep.functional import (
    OFFSETS,
    Functionalized,
    argument_names,
    base_name,
    is_collective,
    is_view,
    overloads,
    parameters,
    written_arguments,
)
from wholestep.nested import map_leaves
from wholestep.torch_compat import OpOverload as Overload
from wholestep.torch_compat import TorchDispatchMode, has_native_kernel

aten = torch.ops.aten

# Views in schema that may copy instead: they keep their base alive but are never made ahead of the call.
MAYBE_VIEWS = {
    "reshape", "reshape_as", "contiguous", "to", "flatten", "ravel", "resolve_conj", "resolve_neg", "type_as",
}  # fmt: skip

# functional overload -> (overload with an out= kernel of its own, further positional arguments).
OUT_ALIASES: dict[Any, tuple[Any, tuple[Any, ...]]] = {
    aten.relu.default: (aten.clamp_min.out, (0,)),  # relu's CPU and CUDA kernels are clamp_min's
    aten.stack.default: (aten.stack.out, ()),  # written for all devices at once, yet not computed and then copied
}

UNSET: Any = object()  # what `empty` fills memory with

# Results that are one constant everywhere, and where in the arguments it stands.
FILLS: dict[Any, Callable[..., Any]] = {
    aten.full.default: lambda size, value, **k: value,
    aten.full_like.default: lambda x, value, **k: value,
    aten.new_full.default: lambda x, size, value, **k: value,
    aten.scalar_tensor.default: lambda value, **k: value,
    **dict.fromkeys(
        (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default),
        lambda *a, **k: UNSET,
    ),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda *a, **k: 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda *a, **k: 1),
}
COPIES = {aten.clone.default, aten._to_copy.default}

# Scatters: the base with one view of it replaced -> the view.
SCATTERS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}

# In-place variants that read other elements than they write, yet give the functional result bit by bit.
SELF_ONLY_INPLACE = {
    "index_put", "_unsafe_index_put", "index_add", "index_copy", "index_fill", "scatter", "scatter_add",
    "masked_fill", "masked_scatter", "fill", "copy",
}  # fmt: skip


@dataclass(frozen=True)
class Mutable:
    """The in-place form of an operator of several results.

    Attributes:
        op: the overload that writes its arguments.
        written: indices of the arguments that it writes.
        fresh: how many results of its own come before the written arguments in the functional form.
        nested: the functional form returns a list for a written list, not its items one by one.
    """

    op: Overload
    written: tuple[int, ...]
    fresh: int
    nested: bool


def is_sure_view(op: Any) -> bool:
    """True for views that can never copy, so that they can be made before their memory is filled."""
    return is_view(op) and base_name(op) not in MAYBE_VIEWS


def is_in_place_collective(op: Any) -> bool:
    """True for collectives that can run on the memory of their result, once their operand is copied there."""
    return is_collective(op) and inplace_variant(op) is not None


def offset_of(op: Any, args: tuple[Any, ...]) -> int:
    """Elements from the operand's first to the result's first, for operators of `OFFSETS`; 0 for all others."""
    place = OFFSETS.get(op, len(args))
    return (args[place] or 0) if place < len(args) else 0


def is_pointwise(op: Any) -> bool:
    """True when element i of the result depends on element i of the operands only."""
    return isinstance(op, Overload) and torch.Tag.pointwise in op.tags and not op.is_view


@functools.cache
def out_variant(op: Overload, key: str) -> tuple[Overload, tuple[Any, ...], tuple[str, ...]] | None:
    """The ``out=`` overload with a kernel of its own on device key ``key``.

    Returns:
        (overload, extra positional arguments, names of the out arguments), or None. Generated out=
        overloads, which compute and then copy, do not count.
    """
    if op in OUT_ALIASES:
        found, extra = OUT_ALIASES[op]
        return found, extra, ("out",)
    if op.namespace not in ("aten", "wholestep") or _computes_in_out(op):
        return None
    for other in overloads(op.namespace, base_name(op)):
        written = written_arguments(other)
        if len(written) == len(op._schema.returns) and parameters(other, written) == parameters(op):
            if written and has_native_kernel(other, key):
                return other, (), tuple(argument_names(other)[i] for i in written)
    return None


def _computes_in_out(op: Overload) -> bool:
    """True for losses, which write all elements to ``out``, resized for them, before they reduce them there."""
    return "reduction" in argument_names(op) and not base_name(op).endswith("_backward")


@functools.cache
def inplace_variant(op: Overload) -> Overload | None:
    """The overload that writes the functional result into its first argument, or None."""
    if op.namespace not in ("aten", "wholestep") or len(op._schema.returns) != 1:
        return None
    same = (o for o in overloads(op.namespace, base_name(op) + "_") if parameters(o) == parameters(op))
    return next((other for other in same if written_arguments(other) == (0,)), None)


@functools.cache
def mutable_variant(op: Any) -> Mutable | None:
    """The argument-writing form of a `Functionalized`, ``_fused_*`` or ``*_functional`` operator."""
    if isinstance(op, Functionalized):  # its schema may not declare what it writes
        return Mutable(op.op, tuple(op.written), _own_results(op.op), nested=False)
    if not isinstance(op, Overload) or len(op._schema.returns) < 2:
        return None
    name = base_name(op)
    variant = name.removesuffix("_functional") if name.endswith("_functional") else name + "_"
    for other in overloads(op.namespace, variant):
        written, own = written_arguments(other), _own_results(other)
        if written and parameters(other) == parameters(op) and own + len(written) == len(op._schema.returns):
            return Mutable(other, written, own, nested=True)
    return None


def _own_results(op: Overload) -> int:
    """How many results are not one of the written arguments."""
    return sum(not (r.alias_info and r.alias_info.is_write) for r in op._schema.returns)


def read_only(op: Overload, arguments: dict[str, Any]) -> set[str]:
    """Arguments that a schema calls written but this call leaves as they are.

    The fused optimizers write the gradients only to unscale them, and never the step counts.
    """
    if not base_name(op).startswith("_fused_"):
        return set()
    return {"state_steps"} | ({"grads"} if arguments.get("grad_scale") is None else set())


class _FirstCall(TorchDispatchMode):
    """Stops at the first ATen call, which it remembers."""

    seen: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = func, args, kwargs
        raise StopIteration


def _first_call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with suppress(Exception), torch.no_grad(), _FirstCall() as mode:  # any refusal means that it cannot serve
        function(*args, **kwargs)
    return mode.seen


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _pattern(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("T", value.dim() == 0, value.dtype)
    return frozenset(map(_pattern, value)) if isinstance(value, (list, tuple)) else type(value)


_REACHES: dict[Any, bool] = {}


def reaches(op: Overload, call: Callable[..., Any], name: str, args: Any, kwargs: Any) -> bool:
    """True when the public ``call`` lands on exactly ``op`` with those arguments: shown by calling it.

    Arguments are compared too: a public function's defaults may be others than the overload's.

    Args:
        op: the overload wanted.
        call: for instance ``torch.add`` or ``torch.Tensor.add_``.
        name: of the call, part of the cache's key.
        args, kwargs: tensors (fake ones too) and numbers as they will be passed.
    """
    if isinstance(call, FunctionType):  # written in Python: it may do more with what the overload gives
        return False
    key = (op, name, tuple(map(_pattern, args)), tuple((k, _pattern(v)) for k, v in kwargs.items()))
    if key not in _REACHES:
        args, kwargs = map_leaves(_on_meta, (args, kwargs))
        wanted, _REACHES[key] = _first_call(op, args, kwargs), False
        with suppress(RuntimeError):  # of other tensors in one place: what they hold, which these do not, would decide
            _REACHES[key] = wanted is not None and wanted[0] is op and wanted == _first_call(call, args, kwargs)
    return _REACHES[key]
