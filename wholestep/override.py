"""Overrides: other modules to trace in the place of the user's, and a last word on the expanded graph.

May import: nothing of the package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn


class Override:
    """What a step computes in the place of some modules, and what becomes of its graph.

    Derive from it, overwrite either method or both, and give instances to ``ws.compile(module_override=[…])``.
    """

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        """The module to trace in the place of one of the model's; that one itself where nothing changes.

        Asked once for each module of the model. The user's objects stay as they are. Parameters and buffers of a
        replacement are inputs of the step like any other, and keep what the step makes of them; it is in training
        where the module is whose place it takes, and may call that one.

        Args:
            fqn: path of the module in the outermost module that the step can see, ``""`` for that one itself.
            module: the user's module.
        """
        return module

    def transform(self, gm: fx.GraphModule, flat_state: list[torch.Tensor | torch.Generator | float]) -> fx.GraphModule:
        """The graph of one rank, collectives included, as it shall run; called once for each program.

        Args:
            gm: may be changed in place. Its placeholders and outputs stay. Calls of functions may be added to it.
            flat_state: what the step reads, in the order of the placeholders: the real parameters, buffers, state
                (as it begins, where the step makes it) and other tensors, whole where a plan has each rank keep a
                part, and numbers such as a learning rate.
        """
        return gm


class Overrides:
    """The overrides of one compiled step.

    Raises:
        TypeError: something else than an `Override` is among them.
    """

    def __init__(self, overrides: Sequence[Override]) -> None:
        for one in overrides:
            if not isinstance(one, Override):
                raise TypeError(f"module_override: instances of ws.Override are required, found {one!r}")
        self.overrides = list(overrides)
        self._known: dict[int, tuple[nn.Module, nn.Module]] = {}

    def replace(self, fqn: str, module: nn.Module) -> nn.Module:
        """The module that takes a module's place, the same one whenever it is asked.

        Raises:
            ValueError: two overrides replace it.
            TypeError: an override gives something else than a module.
        """
        if id(module) not in self._known:
            self._known[id(module)] = module, self._ask(fqn, module)
        return self._known[id(module)][1]

    def _ask(self, fqn: str, module: nn.Module) -> nn.Module:
        chosen, by = module, ""
        where = f"{fqn or 'the outermost module'} ({type(module).__name__})"
        for one in self.overrides:
            new = one.replacement(fqn, module)
            name = type(one).__qualname__
            if not isinstance(new, nn.Module):
                raise TypeError(
                    f"{name}.replacement gives a {type(new).__name__} for {where}; a module is required: return the "
                    "one it was given where nothing changes"
                )
            if new is not module and by:
                raise ValueError(
                    f"module_override: {by} and {name} both replace {where}\n"
                    "  to do: let one of them return the module that it is given"
                )
            if new is not module:
                chosen, by = new, name
        return chosen

    @property
    def transforming(self) -> list[Override]:
        """Those with a `transform` of their own."""
        return [one for one in self.overrides if type(one).transform is not Override.transform]
