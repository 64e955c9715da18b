"""What one call of a step can see, before it runs: where each tensor, number and module is found."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from wholestep.capture.exchange.detached_aliases import Twins
from wholestep.capture.guards.compared_values import is_plain
from wholestep.capture.snapshot.places import Found, Number, Place
from wholestep.capture.snapshot.walk import Walk
from wholestep.capture.sources import Call, Replacement, Source
from wholestep.errors import UnsupportedError
from wholestep.tensor_parts import part_of

# Path of a module below the outermost one in sight, and the module -> the module to trace in its place.
Replace = Callable[[str, torch.nn.Module], torch.nn.Module]


class Seen:
    """Everything that one call of a step can see.

    Attributes:
        call: the function and its arguments.
        places: every holder that the walk met, with a copy of its contents.
        tensors: id of a tensor -> where it was found and what it is for.
        numbers: floats among optimizers' settings and numbers that vary, which are inputs of the step.
        replaced: modules, each with the one that takes its place while the step is traced.
        twins: what takes the place of tensors while the step is traced.
        young: gives the ids of what was made since the step began to be traced; None for all that the walk has not met.
    """

    young: Callable[[], set[int]] | None = None

    def __init__(self, call: Call, names: frozenset[str] = frozenset(),
                 varying: frozenset[str] = frozenset(), replace: Replace | None = None) -> None:
        self.call, self.names, self.varying, self.replace = call, names, varying, replace
        self.walk = Walk(call, names, varying)
        self.places: list[Place] = self.walk.places
        self.tensors: dict[int, Found] = self.walk.tensors
        self.numbers: list[Number] = self.walk.numbers
        self.replaced: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        if replace is not None:
            self._replace(replace)
        self._hidden: dict[int, str] | None = None
        self._versions: list[tuple[torch.Tensor, int, Any]] = []
        self.twins = Twins(())
        self._count_versions()

    def _replace(self, replace: Replace) -> None:
        """Asks for each module in sight what takes its place, and walks that too."""
        asked: dict[int, str] = {}
        modules: dict[str, torch.nn.Module] = {}
        for place in list(self.places):
            if not isinstance(place.owner, torch.nn.Module) or id(place.owner) in asked:
                continue
            for path, module in place.owner.named_modules():
                source = self.walk.first.get(id(module))
                if id(module) in asked or source is None:
                    continue
                asked[id(module)] = path
                new = replace(path, module)
                if new is not module:
                    self.replaced.append((module, new))
                    modules[source.path] = new
                    self.walk.queue(new, Replacement(source))
        self.call = self.walk.call = dataclasses.replace(self.call, replaced=modules)
        self.walk.run()

    def find(self, tensor: torch.Tensor) -> Found | None:
        """Where a tensor was found; None for one that the step made itself.

        A tensor in an attribute that only a library reads is looked for when it is met, and its attribute then
        counts as named by the step.
        """
        found = self.tensors.get(id(tensor)) or self.twins.found.get(id(tensor))
        if found is None and self.walk.hidden:
            name = self._out_of_sight().get(id(tensor))
            if name is not None:
                self.names |= {name}
                self.walk.reach.names.add(name)
                self.walk.run()
                self._count_versions()
                self._hidden = None
                found = self.tensors.get(id(tensor))
                if found is not None and part_of(found.tensor) is not None:
                    raise UnsupportedError(
                        f"{found.source}, of which each rank holds a part, is only found when it is used",
                        remedy="pass it to the step as an argument",
                    )
        return found if found is not None and found.tensor is tensor else None

    def versions(self) -> dict[int, int]:
        """id of each tensor that the step may be given, twins included -> its version counter."""
        known = [*self.tensors.items(), *self.twins.found.items()]
        return {key: f.tensor._version for key, f in known if not f.tensor.is_inference()}

    def _out_of_sight(self) -> dict[int, str]:
        """id of each tensor below an attribute that no code names -> that attribute."""
        if self._hidden is None:
            self._hidden = {}
            for place, key, _ in self.walk.hidden:
                for held in tensors_below(place.before[key]):
                    self._hidden.setdefault(id(held), key)
        return self._hidden

    def _count_versions(self) -> None:
        """Notes version counters and histories of tensors met since the last time."""
        known = len(self._versions)
        new = [f.tensor for f in self.tensors.values() if not f.tensor.is_inference()][known:]
        self._versions += [(tensor, tensor._version, tensor.grad_fn) for tensor in new]

    @property
    def generators(self) -> dict[int, tuple[torch.Generator, Source]]:
        """The random generators that the step can see."""
        return self.walk.generators

    def ask(self, setting: str) -> Any:
        """The value of a setting when the step begins, which becomes a guard."""
        return self.walk.outside.settings.ask(setting)

    def module_names(self) -> dict[int, str]:
        """id of each module that the step can see -> its path, as in ``model.layers.0``."""
        names: dict[int, str] = {}
        for place in self.places:
            if isinstance(place.owner, torch.nn.Module):
                path = re.sub(r"^\w+\['(\w+)'\]", r"\1", str(place.source))
                names.setdefault(id(place.owner), path.removesuffix(".__dict__"))
        return names


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
