"""A compiled module: in every way the module that it was made of, save that a call runs the compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from wholestep.torch_compat import is_fx_symbolic_tracing


class _Of:
    """An attribute of the compiled callable, unless the module has one of that name itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, kind: type) -> Any:
        if module is None:
            return getattr(kind._compiled, self.name)  # type: ignore[attr-defined]
        with suppress(AttributeError):  # of its class
            return getattr(super(CompiledModule, module), self.name)
        with suppress(AttributeError):  # a child, a parameter or a buffer
            return kind.__getattr__(module, self.name)  # type: ignore[attr-defined]
        return getattr(kind._forward if module._is_hooked() else kind._compiled, self.name)  # type: ignore[attr-defined]


class CompiledModule:
    """Mixed into the class of a module: the object shares the module's attributes, hooks, parameters and children.

    So `state_dict()`, `train()`, `parameters()`, attributes and `isinstance` are the module's own, and a change of one
    is a change of the other. A copy, or one that was pickled, is compiled anew.

    Another object of its class, as `type(model)(…)` or a subclass by a library gives, is a module as any other.

    Backward hooks of the module itself may do anything when a backward reaches them, so they stay outside: the module
    is called as any other, and what is compiled is its `forward`.
    """

    _compiled: Callable[..., Any]
    _forward: Callable[..., Any]
    _again: Callable[[nn.Module], nn.Module]

    def _is_hooked(self) -> bool:
        return bool(self._backward_hooks or self._backward_pre_hooks)  # type: ignore[attr-defined]

    def _is_it(self) -> bool:
        """Whether it is what was compiled, and no other object of the class."""
        return self.__dict__ is type(self)._compiled.__wrapped__.__dict__  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_it() or self._is_hooked() or is_fx_symbolic_tracing():  # FX knows modules by their calls
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return type(self)._compiled(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_it():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return type(self)._forward(*args, **kwargs)

    def __prepare_scriptable__(self) -> Any:
        """`torch.jit.script` makes of it what it makes of its module."""
        return type(self)._compiled.__wrapped__ if self._is_it() else self  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._is_it():
            return super().__reduce_ex__(protocol)
        return type(self)._again, (type(self)._compiled.__wrapped__,)  # type: ignore[attr-defined]


for _name in ("recompiles", "breaks", "eager_calls", "guards", "captures", "specialized", "backwards", "graphs", "code",
              "reset", "explain", "stages"):  # fmt: skip
    setattr(CompiledModule, _name, _Of(_name))


def compiled_module(module: nn.Module, make: Callable[..., Any], again: Callable[..., Any]) -> nn.Module:
    """A module that runs a compiled program when it is called.

    Args:
        make: compiles a callable (the module, and its method `forward` without the module's hooks) and keeps it as
            ``__wrapped__`` of the result.
        again: compiles another module in the same way.
    """
    if isinstance(module, CompiledModule) and module._is_it():
        return compiled_module(type(module)._compiled.__wrapped__, make, again)  # type: ignore[attr-defined]
    kind = type(module)

    @functools.wraps(kind.forward)  # libraries and FX ask for its parameters
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return CompiledModule.forward(self, *args, **kwargs)

    bases = (kind,) if issubclass(kind, CompiledModule) else (CompiledModule, kind)
    space = {"_compiled": staticmethod(make(module)), "_forward": staticmethod(make(module.forward)),
             "_again": staticmethod(again), "__module__": kind.__module__, "forward": forward}
    made: nn.Module = object.__new__(type(f"Compiled{kind.__name__}", bases, space))
    made.__dict__ = module.__dict__
    return made
