"""What the fast path compares in bulk: tables, tensors and hooks. Each form here says what native/bulk.c answers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from wholestep.torch_compat import HOOK_TABLES, TENSOR_BASE, tensor_functions, tensor_offsets

try:
    from wholestep.capture.guards import _bulk as native
except ImportError:  # not built
    native = None  # type: ignore[assignment]

Table = tuple[dict[Any, Any], tuple[Any, ...], tuple[Any, ...], bool]
_LAYOUT = attrgetter("shape", "dtype", "device", "requires_grad")
_HOOKS = attrgetter(*HOOK_TABLES)


def identical(left: Any, right: Any) -> bool:
    """True when two iterables of equal length hold the very same objects."""
    return all(map(is_, left, right))


def _match(flat: Any, tables: list[Table], empty: list[dict[Any, Any]]) -> bool:
    """Whether dictionaries hold what they held, and others nothing.

    Args:
        flat: what `flatten` makes of the others, once.
        tables: dictionary, keys, values, and whether the order of keys counts; `ANY` stands for any value.
    """
    return not any(empty) and all(
        len(table) == len(keys) and (not ordered or tuple(table) == keys) and
        all(key in table and (value is ANY or table[key] is value) for key, value in zip(keys, values, strict=True))
        for table, keys, values, ordered in tables
    )  # fmt: skip


def _gather(
    whole: list[dict[Any, Any]], nested: list[dict[Any, Any]], keys: list[tuple[Any, ...]]
) -> list[Any] | None:
    """The values of dictionaries, and of those within others; None where these have other keys."""
    inner = [*chain.from_iterable(map(dict.values, nested))]
    if [*map(tuple, inner)] != keys:
        return None
    return [*chain.from_iterable(map(dict.values, [*whole, *inner]))]


def _recall(found: list[Any], weak: tuple[Any, ...], last: list[Any]) -> bool:
    """Fills a list with what weak references (or None) refer to, and says whether another holds the same."""
    last[:] = [reference and reference() for reference in weak]
    return len(found) == len(last) and identical(found, last)


def _layouts(tensors: Iterable[torch.Tensor]) -> Any:
    """What is equal for tensors of equal sizes, strides, dtypes, devices and `requires_grad`."""
    return [(*_LAYOUT(t), t.stride() if t.layout is torch.strided else t.layout) for t in tensors]


def _hooks(tensors: Iterable[torch.Tensor]) -> list[tuple[int, Any]]:
    """The tables of hooks that tensors have, each with its number."""
    return [(i, table) for i, table in enumerate(chain.from_iterable(map(_HOOKS, tensors))) if table is not None]


def _reads_tensors() -> bool:
    """Whether C code reads tensors: where they lie within Python's objects is looked up once."""
    offsets, functions = tensor_offsets(), tensor_functions()
    if native is None or not offsets or not all(functions):
        return False
    native.use(TENSOR_BASE, offsets, functions)
    return True


ANY = native.ANY if native is not None else object()
flatten = native.flatten if native is not None else lambda tables, empty: b""
match = native.match if native is not None else _match
gather = native.gather if native is not None else _gather
recall = native.recall if native is not None else _recall
_NATIVE = _reads_tensors()
hooks = native.hooks if _NATIVE else _hooks


def layouts_of(tensors: Iterable[torch.Tensor]) -> Any:
    """The form of `layouts` that serves some tensors."""
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided and not t.is_nested
                for t in tensors)  # fmt: skip
    return native.layouts if _NATIVE and plain else _layouts
