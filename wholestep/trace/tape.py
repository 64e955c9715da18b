"""The tape: the graph under construction, and what stands behind each tensor and number of the step.

A real tensor that is met for the first time is *lifted*: it becomes a placeholder and gets a fake twin. A
number that is only known when the step runs is a node too (`host.py`).
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from wholestep.errors import CaptureError, DataDependentError, UnsupportedError
from wholestep.ir import Gradient, Input, InputKind, NodeInfo, set_info
from wholestep.parts import Part
from wholestep.torch_compat import (
    HOOK_TABLES,
    FakeTensor,
    below_autograd,
    empty_fake,
    no_modes,
    sequence_number,
    strict_fake_mode,
)
from wholestep.trace.alias import Geometry, Ref, Storage
from wholestep.trace.host import HostNode, make_host
from wholestep.trace.predicates import Predicate, decide
from wholestep.trace.sizes import Sizes, held, is_size
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
    @property
    def beginning(self) -> Any: ...
    @property
    def entangled(self) -> bool: ...
    @property
    def detached(self) -> bool: ...


class ReshapedInput(Exception):  # noqa: N818 - a request, not an error
    """The step makes an input a view of what it was, as `t_` does; trace again, with a twin in its place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__("an input is given another shape in place")
        self.tensor = tensor


@dataclass(eq=False)
class Lifted:
    """One placeholder: a real tensor with its fake twin, a number, or memory that several tensors share.

    Attributes:
        source: where the value is found; for shared memory, where its first member is.
        members: the tensors in a shared memory, whose value is then the memory as one flat tensor.
    """

    node: fx.Node
    source: Any
    value: torch.Tensor | torch.Generator | float
    ref: Ref | None = None
    fake: Any = None
    members: list[torch.Tensor] = field(default_factory=list)



