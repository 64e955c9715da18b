"""Inputs: the real tensors that a step reads, each a placeholder with a fake twin from when it is first met."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.errors import CaptureError, UnsupportedError
from wholestep.torch_compat import HOOK_TABLES, FakeTensor, address_of, below_autograd, no_modes
from wholestep.trace.functionalize.aliases import Geometry, Ref, elements
from wholestep.trace.record.options import Found, Setting
from wholestep.trace.record.provenance import user_line
from wholestep.trace.record.tape import Tape, fake_value, leaves, map_leaves

aten = torch.ops.aten


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


class Inputs(Tape):
    """A tape that knows what stands behind each tensor of the step."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.find, self.shared, self.parts = setting.find, setting.shared, setting.parts
        self.twins, self.generators, self.ask = setting.twins, setting.generators, setting.ask
        self.flat: dict[int, Lifted] = {}
        self.reached: dict[int, Lifted] = {}  # memory -> an input in it beyond whose elements the step reads
        self.offsets: dict[int, Lifted] = {}  # inputs whose storage offset the graph or Python has read
        self.lifted: list[Lifted] = []
        self.by_id: dict[int, Lifted] = {}
        self.reshaped: dict[int, Ref] = {}  # id of a twin that became a view of what it was -> its way into memory
        self.given: list[tuple[torch.Tensor, bool, dict[str, Any]]] = []  # stand-ins, with their flag and attributes
        self.drawn: dict[int, Lifted] = {}  # the generators that the step draws from

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
                "pass the tensor to the step as an argument; if a library keeps it, compile the parts beside it",
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
        item = self.by_id[id(tensor)] = Lifted(base.node, found.source, tensor, ref, twin)
        self.offsets[id(item)] = item
        return item

    def check_reach(self, place: Geometry, root: Ref) -> None:
        """Notes that a view reaches beyond the elements of an input: its memory has to be an input then."""
        here, index = root.geometry, root.storage.input
        inside = here.offset <= place.offset and place.offset + place.extent <= here.offset + here.extent
        if index is None or inside or place.dtype != here.dtype or not elements(place.shape):
            return
        item = self.lifted[index]
        if isinstance(item.value, torch.Tensor) and not isinstance(item.value, FakeTensor) and not item.members:
            self.reached[memory_of(item.value)] = item

    def read_offset(self, tensor: torch.Tensor) -> None:
        """The storage offset of an input, or of a view of one, decides what the step does: it becomes a guard."""
        if isinstance(tensor, FakeTensor):
            ref = getattr(tensor, "wholestep_ref", None)
        else:
            with no_modes():  # Python asks, with the recorder on
                ref = self.ref(tensor) if self.find(tensor) is not None else None
        index = ref.storage.input if ref is not None else None
        item = self.lifted[index] if index is not None else None
        if item is not None and isinstance(item.value, FakeTensor):
            raise UnsupportedError(f"the storage offset of {item.source}, of symbolic size, is read", user_line())
        if item is not None and not item.members:
            self.offsets[id(item)] = item

    def known(self, real: torch.Tensor) -> Lifted:
        """A tensor with values that the step may hold, and C++ may read, as a constant of the graph."""
        fake = self.constant(real)
        ref: Ref = fake.wholestep_ref  # type: ignore[attr-defined]
        real.wholestep_ref = ref  # type: ignore[attr-defined]
        self.by_id[id(real)] = Lifted(ref.storage.value, "constant", real, ref, fake)
        return self.by_id[id(real)]

    def _fakes(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            self.ref(leaf)
            return leaf if isinstance(leaf, FakeTensor) else self.by_id[id(leaf)].fake
        return fake_value(leaf)

    def _reads(self, leaf: Any) -> Any:
        return self.ref(leaf).read(self.emit) if isinstance(leaf, torch.Tensor) else leaf

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        fakes = map_leaves(self._fakes, args), map_leaves(self._fakes, kwargs)
        with self.fake_mode, torch.no_grad(), below_autograd():
            out = func(*fakes[0], **fakes[1])
        self.watch.add(t for t in leaves(out) if isinstance(t, torch.Tensor) and not hasattr(t, "wholestep_ref"))
        return out

    def _describe(self, tensor: torch.Tensor) -> str:
        lifted = self.by_id.get(id(tensor))
        return str(lifted.source) if lifted else f"a tensor of shape {list(tensor.shape)}"


def memory_of(tensor: torch.Tensor) -> int:
    """Identifies the memory that a tensor lies in."""
    return address_of(tensor.untyped_storage())


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor lies in, as one flat view of its dtype that shares its version counter."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
