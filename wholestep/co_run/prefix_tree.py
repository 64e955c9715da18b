"""Signatures: sequences of recorded operators as a prefix tree, with the layouts of results that each gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from wholestep.co_run.places import storage_at
from wholestep.functional import written_arguments
from wholestep.ir import NodeInfo
from wholestep.nested import tensors_of
from wholestep.torch_compat import OpOverload, default_device, kernel_settings

# Steps whose operators are always others grow the tree at each call: then it begins anew.
MAX_NODES = 100_000

# Calls of one operator after the same calls: where more differ, in sizes that follow from data as a rule, ever new ones
# would be recorded, or compiled, for one use each.
MAX_CALLS = 16


class Layout(NamedTuple):
    """A result in memory of its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Given:
    """A result that is an argument: its position in the schema."""

    position: int


# Of a call: a `Layout`, `Given` or None, or a tuple of such.
Results = Any


# Of a flush: slots whose memory is alive; under plans of the global view, where what the segment reads lies.
Key = tuple[tuple[int, ...], tuple[Any, ...]]


@dataclass(slots=True)
class Node:
    """A recorded call, known by the sequence of calls before it.

    Attributes:
        results: what it gave; of an optimizer's update how often it wrote each tensor.
        next: key of a call -> its node; None for one that runs at once.
        programs: what serves a flush here.
        seen: the numbers of the first flush here.
        refused: flushes for which there is no program.
        note: with plans, the record of the call: phase, line, module.
    """

    results: Results = None
    next: dict[Any, Node | None] = field(default_factory=dict)
    programs: dict[Key, Any] = field(default_factory=dict)
    seen: dict[Key, list[float]] = field(default_factory=dict)
    refused: set[Key] = field(default_factory=set)
    note: NodeInfo | None = None


class Signatures:
    """The prefix trees: one for each state of the settings by which kernels and their results' types are chosen.

    Attributes:
        count: how many nodes there are.
    """

    def __init__(self) -> None:
        self._roots: dict[Any, Node] = {}
        self.count = 0

    def root(self) -> Node:
        """The node before the first call of a segment, under the settings of now."""
        settings = *kernel_settings(), torch.get_default_dtype(), default_device()
        found = self._roots.get(settings)
        if found is None:
            found = self._roots[settings] = Node()
        return found

    def is_full(self, before: Node, facts: Any) -> bool:
        """Whether no more calls of an operator are recorded at a node."""
        return len(before.next) >= MAX_CALLS and sum(key[0] is facts for key in before.next) >= MAX_CALLS

    def add(self, before: Node, key: Any, results: Results) -> Node:
        """A new node."""
        self.count += 1
        if self.count > MAX_NODES:
            self._roots.clear()
            self.count = 0
        node = before.next[key] = Node(results)
        return node


class Unknown(Exception):  # noqa: N818 - a signal, not an error
    """A call whose results are not known before it runs, so that it cannot be deferred."""


def described(func: OpOverload, args: Any, kwargs: Any, found: Any, kind: type = torch.Tensor) -> Results:
    """What a call gave, so that the next one like it can be answered without running it.

    Args:
        kind: the class of its results.

    Raises:
        Unknown: a result is no plain tensor in fresh memory.
    """
    returns = func._schema.returns
    if not returns:
        return None
    several = type(found) in (tuple, list) and len(returns) > 1
    given = _written_by_alias(func)
    memories: set[int] = {storage_at(t) for t in tensors_of((args, kwargs))}
    described = []
    for result, value in zip(returns, found if several else (found,), strict=True):
        alias = result.alias_info
        if alias is not None:
            described.append(Given(given[frozenset(alias.before_set)]))
        else:
            described.append(_layout(value, memories, kind))
    return tuple(described) if several else described[0]


def _written_by_alias(func: OpOverload) -> dict[frozenset[str], int]:
    aliases = ((func._schema.arguments[i].alias_info, i) for i in written_arguments(func))
    return {frozenset(alias.before_set): i for alias, i in aliases if alias is not None}


def _layout(value: Any, memories: set[int], kind: type) -> Results:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return tuple([_layout(item, memories, kind) for item in value])
    if not isinstance(value, torch.Tensor) or type(value) is not kind:
        raise Unknown
    if value.layout is not torch.strided or value.is_nested:
        raise Unknown
    if value.storage_offset() or value.is_quantized:
        raise Unknown
    memory = storage_at(value)
    if memory in memories or value.dtype.is_complex or value.is_neg():
        raise Unknown
    memories.add(memory)
    return Layout(tuple(value.size()), value.stride(), value.dtype, value.device)