class Tape:
    """The graph of one run of a step, and the values that its tensors and numbers have.

    Args:
        find: gives the source of a real tensor, or None when it is reachable from nowhere known.
        whereabouts: follows modules and optimizers.
        shared: memories in which several inputs lie of which one is written; each becomes one input.
        parts: id of a real tensor -> what the rank holds of it; its memory has no values while the step is traced.
        guard_data: numbers and shapes that depend on data become guards, not errors.
        sizes: holds the symbols of tensors whose sizes are some.
    """

    def __init__(
        self,
        find: Callable[[torch.Tensor], Found | None],
        whereabouts: Whereabouts,
        shared: frozenset[int] = frozenset(),
        guard_data: bool = False,
        parts: Mapping[int, Part] | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.sizes = sizes
        self.find, self.whereabouts, self.shared, self.guard_data = find, whereabouts, shared, guard_data
        self.parts = parts or {}
        self.flat: dict[int, Lifted] = {}
        self.graph = fx.Graph()
        self.fake_mode = sizes.mode if sizes else strict_fake_mode()
        self.lifted: list[Lifted] = []
        self.inputs: list[Input] = []
        self.taken: set[str] = set()
        self.by_id: dict[int, Lifted] = {}
        self.twins: Container[int] = ()  # ids of the tensors that stand for inputs while the step is traced
        self.reshaped: dict[int, Ref] = {}  # id of a twin that became a view of what it was -> its way into memory
        self.given: list[tuple[torch.Tensor, bool, dict[str, Any]]] = []  # stand-ins, with their flag and attributes
        self.constants: dict[str, torch.Tensor] = {}
        self.tokens: dict[float, HostNode] = {}
        self.spent: set[float] = set()
        self.in_call = 0
        self.callee: Any = None  # the function of torch's Python API that the step is calling
        self.host: dict[tuple[Any, ...], fx.Node] = {}
        self.predicates: dict[fx.Node, Predicate] = {}
        self.gradients: list[Gradient] = []
        self.last_placeholder: fx.Node | None = None
        # random generators that the step can see, with their sources, by `generator_id`; and those that it draws from
        self.generators: Mapping[int, tuple[torch.Generator, Any]] = {}
        self.drawn: dict[int, Lifted] = {}

    # -- the graph -------------------------------------------------------------------------------------

    def emit(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, value: Any = None
    ) -> fx.Node:
        """Adds a call; runs it on the fake values of its arguments unless the value is given."""
        kwargs = kwargs or {}
        if value is None:
            value = self._run(target, args, kwargs)
        if self.sizes is not None:
            args, kwargs = map_leaves(held, args), map_leaves(held, kwargs)
        node = self.graph.call_function(target, args, kwargs)
        return set_info(node, self._record(value))

    def _run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fakes = map_leaves(_fake_value, args), map_leaves(_fake_value, kwargs)
        with self.fake_mode, torch.no_grad(), below_autograd():
            return target(*fakes[0], **fakes[1])

    def note(self) -> int:
        """Notes whose module the autograd node belongs to that was made last; gives its sequence number.

        Autograd makes an operator's node before it calls the operator.
        """
        seq = max(sequence_number() - 1, 0)
        self.whereabouts.module_of_seq.setdefault(seq, self.whereabouts.module())
        return seq

    def _record(self, value: Any) -> NodeInfo:
        place = self.whereabouts
        seq = place.seq()
        if seq is None:
            seq, module = self.note(), place.module()
        else:
            module = place.module_of_seq.get(seq, "")
        return NodeInfo(value, place.phase(), seq, user_line(), module)

    def placeholder(self, source: Any, kind: InputKind, value: Any) -> fx.Node:
        """A new input of the graph, after those there are."""
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
        unique, count = name, 1
        while unique in self.taken:
            unique, count = f"{name}_{count}", count + 1
        self.taken.add(unique)
        return unique

    # -- tensors ---------------------------------------------------------------------------------------

    def lift_number(self, source: Any, value: float) -> Any:
        """A placeholder for a Python float or int; gives the host number that stands for it."""
        node = self.placeholder(source, "number", value)
        self.lifted.append(Lifted(node, source, value))
        return make_host(HostNode(self, node, value, known=True))

    def stand_in(self, found: Found) -> torch.Tensor:
        """An input that the step is given under a fake with symbolic sizes."""
        assert self.sizes is not None
        fake = self.sizes.stand_in(found.tensor, found.source)
        lifted = Lifted(self.placeholder(found.source, found.kind, fake), found.source, fake)
        lifted.ref, lifted.fake = self.root(fake, lifted.node), fake
        lifted.ref.storage.input = len(self.lifted)
        self.lifted.append(lifted)
        self.by_id[id(fake)] = lifted
        self.given.append((fake, bool(fake.requires_grad), vars(fake) | vars(found.tensor)))
        return fake

    def refuse_changed(self) -> None:
        """Refuses what a step did to Python's side of a stand-in: the tensor that it stands for knows nothing of it."""
        for fake, required, attributes in self.given:
            hooked = any(getattr(fake, name) for name in HOOK_TABLES)
            now = {name: value for name, value in vars(fake).items() if not name.startswith(("_", "wholestep_"))}
            set_anew = any(name not in attributes or attributes[name] is not now[name] for name in now)
            flag = fake.is_leaf and fake.requires_grad != required
            if (fake.is_leaf and fake.grad is not None) or hooked or flag or set_anew:
                source = self.by_id[id(fake)].source
                what = f"{source}, of symbolic size, gets a gradient, a hook, a flag or an attribute"
                raise UnsupportedError(what, user_line())

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The way into memory of a tensor that the step uses."""
        if isinstance(tensor, FakeTensor):
            found = getattr(tensor, "wholestep_ref", None)
            if found is None and getattr(tensor, "fake_mode", None) is not self.fake_mode:
                raise UnsupportedError(
                    f"the step reads a fake tensor of shape {list(tensor.shape)} from outside",
                    user_line(),
                    "give models of fake tensors to explain(), as arguments of the step; they have no values to run on",
                )
            if found is None:
                raise UnsupportedError("an operator's result was made outside of the recorder", user_line())
            return found
        lifted = self.lift_once(tensor)
        assert lifted.ref is not None
        return self.reshaped.get(id(tensor), lifted.ref)

    def lift_once(self, tensor: torch.Tensor) -> Lifted:
        """The input that a real tensor is, or becomes."""
        return self.by_id.get(id(tensor)) or self.lift(tensor)

    def lift(self, tensor: torch.Tensor) -> Lifted:
        """Makes a real tensor an input of the graph.

        Raises:
            CaptureError: nobody knows where it comes from, or tracing cannot follow it.
        """
        found = self.find(tensor)
        if found is None:
            raise CaptureError(
                f"the step reads a tensor of shape {list(tensor.shape)} that none of its arguments, closures, "
                "globals, modules or optimizers holds, so a replay could not find its value",
                user_line(),
                "pass the tensor to the step as an argument",
            )
        if tensor.layout != torch.strided:
            what = f"{found.source} holds a sparse tensor between calls"
            raise UnsupportedError(what, user_line(), "use dense tensors")
        begins_inside = found.detached or tensor._base is not None or id(tensor) in self.twins
        if tensor.requires_grad and not tensor.is_leaf and not begins_inside:
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
        lifted = Lifted(self.placeholder(found.source, found.kind, fake), found.source, tensor)
        ref = self.root(fake, lifted.node)
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
            base = Lifted(self.placeholder(f"memory of {found.source}", found.kind, fake), found.source, flat)
            base.ref, base.fake = self.root(fake, base.node), fake
            base.ref.storage.input = len(self.lifted)
            self.lifted.append(base)
            self.flat[memory] = base
        assert base.ref is not None
        if tensor.dtype != base.ref.geometry.dtype:
            raise UnsupportedError(f"{found.source} shares written memory under another dtype", user_line())
        base.members.append(tensor)
        geometry = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        with self.fake_mode, torch.no_grad():
            twin = torch.as_strided(base.fake, *geometry)
        ref = Ref(base.ref.storage, Geometry.of(tensor), base.ref, aten.as_strided.default, geometry)
        self.by_id[id(tensor)] = Lifted(base.node, found.source, tensor, ref, twin)
        return self.by_id[id(tensor)]

    def root(self, fake: torch.Tensor, node: fx.Node) -> Ref:
        """Makes a tensor the root of memory of its own, with a node's value as content."""
        storage = Storage(node)
        ref = Ref(storage, Geometry.of(fake), node=node, generation=0)
        storage.root = ref
        fake.wholestep_ref = ref  # type: ignore[attr-defined]
        return ref

    def constant(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor that the step builds from Python numbers: a constant of the graph."""
        name = f"constant{len(self.constants)}"
        self.constants[name] = real.detach().clone()
        with self.fake_mode:
            fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=real.device)
        node = set_info(self.graph.get_attr(name), self._record(self.value(fake)))
        self.root(fake, node)
        return fake

    def value(self, fake: torch.Tensor) -> torch.Tensor:
        """A fake of the same geometry for the graph to keep: the step's own tensor and memory can die."""
        if fake.layout != torch.strided or fake.is_conj() or fake.is_neg():
            with self.fake_mode, torch.no_grad(), below_autograd():
                return fake.detach()
        return empty_fake(self.fake_mode, fake)

    def _fakes(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            self.ref(leaf)
            return leaf if isinstance(leaf, FakeTensor) else self.by_id[id(leaf)].fake
        return _fake_value(leaf)

    def _reads(self, leaf: Any) -> Any:
        return self.ref(leaf).read(self.emit) if isinstance(leaf, torch.Tensor) else leaf

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        fakes = map_leaves(self._fakes, args), map_leaves(self._fakes, kwargs)
        with self.fake_mode, torch.no_grad(), below_autograd():
            return func(*fakes[0], **fakes[1])

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
        hosts = [isinstance(a, (torch.SymFloat, torch.SymInt)) and not is_size(a) for a in args]
        nodes = tuple(a.node.fx_node if host else a for a, host in zip(args, hosts, strict=True))
        known = all(a.node.known for a, host in zip(args, hosts, strict=True) if host)
        key = (function, *((type(n), str(n) if is_size(n) else n) for n in nodes))
        if key not in self.host:  # pure functions of numbers: the same call is the same number
            self.host[key] = self.emit(function, nodes, value=hint)
        return make_host(HostNode(self, self.host[key], hint, known))

    def size(self, number: Any) -> Any:
        """A number that follows from symbolic sizes, as a host number."""
        return self.record_host(operator.pos, (number,), number.node.hint)

    def item(self, tensor: torch.Tensor) -> Any:
        """`.item()`: a host number, or the decision at once for a boolean."""
        node = self.emit(aten._local_scalar_dense.default, (self.ref(tensor).read(self.emit),), value=_stand_in(tensor))
        if tensor.dtype == torch.bool:
            return self.decide(node, False, user_line())
        if self.guard_data and (tensor.dtype.is_complex or self.callee is not torch.Tensor.item):
            return self.decide(node, None, user_line())  # C++ asked
        if tensor.dtype.is_complex:
            raise DataDependentError("Python needs the value of a complex tensor", user_line())
        return make_host(HostNode(self, node, node.meta["info"].value, known=False))

    def decide(self, node: fx.Node, hint: Any, line: str, fixed: bool = False) -> Any:
        """Python branches on a host number: its value now becomes a guard, if it is cheap to know.

        Args:
            fixed: it is the same at each call.
        """
        predicate = self.predicates.get(node)
        if predicate is None:
            absent = {item.node for item in self.lifted if id(item.value) in self.parts}
            predicate = decide(node, self.lifted, self.constants, self._is_data, line, self.guard_data or fixed, absent)
            self.predicates[node] = predicate
        return predicate.expected

    def _is_data(self, node: fx.Node) -> bool:
        return any(i.name == node.target and i.kind in ("batch", "tensor", "buffer") for i in self.inputs)

    def token(self, number: HostNode) -> float:
        """A float that stands for a host number where C++ wants a double."""
        if not self.in_call:
            return self.escaped(number, "a C function needs its value")
        token = 0.5 + (len(self.tokens) + 1) * 2.0**-45
        self.tokens[token] = number
        return token

    def escaped(self, number: HostNode, how: str) -> Any:
        if self.guard_data:
            return self.decide(number.fx_node, number.hint, user_line())
        raise DataDependentError(
            f"Python needs a number that is only known when the step runs: {how}",
            user_line(),
            "use it in arithmetic and as operators' arguments only, or return it from the step",
        )


def memory_of(tensor: torch.Tensor) -> int:
    """Identifies the memory that a tensor lies in."""
    return tensor.untyped_storage().data_ptr()


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor lies in, as one flat view of its dtype that shares its version counter."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


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


