"""The snapshot: what a step could see before it ran, so that all of it can be put back and compared."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import torch

from wholestep.capture.guards import guards as guarding
from wholestep.capture.guards.compared_values import is_plain, memory
from wholestep.capture.guards.guards import Guard
from wholestep.capture.snapshot.called_code import CalledCode
from wholestep.capture.snapshot.garbage_collection import no_collection
from wholestep.capture.snapshot.reachable import TensorInput
from wholestep.capture.snapshot.walk import begin, extend, reachable, walk
from wholestep.capture.sources import Args, Attr, Call, Kwargs, Replacement, Root, Source, lineage
from wholestep.capture.substitutes.substitutes import Substitutes
from wholestep.torch_compat import HOOK_TABLES, set_versions

# Path of a module below the outermost one in sight, and the module -> the module to trace in its place.
Replace = Callable[[str, torch.nn.Module], torch.nn.Module]


class Snapshot:
    """Everything that one call of a step can see, before it runs: walks it and records it.

    Args:
        names: settings and variables of the environment that the step is known to read.
        varying: paths of numbers that are inputs rather than guards.
        replace: gives the modules to trace in the place of others.
        called: code that earlier captures have seen to run besides.

    Attributes:
        call: the function and its arguments.
        reachable: every container with its contents, every tensor and number.
        replaced: modules, each with the one that takes its place while the step is traced.
        substitutes: what stands in the place of others while the step is traced.
        differentiable: whether tensors with a history are inputs that gradients flow to, or mere data.
        replaced_gradients: paths of gradients that the step replaces, and that nothing in it reads.
        new_ids: gives the ids of what was made since tracing began; None for all that the walk has not met.

    Raises:
        CaptureError: something is in reach that cannot be captured.
    """

    new_ids: Callable[[], set[int]] | None = None

    @no_collection()
    def __init__(self, fn: Callable[..., Any], args: Args = (), kwargs: Kwargs | None = None,
                 names: frozenset[str] = frozenset(), varying: frozenset[str] = frozenset(),
                 replace: Replace | None = None, differentiable: bool = True,
                 called: CalledCode | None = None) -> None:
        call = self.call = Call(fn, tuple(args), dict(kwargs or {}))
        self.names, self.varying, self.replace = names, varying, replace
        self.differentiable = differentiable
        self.called = CalledCode() if called is None else called
        self._known = len(self.called)
        self.reachable = reachable(call, names, varying, self.called)
        self.containers, self.tensors = self.reachable.containers, self.reachable.tensors
        self.numbers = self.reachable.numbers
        self.replaced: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        if replace is not None:
            self._replace(replace)
        self.substitutes = Substitutes(self.reachable, self.replaced)
        self.replaced_gradients: frozenset[str] = frozenset()
        self._versions = {key: f.tensor._version for key, f in self.tensors.items() if not f.tensor.is_inference()}
        self._grad_mode = torch.is_grad_enabled()
        self._guards: list[Guard] | None = None

    def _replace(self, replace: Replace) -> None:
        """Asks for each module in sight what takes its place, and walks that too."""
        asked: dict[int, str] = {}
        modules: dict[str, torch.nn.Module] = {}
        for container in list(self.containers):
            if not isinstance(container.owner, torch.nn.Module) or id(container.owner) in asked:
                continue
            for path, module in container.owner.named_modules():
                source = self.reachable.first.get(id(module))
                if id(module) in asked or source is None:
                    continue
                asked[id(module)] = path
                new = replace(path, module)
                if new is not module:
                    self.replaced.append((module, new))
                    modules[source.path] = new
                    self.reachable.queue(new, Replacement(source))
        self.call = self.reachable.call = dataclasses.replace(self.call, replaced=modules)
        walk(self.reachable)

    @no_collection()
    def extend(self) -> bool:
        """Takes in what code can see that was seen to run while the step was traced, once all is put back.

        Returns:
            False where the step has to be traced again, from a new snapshot.
        """
        self.called.settle()
        self.names |= self.called.places.keys()
        for name, read in self.called.places.items():
            self.reachable.outside.settings.note(name, read)
        return len(self.called) == self._known or extend(self.reachable, self.called)

    # what was found ------------------------------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> TensorInput | None:
        """Where a tensor was found; None for one that the step made itself, or that is out of its sight."""
        found = self.tensors.get(id(tensor)) or self.substitutes.aliases.found.get(id(tensor))
        return found if found is not None and found.tensor is tensor else None

    def versions(self) -> dict[int, int]:
        """id of each tensor that the step may be given, detached aliases included -> its version counter."""
        known = [*self.tensors.items(), *self.substitutes.aliases.found.items()]
        return {key: f.tensor._version for key, f in known if not f.tensor.is_inference()}

    @contextmanager
    def unwritten(self, tensor: torch.Tensor) -> Iterator[None]:
        """Counts no write to a view meanwhile: asked about a written one, autograd would make its history anew."""
        now = 0 if tensor.is_inference() else tensor._version
        before = self._versions.get(id(tensor), now)
        if not tensor._is_view() or now == before:
            yield
            return
        set_versions((tensor,), (before,))
        try:
            yield
        finally:
            set_versions((tensor,), (now,))

    def module_names(self) -> dict[int, str]:
        """id of each module that the step can see -> its path, as in ``model.layers.0``."""
        names: dict[int, str] = {}
        for container in self.containers:
            if isinstance(container.owner, torch.nn.Module):
                path = re.sub(r"^\w+\['(\w+)'\]", r"\1", str(container.source))
                names.setdefault(id(container.owner), path.removesuffix(".__dict__"))
        return names

    def sizable(self) -> list[TensorInput]:
        """The tensors among the arguments that no other tensor shares memory with, and that have no history."""
        users = Counter(memory(f.tensor) for f in self.tensors.values())
        free = [f for f in self.tensors.values() if _is_bare(f.tensor) and users[memory(f.tensor)] == 1]
        held = (torch.nn.Module, torch.optim.Optimizer)
        holders = {one.source.path for one in self.containers if isinstance(one.owner, held)}
        return [f for f in free if f.kind in ("tensor", "batch") and _is_argument(f.source, holders)]

    def trained_besides(self, sources: Container[str]) -> list[TensorInput]:
        """What optimizers train that is not at one of these sources."""
        trained = [found for key, found in self.tensors.items() if key in self.reachable.trained]
        return [found for found in trained if found.source.text not in sources]

    # what must hold ------------------------------------------------------------------------------------

    def guards(self, sizeless: Container[str] = ()) -> list[Guard]:
        """What must hold in a later call: derived from the contents at the time of the snapshot.

        Args:
            sizeless: paths of tensors whose sizes and strides are no matter.
        """
        if self._guards is None:
            replaced = self.replaced_gradients
            found = guarding.guards(self.reachable)
            self._guards = [g for g in found if not replaced or all(s.path not in replaced for s in lineage(g.source))]
        return [Guard(g.source, g.kind, (*g.expected[:-2], None, None)) if g.kind == "tensor" and g.key[0] in sizeless
                else g for g in self._guards] if sizeless else self._guards

    def replaces_gradient_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that the walk found is one of those."""
        grads = self.replaced_gradients
        return bool(grads) and Attr(self.tensors[id(tensor)].source, "grad").path in grads

    def replaces_gradients(self, tensors: Sequence[torch.Tensor]) -> None:
        """Whether these tensors have a ``.grad`` before the step is no matter: it replaces them unread."""
        found = [self.tensors[id(tensor)] for tensor in tensors if id(tensor) in self.tensors]
        self.replaced_gradients = frozenset(Attr(f.source, "grad").path for f in found)

    def clear_autocast_cache(self) -> None:
        """Clears it, but for a segment, whose operators are cast, and around which a region may keep casts."""
        if self.differentiable:
            torch.clear_autocast_cache()

    def restore(self) -> None:
        """Puts everything back: contents and their order, gradients, flags, hooks, versions, lifted numbers."""
        torch.set_grad_enabled(self._grad_mode)
        self.clear_autocast_cache()
        self.substitutes.unsharded.back()  # tensors have their own data again
        self.reachable.add_given()
        # first: autograd is asked for the gradients of views, which is an error for those whose base was written
        counted = [(self.tensors[key].tensor, version) for key, version in self._versions.items()]
        if moved := [(tensor, version) for tensor, version in counted if tensor._version != version]:
            set_versions(tuple(t for t, _ in moved), tuple(v for _, v in moved))
        failures: list[Exception] = []
        for container in self.containers:
            try:
                if not same(container.kind.read(container.value), container.before):
                    container.kind.write(container.value, container.before)
            except Exception as error:  # an object that refuses: the rest must come back all the same
                failures.append(error)
        self.substitutes.restore()
        if failures:
            raise failures[0]


