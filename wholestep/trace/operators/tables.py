"""Facts of operators, from tables and schemas: which write, their functional variants, what must not be traced.

Collectives of torch.distributed itself are recorded with their waits where they are functional, the others refused;
those on a group of ours are `wholestep::` operators, and never asked about here. What
kernels refuse, they say themselves: fake tensors use other words, or let it pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from wholestep.errors import UnsupportedError
from wholestep.fake_layouts import CannotTry, fill_pivots, scratch_tensors
from wholestep.functional import (
    Functionalized,
    argument_names,
    base_name,
    bound_arguments,
    overloads,
    parameters,
    written_arguments,
)
from wholestep.torch_compat import OpOverload, has_native_kernel, no_modes

aten = torch.ops.aten

# Position of `training` in the operators that write without saying so: without it nothing is written.
TRAINING_FLAG = 5

# Operators whose kernel works differently when gradients are wanted (the LSTM keeps a workspace).
GRAD_SENSITIVE = {aten.mkldnn_rnn_layer.default}

# What to do instead of making nested tensors, for which no fake tensors stand.
NO_NESTED = "use padded tensors and masks, or compile without fullgraph=True"

# How the names begin of operators that make quantized tensors and such of oneDNN, for which no fake ones stand.
OPAQUE = ("quantize_per_", "_make_per_", "_empty_affine_quantized", "_empty_per_channel_affine_quantized", "to_mkldnn")
# The layouts of those for which they do.
LAYOUTS = {torch.strided, torch.sparse_coo}

# Operators on sparse tensors for which fake tensors make up the number of values.
SHAPE_FROM_DATA = {aten._coalesce.default, aten.is_coalesced.default, aten.sparse_mask.default}

# Namespaces whose operators have formulas where they need some.
BUILT_IN = frozenset({"aten", "prims", "prim", "profiler", "wholestep", "wholestep_formulas", "c10d",
                      "_c10d_functional"})  # fmt: skip
_AUTOGRAD_KEYS = "Autograd", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "CompositeImplicitAutograd"


# Those of torch whose kernels call operators that autocast casts.
CAST_INSIDE = {aten._trilinear.default, aten.linalg_pinv.atol_rtol_tensor}


@cache
def is_cast_inside(op: Any) -> bool:
    """Whether autocast sees, in eager, what an operator's kernel calls."""
    return op in CAST_INSIDE or (op.namespace not in BUILT_IN and not has_native_kernel(op, "AutocastCPU"))


@cache
def is_differentiated_inside(op: Any) -> bool:
    """Whether autograd sees, in eager, what a custom operator's kernel calls, since none is registered for autograd."""
    return op.namespace not in BUILT_IN and not any(has_native_kernel(op, key) for key in _AUTOGRAD_KEYS)


# Tensor methods that hand a traced value to Python, with what to do instead: by way of an operator, ...
ESCAPES: dict[str, str] = {
    "__float__": "use .item(), whose result may be used in arithmetic and as an operator's argument",
    **dict.fromkeys(("__int__", "__complex__"), "keep the number in a tensor, or compute it outside of the step"),
    "__index__": "use a size that does not depend on data",
    "__format__": "return the tensor from the step and format it outside",
    "__contains__": "use torch.eq(...).any() and torch.where",
}
# ... or out of memory itself, which only a patch of the method sees where C++ has called Python.
MEMORY_READS: dict[str, str] = {
    "__repr__": "return the tensor from the step and print it outside",
    "tolist": "return the tensor from the step and call tolist() outside",
    **dict.fromkeys(("numpy", "__array__", "__dlpack__"), "return the tensor from the step and convert it outside"),
    **dict.fromkeys(("data_ptr", "const_data_ptr", "mutable_data_ptr"), "address memory outside of the step"),
}


@dataclass(frozen=True)
class Variant:
    """The functional variant of an operator that writes: a pure one that computes the same.

    Attributes:
        target: the pure operator.
        drop: names of arguments (``out``) that it does not take.
    """

    target: Any
    drop: tuple[str, ...] = ()


@cache
def functional_variant(op: OpOverload) -> Variant:
    """The functional variant of an operator that writes: found by schema, else the operator on clones.

    An in-place ``mul_.Tensor`` has ``mul.Tensor``; ``add.out`` has ``add.Tensor`` without ``out``.
    """
    if torch.Tag.nondeterministic_seeded in op.tags:
        return Variant(Functionalized(op))  # another operator may draw in another order when strides differ
    name, written = base_name(op), written_arguments(op)
    drop: tuple[str, ...] = ()
    if name.endswith("_") and not name.endswith("__"):
        kept = parameters(op)
    else:
        drop = tuple(op._schema.arguments[i].name for i in written if op._schema.arguments[i].is_out)
        kept = parameters(op, without=written)
        if len(drop) != len(written):
            return Variant(Functionalized(op))
    for candidate in overloads(op.namespace, name if drop else name.removesuffix("_")):
        pure = not candidate._schema.is_mutable and not candidate.is_view
        if pure and parameters(candidate) == kept and _returns_written(op, candidate):
            return Variant(candidate, drop)
    return Variant(Functionalized(op))


