"""Fake tensors with the layouts that kernels give their results.

torch's rules for fake tensors give other strides than its kernels here and there, while autograd, user code and the
memory plan go by strides, and kernels round by them. So each call of a new signature (operator, layouts of operands,
other arguments) is run by its kernel once in a process, on scratch tensors, and its results' layouts are kept.
May import: functional, nested, torch_compat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.functional import Functionalized, operator_of
from wholestep.nested import map_leaves, tensors_of
from wholestep.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    ShapeEnvironment,
    decomposition_of,
    fake_refusal,
    kernel_settings,
    no_modes,
    refuse_addresses,
    viewed,
)

# Shape, stride, dtype and device of each tensor among a call's results; None for one in an operand's memory.
Layouts = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None, ...]

PIVOTS = frozenset({"pivots", "LU_pivots"})  # arguments of `lu_solve`, `ldl_solve`, `lu_unpack`
LARGEST = 1 << 28  # bytes of the tensors that a kernel is tried on
_MOST = 1 << 16  # signatures kept

aten = torch.ops.aten

_known: dict[Any, Layouts | None] = {}


class CannotTry(Exception):  # noqa: N818 - not for users
    """An argument that no scratch tensor can stand for."""


class KernelMode(FakeTensorMode):
    """Fake tensors by torch's rules, laid out by its kernels; what a kernel takes, a wrong rule does not refuse."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.shape_env is not None:  # no kernel can be asked for sizes that are symbols
            if func in RULES:
                with self:
                    return RULES[func](*args, **kwargs)
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.view.default and type(args[0]) is FakeTensor and is_plain(args[0]):
            return viewed(*args)
        try:
            found = super().__torch_dispatch__(func, types, args, kwargs)
        except (ValueError, TypeError, RuntimeError) as error:
            refused = isinstance(error, RuntimeError) and fake_refusal(error) and func not in SIZED_BY_LISTS
            kept = None if refused else layouts(func, args, kwargs, wrong_rule=True)
            if not kept or None in kept:
                raise
            fakes = tuple([new_fake(self, *place) for place in kept if place])
            return fakes if len(func._schema.returns) > 1 else fakes[0]
        if not differ(func, args, kwargs, found):
            return found
        places = iter(layouts(func, args, kwargs) or ())

        def laid_out(leaf: Any) -> Any:
            place = next(places) if isinstance(leaf, torch.Tensor) else None
            return leaf if place is None else new_fake(self, *place)

        return map_leaves(laid_out, found)


def new_fake(mode: FakeTensorMode, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> FakeTensor:
    """A fake tensor in memory of its own."""
    with no_modes():
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)


def strict_fake_mode(env: ShapeEnvironment | None = None) -> FakeTensorMode:
    """A mode whose tensors refuse to give an address ("Cannot access data pointer of Tensor …").

    Args:
        env: what symbolic sizes of its tensors belong to.
    """
    mode = KernelMode(allow_non_fake_inputs=False, shape_env=env, static_shapes=False)
    mode.cache_enabled = False  # `fake_evaluate` knows more, at a third of the time
    refuse_addresses(mode)
    return mode


def layouts(func: OpOverload, args: Any, kwargs: Any, wrong_rule: bool = False) -> Layouts | None:
    """The layouts of a call's results, given tensors like its operands; None where its kernel cannot be asked."""
    if not is_asked(func, args, kwargs, wrong_rule):
        return None
    if torch.Tag.nondeterministic_seeded in func.tags:
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    try:
        key = func, key_of((args, kwargs), [], offsets=False), kernel_settings()
        if key not in _known:
            if len(_known) >= _MOST:
                _known.clear()
            _known[key] = _asked(func, args, kwargs)
        return _known[key]
    except (CannotTry, TypeError):  # TypeError: an argument without a hash
        return None


