"""What the fast path compares in bulk: tables, tensors and hooks; _bulk.pyi says what the compiled part answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from ctypes import c_size_t, sizeof
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from wholestep.torch_compat import HOOK_TABLES, TENSOR_BASE, set_versions, tensor_functions, tensor_offsets

try:
    from wholestep.capture.guards import _bulk as native
except ImportError as missing:
    raise ImportError("wholestep's compiled parts are missing or older than its code: run `python setup.py build_ext "
                      "--inplace` (or `pip install .`) with a C compiler") from missing  # fmt: skip

ANY, flatten, match, gather = native.ANY, native.flatten, native.match, native.gather
recall, identical = native.recall, native.identical
_LAYOUT = attrgetter("shape", "dtype", "device", "requires_grad")
_HOOKS = attrgetter(*HOOK_TABLES)


def _layouts(tensors: Iterable[torch.Tensor]) -> Any:
    """What is equal for tensors of equal sizes, strides, dtypes, devices and `requires_grad`."""
    return [(*_LAYOUT(t), t.stride() if t.layout is torch.strided else t.layout) for t in tensors]


def _hooks(tensors: Iterable[torch.Tensor]) -> list[tuple[int, Any]]:
    """The tables of hooks that tensors have, each with its number."""
    return [(i, table) for i, table in enumerate(chain.from_iterable(map(_HOOKS, tensors))) if table is not None]


def _grads(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of tensors."""
    return [tensor.grad for tensor in tensors]


def _versions(tensors: tuple[torch.Tensor, ...], writes: tuple[int, ...]) -> tuple[int, ...]:
    """The version counters of tensors after so many more writes to each."""
    return tuple([tensor._version + more for tensor, more in zip(tensors, writes, strict=True)])


def _reads_tensors() -> bool:
    """Whether C code reads tensors: where they lie within Python's objects is looked up once."""
    offsets, functions = tensor_offsets(), tensor_functions()
    if not offsets or not all(functions):
        return False
    native.use(TENSOR_BASE, offsets, functions, torch.empty(0))
    return True


_NATIVE = _reads_tensors()
hooks, grads, versions = (native.hooks, native.grads, native.versions) if _NATIVE else (_hooks, _grads, _versions)


def version_offset() -> int:
    """Where a dictionary has the number that each change of it replaces (PEP 509); 0 where there is none.

    Python 3.13 does not move it at each change of attributes, and 3.14 has none.
    """
    known = sys.implementation.name == "cpython" and sys.version_info < (3, 13)
    return object.__basicsize__ + sizeof(c_size_t) if known else 0  # behind the number of items


native.use_versions(version_offset())


def count_writes(tensors: tuple[torch.Tensor, ...], counts: tuple[int, ...]) -> None:
    """Has version counters stand where in-place calls would have left them."""
    if not (_NATIVE and native.advance(tensors, counts)):
        set_versions(tensors, counts)


def layouts_of(tensors: Iterable[torch.Tensor]) -> Any:
    """The implementation of `layouts` for some tensors: in C where all are plain."""
    plain = all(getattr(type(t), "of_whole", type(t)) in (torch.Tensor, torch.nn.Parameter)  # parts are as these are
                and t.layout is torch.strided and not t.is_nested for t in tensors)  # fmt: skip
    return native.layouts if _NATIVE and plain else _layouts
