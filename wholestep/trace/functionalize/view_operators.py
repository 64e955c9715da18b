"""View operators, in place or not: each result is another `Ref` into the storage of its operand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from wholestep.errors import UnsupportedError
from wholestep.nested import map_leaves
from wholestep.torch_compat import no_modes
from wholestep.trace.functionalize.aliases import Geometry, Ref, elements
from wholestep.trace.functionalize.storage_resize import StorageSizes
from wholestep.trace.numbers.symbolic_sizes import is_made
from wholestep.trace.operators.tables import functional_view
from wholestep.trace.record.inputs import Inputs

aten = torch.ops.aten

# Views of the whole tensor, of the same shape: the result is the same `Ref`.
TRANSPARENT = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
RESIZES = {aten.resize_.default, aten.resize_as_.default}


def check_view(place: Geometry, shape: Sequence[int]) -> None:
    """Eager's error for a shape that a tensor cannot be seen in; fakes of expanded and of overlapping ones give one."""
    with no_modes():
        torch.empty_strided(place.shape, place.stride, device="meta").view(shape)


def check_strided(
    tensor: torch.Tensor, memory: torch.Tensor, shape: Any, stride: Any, storage_offset: int | None = None
) -> None:
    """Eager's error for elements outside of the memory, which is that of another tensor; fakes give them."""
    start = tensor.storage_offset() if storage_offset is None else storage_offset
    last = start + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    there = memory.untyped_storage().nbytes() // tensor.element_size()
    if last >= there and elements(shape):
        with no_modes():
            torch.empty(there, dtype=tensor.dtype).as_strided(shape, stride, start)


class Views:
    """Records the views of one run."""

    def __init__(self, inputs: Inputs, storages: StorageSizes) -> None:
        self.inputs, self.builder, self.storages = inputs, inputs.builder, storages

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator whose results are views of its first argument."""
        base = self.inputs.ref(args[0])
        if func is aten.view.default and self.builder.sizes is not None and base.geometry.repeats:
            check_view(base.geometry, args[1])
        if func is aten.as_strided.default and self.builder.sizes is None:
            check_strided(self.inputs.fake(args[0]), self._memory_behind(args[0], base), *args[1:], **kwargs)
        self.builder.note_module()
        if func is aten.as_strided.default and (len(args) > 3 and args[3] is not None or kwargs.get("storage_offset")):
            self.inputs.read_offset(args[0])
        out = self.inputs.run(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            self._alias(out, base, func, args, kwargs, None)
        else:
            for index, item in enumerate(out):
                self._alias(item, base, func, args, kwargs, index)
        return out

    def _memory_behind(self, tensor: torch.Tensor, ref: Ref) -> Any:
        """A tensor with as much memory as a tensor of the step has: of an input, fakes know its own elements alone."""
        item = self.inputs.items[ref.storage.input] if ref.storage.input is not None else None
        resized = any(size.item is item for size in self.storages.known)
        return self.inputs.fake(tensor) if item is None or resized else item.value

    def _alias(self, out: Any, base: Ref, func: Any, args: Any, kwargs: Any, index: int | None) -> None:
        if func in TRANSPARENT:
            out.wholestep_ref = base
        elif func is aten.as_strided.default:
            # its numbers count from the start of the memory, whatever view it is taken from
            self.inputs.check_reach(Geometry.of(out), base.whole)
            out.wholestep_ref = base.strided(Geometry.of(out))
        else:
            rest, named = tuple(map_leaves(self.inputs.operand, args[1:])), map_leaves(self.inputs.operand, kwargs)
            out.wholestep_ref = Ref(base.storage, Geometry.of(out), base, func, rest, named, index)

    def record_inplace(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`t_`, `unsqueeze_`, …: the tensor itself becomes a view of what it was."""
        tensor, view = args[0], functional_view(func)
        if view is not None:
            self.inputs.run(view, args, kwargs)  # eager's own error first, if there is one
        if not is_made(tensor):
            what = f"{func} changes the shape of {self.inputs.describe(tensor)}, which the step did not make"
            raise UnsupportedError(what, "use the form that returns a view")
        resized = func in RESIZES and self._fits(tensor, args[1])
        if view is None and not resized:
            remedy = "make a new tensor; send objects (torch.distributed.all_gather_object) outside of the step"
            raise UnsupportedError(f"{func} changes which memory a tensor uses", remedy)
        base = self.inputs.ref(tensor)
        before = replace(base)
        if base.storage.root is base:
            base.storage.root = before
        if view is aten.as_strided.default:
            self.inputs.read_offset(tensor)
        self.inputs.run(func, args, kwargs)
        geometry = Geometry.of(tensor)
        if resized or view is aten.as_strided.default:
            # `resize_` within the memory that there is gives a strided view of all of it
            self.inputs.check_reach(geometry, base.whole)
            ref = base.strided(geometry)
        else:
            ref = Ref(base.storage, geometry, before, view, tuple(args[1:]), kwargs)
        tensor.wholestep_ref = ref
        return tensor

    def _fits(self, tensor: torch.Tensor, wanted: Any) -> bool:
        """Whether a tensor can take another shape inside of the memory that it has."""
        whole = self.inputs.ref(tensor).whole.geometry
        count = math.prod(wanted.shape if isinstance(wanted, torch.Tensor) else wanted)
        end = tensor.storage_offset() - whole.offset + count
        return whole.is_dense and not whole.lazy and end <= elements(whole.shape)