def is_asked(func: OpOverload, args: Any, kwargs: Any, wrong_rule: bool = False) -> bool:
    """Whether a call's kernel says which layouts its results have, as torch's rule is not enough."""
    if func.namespace != "aten" or func.is_view or (_UNASKED & {*func.tags} and func not in SIZED_BY_LISTS):
        return False
    if all(result.alias_info for result in func._schema.returns):  # it gives its arguments back
        return False
    if func in ORDERED or kwargs.get("memory_format") is torch.contiguous_format:
        return False
    operands = [*tensors_of((args, kwargs))]
    if torch.Tag.nondeterministic_seeded in func.tags and not _takes_generator(func):
        if any(tensor.numel() for tensor in operands):
            return False  # it would draw from the user's generator
    return (wrong_rule and torch.Tag.pointwise in func.tags) or not _is_settled(func, operands)


def differ(func: Any, args: Any, kwargs: Any, found: Any) -> bool:
    """Whether a call's results, as a graph has them, have other layouts than its kernel gives them."""
    op = operator_of(func)
    kept = layouts(op, args, kwargs) if isinstance(op, OpOverload) else None
    tensors = [*tensors_of(found)]
    if kept is not None and isinstance(func, Functionalized):  # the others are what it has written
        tensors = tensors[: len(kept)]
    if kept is None or len(kept) != len(tensors):
        return False
    return any(place is not None and (t.shape, t.stride()) != place[:2] for t, place in zip(tensors, kept, strict=True))


# Tagged as sized by data, as its form is that takes lengths in tensors; this one takes lists.
SIZED_BY_LISTS = {aten._ctc_loss.default}

# Their results are contiguous, whatever the factors are; to ask would cost as much as the step's own arithmetic.
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
# Their results are in one order, whatever that of the operands is.
ORDERED = {aten._scaled_dot_product_flash_attention_for_cpu_backward.default}
# Their results are contiguous where the operands are.
CONTIGUOUS = {
    aten.embedding.default, aten.embedding_dense_backward.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten._softmax.default, aten._softmax_backward_data.default,
    aten._log_softmax.default, aten._log_softmax_backward_data.default, aten.nll_loss_forward.default,
    aten.nll_loss_backward.default, aten.sum.dim_IntList, aten.mean.dim, aten.stack.default, aten.cat.default,
    aten.clone.default, aten.empty_like.default, aten.new_empty.default, aten._unsafe_view.default,
}  # fmt: skip


def _normalized(x: torch.Tensor, sums: int, wanted: Sequence[bool], *parameters: torch.Tensor | None) -> Any:
    """Results of a batch normalisation, or of its backward: one like its operand, the others of a number a channel."""
    dtype = next((one.dtype for one in parameters if one is not None), x.dtype)
    made = [x.new_empty(sums, dtype=dtype) if one else None for one in wanted[1:]]
    return torch.empty_like(x) if wanted[0] else None, *made


def _batch_norm(x: torch.Tensor, w: Any, b: Any, mean: Any, var: Any, training: bool, *_: float) -> Any:
    return _normalized(x, x.shape[1] if training else 0, (True, True, True), w, b, mean, var)


def _batch_norm_backward(grad: Any, x: torch.Tensor, w: Any, mean: Any, var: Any, *rest: Any) -> Any:
    return _normalized(x, x.shape[1], rest[-1], w, mean, var)


# Rules for sizes that are symbols: where C++ would ask for numbers, and where torch, which writes the arithmetic out in
# Python on symbols, takes 16 ms.
RULES: dict[Any, Callable[..., Any]] = {
    aten.constant_pad_nd.default: decomposition_of(aten.constant_pad_nd.default),
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}

# Results of these depend on more than layouts.
_UNASKED = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def key_of(argument: Any, values: list[torch.Tensor], offsets: bool = True) -> Any:
    """All of an argument that rules and operators on fake tensors see, offsets where asked; collects tensors."""
    kind = type(argument)
    if kind is fx.Node:
        argument = argument.meta["info"].value
        kind = type(argument)
    if issubclass(kind, torch.Tensor):
        values.append(argument)
        if argument.layout is not torch.strided:
            return [argument]  # has no hash
        place = argument.shape, argument.stride(), argument.storage_offset() if offsets else 0
        return *place, argument.dtype, argument.device, argument.is_conj(), argument.is_neg()
    if issubclass(kind, (list, tuple)):
        return tuple([key_of(one, values, offsets) for one in argument])
    if issubclass(kind, dict):
        return tuple([(name, key_of(one, values, offsets)) for name, one in argument.items()])
    return kind, argument