# Operators that multiply in place by a number, and what multiplies by tensors of it. On the CPU, C++ has the number as
# the first operand there, whose kernels round it to half precision before they compute.
ROUNDS_FIRST = {
    aten.mul_.Scalar: aten.mul.Tensor,
    aten._foreach_mul_.Scalar: aten._foreach_mul.List,
    aten._foreach_mul_.ScalarList: aten._foreach_mul.List,
}

# Operators that read a tensor of one number before they write, which may lie in what they write.
FILLS_BY_TENSOR = {aten.fill_.Tensor, aten.masked_fill_.Tensor, aten.index_fill_.int_Tensor}


def _returns_written(op: OpOverload, candidate: OpOverload) -> bool:
    """The candidate's results are the new values of the written arguments, one for one."""
    written = [op._schema.arguments[i] for i in written_arguments(op)]
    returns = candidate._schema.returns
    if len(returns) != len(written):
        return False
    return all(("List" in str(r.type)) == ("List" in str(w.type)) for r, w in zip(returns, written, strict=True))


@cache
def functional_view(op: OpOverload) -> Any:
    """The view that an operator like `transpose_` turns its argument into; None when it is not one."""
    found = (o for o in overloads("aten", base_name(op)[:-1]) if o.is_view and parameters(o) == parameters(op))
    return next(found, None)


def positional(func: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """Positional and keyword arguments in the order of the schema; None for what is not given."""
    return [*args, *map(kwargs.get, argument_names(func)[len(args) :])]


def defaults(func: OpOverload, variant: Variant, given: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that an operator has a default for and its functional variant has not."""
    if not isinstance(variant.target, OpOverload):
        return {}
    needed = {a.name for a in variant.target._schema.arguments if not a.has_default_value()}
    rest = func._schema.arguments[given:]
    return {a.name: a.default_value for a in rest if a.has_default_value() and a.name in needed - set(kwargs)}


def is_fused(func: OpOverload) -> bool:
    """Whether it is one of the fused optimizers."""
    return func._schema.name.startswith("aten::_fused_")


def is_scaled(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a fused optimizer is given a `grad_scale`."""
    return bound_arguments(func, args, kwargs).get("grad_scale") is not None


def is_list_op(func: OpOverload) -> bool:
    """Whether it writes lists of tensors and gives nothing."""
    return not func._schema.returns and func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


@cache
def is_in_place(func: OpOverload) -> bool:
    """Whether an operator that writes into its first operand as `out=` is one that has a form in place."""
    return any(a.is_out for a in func._schema.arguments) and any(overloads(func.namespace, base_name(func) + "_"))


@cache
def is_elementwise(func: OpOverload) -> bool:
    """Whether an operator that writes reads each element before it writes there, and so may be given a tensor twice."""
    variant = functional_variant(func).target
    pointwise = any(torch.Tag.pointwise in op.tags for op in (func, variant) if isinstance(op, OpOverload))
    return pointwise or is_list_op(func) or func.namespace == "wholestep"


_SHM = 'begin the group with torch.distributed.init_process_group("shm"), after import wholestep.comm.torch_backend'


def is_wait(func: OpOverload) -> bool:
    """Whether an operator waits for a collective, now or at the first use. It gives its argument.

    Raises:
        UnsupportedError: the operator is none that can be recorded.
    """
    name = base_name(func)
    if func.namespace == "c10d":
        what = f"torch.distributed's {name.rstrip('_')} on a group of its own engines, which no graph can show"
        raise UnsupportedError(what, f"{_SHM}; or compile without fullgraph=True")
    if name in ("isend", "irecv") or func._schema.is_mutable:
        what = f"torch.distributed's {func}, which works in memory of the step's until it is waited for"
        remedy = "use all_reduce, all_gather_tensor and the like, or compile without fullgraph=True"
        raise UnsupportedError(what, remedy)
    return name in ("wait_tensor", "_wrap_tensor_autograd")


def check(func: OpOverload, args: Any, kwargs: Any) -> None:
    """Raises what a kernel does where fake tensors would let its arguments pass."""
    divides = func in (aten.div_.Scalar, aten.div_.Tensor)  # which gives fractions, for which integers have no place
    if divides and not args[0].is_floating_point() and (said := kernels_error(func, args, kwargs)) is not None:
        raise said


def kernels_error(
    func: OpOverload, args: Any, kwargs: Any, stand_in: Callable[[Any], Any] = scratch_tensors
) -> Exception | None:
    """What eager raises where an operator has failed on fake tensors: its kernel is tried on real ones."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    with no_modes():
        try:
            given = stand_in(args), stand_in(kwargs)
            fill_pivots(func, given[0])
            func(*given[0], **given[1])
        except CannotTry:
            return None
        except Exception as error:
            return error.with_traceback(None)
    return None
