"""What a graph calls besides operators: functional variants of those that write, and the state of the random generator.

May import: torch_compat.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch

from wholestep.torch_compat import OpOverload, wait_collective

# Views whose schema does not say so.
HIDDEN_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"}
# Operators that write to arguments although their schema does not say so: positions, given the arguments.
HIDDEN_WRITES: dict[Any, tuple[int, ...]] = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}


# Where an offset stands among the arguments. Operators count it from the start of the memory, a graph from the
# operand's first element, since only the lowering knows where in its memory that one lies.
OFFSETS: dict[Any, int] = {
    torch.ops.aten.as_strided.default: 3,
    torch.ops.aten.as_strided_copy.default: 3,
    torch.ops.aten.as_strided_scatter.default: 4,
}


@cache
def base_name(op: OpOverload) -> str:
    """``aten::add_.Tensor`` -> ``add_``."""
    return op._schema.name.split("::")[-1]


@cache
def written_arguments(op: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that an operator declares to write."""
    return tuple(i for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write)


@cache
def argument_names(op: OpOverload) -> tuple[str, ...]:
    """The names in an operator's schema, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


def bound_arguments(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What a call of an operator, or of a variant of one, gives, by the names in the schema, whose order it has."""
    return dict(zip(argument_names(operator_of(target)), args, strict=False)) | kwargs


@cache
def is_view(op: Any) -> bool:
    """True for operators whose results share memory with an argument, or may; some schemas do not say so."""
    return isinstance(op, OpOverload) and (bool(op.is_view) or base_name(op) in HIDDEN_VIEWS)


def is_wait(op: Any) -> bool:
    """True for the end of a collective, which gives its operand itself."""
    return isinstance(op, OpOverload) and op._schema.name == "wholestep::wait"


def is_collective(op: Any) -> bool:
    """True for operators that start a collective: every rank must issue them in one order."""
    return isinstance(op, OpOverload) and op.namespace == "wholestep" and not is_wait(op)


def overloads(namespace: str, name: str) -> list[OpOverload]:
    """All overloads of an operator; none where there is no such operator."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


def parameters(op: OpOverload, without: Sequence[int] = ()) -> list[tuple[str, str]]:
    """Names and types of an operator's arguments: equal for the functional, in-place and out= variants of one."""
    return [(a.name, str(a.type)) for i, a in enumerate(op._schema.arguments) if i not in without]


def clone_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A clone with a tensor's very strides, gaps between elements included: kernels round, and draw, by them."""
    clone = tensor.clone()
    if clone.stride() == tensor.stride() or 0 in tensor.stride():
        return clone
    gaps = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return gaps.copy_(tensor)


class Wrapped:
    """An operator that runs with something around it; equal to another of its class around the same operator.

    Attributes:
        op: the operator.
        written: positions of arguments in the place of which copies are written.
    """

    prefix: ClassVar[str]
    written: tuple[int, ...] = ()

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.__name__ = self.__qualname__ = f"{self.prefix}_{op.name().split('::')[-1].replace('.', '_')}"
        self.__module__ = "wholestep.functional"

    def __repr__(self) -> str:
        return f"{self.prefix}({self.op})"

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Wrapped) and type(other) is type(self)
        return same and (other.op, other.written) == (self.op, self.written)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.prefix, self.op))


def operator_of(target: Any) -> Any:
    """The operator that a call of a graph runs, on its own or within a variant; what is no operator, as it is."""
    return target.op if isinstance(target, Wrapped) else target


