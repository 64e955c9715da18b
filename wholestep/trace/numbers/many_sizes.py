"""The sizes that one program serves: those that meet the guards of its trace, and for which all else is alike.

Kernels must give results of the layouts that the trace has, which they are asked once for each size, and lowering must
decide as it did for the sizes that the program was made for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from wholestep.fake_layouts import differ
from wholestep.nested import leaves, map_leaves
from wholestep.sizes import Size, SizeDecisions, SizedFake
from wholestep.trace.numbers.symbolic_sizes import Sizes
from wholestep.trace.outputs.output_records import OutputAlias

# Sizes of which it is known whether they are served.
_MOST = 1024


class ManySizes:
    """The sizes of one program.

    Args:
        sizes: the symbols of its trace.
        decisions: what was decided on them since, by lowering too, which may have been of an equal trace.
        asked: calls, with arguments and results, of whose kernels the layouts of the results must be asked.
        aliases: the tensors that outlive the step.
        inputs: by the path of their source, tensors of the call that the program is made for.

    Attributes:
        in_order: paths of the tensors whose sizes are symbols.
    """

    def __init__(
        self, sizes: Sizes, decisions: SizeDecisions, asked: list[tuple[Any, ...]], aliases: list[OutputAlias],
        inputs: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.sizes, self.decisions = sizes, decisions
        self._asked, self._aliases = asked, aliases
        self.in_order = [source.path for source, _, _ in sizes.layouts]
        self._expressions = [*dict.fromkeys(_expressions([asked, [a.views for a in aliases]]))]
        self._function = decisions.function(map(repr, self._expressions))
        self._conditions: tuple[list[str], Any] = [], decisions.function([])
        made_for = self._key([inputs[path] for path in self.in_order])
        self._served: dict[Any, list[OutputAlias] | str] = {made_for: aliases}

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the tensors whose sizes are symbols."""
        return frozenset(self.in_order)

    @property
    def conditions(self) -> list[tuple[str, str]]:
        """What must hold of the sizes, in words, and where it was decided."""
        traced = [(self.sizes.words(guard), f"decided at {line}") for guard, line in self.sizes.env.conditions()]
        return [*traced, *((self.sizes.words(text), "decided in lowering") for text in self.decisions.conditions)]

    def serve(self, tensors: Sequence[torch.Tensor]) -> list[OutputAlias] | str:
        """The aliases at the sizes of a call, or why the program does not serve it.

        Args:
            tensors: those whose sizes are symbols, in the order of the trace's layouts.
        """
        key = self._key(tensors)
        found = self._served.get(key)
        if found is None:
            if len(self._served) >= _MOST:
                self._served.clear()
            found = self._served[key] = self._anew(tensors)
        return found

    def _key(self, tensors: Sequence[torch.Tensor]) -> Any:
        return tuple([(tensor.shape, tensor.stride()) for tensor in tensors])

    def _anew(self, tensors: Sequence[torch.Tensor]) -> list[OutputAlias] | str:
        by_path = dict(zip(self.in_order, tensors, strict=True))
        misfit = self.sizes.misfit(by_path)
        if misfit is not None:
            return misfit
        values = self.sizes.values(by_path).values()
        conditions = [*self.decisions.conditions]
        if self._conditions[0] != conditions:
            self._conditions = conditions, self.decisions.function(conditions)
        for condition, holds in zip(conditions, self._conditions[1](*values), strict=True):
            if not holds:
                return f"{self.sizes.words(condition)}: expected True, found False (decided in lowering)"
        numbers = dict(zip(self._expressions, self._function(*values), strict=True))
        for target, args, kwargs, value in self._asked:
            if differ(target, *_at((args, kwargs, value), numbers)):
                return f"{target} gives another layout than for the sizes that the program was made for"
        return [replace(a, views=_at(a.views, numbers)) for a in self._aliases]


def _expressions(tree: Any) -> list[Size]:
    """The sizes in nested values."""
    return [size for size in leaves(map_leaves(_place, tree)) if isinstance(size, Size)]


def _place(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.stride()) if isinstance(leaf, SizedFake) else leaf


def _at(tree: Any, numbers: Mapping[Size, int]) -> Any:
    """Nested values at other sizes."""

    def at(leaf: Any) -> Any:
        if isinstance(leaf, SizedFake):
            place = map_leaves(at, _place(leaf))
            return torch.empty_strided(*place, dtype=leaf.dtype, device=leaf.device)  # in less time than a fake one
        return numbers[leaf] if isinstance(leaf, Size) else leaf

    return map_leaves(at, tree)
