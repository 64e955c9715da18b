"""The recorder: a dispatch mode under which the user's step runs once, on fake tensors.

Every operator that reaches the dispatcher comes through `Recorder.__torch_dispatch__`. A real tensor that
is met for the first time is *lifted*: it becomes a placeholder and gets a fake twin. The operator runs on
fakes, and a pure form of it is written into the graph (`aliases.py` says which values it reads). An in-place
call gives back the very tensor it was given, so that user code, modules, optimizers and the autograd
engine run as they always do, while nothing real changes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.errors import CaptureError, DataDependentError, UnsupportedError
from wholestep.functional import UnderGrad
from wholestep.torch_compat import FakeTensor, TorchDispatchMode, fake_refusal, generator_id, has_native_kernel
from wholestep.trace.functionalize.aliases import Geometry, Ref
from wholestep.trace.functionalize.writes import Writes
from wholestep.trace.numbers.predicates import follows_from_numbers, geometry
from wholestep.trace.numbers.symbolic_sizes import is_host, is_size
from wholestep.trace.operators.kernel_checks import CHECKS, check_strided, check_view, kernels_error
from wholestep.trace.operators.packed_sequences import pack
from wholestep.trace.operators.tables import (
    GRAD_SENSITIVE,
    HIDDEN_WRITES,
    SHAPE_FROM_DATA,
    TRAINING_FLAG,
    all_args,
    is_view,
)
from wholestep.trace.record.inputs import Lifted
from wholestep.trace.record.options import Setting
from wholestep.trace.record.provenance import user_line
from wholestep.trace.record.tape import leaves, map_leaves

aten = torch.ops.aten


class Recorder(Writes, TorchDispatchMode):
    """Records one run of a step."""

    def __init__(self, setting: Setting) -> None:
        TorchDispatchMode.__init__(self)
        Writes.__init__(self, setting)
        self.whereabouts.thread.mode = self

    # -- dispatch --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in UNRECORDED:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and has_native_kernel(func, "CompositeImplicitAutograd"):
            with self:  # below autograd, as without gradients: what it calls may write, unsaid (batch_norm)
                return func.decompose(*args, **kwargs)
        func = MATERIAL.get(func, func)
        try:
            args, kwargs = self._with_plain_numbers(func, args, kwargs)
            special = SPECIAL.get(func)
            if special is not None:
                return special(self, *args, **kwargs)
            args, kwargs = map_leaves(self._exchange, args), map_leaves(self._exchange, kwargs)
            if func in CHECKS:
                CHECKS[func](*args, **kwargs)
            if func in HIDDEN_WRITES and all_args(func, args, kwargs)[TRAINING_FLAG]:
                return self._hidden(func, args, kwargs)
            if func._schema.is_mutable:
                return self._mutable(func, args, kwargs)
            return self._view(func, args, kwargs) if is_view(func) else self._pure(func, args, kwargs)
        except (ValueError, RuntimeError) as error:
            kind = fake_refusal(error) if isinstance(error, RuntimeError) else None
            if kind is None:
                said = None if isinstance(error, CaptureError) else kernels_error(func, args, kwargs)
                if said is not None:
                    raise said from error
                raise
            if kind == "data" and not func._schema.is_mutable and (self.guard_data or self._is_fixed(func, args)):
                return self._observed(func, args, kwargs)
            raise _translated(func, error, kind, self.guard_data) from error

    def _with_plain_numbers(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with those numbers known now that the place or the shape of a result depends on."""
        if not any(map(is_host, (*leaves(args), *leaves(kwargs)))):
            return args, kwargs
        arguments = {a.name: a for a in func._schema.arguments}
        names = list(arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, value in given.items():
            whole = "int" in str(arguments[name].type) or func.overloadpacket in RANGES
            if whole and any(map(is_host, leaves(value))) and not self._is_free(func, given, len(args), name):
                given[name] = map_leaves(self._plain, value)
        return tuple(given[name] for name in names[: len(args)]), {name: given[name] for name in kwargs}

    def _is_free(self, func: Any, given: dict[str, Any], count: int, name: str) -> bool:
        """Whether an operator's result has its shape whatever an integer is."""
        if is_view(func) or torch.Tag.inplace_view in func.tags:
            return False
        tried = [given | {name: map_leaves(partial(_tried, wanted), given[name])} for wanted in TRIED]
        shapes = [self._shapes(func, arguments, count) for arguments in tried]
        return shapes[0] is not None and all(other == shapes[0] for other in shapes)

    def _plain(self, leaf: Any) -> Any:
        return self.escaped(leaf.node, "the shape of a result depends on it") if is_host(leaf) else leaf

    def _shapes(self, func: Any, given: dict[str, Any], count: int) -> Any:
        """The shapes of what a call gives, the first arguments by position; None where it fails."""
        given = {name: map_leaves(self._exchange, value) for name, value in given.items()}
        try:
            out = self._execute(func, [given.pop(name) for name in list(given)[:count]], given)
            return [(leaf.shape, leaf.stride()) for leaf in leaves(out) if isinstance(leaf, torch.Tensor)]
        except Exception:
            return None

    def _exchange(self, leaf: Any) -> Any:
        """Symbolic numbers and tokens -> host numbers' nodes; everything else as it is."""
        if isinstance(leaf, (torch.SymFloat, torch.SymInt)):
            return leaf if is_size(leaf) else leaf.node.fx_node
        if isinstance(leaf, torch.Generator):
            return self.generator(leaf)
        if type(leaf) is float and leaf in self.tokens:
            self.spent.add(leaf)
            return self.tokens[leaf].fx_node
        return leaf

    def generator(self, generator: torch.Generator) -> fx.Node | None:
        """The input that a random generator which the step can see is, or becomes; None for the default generator."""
        key = generator_id(generator)
        if key == generator_id(torch.default_generator):
            return None
        found = self.generators.get(key)
        if found is None:
            what = "a random operator with a generator that the step makes, or that is out of its sight"
            raise UnsupportedError(what, user_line(), "make it before the step")
        if self.parts:
            what = "a random operator with its own generator, in a step that is spread over ranks"
            raise UnsupportedError(what, user_line(), "draw from torch's default generator")
        if key not in self.drawn:
            self.drawn[key] = Lifted(self.placeholder(found[1], "generator", None), found[1], found[0])
            self.lifted.append(self.drawn[key])
        return self.drawn[key].node

    def _pure(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in SHAPE_FROM_DATA:
            what = f"the shape of the result of {func} depends on data"
            raise UnsupportedError(what, user_line(), "use dense tensors")
        out = self._execute(func, args, kwargs)
        if isinstance(out, torch.Tensor) and hasattr(out, "wholestep_ref") and func.namespace != "wholestep":
            return out  # gave its argument back; so does a collective's wait, which is a step of its own all the same
        place = STRIDED_COPIES.get(func, len(args))
        if place < len(args) and args[place] is not None:
            self.read_offset(args[0])
            args = (*args[:place], args[place] - args[0].storage_offset(), *args[place + 1 :])
        reads = map_leaves(self._reads, args), map_leaves(self._reads, kwargs)
        if isinstance(out, torch.Tensor):
            self.root(out, self.emit(func, *reads, value=self.value(out)))
            return out
        target = UnderGrad(func) if func in GRAD_SENSITIVE and torch.is_grad_enabled() else func
        node = self.emit(target, *reads, value=map_leaves(self._kept, out))
        return self._results(node, out)

    def _observed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator whose result's shape, or the bool it gives, depends on data: as it is on the real inputs."""
        node = self.emit(func, map_leaves(self._reads, args), map_leaves(self._reads, kwargs), value=())
        if str(func._schema.returns[0].type) == "bool":
            return self.decide(node, None, user_line(), not self.guard_data)
        shaped = self.emit(geometry, (self._shaped_like(node),), value=())
        found = self.decide(shaped, None, user_line(), not self.guard_data)
        with self.fake_mode:
            fakes = [torch.empty_strided(*place, dtype=dtype, device=device) for *place, dtype, device in found]
        if len(func._schema.returns) > 1:
            node.meta["info"].value = node.meta["val"] = tuple(map(self.value, fakes))
            return self._results(node, tuple(fakes))
        node.meta["info"].value = node.meta["val"] = self.value(fakes[0])
        self.root(fakes[0], node)
        return fakes[0]

    def _is_fixed(self, func: Any, args: Any) -> bool:
        """Whether a result's shape depends on values that are the same at each call, as those of `torch.eye` are."""
        nodes: list[fx.Node] = []

        def note(leaf: Any) -> None:
            if isinstance(leaf, torch.Tensor):
                nodes.append(self._reads(leaf))

        map_leaves(note, args[1:] if func in SHAPE_ALONE else args)
        return follows_from_numbers(nodes)

    def _shaped_like(self, node: fx.Node) -> fx.Node:
        """A call whose result has the shape of a node's, without operands of which only the shape counts."""
        if node.target not in SHAPE_ALONE:
            return node
        value = node.args[0].meta["info"].value  # type: ignore[union-attr]
        options = {"dtype": value.dtype, "device": value.device}
        blank = self.emit(aten.empty_strided.default, (list(value.shape), list(value.stride())), options)
        return self.emit(node.target, (blank, *node.args[1:]), dict(node.kwargs), value=())

    def _kept(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _results(self, node: fx.Node, out: Any) -> Any:
        """Gives every tensor of a call's several results its own node."""
        for index, item in enumerate(out if isinstance(out, (tuple, list)) else ()):
            if isinstance(item, (tuple, list)):
                self._results(self.emit(operator.getitem, (node, index)), item)
            elif isinstance(item, torch.Tensor):
                self.root(item, self.emit(operator.getitem, (node, index)))
        return out

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        base = self.ref(args[0])
        if func is aten.view.default and (base.geometry.repeats or self.sizes is None):
            check_view(base.geometry, args[1])
        if func is aten.as_strided.default and self.sizes is None:
            check_strided(self._fakes(args[0]), self._memory_behind(args[0], base), *args[1:], **kwargs)
        self.note()
        if func is aten.as_strided.default and (len(args) > 3 and args[3] is not None or kwargs.get("storage_offset")):
            self.read_offset(args[0])
        out = self._execute(func, args, kwargs)
        if func is aten.view.default and any(type(size) is int and size == 0 for size in out.shape):
            # torch caches the fake of such a view as memory of its own, which begins at 0
            place = list(out.shape), list(out.stride()), self._fakes(args[0]).storage_offset()
            out = self._execute(aten.as_strided.default, (args[0], *place), {})
        if isinstance(out, torch.Tensor):
            self._alias(out, base, func, args, kwargs, None)
        else:
            for index, item in enumerate(out):
                self._alias(item, base, func, args, kwargs, index)
        return out

    def _memory_behind(self, tensor: torch.Tensor, ref: Ref) -> torch.Tensor:
        """A tensor with as much memory as a tensor of the step has: of an input, fakes know its own elements alone."""
        item = self.lifted[ref.storage.input] if ref.storage.input is not None else None
        known = item is not None and all(m.item is not item for m in self.memories.values())
        return item.value if known else self._fakes(tensor)  # type: ignore[union-attr,return-value]

    def _alias(self, out: torch.Tensor, base: Ref, func: Any, args: Any, kwargs: Any, index: int | None) -> None:
        if func in TRANSPARENT:
            out.wholestep_ref = base  # type: ignore[attr-defined]
            return
        rest = tuple(map_leaves(self._reads, args[1:]))
        if func is aten.as_strided.default:
            # its numbers count from the start of the memory, whatever view it is taken from
            root = base.storage.root
            assert root is not None
            self.check_reach(Geometry.of(out), root)
            offset = out.storage_offset() - root.geometry.offset
            base, rest, kwargs = root, (list(out.shape), list(out.stride()), offset), {}
        ref = Ref(base.storage, Geometry.of(out), base, func, rest, map_leaves(self._reads, kwargs), index)
        out.wholestep_ref = ref  # type: ignore[attr-defined]


def _tried(wanted: int | None, leaf: Any) -> Any:
    return leaf if not is_host(leaf) else leaf.node.hint if wanted is None else wanted


def _translated(func: Any, error: Exception, kind: str, guard_data: bool) -> CaptureError:
    if kind == "device":
        return UnsupportedError(f"{func}: {error}", user_line(), "move the model and its batch to one device")
    if kind == "data":
        return DataDependentError(
            f"the shape or value of the result of {func} depends on data",
            user_line(),
            "use a form with a fixed shape, such as torch.where or a mask"
            + ("" if guard_data else ", or pass guard_data=True to ws.compile"),
        )
    return UnsupportedError(
        f"{func} has no rule for fake tensors: {error}",
        user_line(),
        "register one with torch.library.register_fake",
    )


# Zeros without memory, which autograd makes for gradients that are not there; C++ asks fakes what they are made of.
MATERIAL = {aten._efficientzerotensor.default: aten.zeros.default}

# Ranges that torch.optim marks for a profiler, and questions about a tensor's device: no part of the step.
UNRECORDED = ("profiler", "prim")

# Where an offset stands that eager counts from the start of the memory, and a graph from the operand's first element.
STRIDED_COPIES = {aten.as_strided_copy.default: 3, aten.as_strided_scatter.default: 4}

# Operators whose result has as many elements as its numbers say, whatever their type.
RANGES = {aten.arange, aten.range}

# What stands for an integer to see whether a result's shape depends on it; None for the integer's own hint.
TRIED = (None, 0, 1, 2, 5, -3, 1000)

# Operators whose result's shape depends on the data of other operands than the first.
SHAPE_ALONE = {aten.index.Tensor, aten.masked_select.default}

# Views of the whole tensor, of the same shape: the result is the same way into memory.
TRANSPARENT = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


def _lift_fresh(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    constant = recorder.constant(tensor)
    recorder.watch.add([constant])
    return constant


def _split(recorder: Recorder, tensor: torch.Tensor, size: Any, dim: int = 0) -> Any:
    """`split`; of nothing, it is one part of nothing, on which fake tensors of torch 2.11 fail."""
    if tensor.shape[dim] == 0:
        return recorder._view(aten.split_with_sizes.default, (tensor, [0], dim), {})
    return recorder._view(aten.split.Tensor, (tensor, size, dim), {})


def _conj(recorder: Recorder, tensor: Any) -> Any:
    if isinstance(tensor, torch.Tensor):
        return recorder._view(aten._conj.default, (tensor,), {})
    # a Python number that autograd saved
    return recorder.constant(torch.tensor(tensor.conjugate(), dtype=torch.complex128))


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten._conj.default: _conj,
    aten.split.Tensor: _split,
    aten._local_scalar_dense.default: Recorder.item,
    aten.item.default: Recorder.item,
    aten.lift_fresh.default: _lift_fresh,
    aten._pack_padded_sequence.default: pack,
    aten.lift.default: _lift_fresh,
}

