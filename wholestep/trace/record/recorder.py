"""The recorder: a dispatch mode under which the user's step runs once, on fake tensors.

Every operator that reaches the dispatcher comes through `Recorder.__torch_dispatch__`. A real tensor becomes an input
at its first use (`inputs.py`). The operator runs on fakes, and a pure variant of it is written into the graph
(`functionalize/` says which values it reads and what its writes become). An in-place call gives back the very tensor it
was given, so that user code, modules, optimizers and the autograd engine run as they always do, while nothing real
changes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from wholestep.capture import Snapshot
from wholestep.errors import CaptureError, DataDependentError, UnsupportedError
from wholestep.functional import HIDDEN_WRITES, UnderGrad, Waited, base_name, bound_arguments, parameters
from wholestep.ir import set_info
from wholestep.nested import leaves, map_leaves
from wholestep.torch_compat import (
    COLLECTIVE_NAMESPACES,
    FakeTensor,
    HigherOrderOperator,
    UnwrappedDispatchMode,
    casts_where_called,
    fake_refusal,
    has_native_kernel,
)
from wholestep.trace.functionalize.mutations import Mutations
from wholestep.trace.functionalize.storage_resize import StorageSizes
from wholestep.trace.functionalize.view_operators import Views
from wholestep.trace.numbers.decisions import OTHERWISE, follows_from_numbers, geometry
from wholestep.trace.numbers.recorded_numbers import RecordedNumbers
from wholestep.trace.numbers.symbolic_sizes import Sizes, is_host
from wholestep.trace.operators import tables
from wholestep.trace.record.caught_errors import index_ranges, is_caught, refuses
from wholestep.trace.record.graph_builder import GraphBuilder
from wholestep.trace.record.inputs import Inputs
from wholestep.trace.record.provenance import Provenance
from wholestep.trace.record.zero_tensors import ZeroTensors

aten = torch.ops.aten


class Recorder(UnwrappedDispatchMode):
    """Records one run of a step.

    Args:
        world: the snapshot of what the step can see.
        provenance: follows modules and optimizers.
        shared: memories that several inputs share, of which one is written.
        decides: Python may decide on bools that are not known before the step.
        sizes: holds the symbols of tensors whose sizes are some.
        outcomes: what is known of bools that the ranks decide on together; None where they do not.

    Attributes:
        builder: writes the graph.
        inputs: the tensors, numbers and generators that the step reads.
        numbers: host numbers, and the decisions that Python takes on them.
        hooks_before: how many hooks this process had registered when the step began.
        zeros: tangents that are not there.
        views, mutations, storages: what functionalisation makes of views, writes and resized storages.
        hooked: the autograd nodes of tensors of the step that were, or may have been, given hooks.
    """

    supports_higher_order_operators = True  # to refuse them by line
    deferring = False

    def __init__(
        self, world: Snapshot, provenance: Provenance, shared: frozenset[int] = frozenset(),
        decides: bool = False, sizes: Sizes | None = None, outcomes: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.builder = GraphBuilder(provenance, sizes)
        self.inputs = Inputs(self.builder, world, shared)
        self.numbers = RecordedNumbers(self.inputs, decides, outcomes)
        self.storages = StorageSizes(self.inputs)
        self.views, self.mutations = Views(self.inputs, self.storages), Mutations(self.inputs)
        self.zeros = ZeroTensors()
        self.hooks_before = RemovableHandle.next_id
        self.hooked: list[Any] = []
        provenance.mode = self

    def forget(self) -> None:
        """Lets go of what it knows, at the end: values of the graph lead to the builder, and no further then."""
        self.numbers.forget()
        self.hooked.clear()
        del self.inputs.on_new  # a method of what holds the inputs: without the cycle, all of this goes at once
        self.builder.provenance.mode = self.builder.provenance.called = None

    # -- dispatch --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:  # which autograd's engine asks for twice for each operator
            return args[0].fake_device
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            refuse_higher_order()
        if func.namespace in UNRECORDED:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and has_native_kernel(func, "CompositeImplicitAutograd"):
            with self:  # below autograd, as without gradients: what it calls may write, unsaid (batch_norm)
                return func.decompose(*args, **kwargs)
        if func is aten._efficientzerotensor.default:
            return self.zeros.add(self.__torch_dispatch__(aten.zeros.default, types, args, kwargs))
        if self.zeros.concern(func, args):
            with self:
                return self.zeros.result(func, args, kwargs)
        args = self._values_alone(func, args)
        try:
            args, kwargs = self._with_plain_numbers(func, args, kwargs)
            if func.namespace in COLLECTIVE_NAMESPACES and tables.is_wait(func):
                return args[0]
            special = SPECIAL.get(func)
            if special is not None:
                return special(self, *args, **kwargs)
            args, kwargs = map_leaves(self._for_graph, args), map_leaves(self._for_graph, kwargs)
            if self.numbers.tokens:
                args, kwargs = self.numbers.with_numbers(func, args, kwargs)
            tables.check(func, args, kwargs)
            if tables.is_cast_inside(func) and casts_where_called():
                what = f"{func} runs under autocast, which casts what its kernel calls"
                raise UnsupportedError(what, f"give it a register_autocast(), or {OTHERWISE}")
            if (error := refuses(func)) is not None and is_caught(error) and not self._is_in_range(func, args, kwargs):
                what = f"the step catches the {error.__name__} that {func} raises on some data"
                raise UnsupportedError(what, "check the data before it, or compile without fullgraph=True")
            if tables.is_differentiated_inside(func):
                _refuse_gradients(func, args, kwargs)
            if func in HIDDEN_WRITES and tables.positional(func, args, kwargs)[tables.TRAINING_FLAG]:
                return self.mutations.record_undeclared(func, args, kwargs)
            if func._schema.is_mutable:
                in_place_view = torch.Tag.inplace_view in func.tags
                record = self.views.record_inplace if in_place_view else self.mutations.record
                return record(func, args, kwargs)
            return self.views.record(func, args, kwargs) if func.is_view else self._pure(func, args, kwargs)
        except CaptureError as error:
            self.numbers.refused(error)
            raise
        except (ValueError, RuntimeError, IndexError) as error:
            kind = fake_refusal(error) if isinstance(error, RuntimeError) else None
            if kind is None:
                said = tables.kernels_error(func, args, kwargs)
                if said is not None:
                    raise said from error
                raise
            if kind == "data" and not func._schema.is_mutable:
                truth, fixed = str(func._schema.returns[0].type) == "bool", self._is_fixed(func, args)
                if fixed or (truth and self.numbers.may_decide):
                    return self._observed(func, args, kwargs, truth, fixed)
            raise _translated(func, error, kind) from error

    def _is_in_range(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a kernel refuses indices alone, and none that it is given; a decision, as if the step had asked."""
        ranges = index_ranges(func, bound_arguments(func, args, kwargs))
        if ranges is None or not self.numbers.may_decide:
            return False
        with self:
            return all(torch.equal(index.clamp(least, most), index) for index, least, most in ranges)

    def _values_alone(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a decomposition, without the vectors that eager computes for gradients alone.

        C++ asks for them whenever it is given fake tensors, and LAPACK rounds the values otherwise then.
        """
        if func not in VECTORS or self.numbers.call is None or self.numbers.call.function not in OF_VALUES:
            return args
        differentiated = torch.is_grad_enabled() and args[0].requires_grad
        return args if differentiated else (args[0], *(args[1:2] or VECTORS[func]), False)

    def _with_plain_numbers(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with those integers known now on which the place or the shape of a result may depend."""
        if not any(map(is_host, (*leaves(args), *leaves(kwargs)))):
            return args, kwargs
        kinds, given = dict(parameters(func)), bound_arguments(func, args, kwargs)
        for name, value in given.items():
            whole = "int" in kinds[name] or func.overloadpacket in RANGES
            if whole and any(map(is_host, leaves(value))):
                given[name] = map_leaves(self._plain, value)
        return tuple(given.values())[: len(args)], {name: given[name] for name in kwargs}

    def _plain(self, leaf: Any) -> Any:
        return self.numbers.escaped(leaf.node, "an operator takes it as a size or a place") if is_host(leaf) else leaf

    def _for_graph(self, leaf: Any) -> Any:
        """Host numbers and generators -> their nodes; everything else as it is."""
        if is_host(leaf):
            return leaf.node.fx_node
        return self.inputs.generator(leaf) if issubclass(type(leaf), torch.Generator) else leaf

    def _pure(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in tables.SHAPE_FROM_DATA:
            what = f"the shape of the result of {func} depends on data"
            raise UnsupportedError(what, "use dense tensors, or compile without fullgraph=True")
        out = OPAQUE if base_name(func).startswith(tables.OPAQUE) else self.inputs.run(func, args, kwargs)
        if out is OPAQUE or any(isinstance(t, torch.Tensor) and t.layout not in tables.LAYOUTS for t in leaves(out)):
            what = f"{func} makes a tensor that is quantized or in a layout of its own, which no fake one stands for"
            raise UnsupportedError(what, "use plain dense tensors, or compile without fullgraph=True")
        if isinstance(out, torch.Tensor) and hasattr(out, "wholestep_ref") and func.namespace != "wholestep":
            return out  # gave its argument back; so does a collective's wait, which is a step of its own all the same
        args = self.inputs.counted_from_first(func, args)
        target = UnderGrad(func) if func in tables.GRAD_SENSITIVE and torch.is_grad_enabled() else func
        target = Waited(func) if func.namespace in COLLECTIVE_NAMESPACES else target
        reads = map_leaves(self.inputs.operand, args), map_leaves(self.inputs.operand, kwargs)
        return self._results(self.builder.emit(target, *reads, value=map_leaves(self.builder.detached, out)), out)

    def _observed(self, func: Any, args: Any, kwargs: Any, truth: bool, fixed: bool) -> Any:
        """A bool that depends on data, as it is on the real inputs; or a result of a shape that is always the same."""
        reads = map_leaves(self.inputs.operand, args), map_leaves(self.inputs.operand, kwargs)
        node = self.builder.emit(func, *reads, value=False if truth else ())
        if truth:
            return self.numbers.decide(node, fixed)
        found = geometry(self.numbers.real.of(self._shaped_like(node)))
        with self.builder.fake_mode:
            fakes = [torch.empty_strided(*place, dtype=dtype, device=device) for *place, dtype, device in found]
        out = tuple(fakes) if len(func._schema.returns) > 1 else fakes[0]
        node.meta["info"].value = map_leaves(self.builder.detached, out)
        return self._results(set_info(node, node.meta["info"]), out)

    def _is_fixed(self, func: Any, args: Any) -> bool:
        """Whether a result's shape depends on values that are the same at each call, as those of `torch.eye` are."""
        read = leaves(args[1:] if func in SHAPE_ALONE else args)
        return follows_from_numbers(self.inputs.read(t) for t in read if isinstance(t, torch.Tensor))

    def _shaped_like(self, node: fx.Node) -> fx.Node:
        """A call whose result has the shape of a node's, without operands of which only the shape counts."""
        if node.target not in SHAPE_ALONE:
            return node
        value = node.args[0].meta["info"].value  # type: ignore[union-attr]
        options = {"dtype": value.dtype, "device": value.device}
        blank = self.builder.emit(aten.empty_strided.default, (list(value.shape), list(value.stride())), options)
        return self.builder.emit(node.target, (blank, *node.args[1:]), dict(node.kwargs), value=())

    def _results(self, node: fx.Node, out: Any) -> Any:
        """Gives every tensor among a call's results its own node."""
        if isinstance(out, torch.Tensor):
            self.builder.root(out, node)
        for index, item in enumerate(out if issubclass(type(out), (tuple, list)) else ()):
            if isinstance(item, (torch.Tensor, tuple, list)):
                self._results(self.builder.emit(operator.getitem, (node, index)), item)
        return out


def refuse_higher_order(*_: Any, **__: Any) -> Any:
    """A higher-order operator, `torch.cond` among them, which in eager Dynamo runs."""
    remedy = "write it as a Python loop or branch, or with torch.where, or compile without fullgraph=True"
    raise UnsupportedError("the step calls a higher-order operator, which tracing cannot follow", remedy)


def _refuse_gradients(func: Any, args: Any, kwargs: Any) -> None:
    """An operator without a formula is differentiated by what its kernel calls, which tracing does not see."""
    tensors = [leaf for leaf in (*leaves(args), *leaves(kwargs)) if isinstance(leaf, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        what = f"{func} has no formula for its gradient, so that autograd sees what its kernel calls"
        raise UnsupportedError(what, "register one with torch.library.register_autograd, or detach")


def _translated(func: Any, error: Exception, kind: str) -> CaptureError:
    if kind == "device":
        return UnsupportedError(f"{func}: {error}", "move the model and its batch to one device")
    if kind == "data":
        what = f"the shape or value of the result of {func} depends on data"
        return DataDependentError(what, f"use a form with a fixed shape, such as torch.where or a mask; or {OTHERWISE}")
    if "nested" in str(func):
        return UnsupportedError(f"{func} makes or takes a nested tensor", tables.NO_NESTED)
    what = f"{func} has no rule for fake tensors: {error}"
    return UnsupportedError(what, "register one with torch.library.register_fake")


OPAQUE = object()  # what no fake tensor stands for

DEVICE = torch.ops.prim.device.default

# Ranges that torch.optim marks for a profiler, and questions about a tensor's device: no part of the step.
UNRECORDED = ("profiler", "prim")

# Decompositions that may leave out the vectors: the argument before the one that says so; and who wants values alone.
VECTORS: dict[Any, tuple[Any, ...]] = {aten._linalg_svd.default: (False,), aten._linalg_eigh.default: ("L",)}
OF_VALUES = frozenset({
    torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.norm, torch.linalg.matrix_norm, torch.linalg.cond,
    torch.linalg.matrix_rank, torch.norm, torch.Tensor.norm, torch.nuclear_norm,
})  # fmt: skip

# Operators whose result has as many elements as its numbers say, whatever their type.
RANGES = {aten.arange, aten.range}

# Operators whose result's shape depends on the data of other operands than the first.
SHAPE_ALONE = {aten.index.Tensor, aten.masked_select.default}


def _lift_fresh(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    constant = recorder.builder.constant(tensor)
    recorder.builder.watch.add([constant])
    return constant


def _split(recorder: Recorder, tensor: torch.Tensor, size: Any, dim: int = 0) -> Any:
    """`split`; of nothing, it is one part of nothing, on which fake tensors of torch 2.11 fail."""
    if tensor.shape[dim] == 0:
        return recorder.views.record(aten.split_with_sizes.default, (tensor, [0], dim), {})
    return recorder.views.record(aten.split.Tensor, (tensor, size, dim), {})


def _conj(recorder: Recorder, tensor: Any) -> Any:
    if isinstance(tensor, torch.Tensor):
        return recorder.views.record(aten._conj.default, (tensor,), {})
    # a Python number that autograd saved
    return recorder.builder.constant(torch.tensor(tensor.conjugate(), dtype=torch.complex128))


SPECIAL: dict[Any, Callable[..., Any]] = {
    # no views to autograd, which they are in memory
    aten.unsafe_split.Tensor: _split,
    aten.split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: lambda recorder, *args: recorder.views.record(
        aten.split_with_sizes.default, args, {}
    ),
    aten._conj.default: _conj,
    aten._local_scalar_dense.default: lambda recorder, tensor: recorder.numbers.item(tensor),
    aten.item.default: lambda recorder, tensor: recorder.numbers.item(tensor),
    aten.lift_fresh.default: _lift_fresh,
    aten.lift.default: _lift_fresh,
}