class Functionalized(Wrapped):
    """A functional variant of an operator that writes to its arguments and has none among ATen's.

    Calling it clones each written argument, runs the operator, and returns a tuple: the operator's own
    results that are not one of the written arguments, then the new values of the written arguments, in
    schema order (a written list contributes one entry per tensor).

    Args:
        op: the operator.
        written: positions of the written arguments, for an operator whose schema does not declare them.
    """

    prefix = "functional"

    def __init__(self, op: OpOverload, written: tuple[int, ...] | None = None) -> None:
        super().__init__(op)
        self.written = written_arguments(op) if written is None else written

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        bound = bound_arguments(self, args, kwargs)
        written: list[torch.Tensor] = []
        for name in (argument_names(self.op)[index] for index in self.written):
            old = bound.get(name)
            if isinstance(old, torch.Tensor):
                bound[name] = clone_as_it_lies(old)
                written.append(bound[name])
            elif isinstance(old, (list, tuple)):
                bound[name] = [clone_as_it_lies(t) for t in old]
                written.extend(bound[name])
        out = self.op(**bound) if any(a.kwarg_only for a in self.op._schema.arguments) else self.op(*bound.values())
        outs = list(out) if isinstance(out, (tuple, list)) else [] if out is None else [out]
        fresh = [o for o in outs if not any(o is w for w in written)]
        return (*fresh, *written)


class UnderGrad(Wrapped):
    """An operator whose kernel asks whether gradients are wanted, run as if they were."""

    prefix = "under_grad"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return self.op(*args, **kwargs)


class Waited(Wrapped):
    """A functional collective of torch.distributed that also ends: until then it may read what it was given."""

    prefix = "waited"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.op(*args, **kwargs)
        return wait_collective(out) if isinstance(out, torch.Tensor) else [wait_collective(one) for one in out]


class Replayed(Wrapped):
    """A random operator that draws again what it has drawn: its first argument is the generator's state of then.

    The generator, its own or the default one, is where it was afterwards.

    Args:
        target: the operator, or a functional variant of it.
    """

    prefix = "replayed"

    def __init__(self, target: Any) -> None:
        super().__init__(operator_of(target))
        self.target, self.written = target, getattr(target, "written", ())

    def __call__(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        generator = kwargs.get("generator") or torch.default_generator
        now = generator.get_state()
        generator.set_state(state)
        try:
            return self.target(*args, **kwargs)
        finally:
            generator.set_state(now)


class Diverged(Exception):  # noqa: N818 - an answer, not an error
    """A program meets another value than the one that Python went on with when the step was captured."""

    def __init__(self, decided: Decided, found: Any) -> None:
        super().__init__(f"{decided.text}: expected {decided.expected}, found {found} (decided at {decided.line})")
        self.decided, self.found = decided, found


class Decided:
    """Python went on with a value, in a way that serves no other: `Diverged` where there is one. Effectful.

    It is called with the value. What reads that besides runs after it, and no input is written before it.

    Args:
        expected: the value.
        index: how many were decided before it.
        text, line: what was decided, in words, and the user's line.
    """

    __name__ = "decided"
    __module__ = "wholestep.functional"

    def __init__(self, expected: Any, index: int, text: str, line: str) -> None:
        self.expected, self.index, self.text, self.line = expected, index, text, line

    def __repr__(self) -> str:
        return f"decided({self.expected!r})"

    @property
    def in_words(self) -> str:
        """What is expected, and where Python went on with it."""
        return f"{self.text}: expected {self.expected} (decided at {self.line})"

    def __call__(self, found: Any) -> None:
        if not same_value(found, self.expected):
            raise Diverged(self, found)


class Required:
    """Raises where its operand is not true. Effectful.

    Args:
        what: the error's words.
    """

    __name__ = "required"
    __module__ = "wholestep.functional"

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"required({self.what!r})"

    def __call__(self, operand: torch.Tensor) -> None:
        if not operand:
            raise ValueError(self.what)


def same_value(found: Any, expected: Any) -> bool:
    """Equality, with each NaN like any other and the two zeros apart, as code that divides by them sees them."""
    return found is expected or type(found) is type(expected) and repr(found) == repr(expected)


def get_rng_state(generator: torch.Generator | None = None) -> torch.Tensor:
    """State of a CPU generator (None: the default one): uint8 [5056]. Effectful: stays among random operators."""
    return (generator or torch.default_generator).get_state()


def set_rng_state(state: torch.Tensor, generator: torch.Generator | None = None) -> None:
    """Sets a generator to ``state``. Effectful: never removed, never reordered."""
    (generator or torch.default_generator).set_state(state)


def manual_seed(seed: int, generator: torch.Generator | None = None) -> None:
    """Seeds a generator. Effectful: never removed, never reordered."""
    (generator or torch.default_generator).manual_seed(seed)
