"""Provenance of operators in the user's program: file and line, module path, phase of the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from wholestep.errors import UnsupportedError
from wholestep.ir import Phase
from wholestep.torch_compat import TorchDispatchMode, current_autograd_node, is_inside, node_sequence_number
from wholestep.trace.record.user_line import RunningCode, user_line


class Provenance:
    """Follows modules and optimizers while the step runs, through torch's global hooks.

    What threads do meanwhile that do not trace is not part of the step.

    Args:
        names: paths of modules, by their ids.
        refused: wrappers that cannot be in the step, and the plans to use in their place.

    Attributes:
        mode: the recorder, once there is one.
        called: looks at the code that calls operators, while a step is traced.
    """

    def __init__(self, names: dict[int, str], refused: Mapping[tuple[str, str], str] | None = None) -> None:
        self.names, self._refused = names, STOCK if refused is None else refused
        self.modules: list[str] = []
        self.outermost: Callable[[nn.Module, bool], None] | None = None  # told of forwards inside of no other
        self.optimizers = self.updates = 0  # optimizers that step now, and steps so far
        self.module_of_seq: dict[int, str] = {}
        self._thread = threading.get_ident()
        self.mode: TorchDispatchMode | None = None
        self.called: RunningCode | None = None

    def is_here(self) -> bool:
        """True in the thread that traces, and in those that the autograd engine lends it."""
        return threading.get_ident() == self._thread or (self.mode is not None and is_inside(self.mode))

    def phase(self) -> Phase:
        """Which part of the step runs."""
        if self.optimizers:
            return "optimizer"
        return "backward" if current_autograd_node() is not None else "forward"

    def _tell(self, module: nn.Module, begins: bool) -> None:
        if self.outermost is not None and len(self.modules) == 1 and current_autograd_node() is None:
            self.outermost(module, begins)

    def module(self) -> str:
        """The path of the module whose forward runs."""
        return self.modules[-1] if self.modules else ""

    def seq(self) -> int | None:
        """The sequence number of the autograd node that runs; None in a forward."""
        node = current_autograd_node()
        return None if node is None else node_sequence_number(node)

    def _refuse_wrappers(self, module: nn.Module) -> None:
        for base in type(module).__mro__:
            for (package, name), plan in self._refused.items():
                if base.__name__ == name and base.__module__.startswith(package):
                    what = f"{name} inside of a compiled step, which communicates where no graph can show it"
                    remedy = f"give the step the module as it was before, and a plan: plan=ws.{plan}(axis), mesh=…"
                    raise UnsupportedError(what, remedy, where=user_line())

    @contextmanager
    def following(self) -> Iterator[None]:
        """While the step runs."""

        def enter(module: nn.Module, args: Any) -> None:
            if self.is_here():
                self.modules.append(self.names.get(id(module), type(module).__name__))
                self._refuse_wrappers(module)  # after which `leave` is called, too
                self._tell(module, True)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if self.is_here():
                self._tell(module, False)
                self.modules.pop()

        def count(by: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self.optimizers += by * self.is_here()
                self.updates += self.is_here()

            return hook

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(count(1)),
            register_optimizer_step_post_hook(count(-1)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


# Modules that reduce or gather in C++ and in hooks, past the dispatcher, known by the names of their classes.
STOCK = {
    ("torch.nn.parallel", "DistributedDataParallel"): "DataParallel",
    ("torch.distributed", "FullyShardedDataParallel"): "FullyShard",
    ("torch.distributed", "FSDPModule"): "FullyShard",
}
WITH_PLAN = STOCK | {
    ("wholestep.parallel", "DistributedDataParallel"): "DataParallel",
    ("wholestep.parallel", "FSDPModule"): "FullyShard",
}
