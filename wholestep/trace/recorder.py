"""The recorder: a dispatch mode under which the user's step runs once, on fake tensors.

Every operator that reaches the dispatcher comes through `Recorder.__torch_dispatch__`. A real tensor that
is met for the first time is *lifted*: it becomes a placeholder and gets a fake twin. The operator runs on
fakes, and a pure form of it is written into the graph (`alias.py` says which values it reads). An in-place
call gives back the very tensor it was given, so that user code, modules, optimizers and the autograd
engine run as they always do, while nothing real changes.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.errors import CaptureError, DataDependentError, UnsupportedError
from wholestep.ir import Functionalized, Gradient, Input, InputKind, NodeInfo, UnderGrad, set_info
from wholestep.torch_compat import FAKE_ERRORS, FakeTensor, FakeTensorMode, below_autograd, no_modes, sequence_number
from wholestep.trace.alias import Geometry, Ref, Storage, fit
from wholestep.trace.host import HostNode, make_host
from wholestep.trace.ops import (
    GRAD_SENSITIVE,
    HIDDEN_WRITES,
    SHAPE_FROM_DATA,
    TRAINING_FLAG,
    Overload,
    Twin,
    is_view,
    pure_twin,
    view_twin,
    written_arguments,
)
from wholestep.trace.predicates import Predicate, decide
from wholestep.trace.where import Whereabouts, user_line

aten = torch.ops.aten


class Found(Protocol):
    """A tensor that capture knows: where it is reachable and what it is for."""

    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def source(self) -> Any: ...
    @property
    def kind(self) -> InputKind: ...


@dataclass(eq=False)
class Lifted:
    """One placeholder: a real tensor with its fake twin, a number, or memory that several tensors share.

    Attributes:
        source: where the value is found; for shared memory, where its first member is.
        members: the tensors in a shared memory, whose value is then the memory as one flat tensor.
    """

    node: fx.Node
    source: Any
    value: torch.Tensor | float
    ref: Ref | None = None
    fake: Any = None
    members: list[torch.Tensor] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Records one run of a step.

    Args:
        find: gives the source of a real tensor, or None when it is reachable from nowhere known.
        whereabouts: follows modules and optimizers.
        shared: memories in which several inputs lie of which one is written; each becomes one input.
    """

    def __init__(
        self, find: Callable[[torch.Tensor], Found | None], whereabouts: Whereabouts, shared: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        self.find, self.whereabouts, self.shared = find, whereabouts, shared
        self.flat: dict[int, Lifted] = {}
        self.graph = fx.Graph()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=False)
        self.lifted: list[Lifted] = []
        self.inputs: list[Input] = []
        self.by_id: dict[int, Lifted] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.tokens: dict[float, HostNode] = {}
        self.spent: set[float] = set()
        self.in_call = 0
        self.host: dict[tuple[Any, ...], fx.Node] = {}
        self.predicates: dict[fx.Node, Predicate] = {}
        self.gradients: list[Gradient] = []
        self.last_placeholder: fx.Node | None = None

    # -- the graph -------------------------------------------------------------------------------------

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, value: Any = None) -> fx.Node:
        """Adds a call; runs it on the fake values of its arguments unless the value is given."""
        kwargs = kwargs or {}
        if value is None:
            value = self._run(target, args, kwargs)
        node = self.graph.call_function(target, args, kwargs)
        return set_info(node, self._record(value))

    def _run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fakes = map_leaves(_fake_value, args), map_leaves(_fake_value, kwargs)
        with self.fake_mode, torch.no_grad(), below_autograd():
            return target(*fakes[0], **fakes[1])

    def _record(self, value: Any) -> NodeInfo:
        place = self.whereabouts
        seq = place.seq()
        if seq is None:
            seq = sequence_number()
            place.module_of_seq[seq] = place.module()
            module = place.module()
        else:
            module = place.module_of_seq.get(seq, "")
        return NodeInfo(value, place.phase(), seq, user_line(), module)

    def _placeholder(self, source: Any, kind: InputKind, value: Any) -> fx.Node:
        with no_modes():  # a source may print a tensor
            source = str(source)
        name = self._name(source)
        position = self.last_placeholder
        with self.graph.inserting_after(position) if position else self.graph.inserting_before(self._first()):
            node = self.graph.placeholder(name)
        self.last_placeholder = node
        self.inputs.append(Input(str(node.target), source, kind))
        return set_info(node, NodeInfo(value))

    def _first(self) -> fx.Node | None:
        return next(iter(self.graph.nodes), None)

    def _name(self, source: str) -> str:
        name = re.sub(r"\W+", "_", re.sub(r"^[LGC]\['(\w+)'\]", r"\1", source)).strip("_") or "value"
        if name[0].isdigit() or keyword.iskeyword(name):
            name = f"v_{name}"
        taken = {i.name for i in self.inputs}
        unique, count = name, 1
        while unique in taken:
            unique, count = f"{name}_{count}", count + 1
        return unique

    # -- tensors ---------------------------------------------------------------------------------------

    def lift_number(self, source: Any, value: float) -> Any:
        """A placeholder for a Python float; gives the host number that stands for it."""
        node = self._placeholder(source, "number", value)
        self.lifted.append(Lifted(node, source, value))
        return make_host(HostNode(self, node, value, known=True))

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The way into memory of a tensor that the step uses."""
        if isinstance(tensor, FakeTensor):
            found = getattr(tensor, "wholestep_ref", None)
            if found is None:
                raise UnsupportedError("an operator's result was made outside of the recorder", user_line())
            return found
        lifted = self.by_id.get(id(tensor)) or self._lift(tensor)
        assert lifted.ref is not None
        return lifted.ref

    def _lift(self, tensor: torch.Tensor) -> Lifted:
        found = self.find(tensor)
        if found is None:
            raise CaptureError(
                f"the step reads a tensor of shape {list(tensor.shape)} that none of its arguments, closures, "
                "globals, modules or optimizers holds, so a replay could not find its value",
                user_line(),
                "pass the tensor to the step as an argument",
            )
        if tensor.requires_grad and not tensor.is_leaf:
            raise UnsupportedError(
                f"{found.source} is the result of an earlier differentiable computation",
                user_line(),
                "compute it inside of the step, or pass it detached",
            )
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise UnsupportedError(f"{found.source} is a {type(tensor).__name__}, a tensor subclass", user_line())
        if memory_of(tensor) in self.shared:
            return self._member(tensor, found)
        fake = self.fake_mode.from_tensor(tensor.detach(), static_shapes=True)
        lifted = Lifted(self._placeholder(found.source, found.kind, fake), found.source, tensor)
        ref = self._root(fake, lifted.node)
        ref.storage.input = len(self.lifted)
        lifted.ref, lifted.fake = ref, fake
        self.lifted.append(lifted)
        self.by_id[id(tensor)] = lifted
        return lifted

    def _member(self, tensor: torch.Tensor, found: Found) -> Lifted:
        """A tensor in a memory that other inputs share: a view of the memory, which is the input."""
        memory = memory_of(tensor)
        base = self.flat.get(memory)
        if base is None:
            flat = flat_memory(tensor)
            fake = self.fake_mode.from_tensor(flat, static_shapes=True)
            base = Lifted(self._placeholder(f"memory of {found.source}", found.kind, fake), found.source, flat)
            base.ref, base.fake = self._root(fake, base.node), fake
            base.ref.storage.input = len(self.lifted)
            self.lifted.append(base)
            self.flat[memory] = base
        assert base.ref is not None
        if tensor.dtype != base.ref.geometry.dtype:
            raise UnsupportedError(f"{found.source} shares written memory under another dtype", user_line())
        base.members.append(tensor)
        geometry = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        with self.fake_mode, torch.no_grad():
            fake = torch.as_strided(base.fake, *geometry)
        ref = Ref(base.ref.storage, Geometry.of(tensor), base.ref, aten.as_strided.default, geometry)
        self.by_id[id(tensor)] = Lifted(base.node, found.source, tensor, ref, fake)
        return self.by_id[id(tensor)]

    def _root(self, fake: torch.Tensor, node: fx.Node) -> Ref:
        storage = Storage(node)
        ref = Ref(storage, Geometry.of(fake), node=node, generation=0)
        storage.root = ref
        fake.wholestep_ref = ref  # type: ignore[attr-defined]
        return ref

    def _constant(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor that the step builds from Python numbers: a constant of the graph."""
        name = f"constant{len(self.constants)}"
        self.constants[name] = real.detach().clone()
        with self.fake_mode:
            fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=real.device)
        node = set_info(self.graph.get_attr(name), self._record(self.value(fake)))
        self._root(fake, node)
        return fake

    def value(self, fake: torch.Tensor) -> torch.Tensor:
        """A fake of the same geometry for the graph to keep: the step's own tensor and memory can die."""
        if fake.layout != torch.strided or fake.is_conj() or fake.is_neg():
            with self.fake_mode, torch.no_grad(), below_autograd():
                return fake.detach()
        with self.fake_mode:
            return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device)

    # -- dispatch --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in UNRECORDED:
            return func(*args, **kwargs)
        try:
            special = SPECIAL.get(func)
            if special is not None:
                return special(self, *args, **kwargs)
            args, kwargs = map_leaves(self._exchange, args), map_leaves(self._exchange, kwargs)
            if func in HIDDEN_WRITES and all_args(func, args, kwargs)[TRAINING_FLAG]:
                return self._hidden(func, args, kwargs)
            if func._schema.is_mutable:
                return self._mutable(func, args, kwargs)
            return self._view(func, args, kwargs) if is_view(func) else self._pure(func, args, kwargs)
        except FAKE_ERRORS as error:
            raise _translated(func, error) from error
        except RuntimeError as error:
            if "no fake impl registered" in str(error):
                raise _translated(func, error) from error
            raise

    def _exchange(self, leaf: Any) -> Any:
        """Symbolic numbers and tokens -> host numbers' nodes; everything else as it is."""
        if isinstance(leaf, (torch.SymFloat, torch.SymInt)):
            return leaf.node.fx_node
        if isinstance(leaf, torch.Generator):
            if leaf is not torch.default_generator:
                raise UnsupportedError("a random operator with its own generator", user_line(), "use the default one")
            return None
        if type(leaf) is float and leaf in self.tokens:
            self.spent.add(leaf)
            return self.tokens[leaf].fx_node
        return leaf

    def _fakes(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            self.ref(leaf)
            return leaf if isinstance(leaf, FakeTensor) else self.by_id[id(leaf)].fake
        return leaf.meta["info"].value if isinstance(leaf, fx.Node) else leaf

    def _reads(self, leaf: Any) -> Any:
        return self.ref(leaf).read(self.emit) if isinstance(leaf, torch.Tensor) else leaf

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        fakes = map_leaves(self._fakes, args), map_leaves(self._fakes, kwargs)
        with self.fake_mode, torch.no_grad(), below_autograd():
            return func(*fakes[0], **fakes[1])

    def _pure(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in SHAPE_FROM_DATA:
            raise UnsupportedError(f"the shape of the result of {func} depends on data", user_line(), "use dense tensors")
        out = self._execute(func, args, kwargs)
        if isinstance(out, torch.Tensor) and hasattr(out, "wholestep_ref"):  # gave its argument back
            return out
        reads = map_leaves(self._reads, args), map_leaves(self._reads, kwargs)
        if isinstance(out, torch.Tensor):
            self._root(out, self.emit(func, *reads, value=self.value(out)))
            return out
        target = UnderGrad(func) if func in GRAD_SENSITIVE and torch.is_grad_enabled() else func
        node = self.emit(target, *reads, value=map_leaves(self._kept, out))
        return self._results(node, out)

    def _kept(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _results(self, node: fx.Node, out: Any) -> Any:
        """Gives every tensor of a call's several results its own node."""
        for index, item in enumerate(out if isinstance(out, (tuple, list)) else ()):
            if isinstance(item, (tuple, list)):
                self._results(self.emit(operator.getitem, (node, index)), item)
            elif isinstance(item, torch.Tensor):
                self._root(item, self.emit(operator.getitem, (node, index)))
        return out

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        base = self.ref(args[0])
        out = self._execute(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            self._alias(out, base, func, args, kwargs, None)
        else:
            for index, item in enumerate(out):
                self._alias(item, base, func, args, kwargs, index)
        return out

    def _alias(self, out: torch.Tensor, base: Ref, func: Any, args: Any, kwargs: Any, index: int | None) -> None:
        if func in TRANSPARENT:
            out.wholestep_ref = base  # type: ignore[attr-defined]
            return
        rest = tuple(map_leaves(self._reads, args[1:]))
        if func is aten.as_strided.default:
            # its numbers count from the start of the memory, whatever view it is taken from
            root = base.storage.root
            assert root is not None
            offset = out.storage_offset() - root.geometry.offset
            base, rest, kwargs = root, (list(out.shape), list(out.stride()), offset), {}
        ref = Ref(base.storage, Geometry.of(out), base, func, rest, map_leaves(self._reads, kwargs), index)
        out.wholestep_ref = ref  # type: ignore[attr-defined]

    def _mutable(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.inplace_view in func.tags:
            return self._inplace_view(func, args, kwargs)
        twin = pure_twin(func)
        written = self._written(func, args, kwargs, written_arguments(func))
        if not _is_list_op(func):
            out = self._execute(func, args, kwargs)
            for tensor in written:
                self._check_geometry(func, tensor)
        else:
            out = None
            if func._schema.name.startswith("aten::_foreach_"):  # on the CPU they are a loop of in-place calls
                torch.autograd.graph.increment_version([t for t in written if t.device.type == "cpu"])
        node = self._write(func, twin, written, args, kwargs)
        return self._given_back(func, node, out, args, kwargs)

    def _hidden(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that writes without saying so: its pure form and its own results."""
        positions = HIDDEN_WRITES[func]
        written = self._written(func, args, kwargs, positions)
        out = self._execute(func, args, kwargs)
        node = self._write(func, Twin(Functionalized(func, positions)), written, args, kwargs)
        for index, item in enumerate(out):
            self._root(item, self.emit(operator.getitem, (node, index)))
        return out

    def _written(self, func: Any, args: Any, kwargs: Any, positions: tuple[int, ...]) -> list[torch.Tensor]:
        """The tensors that a call writes, in schema order."""
        bound = all_args(func, args, kwargs)
        tensors: list[torch.Tensor] = []
        for position in positions:
            if position == 1 and func._schema.name.startswith("aten::_fused_") and not bound.get(_scale_position(func)):
                continue  # gradients are only written when they are unscaled
            item = bound.get(position)
            tensors.extend([item] if isinstance(item, torch.Tensor) else [t for t in item or () if t is not None])
        return tensors

    def _write(self, func: Any, twin: Twin, written: list[torch.Tensor], args: Any, kwargs: Any) -> fx.Node:
        """Records the pure form and makes its results the written tensors' content."""
        kept = {k: v for k, v in kwargs.items() if k not in twin.drop} | _defaults(func, twin, len(args), kwargs)
        refs = [self.ref(t) for t in written]
        node = self.emit(twin.target, map_leaves(self._reads, args), map_leaves(self._reads, kept))
        for ref, new in zip(refs, self._new_values(func, twin, node, len(written), args, kwargs), strict=True):
            ref.write(fit(new, ref, self.emit), self.emit)
        return node

    def _new_values(self, func: Any, twin: Twin, node: fx.Node, count: int, args: Any, kwargs: Any) -> Iterator[fx.Node]:
        value = node.meta["info"].value
        if isinstance(value, torch.Tensor):
            yield node
            return
        if isinstance(twin.target, Functionalized):
            for index in range(len(value) - count, len(value)):
                yield self.emit(operator.getitem, (node, index))
            return
        fused = func._schema.name.startswith("aten::_fused_")
        skip = fused and not all_args(func, args, kwargs).get(_scale_position(func))
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
        bound = {a.name: v for a, v in zip(func._schema.arguments, _positional(func, args, kwargs), strict=True)}
        by_alias = {tuple(sorted(a.alias_info.before_set)): n for n, a in names.items() if a.alias_info}
        returns = func._schema.returns
        outs = out if isinstance(out, (tuple, list)) else (out,) * min(1, len(returns))
        given: list[Any] = []
        for result, item in zip(returns, outs, strict=False):
            source = by_alias.get(tuple(sorted(result.alias_info.before_set))) if result.alias_info else None
            given.append(bound[source] if source else item)
        fresh = [g for g in given if isinstance(g, FakeTensor) and not hasattr(g, "wholestep_ref")]
        for index, item in enumerate(fresh):  # an operator on clones gives its own results first
            self._root(item, self.emit(operator.getitem, (node, index)))
        return None if not given else given[0] if len(given) == 1 else tuple(given)

    def _inplace_view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`t_`, `unsqueeze_`, …: the tensor itself becomes a view of what it was."""
        tensor = args[0]
        if not isinstance(tensor, FakeTensor):
            raise UnsupportedError(
                f"{func} changes the shape of {self._describe(tensor)}, which the step did not make",
                user_line(),
                "use the form that returns a view",
            )
        view = view_twin(func)
        if view is None:
            raise UnsupportedError(f"{func} changes which memory a tensor uses", user_line(), "make a new tensor")
        base = self.ref(tensor)
        old = Ref(base.storage, base.geometry, base.parent, base.view, base.args, base.kwargs, base.index)
        old.node, old.generation = base.node, base.generation
        if base.storage.root is base:
            base.storage.root = old
        self._execute(func, args, kwargs)
        tensor.wholestep_ref = Ref(base.storage, Geometry.of(tensor), old, view, tuple(args[1:]), kwargs)
        return tensor

    # -- checks ----------------------------------------------------------------------------------------

    def _check_geometry(self, func: Any, tensor: torch.Tensor) -> None:
        ref = self.ref(tensor)
        now = tensor if isinstance(tensor, FakeTensor) else self.by_id[id(tensor)].fake
        if not ref.geometry.holds(now):
            raise UnsupportedError(
                f"{func} resized {self._describe(tensor)} from {list(ref.geometry.shape)} to {list(now.shape)}",
                user_line(),
                "give it an output of the right shape",
            )

    def made_at(self, value: Any) -> str:
        """The user's line that made a tensor or number of the step."""
        if isinstance(value, (torch.SymFloat, torch.SymInt)):
            return str(value.node.fx_node.meta["info"].where)
        if isinstance(value, FakeTensor):
            return str(self.ref(value).storage.value.meta["info"].where)
        return ""

    def _describe(self, tensor: torch.Tensor) -> str:
        lifted = self.by_id.get(id(tensor))
        return str(lifted.source) if lifted else f"a tensor of shape {list(tensor.shape)}"

    # -- host numbers ----------------------------------------------------------------------------------

    def record_host(self, function: Callable[..., Any], args: tuple[Any, ...], hint: Any) -> Any:
        """Adds a call of a Python function on host numbers; gives the number that stands for its result."""
        nodes = tuple(a.node.fx_node if isinstance(a, (torch.SymFloat, torch.SymInt)) else a for a in args)
        known = all(a.node.known for a in args if isinstance(a, (torch.SymFloat, torch.SymInt)))
        key = (function, *((type(n), n) for n in nodes))
        if key not in self.host:  # pure functions of numbers: the same call is the same number
            self.host[key] = self.emit(function, nodes, value=hint)
        return make_host(HostNode(self, self.host[key], hint, known))

    def item(self, tensor: torch.Tensor) -> Any:
        """`.item()`: a host number, or the decision at once for a boolean."""
        node = self.emit(aten._local_scalar_dense.default, (self.ref(tensor).read(self.emit),), value=_stand_in(tensor))
        if tensor.dtype == torch.bool:
            return self.decide(node, False, user_line())
        if tensor.dtype.is_complex:
            raise DataDependentError("Python needs the value of a complex tensor", user_line())
        return make_host(HostNode(self, node, node.meta["info"].value, known=False))

    def decide(self, node: fx.Node, hint: Any, line: str) -> Any:
        """Python branches on a host number: its value now becomes a guard, if it is cheap to know."""
        predicate = self.predicates.get(node)
        if predicate is None:
            predicate = self.predicates[node] = decide(node, self.lifted, self.constants, line)
        return predicate.expected

    def token(self, number: HostNode) -> float:
        """A float that stands for a host number where C++ wants a double."""
        if not self.in_call:
            return self.escaped(number, "a C function needs its value")
        token = 0.5 + (len(self.tokens) + 1) * 2.0**-45
        self.tokens[token] = number
        return token

    def escaped(self, number: HostNode, how: str) -> Any:
        raise DataDependentError(
            f"Python needs a number that is only known when the step runs: {how}",
            user_line(),
            "use it in arithmetic and as operators' arguments only, or return it from the step",
        )


def memory_of(tensor: torch.Tensor) -> int:
    """Identifies the memory that a tensor lies in."""
    return tensor.untyped_storage().data_ptr()


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor lies in, as one flat tensor of its dtype."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to the leaves of nested lists, tuples and dicts."""
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        return tuple(map_leaves(function, item) for item in tree)
    if isinstance(tree, list):
        return [map_leaves(function, item) for item in tree]
    if isinstance(tree, dict):
        return {key: map_leaves(function, item) for key, item in tree.items()}
    return function(tree)


def _fake_value(leaf: Any) -> Any:
    return leaf.meta["info"].value if isinstance(leaf, fx.Node) else leaf


def _stand_in(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1


def _positional(func: Overload, args: Any, kwargs: Any) -> list[Any]:
    names = [a.name for a in func._schema.arguments]
    return [*args, *(kwargs.get(name) for name in names[len(args) :])]


def all_args(func: Overload, args: Any, kwargs: Any) -> dict[int, Any]:
    """Position -> argument, however it was passed."""
    return dict(enumerate(_positional(func, args, kwargs)))


def _defaults(func: Overload, twin: Twin, given: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that an operator has a default for and its twin has not."""
    if not isinstance(twin.target, Overload):
        return {}
    needed = {a.name for a in twin.target._schema.arguments if not a.has_default_value()}
    rest = func._schema.arguments[given:]
    return {a.name: a.default_value for a in rest if a.has_default_value() and a.name in needed - set(kwargs)}


def _scale_position(func: Overload) -> int:
    return next((i for i, a in enumerate(func._schema.arguments) if a.name == "grad_scale"), -1)


def _is_list_op(func: Overload) -> bool:
    return not func._schema.returns and func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


def _translated(func: Any, error: Exception) -> CaptureError:
    name = type(error).__name__
    if "Device" in name:
        return UnsupportedError(f"{func}: {error}", user_line(), "move the model and its batch to one device")
    if "Data" in name or "Dynamic" in name:
        return DataDependentError(
            f"the shape or value of the result of {func} depends on data",
            user_line(),
            "use a form with a fixed shape, such as torch.where or a mask",
        )
    return UnsupportedError(
        f"{func} has no rule for fake tensors: {error}",
        user_line(),
        "register one with torch.library.register_fake",
    )


# Ranges that torch.optim marks for a profiler, and questions about a tensor's device: no part of the step.
UNRECORDED = ("profiler", "prim")

# Views of the whole tensor, of the same shape: the result is the same way into memory.
TRANSPARENT = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


def _lift_fresh(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else recorder._constant(tensor)


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: Recorder.item,
    aten.item.default: Recorder.item,
    aten.lift_fresh.default: _lift_fresh,
    aten.lift.default: _lift_fresh,
}
