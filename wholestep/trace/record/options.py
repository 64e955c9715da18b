"""What a run under the recorder begins with: how to find the tensors that it meets, and how to treat them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from wholestep.ir import InputKind
from wholestep.tensor_parts import Part
from wholestep.trace.numbers.symbolic_sizes import Sizes
from wholestep.trace.record.provenance import Whereabouts


class Found(Protocol):
    """A tensor that capture knows: where it is reachable and what it is for."""

    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def source(self) -> Any: ...
    @property
    def kind(self) -> InputKind: ...
    @property
    def beginning(self) -> Any: ...
    @property
    def entangled(self) -> bool: ...
    @property
    def detached(self) -> bool: ...


@dataclass(frozen=True)
class Setting:
    """The arguments of a recorder and of the classes that it is made of.

    Attributes:
        find: gives the source of a real tensor, or None when it is reachable from nowhere known.
        whereabouts: follows modules and optimizers.
        shared: memories in which several inputs lie of which one is written; each becomes one input.
        guard_data: numbers and shapes that depend on data become guards, not errors.
        parts: id of a real tensor -> what the rank holds of it; its memory has no values while the step is traced.
        sizes: holds the symbols of tensors whose sizes are some.
        twins: ids of the tensors that stand for inputs while the step is traced.
        generators: the random generators that the step can see, with their sources, by `generator_id`.
        ask: gives the value of a setting by its name, which becomes a guard.
    """

    find: Callable[[torch.Tensor], Found | None]
    whereabouts: Whereabouts
    shared: frozenset[int] = frozenset()
    guard_data: bool = False
    parts: Mapping[int, Part] = field(default_factory=dict)
    sizes: Sizes | None = None
    twins: Container[int] = ()
    generators: Mapping[int, tuple[torch.Generator, Any]] = field(default_factory=dict)
    ask: Callable[[str], Any] = str
