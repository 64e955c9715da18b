"""Compiled backward: `backward()` over any mixture of compiled and eager pieces, as one captured program.

The autograd engine runs once over its own graph while the recorder looks on: nodes, hooks and accumulation into
``.grad`` run as they always do, on fake tensors, and everything that they compute is one graph. What the engine reads
(saved tensors, hooks, contexts) are the arguments of that step, taken from the graph before it runs
(`autograd_graph.py`), so that the next backward of the same structure binds its own. Hooks are Python like any other
that capture sees: what they read is an input or a guard, what they change is replayed.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from wholestep.aot_autograd.autograd_graph import Engine, Structure, free, structure
from wholestep.capture import Args, Kwargs, Snapshot, TensorInput
from wholestep.errors import CaptureError, GraphError, LoweringError, UnsupportedError
from wholestep.torch_compat import FakeTensor, dispatch_modes_active, storage_id
from wholestep.trace.operators.data_dependent_formulas import by_data
from wholestep.trace.patches.engine_hook import handled
from wholestep.trace.record.user_line import user_line

# Sizes that are always others would have each backward captured: better eager than seconds for each.
MAX_STRUCTURES = 256


class Served(Protocol):
    """A compiled step, as `compiled.py` makes them."""

    recompiles: list[str]

    @property
    def captures(self) -> int: ...
    def serve(self, args: Args, kwargs: Kwargs, ready: Callable[[], Any]) -> Any: ...


# (function, backend, look) -> a compiled step: the later stages, which this room cannot know.
Pipeline = Callable[[Callable[..., Any], Any, Callable[..., Snapshot]], Served]


@dataclass
class Captures:
    """What was captured for one backend.

    Attributes:
        steps: key of a structure -> its compiled step.
        refused: key of a structure that cannot be captured -> why.
    """

    steps: dict[Any, Served] = field(default_factory=dict)
    refused: dict[Any, str] = field(default_factory=dict)


class SavedSnapshot(Snapshot):
    """A snapshot of a backward: tensors with a history are data here, and the engine unpacks some of them anew."""

    def __init__(self, fn: Callable[..., Any], args: Args, kwargs: Kwargs, **settings: Any) -> None:
        super().__init__(fn, args, kwargs, differentiable=False, **settings)
        tensors, *_ = args
        self.by_place = {_place(t): self.tensors[id(t)] for t in reversed(tensors)}

    def find(self, tensor: torch.Tensor) -> TensorInput | None:
        found = super().find(tensor)
        if found is None and not isinstance(tensor, FakeTensor):
            found = self.by_place.get(_place(tensor))
        return replace(found, detached=True) if found is not None else None


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided:
        return (id(tensor),)
    place = storage_id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, tensor.device


_running = threading.local()


def backward(saved: Sequence[torch.Tensor], hooks: Sequence[Any], packed: Sequence[Any]) -> Any:
    """The step that is captured: what the engine does now, on tensors and hooks that are its arguments."""
    return _running.engine()


class CompiledBackward(ContextDecorator):
    """The context in which backwards are captured, and a decorator: see `wholestep.autograd.compiled_backward`.

    Attributes:
        captures: how many backwards were captured so far for this backend.
        recompiles: why a backward of known structure needed another program, one reason each.
        eager: why backwards in this context were left to the engine -> how often.
    """

    def __init__(self, backend: Any, make: Pipeline) -> None:
        self.backend, self._make = backend, make
        self._found = _captures(backend)
        self._open: list[AbstractContextManager[None]] = []
        self.eager: Counter[str] = Counter()

    @property
    def captures(self) -> int:
        return sum(step.captures for step in self._found.steps.values())

    @property
    def recompiles(self) -> list[str]:
        return [reason for step in self._found.steps.values() for reason in step.recompiles]

    def __enter__(self) -> CompiledBackward:
        self._open.append(handled(self._backward))
        self._open[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.pop().__exit__(None, None, None)

    def _backward(
        self, run: Engine, roots: Any, grads: Any, keep: bool, create: bool, inputs: Any, *allow: bool, **flags: bool
    ) -> Any:
        """What `torch.autograd.backward` and `torch.autograd.grad` call in place of the engine."""
        eager = functools.partial(run, roots, grads, keep, create, inputs, *allow, **flags)
        retaining = functools.partial(by_data, run, roots, grads, True, create, inputs, *allow, **flags)
        if dispatch_modes_active():  # inside of a capture, and part of it
            return by_data(run, roots, grads, keep, create, inputs, *allow, **flags)
        if create:
            raise UnsupportedError(
                "a backward with create_graph=True inside of compiled_backward: its result would have no history",
                "call it outside of the context",
                where=user_line(),
            )
        graph = run, roots, grads, inputs, flags["accumulate_grad"]
        try:
            found = structure(*graph)
        except Exception as error:  # eager's own errors come again from eager
            return self._left_to(eager, f"{type(error).__name__}: {error}")
        if found.outside:
            return self._left_to(eager, "a hook made in C++, such as retain_grad() on an intermediate tensor")
        return self._serve(found, retaining, (lambda: None) if keep else functools.partial(free, *graph), eager)

    def _serve(self, found: Structure, retaining: Engine, ready: Callable[[], Any], eager: Engine) -> Any:
        """Runs the program of a structure, made first if there is none that serves.

        Args:
            retaining: the engine's backward that frees nothing, for capture.
            ready: frees what the graph saved, once a program serves.
            eager: the backward as the user called it.
        """
        refused, key = self._found.refused, found.key
        if key not in self._found.steps and len(self._found.steps) >= MAX_STRUCTURES:
            return self._left_to(eager, f"{MAX_STRUCTURES} structures and shapes were captured, and this is another")
        if key in refused:
            return self._left_to(eager, refused[key])
        step = self._found.steps.get(key) or self._make(backward, self.backend, SavedSnapshot)
        begun = False

        def begin() -> None:
            nonlocal begun
            ready()
            begun = True

        _running.engine = retaining
        try:
            result = step.serve((found.tensors, found.hooks, found.packed), {}, begin)
        except CaptureError as error:
            refused[key] = str(error)
            return self._left_to(eager, str(error))
        except Exception as error:
            if begun or isinstance(error, (GraphError, LoweringError)):
                raise
            return self._left_to(eager, f"{type(error).__name__}: {error}")  # a hook's own: it comes again
        finally:
            _running.engine = None
        self._found.steps[key] = step
        return result

    def _left_to(self, eager: Engine, reason: str) -> Any:
        result = eager()
        self.eager[reason] += 1
        return result


_BY_NAME: dict[str, Captures] = {}
_BY_FUNCTION: WeakKeyDictionary[Any, Captures] = WeakKeyDictionary()


def _captures(backend: Any) -> Captures:
    """What is known for a backend: contexts that are opened anew in each step share it."""
    return (_BY_NAME if isinstance(backend, str) else _BY_FUNCTION).setdefault(backend, Captures())
