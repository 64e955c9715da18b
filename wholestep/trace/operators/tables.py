"""Tables of the recorder: which operators write, their pure twins, and what must not be traced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from wholestep.functional import Functionalized
from wholestep.torch_compat import OpOverload as Overload

aten = torch.ops.aten

# Operators that write to arguments although their schema does not say so: positions, given the arguments.
HIDDEN_WRITES: dict[Any, tuple[int, ...]] = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}
# Position of `training` in the operators above: without it nothing is written.
TRAINING_FLAG = 5

# Operators that write one value everywhere, and so also where elements repeat.
CONSTANT_WRITES = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}

# In-place operators that eager lets write where elements repeat; what they leave there is not defined, or deprecated.
EAGER_REPEATS = {"aten::masked_fill_", "aten::relu_", "aten::clamp_", "aten::clamp_min_", "aten::clamp_max_",
                 "aten::index_fill_"}  # fmt: skip

# Operators whose kernel works differently when gradients are wanted (the LSTM keeps a workspace).
GRAD_SENSITIVE = {aten.mkldnn_rnn_layer.default}

# Operators on sparse tensors for which fake tensors make up the number of values.
SHAPE_FROM_DATA = {aten._coalesce.default, aten.is_coalesced.default, aten.sparse_mask.default}

# Tensor methods that hand a traced value to Python, with what to do instead: by way of an operator, ...
ESCAPES: dict[str, str] = {
    "__float__": "use .item(), whose result may be used in arithmetic and as an operator's argument",
    "__int__": "keep the number in a tensor, or compute it outside of the step",
    "__index__": "use a size that does not depend on data",
    "__complex__": "keep the number in a tensor",
    "__format__": "return the tensor from the step and format it outside",
    "__contains__": "use torch.eq(...).any() and torch.where",
}
# ... or out of memory itself, which only the exchange of the method sees where C++ has called Python.
MEMORY_READS: dict[str, str] = {
    "__repr__": "return the tensor from the step and print it outside",
    "tolist": "return the tensor from the step and call tolist() outside",
    "numpy": "return the tensor from the step and call numpy() outside",
    "__array__": "return the tensor from the step and convert it outside",
    "__dlpack__": "return the tensor from the step and convert it outside",
    "data_ptr": "address memory outside of the step",
    "const_data_ptr": "address memory outside of the step",
    "mutable_data_ptr": "address memory outside of the step",
}


@dataclass(frozen=True)
class Twin:
    """A pure operator that computes what another one writes.

    Attributes:
        target: the pure operator.
        drop: names of arguments (``out``) that the pure one does not take.
    """

    target: Any
    drop: tuple[str, ...] = ()


@cache
def written_arguments(op: Overload) -> tuple[int, ...]:
    """Positions of the arguments that an operator declares to write."""
    return tuple(i for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write)


@cache
def is_view(op: Overload) -> bool:
    """True for operators whose results share memory with an argument without writing to it."""
    return any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)


def _type(argument: Any) -> str:
    return str(argument.type)


@cache
def pure_twin(op: Overload) -> Twin:
    """The pure form of an operator that writes: found by schema, else the operator on clones.

    An in-place ``mul_.Tensor`` has ``mul.Tensor``; ``add.out`` has ``add.Tensor`` without ``out``.
    """
    if torch.Tag.nondeterministic_seeded in op.tags:
        return Twin(Functionalized(op))  # a pure form may draw in another order when strides differ
    namespace, _, name = op._schema.name.partition("::")
    packets = getattr(torch.ops, namespace)
    arguments = list(op._schema.arguments)
    drop: tuple[str, ...] = ()
    if name.endswith("_") and not name.endswith("__"):
        wanted = name[:-1]
    else:
        written = written_arguments(op)
        drop = tuple(arguments[i].name for i in written if arguments[i].is_out)
        wanted = name
        if len(drop) != len(written):
            return Twin(Functionalized(op))
    kept = [(a.name, _type(a)) for a in arguments if a.name not in drop]
    packet = getattr(packets, wanted, None)
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        if candidate._schema.is_mutable or is_view(candidate):
            continue
        if [(a.name, _type(a)) for a in candidate._schema.arguments] == kept and _returns_written(op, candidate):
            return Twin(candidate, drop)
    return Twin(Functionalized(op))


def _returns_written(op: Overload, candidate: Overload) -> bool:
    """The candidate's results are the new values of the written arguments, one for one."""
    written = [op._schema.arguments[i] for i in written_arguments(op)]
    returns = candidate._schema.returns
    if len(returns) != len(written):
        return False
    return all(("List" in _type(r)) == ("List" in _type(w)) for r, w in zip(returns, written, strict=True))


@cache
def view_twin(op: Overload) -> Any:
    """The view that an operator like `transpose_` turns its argument into; None when it is not one."""
    name = op._schema.name.split("::")[1]
    packet = getattr(aten, name[:-1], None)
    wanted = [(a.name, _type(a)) for a in op._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        if is_view(candidate) and [(a.name, _type(a)) for a in candidate._schema.arguments] == wanted:
            return candidate
    return None


def positional(func: Overload, args: Any, kwargs: Any) -> list[Any]:
    """Positional and keyword arguments in the order of the schema; None for what is not given."""
    names = [a.name for a in func._schema.arguments]
    return [*args, *(kwargs.get(name) for name in names[len(args) :])]


def all_args(func: Overload, args: Any, kwargs: Any) -> dict[int, Any]:
    """Position -> argument, however it was passed."""
    return dict(enumerate(positional(func, args, kwargs)))


def defaults(func: Overload, twin: Twin, given: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that an operator has a default for and its twin has not."""
    if not isinstance(twin.target, Overload):
        return {}
    needed = {a.name for a in twin.target._schema.arguments if not a.has_default_value()}
    rest = func._schema.arguments[given:]
    return {a.name: a.default_value for a in rest if a.has_default_value() and a.name in needed - set(kwargs)}


def is_fused(func: Overload) -> bool:
    """Whether it is one of the fused optimizers."""
    return func._schema.name.startswith("aten::_fused_")


def scale_position(func: Overload) -> int:
    """Where a fused optimizer takes `grad_scale`; -1 where it does not."""
    return next((i for i, a in enumerate(func._schema.arguments) if a.name == "grad_scale"), -1)


def is_list_op(func: Overload) -> bool:
    """Whether it writes lists of tensors and gives nothing."""
    return not func._schema.returns and func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))
