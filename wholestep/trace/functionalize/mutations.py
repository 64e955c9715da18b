"""Mutations: in-place calls, `out=`, and operators that write undeclared, as calls of their functional variants."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from wholestep.errors import UnsupportedError
from wholestep.fake_layouts import run_kernel, scratch_tensors
from wholestep.functional import HIDDEN_WRITES, OFFSETS, Functionalized, written_arguments
from wholestep.nested import map_leaves, tensors_of
from wholestep.torch_compat import FakeTensor, OpOverload, no_modes
from wholestep.trace.functionalize.aliases import Geometry, Ref
from wholestep.trace.operators import tables
from wholestep.trace.operators.tables import Variant
from wholestep.trace.record.graph_builder import fake_value
from wholestep.trace.record.inputs import Inputs

aten = torch.ops.aten

_HALVES = (torch.bfloat16, torch.float16)


class Mutations:
    """Turns the writes of one run into new values."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.builder = inputs, inputs.builder

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator whose schema says that it writes; gives back the very tensors that it was given."""
        if func is aten._fused_moving_avg_obs_fq_helper.default:
            _refuse_resizing(tables.positional(func, args, kwargs))
        in_loop = tables.is_list_op(func)
        if in_loop and self._overlap(args, kwargs):
            count = len(args[0])
            for index in range(count):  # one after the other: a later tensor sees an earlier one's write
                only = functools.partial(_only, index, count)
                self.record(func, tuple(map(only, args)), {k: only(v) for k, v in kwargs.items()})
            return None
        written = self._written(func, args, kwargs, written_arguments(func))
        self._refuse_meeting(func, written, args, kwargs)
        out = None
        if not in_loop:
            out = self.inputs.run(func, args, kwargs)
            for tensor in written:
                self._check_geometry(func, tensor)
            if tables.is_differentiated_inside(func):  # its kernel writes by operators, which count
                torch.autograd.graph.increment_version(written)
        elif func._schema.name.startswith("aten::_foreach_"):  # on the CPU they are a loop of in-place calls
            torch.autograd.graph.increment_version([t for t in written if t.device.type == "cpu"])
        if func in tables.ROUNDS_FIRST and any(t.dtype in _HALVES and t.device.type == "cpu" for t in written):
            variant, factors = Variant(tables.ROUNDS_FIRST[func]), self._factors(written, args[1])
            node = self._write(func, variant, written, (args[0], factors if in_loop else factors[0]), kwargs)
        else:
            node = self._write(func, tables.functional_variant(func), written, args, kwargs)
        return self._given_back(func, node, out, args, kwargs)

    def _factors(self, tensors: list[torch.Tensor], numbers: Any) -> list[fx.Node]:
        """A number, or one for each tensor, as tensors of their dtypes."""
        each = numbers if isinstance(numbers, (list, tuple)) else [numbers] * len(tensors)
        kinds = [{"dtype": t.dtype, "device": t.device} for t in tensors]
        return [self.builder.emit(aten.scalar_tensor.default, (n,), k) for n, k in zip(each, kinds, strict=True)]

    def record_undeclared(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that writes without saying so: its functional variant and its own results."""
        positions = HIDDEN_WRITES[func]
        written = self._written(func, args, kwargs, positions)
        self._refuse_meeting(func, written, args, kwargs)
        out = self.inputs.run(func, args, kwargs)
        node = self._write(func, Variant(Functionalized(func, positions)), written, args, kwargs)
        for index, item in enumerate(out):
            self.builder.root(item, self._part(node, index))
        return out

    def _part(self, node: fx.Node, index: int) -> fx.Node:
        return self.builder.emit(operator.getitem, (node, index))

    def _same_elements(self, one: torch.Tensor, two: torch.Tensor) -> bool:
        """Whether each element of a tensor is the other's: a copy then returns before it looks at layouts."""
        ours, theirs = self.inputs.ref(one), self.inputs.ref(two)
        return ours.storage is theirs.storage and ours.geometry == theirs.geometry

    def _refuse_meeting(self, func: OpOverload, written: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        """Refuses writes to one place twice, or where the call reads: with the kernel's error, where it has one."""
        copies_itself = func is aten.copy_.default and self._same_elements(args[0], args[1])  # no kernel runs
        refs = [self.inputs.ref(t) for t in written]
        if any(ref.geometry.overlaps or ref.whole.geometry.overlaps for ref in refs):
            error = None if copies_itself else self._kernels_error(func, args, kwargs)
            what = f"{func} writes to an expanded tensor, or to another that has several elements in one place"
            raise error or UnsupportedError(what, "clone it first")
        if copies_itself or func in tables.FILLS_BY_TENSOR or func._schema.name.endswith("_copy"):  # which read first
            return
        places: dict[int, list[Geometry]] = {}
        own = Counter(map(id, written))
        if args and id(args[0]) in own and tables.is_in_place(func):
            own[id(args[0])] += 1
        for tensor in tensors_of((args, kwargs)):
            if own[id(tensor)]:  # what is written; given once more, it is read as well
                own[id(tensor)] -= 1
                continue
            ref = self.inputs.ref(tensor)
            places.setdefault(id(ref.storage), []).append(ref.geometry)
        pairs = [(ref.geometry, other) for ref in refs for other in places.get(id(ref.storage), ())
                 if ref.geometry.meets(other) or ref.geometry.fills(other)]  # fmt: skip
        elementwise = tables.is_elementwise(func)
        if not pairs or (elementwise and all(one == other for one, other in pairs)):
            return
        error = self._kernels_error(func, args, kwargs)
        if error is not None or not elementwise or any(one.meets(other) for one, other in pairs):
            what = f"{func} reads some of the memory that it writes: whether before or after depends on its kernel"
            raise error or UnsupportedError(what, "clone what it reads first")

    def _kernels_error(self, func: OpOverload, args: Any, kwargs: Any) -> Exception | None:
        """What a kernel says to tensors that meet in memory as these do: fake ones have no addresses to see that."""
        storages: dict[int, torch.UntypedStorage] = {}

        def placed(leaf: Any) -> Any:
            scratch = scratch_tensors(leaf)
            if not isinstance(leaf, torch.Tensor):
                return scratch
            ref = self.inputs.ref(leaf)
            storage = storages.setdefault(id(ref.storage), scratch.untyped_storage())  # which grows
            empty, place = torch.empty(0, dtype=leaf.dtype, device=leaf.device), ref.geometry
            return empty.set_(storage, place.offset, place.shape, place.stride).zero_()

        return tables.kernels_error(func, args, kwargs, functools.partial(map_leaves, placed))

    def _overlap(self, args: Any, kwargs: Any) -> bool:
        """Whether two tensors of a list operator share memory."""
        if len(args[0]) < 2:
            return False
        written = [id(self.inputs.ref(t).storage) for t in args[0]]
        others = [t for group in (*args[1:], *kwargs.values()) if isinstance(group, list) for t in group]
        read = [id(self.inputs.ref(t).storage) for t in others if isinstance(t, torch.Tensor)]
        return len(set(written)) < len(written) or any(
            storage in written and written.index(storage) != index % len(written) for index, storage in enumerate(read)
        )

    def _written(self, func: Any, args: Any, kwargs: Any, positions: tuple[int, ...]) -> list[torch.Tensor]:
        """The tensors that a call writes, in schema order."""
        bound = tables.positional(func, args, kwargs)
        tensors: list[torch.Tensor] = []
        for position in positions:
            if position == 1 and tables.is_fused(func) and not tables.is_scaled(func, args, kwargs):
                continue  # gradients are only written when they are unscaled
            item = bound[position]
            tensors.extend([item] if isinstance(item, torch.Tensor) else [t for t in item or () if t is not None])
        return tensors

    def _write(self, func: Any, variant: Variant, written: list[torch.Tensor], args: Any, kwargs: Any) -> fx.Node:
        """Records the functional variant and makes its results the written tensors' content."""
        kept = {k: v for k, v in kwargs.items() if k not in variant.drop}
        kept |= tables.defaults(func, variant, len(args), kwargs)
        refs = [self.inputs.ref(t) for t in written]
        counted = self.inputs.counted_from_first(variant.target, args)
        reads = map_leaves(self.inputs.operand, counted), map_leaves(self.inputs.operand, kept)
        scaled = tables.is_fused(func) and tables.is_scaled(func, args, kwargs)
        value = self._like_written(func, *reads) if scaled else None
        if counted is not args:  # it may reach before the operand's first element, where its content ends
            value = self.inputs.run(variant.target, args, kept)
        node = self.builder.emit(variant.target, *reads, value=value)
        news = [*self._new_values(func, variant, node, len(written), scaled)]
        into_out = any(func._schema.arguments[index].is_out for index in written_arguments(func))
        if into_out:
            for tensor, new in zip(written, news, strict=True):  # fake tensors keep their sizes
                self._check_shape(func, tensor, fake_value(new))
        # kernels compute in the dtype of an `out=`, and round by how it lies
        other = into_out and not all(r.geometry.holds(fake_value(n)) for r, n in zip(refs, news, strict=True))
        if other:
            self._check_strides(func, written, args, kwargs)
        on_clones = isinstance(variant.target, Functionalized)
        computes = not on_clones and not tables.is_list_op(func) and variant.target not in OFFSETS
        if computes and (other or _permutes(refs, news)) or not on_clones and _is_product(func, news):
            return self._write(func, Variant(Functionalized(func)), written, args, kwargs)
        for ref, new in zip(refs, news, strict=True):
            ref.write(self._arrived(func, ref, new))
        return node

    def _arrived(self, func: Any, ref: Ref, new: fx.Node) -> fx.Node:
        """What a collective makes of a tensor in a shared memory, which is made anew of it before its own wait."""
        while func._schema.name.startswith("wholestep::") and ref.parent is not None:
            if ref.view is aten.as_strided.default:
                return self.builder.emit(torch.ops.wholestep.wait.default, (new,))
            ref = ref.parent
        return new

    def _like_written(self, func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], ...]:
        """The value of a fused optimizer's functional variant, whose kernel looks at the scale of the gradients."""
        bound = tables.positional(func, args, kwargs)
        with self.builder.fake_mode:
            return tuple([torch.empty_like(fake_value(n)) for n in bound[i]] for i in written_arguments(func))

    def _new_values(self, func: Any, variant: Variant, node: fx.Node, count: int, scaled: bool) -> Iterator[fx.Node]:
        value = node.meta["info"].value
        if isinstance(value, torch.Tensor):
            yield node
        elif isinstance(variant.target, Functionalized):
            yield from (self._part(node, index) for index in range(len(value) - count, len(value)))
        else:
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield self._part(node, index)
                elif item and not (index == 1 and tables.is_fused(func) and not scaled):
                    group = self._part(node, index)
                    yield from (self._part(group, inner) for inner in range(len(item)))

    def _given_back(self, func: Any, node: fx.Node, out: Any, args: Any, kwargs: Any) -> Any:
        """The very tensors that were written where the schema returns them, new ones where it does not."""
        returns = func._schema.returns
        pairs = zip(func._schema.arguments, tables.positional(func, args, kwargs), strict=True)
        by_alias = {tuple(a.alias_info.before_set): given for a, given in pairs if a.alias_info}
        outs = out if issubclass(type(out), (tuple, list)) else (out,) if returns else ()
        results = zip(returns, outs, strict=False)
        given = [by_alias.get(tuple(r.alias_info.before_set), item) if r.alias_info else item for r, item in results]
        fresh = [g for g in given if isinstance(g, FakeTensor) and not hasattr(g, "wholestep_ref")]
        for index, item in enumerate(fresh):  # an operator on clones gives its own results first
            self.builder.root(item, self._part(node, index))
        return None if not given else given[0] if len(given) == 1 else tuple(given)

    def _check_geometry(self, func: Any, tensor: torch.Tensor) -> None:
        geometry, now = self.inputs.ref(tensor).geometry, self.inputs.fake(tensor)
        if not geometry.holds(now):
            self._refuse_size(func, tensor, now)

    def _check_shape(self, func: Any, tensor: torch.Tensor, result: torch.Tensor) -> None:
        if self.inputs.ref(tensor).geometry.shape != result.shape:
            self._refuse_size(func, tensor, result)

    def _check_strides(self, func: Any, written: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        """A kernel may resize its `out=`, and back, which loses its strides; fake tensors keep theirs."""
        with no_modes():
            ran = run_kernel(func, args, kwargs)
        for given, scratch in zip(tensors_of((args, kwargs)), ran[0] if ran is not None else (), strict=False):
            if given.stride() != scratch.stride() and any(given is tensor for tensor in written):
                what = f"{func} gives {self.inputs.describe(given)} other strides"
                raise UnsupportedError(what, "give it a contiguous output")

    def _refuse_size(self, func: Any, tensor: torch.Tensor, now: torch.Tensor) -> None:
        before = list(self.inputs.ref(tensor).geometry.shape)
        what = f"{func} resized {self.inputs.describe(tensor)} from {before} to {list(now.shape)}"
        raise UnsupportedError(what, "give it an output of the right shape")


def _refuse_resizing(given: list[Any]) -> None:
    """Refuses fake quantisation by rows whose statistics have another size yet: its kernel resizes them at its will."""
    (x, _, _, *statistics), axis, by_rows = given[:7], given[10], given[11]
    if by_rows and any(each.shape != (x.shape[axis],) for each in statistics):
        what = "fake quantisation by rows resizes its statistics when it first observes"
        raise UnsupportedError(what, "run the model once before the step is compiled")


def _permutes(refs: list[Ref], news: list[fx.Node]) -> bool:
    """Whether a functional variant gives dimensions in another order than the memory has them that eager writes to.

    The kernel goes through its operands in another order then, and may round otherwise.
    """
    pairs = [(ref.geometry, fake_value(new)) for ref, new in zip(refs, news, strict=True)]
    return any(place.shape == value.shape and not place.repeats and not place.orders(value) for place, value in pairs)


def _is_product(func: OpOverload, news: list[fx.Node]) -> bool:
    """Whether kernels in place may round otherwise than others: their loops over complex numbers are compiled twice."""
    return func is not aten.copy_.default and any(fake_value(new).is_complex() for new in news)


def _only(index: int, count: int, argument: Any) -> Any:
    """The part of a list operator's argument that concerns one of its tensors."""
    whole = isinstance(argument, (list, tuple)) and len(argument) == count
    return [argument[index]] if whole else argument
