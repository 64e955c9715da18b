"""Sizes that are symbols while a step is traced, so that one trace serves many of them.

Tensors among the step's arguments are replaced by fakes whose sizes are symbols of torch's shape environment. Sizes
that follow from them are expressions; where Python or an operator decides on one, the environment notes the outcome
as a guard. A trace holds for all sizes that meet its guards: `specialize.py` makes the trace of given sizes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.fake_layouts import strict_fake_mode
from wholestep.nested import map_leaves
from wholestep.sizes import function_of
from wholestep.torch_compat import FakeTensor, ShapeEnvironment, expression_of, size_symbol
from wholestep.trace.record.user_line import user_line


def is_made(value: object) -> bool:
    """Whether something is a tensor that the step made, not a fake that it was given for an input."""
    return isinstance(value, FakeTensor) and not getattr(value, "wholestep_given", False)


def is_size(value: object) -> bool:
    """Whether something is a number that follows from symbolic sizes."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and hasattr(value.node, "shape_env")


def is_host(value: object) -> bool:
    """Whether something is a number that is only known when the step runs."""
    # not `isinstance`, which asks a fake tensor for its `__class__`, in Python: 4 us, some times for each operator
    return issubclass(type(value), (torch.SymInt, torch.SymFloat)) and not hasattr(value.node, "shape_env")  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Held:
    """A number that follows from symbolic sizes, as a call's argument in the graph."""

    number: Any

    def __repr__(self) -> str:
        return str(self.number)


def held(leaf: Any) -> Any:
    """A leaf of a call's arguments as the graph keeps it."""
    return Held(leaf) if is_size(leaf) else leaf


def decided(tree: Any) -> Any:
    """A call's arguments with the numbers that symbolic sizes are now, which decides on them."""
    kinds: dict[Any, Any] = {torch.SymFloat: float, torch.SymBool: bool}

    def number(leaf: Any) -> Any:
        return kinds.get(type(leaf.number), int)(leaf.number) if isinstance(leaf, Held) else leaf

    return map_leaves(number, tree)


def hinted(tree: Any) -> Any:
    """A call's arguments with the numbers that symbolic sizes are now, which decides nothing."""
    return map_leaves(lambda leaf: leaf.number.node.hint if isinstance(leaf, Held) else leaf, tree)


# Sizes of tensors among the arguments: the tensor's source, and the dimension.
Dims = frozenset[tuple[Any, int]]


@dataclass(frozen=True)
class Symbol:
    """One size: of dimension ``dim`` of the tensor at ``source``."""

    source: Any
    dim: int
    symbol: Any

    def __str__(self) -> str:
        return f"{self.source}.shape[{self.dim}]"


