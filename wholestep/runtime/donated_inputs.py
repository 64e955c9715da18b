"""Donated inputs: tensors that a call gives up, whose memory is free once the program has read them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from wholestep.ir import InputKind
from wholestep.trace import Traced

# What lasts from call to call is somebody else's to free.
LASTING: frozenset[InputKind] = frozenset(["parameter", "buffer", "state", "grad", "generator", "number"])


@dataclass(frozen=True)
class DonatedInputs:
    """What each call gives up of a list of tensors that is its first argument.

    Attributes:
        items: indices of the inputs that nothing looks at again once the program has.
        freed: those of them that a program reads, and may free.
        kept: positions in the list that the replay of effects still looks at.
    """

    items: frozenset[int] = frozenset()
    freed: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()

    def take(self, given: list[Any], values: list[Any]) -> None:
        """Takes out of the list, and of the values bound for a call, what the call gives up."""
        given[:] = [tensor if i in self.kept else None for i, tensor in enumerate(given)]
        for index in self.items:
            values[index] = None


def donated_inputs(traced: Traced, count: int, read: Collection[str]) -> DonatedInputs:
    """What may be given up.

    Args:
        count: length of the list.
        read: paths of what effects and result are made from.
    """
    signature = traced.step.signature
    looked_at = {i for alias in traced.aliases if (i := alias.input) is not None} | set(signature.mutations.values())
    looked_at |= {*traced.versions, *(i for i, *_ in traced.refused)}
    looked_at |= {i for i, before, after in traced.storage_sizes if before != after}
    paths = [f"args[0][{i}]" for i in range(count)]
    kept = frozenset(i for i, path in enumerate(paths) if any(r.startswith(path) for r in read))
    donated = {path for i, path in enumerate(paths) if i not in kept}
    sources = [item.source.path for item in traced.inputs]
    items = frozenset(i for i, path in enumerate(sources) if path in donated and i not in looked_at)
    freed = frozenset(i for i in items if i < traced.n_inputs and signature.inputs[i].kind not in LASTING)
    return DonatedInputs(items, freed, kept)