def _is_argument(source: Source, holders: Container[str]) -> bool:
    """Whether a source is an argument, or inside of one that is none of the holders, given by their paths."""
    *_, root = above = [*lineage(source)]
    return isinstance(root, Root) and root.argument is not None and not any(s.path in holders for s in above)


def _is_bare(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements in memory of its own, no history, no gradient and no hooks."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() > 0
    if not plain or not tensor.is_leaf or tensor.grad is not None or any(getattr(tensor, name) for name in HOOK_TABLES):
        return False
    return not tensor.is_conj() and not tensor.is_neg() and not tensor.is_inference()


def tensors_below(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in containers and objects below a value."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        if is_plain(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            todo += value
        elif not isinstance(value, (type, ModuleType)):
            todo += getattr(value, "__dict__", {}).values()


def same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """True when two views of a container have the same keys in the same order with the very same values."""
    return len(now) == len(before) and all(
        k is j or (type(k) is type(j) and type(k) in (str, int) and k == j) for k, j in zip(now, before, strict=True)
    ) and all(v is w for v, w in zip(now.values(), before.values(), strict=True))


def unguarded_in_sight(fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> list[Any]:
    """What a call could see whose contents no guard compares, as NumPy arrays; past what cannot be walked."""
    found = begin(Call(fn, tuple(args), dict(kwargs)))
    while found.queued or any(found.waiting):
        with suppress(Exception), no_collection():
            walk(found)
    return found.unguarded