def is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor whose memory holds its elements as they are, by strides."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _is_settled(func: OpOverload, operands: list[torch.Tensor]) -> bool:
    """Whether torch's rule will do: many operators keep contiguous what is, and products of matrices are. Also where a
    kernel must not be asked: it would read a workspace of zeros.
    """
    if func in PRODUCTS:
        return len(operands) == 2 or is_contiguous(operands[0])
    if func is aten.batch_norm_backward.default:  # an empty workspace is none; on fake tensors others' are empty, too
        operands = [t for t in operands if t.dtype is not torch.uint8 or t.numel()]
    row_by_row = (torch.Tag.pointwise in func.tags or func in CONTIGUOUS) and all(map(is_contiguous, operands))
    return row_by_row or not operands or is_opaque(operands)


def is_opaque(tensors: list[torch.Tensor]) -> bool:
    """Whether there are bytes among numbers: a kernel's workspace, in a form that it alone knows."""
    return len({t.dtype is torch.uint8 for t in tensors}) > 1


def is_contiguous(tensor: torch.Tensor) -> bool:
    """True for a tensor whose elements follow one another, with the strides that new ones have."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def _takes_generator(func: OpOverload) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _asked(func: OpOverload, args: Any, kwargs: Any) -> Layouts | None:
    with no_modes():
        ran = run_kernel(func, args, kwargs)
        if ran is None:
            return None
        operands, found = ran
        memories = {t.untyped_storage().data_ptr() for t in operands}
        shared = [t.numel() > 0 and t.untyped_storage().data_ptr() in memories for t in tensors_of(found)]
        pairs = zip(tensors_of(found), shared, strict=True)
        return tuple([None if inside else (t.shape, t.stride(), t.dtype, t.device) for t, inside in pairs])


def run_kernel(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], Any] | None:
    """Runs a call on scratch tensors, with no modes on.

    Returns:
        These tensors and what the call gives; None where that fails, or says nothing on layouts.
    """
    operands = [*tensors_of((args, kwargs))]
    if any(0 in t.shape for t in operands) and any(t.dtype in (torch.int32, torch.int64) for t in operands):
        return None  # kernels do not all check that there is an element 0
    try:
        given = scratch_tensors(args), scratch_tensors(kwargs)
        fill_pivots(func, given[0])
        if torch.Tag.nondeterministic_seeded in operator_of(func).tags and _takes_generator(func):
            given[1]["generator"] = torch.Generator()
        with torch.no_grad():
            results = func(*given[0], **given[1])
    except Exception:  # whatever it is: the call itself will say it
        return None
    found = [*tensors_of(results)]
    is_said = all(map(is_plain, found))
    return ([*tensors_of(given)], results) if is_said and not is_opaque([t for t in found if t.numel()]) else None


def scratch_tensors(tree: Any) -> Any:
    """Real tensors in the layouts of those among a call's arguments, which are as they are otherwise.

    Raises:
        CannotTry: an argument is none of size, number or plain tensor, or they are too large.
    """
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors_of(tree)) > LARGEST:
        raise CannotTry
    return map_leaves(_scratch, tree)


def fill_pivots(func: Any, args: Sequence[Any]) -> None:
    """Gives LAPACK's pivots among a call's scratch tensors the value at which they begin: 1."""
    for argument, given in zip(operator_of(func)._schema.arguments, args, strict=False):
        if argument.name in PIVOTS and isinstance(given, torch.Tensor):
            given.fill_(1)


def _scratch(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        plain = leaf.layout == torch.strided and leaf.device.type != "meta" and not leaf.is_neg()
        if not plain or any(type(n) is not int for n in leaf.shape):
            raise CannotTry
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        if 0 in leaf.shape or leaf.storage_offset():  # some kernels ask what memory is there
            there = min(leaf.untyped_storage().nbytes(), LARGEST) // leaf.itemsize
            made = torch.empty(there, dtype=leaf.dtype, device=leaf.device)
            made = made.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        made.zero_()  # an index of which kernels do not all check that it is in bounds
        return made.conj() if leaf.is_conj() else made
    known = leaf is None or isinstance(leaf, (bool, int, float, complex, str)) or type(leaf).__module__ == "torch"
    if not known or isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise CannotTry
    return leaf
