"""How the queue treats an operator, by its schema and tags: a table asked once an overload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from wholestep.functional import HIDDEN_WRITES, argument_names, base_name, written_arguments
from wholestep.torch_compat import HigherOrderOperator, OpOverload, has_native_kernel
from wholestep.trace.operators.tables import (
    CAST_INSIDE,
    GRAD_SENSITIVE,
    SHAPE_FROM_DATA,
    is_cast_inside,
    is_differentiated_inside,
)
from wholestep.trace.record.caught_errors import refuses

aten = torch.ops.aten


class Kind(Enum):
    """How the queue treats a call of an operator.

    Attributes:
        VIEW: runs at once on memory that may not be written yet, and is recorded.
        DEFERRED: recorded; its results, those that are no arguments, get memory that a flush writes.
        AT_ONCE: runs at once, after a flush of what it may read.
    """

    VIEW = auto()
    DEFERRED = auto()
    AT_ONCE = auto()


# Operators that change what a tensor is or what its memory means, whose results' sizes follow from data, or whose
# kernels ask for grad mode.
_AT_ONCE = {
    aten._local_scalar_dense.default, aten.item.default, aten.equal.default, aten.is_same_size.default,
    aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor, aten.set_.source_Storage, aten.set_.default,
    aten.resize_.default, aten.resize_as_.default, aten._pack_padded_sequence.default, aten.record_stream.default,
    aten.lift_fresh.default, aten.lift.default, aten.empty.memory_format, aten._efficientzerotensor.default,
    aten._neg_view.default, aten._conj.default,
    *SHAPE_FROM_DATA, *GRAD_SENSITIVE, *CAST_INSIDE,
}  # fmt: skip

# Of these, those that only read, so that what they do not read may stay deferred.
_READS = {aten._local_scalar_dense.default, aten.item.default, aten.equal.default}

# And those that tell Python nothing of what is in tensors. C++ may write to what `empty` gives.
_TELL_NOTHING = {aten.lift_fresh.default, aten.empty.memory_format}

# Operators that take a number as what to write.
_FILLS = {"full", "full_like", "new_full", "fill", "masked_fill", "index_fill", "scalar_tensor", "where", "add", "lerp"}

# Operators that give views although their schema does not say so, and what says it: writes reach both tensors.
_VIEWS = {aten._unsafe_view.default: aten.view.default}

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


@dataclass(frozen=True, eq=False, slots=True)
class Facts:
    """What the queue asks of an operator at each call, looked up once; hashed by identity, unlike an overload.

    Attributes:
        written: positions of the arguments that it writes, also where its schema does not say so.
        names: of its arguments, by position.
        only_reads: runs at once, and needs only what it reads.
        tells: runs at once, and Python may decide by what it gives.
        random: draws from a generator.
        any_float: floats among its arguments do not decide how its results are laid out.
        refuses: the error that its kernel may raise on data.
        differentiated_inside: autograd sees what its kernel calls.
        in_loop: writes to lists of tensors, on the CPU by calls in place that count.
        cast_inside: autocast sees what its kernel calls.
    """

    op: OpOverload
    kind: Kind
    written: tuple[int, ...]
    names: tuple[str, ...]
    only_reads: bool
    tells: bool
    random: bool
    any_float: bool
    refuses: type[Exception] | None = None
    differentiated_inside: bool = False
    in_loop: bool = False
    cast_inside: bool = False

    def argument(self, args: Sequence[Any], kwargs: Mapping[str, Any], position: int) -> Any:
        """An argument by its position in the schema."""
        return args[position] if position < len(args) else kwargs.get(self.names[position])


_known: dict[int, Facts] = {}


def facts_of(op: Any) -> Facts:
    """The facts of an `OpOverload`, or of a higher-order operator."""
    found = _known.get(id(op))
    if found is None and op in _VIEWS:
        found = _known[id(op)] = facts_of(_VIEWS[op])
    elif found is None and isinstance(op, HigherOrderOperator):
        found = _known[id(op)] = Facts(op, Kind.AT_ONCE, (), (), False, True, False, False)  # type: ignore[arg-type]
    elif found is None:
        written = (*written_arguments(op), *HIDDEN_WRITES.get(op, ()))
        tells = op not in _TELL_NOTHING and op.namespace != "profiler"
        only_reads = op in _READS or not tells
        name = base_name(op)
        any_float = torch.Tag.pointwise in op.tags or name in _FILLS or name.startswith(("_foreach_", "_fused_"))
        any_float |= name.endswith("_") and not name.endswith("__")
        random = torch.Tag.nondeterministic_seeded in op.tags
        inside = is_differentiated_inside(op)
        kind, refused = _kind(op), refuses(op)
        names, in_loop, cast = argument_names(op), bool(written) and name.startswith("_foreach_"), is_cast_inside(op)
        found = Facts(op, kind, written, names, only_reads, tells, random, any_float, refused, inside, in_loop, cast)
        _known[id(op)] = found
    return found


def _kind(op: OpOverload) -> Kind:
    gives_nothing = not op._schema.returns and not op._schema.is_mutable
    if op in _AT_ONCE or op.namespace != "aten" or _TAGS & set(op.tags) or gives_nothing:
        return Kind.AT_ONCE
    if has_native_kernel(op, "CompositeImplicitAutograd"):  # reaches here in inference mode alone
        return Kind.AT_ONCE
    if op.is_view:
        return Kind.VIEW
    if any("Tensor" not in str(result.type) for result in op._schema.returns):
        return Kind.AT_ONCE
    return Kind.DEFERRED
