"""Fake evaluation of calls, memoised: the layers of a model make the same calls again, and so do captures.

What is known is kept by all that operators see of their arguments, and by the settings they choose kernels by.
May import: fake_layouts, functional, ir, nested, torch_compat.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from wholestep.fake_layouts import CONTIGUOUS, is_contiguous, is_opaque, is_plain, key_of, layouts, new_fake, run_kernel
from wholestep.functional import OFFSETS, Functionalized, operator_of
from wholestep.ir import info
from wholestep.nested import leaves, map_leaves, tensors_of
from wholestep.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    below_autograd,
    empty_fake,
    equal_expressions,
    expression_of,
    fake_of,
    fake_view,
    kernel_settings,
    no_modes,
    storage_id,
)

aten = torch.ops.aten

_VALUES = "wholestep_values"  # an attribute of a mode: its values live as long as it does
_MOST = 1 << 14  # calls whose results are known
_SMALL = 1 << 16  # bytes of operands on which kernels take microseconds, however much they broadcast
_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}


def evaluate(mode: FakeTensorMode | None, target: Any, args: Any, kwargs: Any) -> Any:
    """The value of a call in a graph: shape, strides, dtype and device. Nodes of equal ones may share the object.

    Args:
        mode: of the fake tensors; not needed where an operand is one.
        target: what is called.
        args, kwargs: its arguments, nodes among them.
    """
    if target is operator.getitem:  # of as many results as there are parameters
        return info(args[0]).value[args[1]]
    values: list[torch.Tensor] = []
    key = target, key_of(args, values), key_of(kwargs, values), torch.get_default_dtype()
    mode = mode or values[0].fake_mode  # type: ignore[attr-defined]
    known = mode.__dict__.setdefault(_VALUES, {})
    if mode.shape_env is not None:
        key = _by_expressions(key)
    found = _get(known, key)
    if found is None:
        found = results(mode, target, *fx.map_arg((args, kwargs), lambda node: info(node).value))
        with contextlib.suppress(TypeError):
            known[key] = found
    return found


def alone(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake of a plain tensor's geometry, in no other's memory, for the graph to keep; nodes may share it."""
    if mode.shape_env is None:
        return empty_fake(mode, tensor)
    known, key = mode.__dict__.setdefault(_VALUES, {}), _by_expressions(key_of(tensor, [], False))
    if key not in known:
        known[key] = empty_fake(mode, tensor)
    return known[key]  # type: ignore[no-any-return]


