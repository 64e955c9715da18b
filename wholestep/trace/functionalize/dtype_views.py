"""Views of memory as elements of another dtype, or with other signs: `z.real`, `z.conj()`, `x.view(torch.int32)`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wholestep.trace.functionalize.aliases import Geometry, Ref

aten = torch.ops.aten
DTYPES = {aten.view_as_real.default, aten.view_as_complex.default, aten.view.dtype}


@dataclass(frozen=True)
class ElementKind:
    """What a view's elements are.

    Attributes:
        conjugated, negated: whether that is still to be done when they are read.
        bits: whether the dtype is that of `view(dtype)`, which autograd does not follow.
    """

    dtype: torch.dtype
    conjugated: bool
    negated: bool
    bits: bool

    def shown(self, base: torch.Tensor) -> torch.Tensor:
        """All elements of a tensor, as those of this dtype."""
        if base.dtype == self.dtype:
            return base
        if self.bits:
            return base.as_strided((base.numel(),), (1,)).view(self.dtype)
        return torch.view_as_real(base) if base.is_complex() else torch.view_as_complex(base)

    def signed(self, view: torch.Tensor) -> torch.Tensor:
        """A view of elements of this dtype, conjugated or negated as this kind is."""
        view = view.conj() if view.is_conj() != self.conjugated else view
        return aten._neg_view.default(view) if view.is_neg() != self.negated else view  # type: ignore[no-any-return]


def kind_of(tensor: torch.Tensor, ref: Ref) -> ElementKind | None:
    """The kind of a tensor in memory of a certain dtype; None where it cannot be shown as a view of all that memory."""
    whole, here = ref.whole.geometry, ref.geometry
    changes: list[Ref] = []
    above: Ref | None = ref
    while above is not None:
        changes += [above] if above.view in DTYPES else []
        above = above.parent
    bits = any(change.view is aten.view.dtype for change in changes)
    if bits:
        fits = whole.is_dense and here.dtype.itemsize <= whole.dtype.itemsize
    else:  # of `view_as_complex` of a part, the first element may be the second of a pair
        parts = [c.parent for c in changes if c.view is aten.view_as_complex.default]
        fits = len(changes) <= 1 and all(part is not None and part.geometry == whole for part in parts)
    return ElementKind(here.dtype, tensor.is_conj(), tensor.is_neg(), bits) if fits and not whole.lazy else None


def offset_from(here: Geometry, whole: Geometry) -> int:
    """Elements from the first of a memory to the first of a view, counted in the view's own."""
    return here.offset - whole.offset * whole.dtype.itemsize // here.dtype.itemsize
