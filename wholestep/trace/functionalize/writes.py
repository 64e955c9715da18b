"""Writes: in-place calls, `out=`, and operators that write without saying so, as pure calls on the tape."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.errors import UnsupportedError
from wholestep.functional import Functionalized
from wholestep.torch_compat import FakeTensor, OpOverload, below_autograd, no_modes
from wholestep.trace.functionalize.aliases import Geometry, Ref, elements, fit
from wholestep.trace.functionalize.storage_resize import Storages
from wholestep.trace.numbers.symbolic_sizes import is_made
from wholestep.trace.operators.tables import (
    CONSTANT_WRITES,
    EAGER_REPEATS,
    HIDDEN_WRITES,
    Twin,
    all_args,
    defaults,
    is_fused,
    is_list_op,
    positional,
    pure_twin,
    scale_position,
    view_twin,
    written_arguments,
)
from wholestep.trace.record.inputs import ReshapedInput
from wholestep.trace.record.provenance import user_line
from wholestep.trace.record.tape import fake_value, map_leaves

aten = torch.ops.aten

RESIZES = {aten.resize_.default, aten.resize_as_.default}


class Writes(Storages):
    """The part of the recorder that makes writes into new values."""

    def _mutable(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.inplace_view in func.tags:
            return self._inplace_view(func, args, kwargs)
        if is_list_op(func) and self._overlap(args, kwargs):
            count = len(args[0])
            for index in range(count):  # one after the other: a later tensor sees an earlier one's write
                only = partial(_only, index, count)
                self._mutable(func, tuple(map(only, args)), {k: only(v) for k, v in kwargs.items()})
            return None
        twin = pure_twin(func)
        written = self._written(func, args, kwargs, written_arguments(func))
        to_itself = func is aten.copy_.default and self._same_elements(args[0], args[1])
        if func not in CONSTANT_WRITES and not to_itself:
            self._refuse_repeats(func, [self.ref(t).geometry for t in written])
        if not is_list_op(func) and func not in CONSTANT_WRITES:
            self._refuse_partial_overlap(written, args, kwargs)
        if not is_list_op(func):
            out = self._execute(func, args, kwargs)
            for tensor in written:
                self._check_geometry(func, tensor)
        else:
            out = None
            if func._schema.name.startswith("aten::_foreach_"):  # on the CPU they are a loop of in-place calls
                torch.autograd.graph.increment_version([t for t in written if t.device.type == "cpu"])
        node = self._write(func, twin, written, args, kwargs)
        return self._given_back(func, node, out, args, kwargs)

    def _same_elements(self, one: torch.Tensor, two: torch.Tensor) -> bool:
        """Whether each element of a tensor is the other's: a copy then returns before it looks at how they lie."""
        ours, theirs = self.ref(one), self.ref(two)
        return ours.storage is theirs.storage and ours.geometry == theirs.geometry

    def _refuse_repeats(self, func: OpOverload, places: list[Geometry]) -> None:
        """Writes where several elements lie in one place: eager's error, or ours where it lets chance decide."""
        repeats = any(place.repeats for place in places)
        if not repeats and not any(place.overlaps for place in places):
            return
        if func._schema.name in EAGER_REPEATS or not repeats:
            raise UnsupportedError(f"{func} writes to an expanded tensor", user_line(), "clone it first")
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )

    def _refuse_partial_overlap(self, written: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        """ATen's kernels refuse to write where they still read; fake tensors have no addresses to see that."""
        read = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        for out in written:
            for tensor in read:
                one, two = self.ref(out), self.ref(tensor)
                if one.storage is two.storage and one.geometry.overlaps_partly(two.geometry):
                    raise RuntimeError(
                        "unsupported operation: some elements of the input tensor and the written-to tensor refer "
                        "to a single memory location. Please clone() the tensor before performing the operation."
                    )

    def _overlap(self, args: Any, kwargs: Any) -> bool:
        """Whether two tensors of a list operator lie in one memory."""
        if len(args[0]) < 2:
            return False
        written = [id(self.ref(t).storage) for t in args[0]]
        others = [t for group in (*args[1:], *kwargs.values()) if isinstance(group, list) for t in group]
        read = [self.ref(t).storage for t in others if isinstance(t, torch.Tensor)]
        return len(set(written)) < len(written) or any(
            id(storage) in written and written.index(id(storage)) != index % len(written)
            for index, storage in enumerate(read)
        )

    def _hidden(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that writes without saying so: its pure form and its own results."""
        positions = HIDDEN_WRITES[func]
        written = self._written(func, args, kwargs, positions)
        out = self._execute(func, args, kwargs)
        node = self._write(func, Twin(Functionalized(func, positions)), written, args, kwargs)
        for index, item in enumerate(out):
            self.root(item, self.emit(operator.getitem, (node, index)))
        return out

    def _written(self, func: Any, args: Any, kwargs: Any, positions: tuple[int, ...]) -> list[torch.Tensor]:
        """The tensors that a call writes, in schema order."""
        bound = all_args(func, args, kwargs)
        tensors: list[torch.Tensor] = []
        for position in positions:
            if position == 1 and is_fused(func) and bound.get(scale_position(func)) is None:
                continue  # gradients are only written when they are unscaled
            item = bound.get(position)
            tensors.extend([item] if isinstance(item, torch.Tensor) else [t for t in item or () if t is not None])
        return tensors

    def _write(self, func: Any, twin: Twin, written: list[torch.Tensor], args: Any, kwargs: Any) -> fx.Node:
        """Records the pure form and makes its results the written tensors' content."""
        kept = {k: v for k, v in kwargs.items() if k not in twin.drop} | defaults(func, twin, len(args), kwargs)
        refs = [self.ref(t) for t in written]
        reads = map_leaves(self._reads, args), map_leaves(self._reads, kept)
        scaled = is_fused(func) and all_args(func, args, kwargs).get(scale_position(func)) is not None
        node = self.emit(twin.target, *reads, value=self._like_written(func, *reads) if scaled else None)
        news = [*self._new_values(func, twin, node, len(written), args, kwargs)]
        if not isinstance(twin.target, Functionalized) and not is_list_op(func) and _turns(refs, news):
            return self._write(func, Twin(Functionalized(func)), written, args, kwargs)
        for ref, new in zip(refs, news, strict=True):
            ref.write(fit(new, ref, self.emit), self.emit)
        return node

    def _like_written(self, func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], ...]:
        """The value of a fused optimizer's pure form, whose kernel looks at the scale of the gradients."""
        bound = all_args(func, args, kwargs)
        with self.fake_mode:
            return tuple([torch.empty_like(fake_value(n)) for n in bound[i]] for i in written_arguments(func))

    def _new_values(
        self, func: Any, twin: Twin, node: fx.Node, count: int, args: Any, kwargs: Any
    ) -> Iterator[fx.Node]:
        value = node.meta["info"].value
        if isinstance(value, torch.Tensor):
            yield node
            return
        if isinstance(twin.target, Functionalized):
            for index in range(len(value) - count, len(value)):
                yield self.emit(operator.getitem, (node, index))
            return
        skip = is_fused(func) and all_args(func, args, kwargs).get(scale_position(func)) is None
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield self.emit(operator.getitem, (node, index))
            elif not (skip and index == 1):
                group = self.emit(operator.getitem, (node, index)) if item else None
                for inner in range(len(item)):
                    yield self.emit(operator.getitem, (group, inner))

    def _given_back(self, func: Any, node: fx.Node, out: Any, args: Any, kwargs: Any) -> Any:
        """The very tensors that were written where the schema returns them, new ones where it does not."""
        names = {a.name: a for a in func._schema.arguments}
        bound = {a.name: v for a, v in zip(func._schema.arguments, positional(func, args, kwargs), strict=True)}
        by_alias = {tuple(sorted(a.alias_info.before_set)): n for n, a in names.items() if a.alias_info}
        returns = func._schema.returns
        outs = out if isinstance(out, (tuple, list)) else (out,) * min(1, len(returns))
        given: list[Any] = []
        for result, item in zip(returns, outs, strict=False):
            source = by_alias.get(tuple(sorted(result.alias_info.before_set))) if result.alias_info else None
            given.append(bound[source] if source else item)
        fresh = [g for g in given if isinstance(g, FakeTensor) and not hasattr(g, "wholestep_ref")]
        for index, item in enumerate(fresh):  # an operator on clones gives its own results first
            self.root(item, self.emit(operator.getitem, (node, index)))
        return None if not given else given[0] if len(given) == 1 else tuple(given)

    def _inplace_view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`t_`, `unsqueeze_`, …: the tensor itself becomes a view of what it was."""
        tensor, view = args[0], view_twin(func)
        if view is not None:
            self._execute(view, args, kwargs)  # eager's own error first, if there is one
        if not is_made(tensor):
            return self._reshape_input(func, view, args, kwargs)
        if func in RESIZES and self._fits(tensor, args[1]):
            return self._resize(func, args, kwargs)
        if view is None:
            raise UnsupportedError(f"{func} changes which memory a tensor uses", user_line(), "make a new tensor")
        base = self.ref(tensor)
        old = Ref(base.storage, base.geometry, base.parent, base.view, base.args, base.kwargs, base.index)
        old.node, old.generation = base.node, base.generation
        if base.storage.root is base:
            base.storage.root = old
        self._execute(func, args, kwargs)
        ref = Ref(base.storage, Geometry.of(tensor), old, view, tuple(args[1:]), kwargs)
        tensor.wholestep_ref = ref  # type: ignore[attr-defined]
        return tensor

    def _reshape_input(self, func: Any, view: Any, args: Any, kwargs: Any) -> Any:
        """An input that becomes a view of what it was: a twin does so while the step is traced, itself at each run."""
        tensor = args[0]
        can = view is not None and _can_have_a_twin(tensor) and not self.parts
        if can and id(tensor) not in self.twins:
            raise ReshapedInput(tensor)
        base, before = self.ref(tensor), tensor.storage_offset()
        item = self.by_id[id(tensor)]
        with self.fake_mode, torch.no_grad(), below_autograd():
            fake = func(item.fake.detach(), *args[1:], **kwargs)
        if not can or fake.storage_offset() != item.fake.storage_offset():
            raise UnsupportedError(
                f"{func} changes the shape of {self._describe(tensor)}, which the step did not make",
                user_line(),
                "use the form that returns a view",
            )
        with no_modes(), torch.no_grad(), below_autograd():
            func(*args, **kwargs)
        assert tensor.storage_offset() == before
        item.fake = fake
        self.reshaped[id(tensor)] = Ref(base.storage, Geometry.of(fake), base, view, tuple(args[1:]), kwargs)
        return tensor

    def _fits(self, tensor: torch.Tensor, wanted: Any) -> bool:
        """Whether a tensor can take another shape inside of the memory that it has."""
        root = self.ref(tensor).storage.root
        assert root is not None
        count = math.prod(wanted.shape if isinstance(wanted, torch.Tensor) else wanted)
        end = tensor.storage_offset() - root.geometry.offset + count
        return root.geometry.is_dense and not root.geometry.lazy and end <= elements(root.geometry.shape)

    def _resize(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`resize_` that needs no new memory: the tensor becomes a strided view of all that it lies in."""
        tensor = args[0]
        base = self.ref(tensor)
        if base.storage.root is base:
            base.storage.root = Ref(base.storage, base.geometry, node=base.node, generation=base.generation)
        self._execute(func, args, kwargs)
        root, geometry = base.storage.root, Geometry.of(tensor)
        assert root is not None
        place = (list(geometry.shape), list(geometry.stride), geometry.offset - root.geometry.offset)
        tensor.wholestep_ref = Ref(base.storage, geometry, root, aten.as_strided.default, place)
        return tensor

    def _check_geometry(self, func: Any, tensor: torch.Tensor) -> None:
        ref = self.ref(tensor)
        now = tensor if isinstance(tensor, FakeTensor) else self.by_id[id(tensor)].fake
        if not ref.geometry.holds(now):
            raise UnsupportedError(
                f"{func} resized {self._describe(tensor)} from {list(ref.geometry.shape)} to {list(now.shape)}",
                user_line(),
                "give it an output of the right shape",
            )


def _turns(refs: list[Ref], news: list[fx.Node]) -> bool:
    """Whether a pure form gives dimensions in another order than the memory has them that eager writes to.

    The kernel goes through its operands in another order then, and may round otherwise.
    """
    pairs = [(ref.geometry, fake_value(new)) for ref, new in zip(refs, news, strict=True)]
    return any(place.shape == value.shape and not place.repeats and not place.orders(value) for place, value in pairs)


def _can_have_a_twin(tensor: torch.Tensor) -> bool:
    """Not a leaf: gradients flow to itself."""
    leaf = tensor.requires_grad and tensor.is_leaf
    return type(tensor) is torch.Tensor and not tensor.is_inference() and not leaf


def _only(index: int, count: int, argument: Any) -> Any:
    """The part of a list operator's argument that concerns one of its tensors."""
    whole = isinstance(argument, (list, tuple)) and len(argument) == count
    return [argument[index]] if whole else argument