class Sizes:
    """The symbols of one trace.

    Args:
        dims: the sizes that are symbols; None for all.

    Attributes:
        mode: that of the fakes.
        symbols: one for each size above 1; sizes of 0 and 1 decide too much, and are what they are.
        layouts: for each tensor its source, sizes and strides, symbols among them.
    """

    def __init__(self, dims: Dims | None = None) -> None:
        self.dims = dims
        self.begin()

    def begin(self) -> None:
        """Forgets what an earlier attempt to trace the step has left."""
        self.env = ShapeEnvironment(user_line)
        self.mode = strict_fake_mode(self.env)
        self.symbols: list[Symbol] = []
        self.layouts: list[tuple[Any, list[Any], list[Any]]] = []
        self._function: Callable[..., Any] | None = None

    def among(self, found: Iterable[Any]) -> list[Any]:
        """Those of some inputs that have symbols among their sizes."""
        return [f for f in found if self.dims is None or any((f.source, d) in self.dims for d in range(f.tensor.dim()))]

    def fake(self, tensor: torch.Tensor, source: Any) -> torch.Tensor:
        """A fake of a tensor, with symbols for its sizes, and for the strides that follow from them."""
        shape = [self._size(source, dim, size) for dim, size in enumerate(tensor.shape)]
        strides = _strides(tensor, shape)
        with self.mode, torch.no_grad():
            fake = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        fake.wholestep_given = True  # type: ignore[attr-defined]
        self.layouts.append((source, shape, strides))
        return fake.requires_grad_(tensor.requires_grad)

    def _size(self, source: Any, dim: int, size: int) -> Any:
        if size < 2 or (self.dims is not None and (source, dim) not in self.dims):
            return size
        symbol, number = size_symbol(self.env, f"{source}.shape[{dim}]", size)
        self.symbols.append(Symbol(source, dim, symbol))
        return number

    def values(self, tensors: Mapping[str, torch.Tensor]) -> dict[Any, int]:
        """The size that each symbol has in a call.

        Args:
            tensors: by the path of their source.
        """
        return {s.symbol: int(tensors[s.source.path].shape[s.dim]) for s in self.symbols}

    def misfit(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Why the trace does not hold for the sizes of a call; None when it does."""
        for source, shape, _ in self.layouts:
            found = tensors[source.path]
            if found.dim() != len(shape):
                return f"{source} shape: expected {len(shape)} dimensions, found {list(found.shape)}"
            for dim, (size, now) in enumerate(zip(shape, found.shape, strict=True)):
                if now != size if type(size) is int else now < 2:
                    wanted = size if type(size) is int else "2 or more"
                    return f"{source}.shape[{dim}]: expected {wanted}, found {now}"
        values = self.values(tensors)
        conditions = self.env.conditions()
        if self._function is None:
            self._function = self._compiled([guard for guard, _ in conditions])
        holds, expected_strides = self._function(*values.values())
        for (guard, line), met in zip(conditions, holds, strict=True):
            if not met:
                return self._broken(guard, values, line)
        for (source, _, _), expected in zip(self.layouts, expected_strides, strict=True):
            found = tensors[source.path]
            if any(a != b for a, b, size in zip(expected, found.stride(), found.shape, strict=True)):
                return f"{source} stride: expected {[*expected]}, found {list(found.stride())}"
        return None

    def _compiled(self, conditions: list[Any]) -> Callable[..., Any]:
        """Whether conditions hold, and the strides of the layouts, as a function of the symbols."""
        strides = [[expression_of(stride) for stride in layout[2]] for layout in self.layouts]
        return function_of([s.symbol for s in self.symbols], (conditions, strides))

    def _broken(self, guard: Any, values: Mapping[Any, int], line: str) -> str:
        at = f" (decided at {line})" if line else ""
        found = ", ".join(f"{s} is {values[s.symbol]}" for s in self.symbols if s.symbol in guard.free_symbols)
        return f"{self.words(guard)}: expected True, found False, as {found}{at}"

    def words(self, expression: Any) -> str:
        """An expression in terms of the user's tensors."""
        names = {str(s.symbol): str(s) for s in self.symbols}
        text = str(expression)
        for name in sorted(names, key=len, reverse=True):
            text = text.replace(name, names[name])
        return text.removeprefix("Eq(").removesuffix(")").replace(", ", " == ") if text.startswith("Eq(") else text

    def specialized(self) -> dict[tuple[Any, int], str]:
        """Which sizes only one value serves, and which line decided so."""
        found = {}
        for symbol in self.symbols:
            only = self.env.only(symbol.symbol)
            if only is not None:
                value, line = only
                at = f" (decided at {line})" if line else ""
                found[symbol.source, symbol.dim] = f"{symbol} is {value}{at}"
        return found


def _strides(tensor: torch.Tensor, shape: Sequence[Any]) -> list[Any]:
    """Strides as products of symbolic sizes, where the tensor's are such products."""
    strides: list[Any] = list(tensor.stride())
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d] != 1, -d))
    expected, symbolic = 1, 1
    for dim in order:
        if tensor.stride(dim) == expected:
            strides[dim] = symbolic
            expected, symbolic = expected * tensor.shape[dim], symbolic * shape[dim]
        else:
            break
    return strides