def results(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What a call gives on fake tensors: tensors in memory of their own, views of its arguments, or these."""
    if not _depends_on_layouts(func):
        return run(mode, func, args, kwargs)
    operands: list[torch.Tensor] = []
    offsets = torch.Tag.pointwise not in operator_of(func).tags
    sized = mode.shape_env is not None  # what was decided on symbols is known to their environment's mode alone

    def key_now() -> Any:
        operands.clear()
        key = func, key_of(args, operands, offsets), key_of(kwargs, operands, offsets), torch.get_default_dtype()
        return _by_expressions((*key, kernel_settings())) if sized else (*key, kernel_settings())

    key = key_now()
    if not all(_is_plain_fake(one, mode) for one in operands):
        return run(mode, func, args, kwargs)
    kept = _get(_known, key)
    if kept is None and sized:
        kept = _get(mode.__dict__.setdefault(_VALUES, {}), key)
    if kept is None and not sized:
        ask = _by_kernel if _is_small(func, args, kwargs, operands) else _by_some_elements
        kept = _keep(_known, key, ask(func, args, kwargs))
    if kept is not None:
        return map_leaves(lambda leaf: _anew(leaf, mode, operands), kept)
    given = [*operands]
    found = _UNKNOWN if sized else _by_layouts(mode, func, args, kwargs)
    if found is _UNKNOWN:
        found = _apart(mode, run(mode, func, args, kwargs), given)
    if key == key_now():
        known, like = (mode.__dict__[_VALUES], mode) if sized else (_known, _mode_of_kept())
        _keep(known, key, _kept(found, given, like))
    return found


def _by_layouts(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Results whose layouts the kernel is asked for in any case: torch's rule has nothing to add."""
    if not isinstance(func, OpOverload) or any(str(r.type) != "Tensor" or r.alias_info for r in func._schema.returns):
        return _UNKNOWN
    places = layouts(func, args, kwargs)
    if not places or None in places or len(places) != len(func._schema.returns):
        return _UNKNOWN
    made = tuple([new_fake(mode, *place) for place in places if place is not None])
    return made if len(made) > 1 else made[0]


def _apart(mode: FakeTensorMode, found: Any, operands: list[torch.Tensor]) -> Any:
    """Results of which torch's rule gives one object for several, as for the biases of a recurrent layer's backward."""
    given, seen = {id(one) for one in operands}, set[int]()

    def once(leaf: Any) -> Any:
        again = isinstance(leaf, torch.Tensor) and id(leaf) in seen - given
        seen.add(id(leaf))
        return _anew(leaf, mode, operands) if again else leaf

    return map_leaves(once, found)


def _by_expressions(key: Any) -> Any:
    """A key in which symbolic sizes, which have no hash, are what they are in terms of symbols."""
    return tuple([_by_expressions(one) for one in key]) if isinstance(key, tuple) else expression_of(key)


def _keep(known: dict[Any, Any], key: Any, kept: Any) -> Any:
    """Remembers what a call's results are made of anew, where that is known; gives it, or None."""
    if any(leaf is _UNKNOWN for leaf in leaves(kept)):
        return None
    if len(known) >= _MOST:
        known.clear()
    with contextlib.suppress(TypeError):  # an argument without a hash
        known[key] = kept
    return kept


def _is_small(func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> bool:
    """Whether a call's kernel, on scratch tensors, takes less time than torch's rules, and touches nothing else."""
    if not operands or is_opaque(operands) or torch.Tag.nondeterministic_seeded in operator_of(func).tags:
        return False
    if func is aten.embedding_dense_backward.default:  # whose results have as many rows as a number says
        return False
    if any(type(one) is int and _SMALL < abs(one) < sys.maxsize for one in leaves((args, kwargs))):
        return False  # results may be large
    if any(tensor.device.type != "cpu" for tensor in operands):  # a GPU's take longer, and may fail after the call
        return False
    # torch's rules for losses and norms, written in Python, take 3 to 25 ms; kernels a millisecond for a megabyte
    most = _SMALL << 6 if func in CONTIGUOUS else _SMALL
    return sum((tensor.numel() + tensor.storage_offset()) * tensor.itemsize for tensor in operands) <= most


def _by_kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """What a call's results are made of anew, as its kernel gives them."""
    with no_modes():
        ran = run_kernel(func, args, kwargs)
        if ran is None:
            return _UNKNOWN
        operands, found = ran
        if any(not isinstance(one, torch.Tensor) for one in leaves(found)) and operator_of(func)._schema.returns:
            return _UNKNOWN  # a number that depends on what tensors hold, or a tensor that this call does not need
        return _kept(found, operands, _mode_of_kept())


def _by_some_elements(func: Any, args: Any, kwargs: Any) -> Any:
    """The same of a pointwise operator on large operands of one shape, as its kernel gives them for a few elements."""
    tags, operands = operator_of(func).tags, [*tensors_of((args, kwargs))]
    shapes = {one.shape for one in operands if one.dim()}
    asked = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and len(shapes) == 1
    if not asked or not all(one.device.type == "cpu" and is_contiguous(one) for one in operands):
        return _UNKNOWN

    def some(leaf: Any) -> Any:
        return torch.empty([2] * leaf.dim(), dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    def whole(leaf: Any) -> Any:
        if type(leaf) is not FakeTensor:
            return leaf
        known = leaf.shape == some(like).shape and is_contiguous(leaf)
        return empty_fake(leaf.fake_mode, leaf, (like.shape, like.stride())) if known else _UNKNOWN

    like = next(one for one in operands if one.dim())
    with no_modes():
        return map_leaves(whole, _by_kernel(func, *map_leaves(some, (args, kwargs))))


def run(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    """Runs a call on fake tensors, as below autograd."""
    with mode, torch.no_grad(), below_autograd():
        return target(*args, **kwargs)


def _get(known: dict[Any, Any], key: Any) -> Any:
    try:
        return known.get(key)
    except TypeError:  # an argument without a hash
        return None


_UNKNOWN = object()
_known: dict[Any, Any] = {}  # a call and what it goes by -> what its results are made of anew


@dataclass(frozen=True)
class _InOperand:
    """A result in the memory of an operand: that one itself, or a view like another tensor."""

    place: int
    like: FakeTensor | None


@cache
def _depends_on_layouts(func: Any) -> bool:
    """Whether calls of an operator on tensors of equal layouts give tensors of equal layouts, and change none."""
    op = func.op if isinstance(func, Functionalized) else func
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op in OFFSETS:
        return False
    return _BY_DATA.isdisjoint(op.tags) and op.overloadpacket is not torch.ops.aten.set_


def _is_plain_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> bool:
    is_its = isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.constant is None
    return is_its and is_plain(tensor)


@cache
def _mode_of_kept() -> FakeTensorMode:
    """The mode of the tensors that results are made like; the first mode that is made imports much of torch."""
    return FakeTensorMode()


def _kept(found: Any, operands: list[torch.Tensor], mode: FakeTensorMode) -> Any:
    """What a call's results are made of anew: tensors of a mode that has their symbols, if any."""
    places = [*enumerate(operands)][::-1]  # the first one counts
    by_id = {id(one): place for place, one in places}
    by_memory = {storage_id(one.untyped_storage()): place for place, one in places}

    def kept(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not is_plain(leaf):
            return _UNKNOWN
        if id(leaf) in by_id:
            return _InOperand(by_id[id(leaf)], None)
        memory = leaf.untyped_storage()
        place = by_memory.get(storage_id(memory))
        if place is not None:
            return _InOperand(place, fake_of(mode, leaf))
        made = empty_fake(mode, leaf)
        return made if equal_expressions(memory.nbytes(), made.untyped_storage().nbytes()) else _UNKNOWN

    return map_leaves(kept, found)


def _anew(leaf: Any, mode: FakeTensorMode, operands: list[torch.Tensor]) -> Any:
    if type(leaf) is _InOperand:
        operand = operands[leaf.place]
        return operand if leaf.like is None else fake_view(operand, leaf.like)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return empty_fake(mode, leaf) if mode.shape_env is None else fake_of(mode, leaf)
