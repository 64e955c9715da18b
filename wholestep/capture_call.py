"""One capture: a call of a step runs once on fake tensors, again where the trace asks for it; nothing real changes.

May import: aot_autograd, capture, errors, patches, spmd, step_log, trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wholestep.aot_autograd.differentiate import differentiate
from wholestep.capture import Args, CalledCode, Kwargs, PartsOf, Snapshot, functions_of, new_objects, places_of
from wholestep.capture.outside.external_calls import FirstImportError
from wholestep.errors import LeakError, UnsupportedError
from wholestep.patches import is_suspended, to_its_end
from wholestep.spmd import BufferBroadcast
from wholestep.step_log import collecting
from wholestep.trace import ReentrantCheckpoint, SharedMemory, Traced, UnmetCode, trace_step
from wholestep.trace.numbers.symbolic_sizes import Sizes
from wholestep.trace.outputs.leaks import Watch

TakeSnapshot = Callable[..., Snapshot]  # called as `Snapshot` is

_MOST_WALKS = 64
_thread = threading.local()
_lock = threading.RLock()  # a capture puts fake numbers and aliases where all threads see them


def is_tracing() -> bool:
    """True inside of a step that this thread is capturing."""
    return getattr(_thread, "tracing", False) and not is_suspended()


def refuse_leaks(watch: Watch) -> None:
    """Refuses a step that has left tensors of its capture alive elsewhere, once the pipeline has let go of its own."""
    with _lock:  # no other thread's capture has set garbage aside
        watch.refuse()


def capture(
    fn: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    varying: frozenset[str] = frozenset(),
    decides: bool = False,
    differentiable: bool = True,
    take: TakeSnapshot = Snapshot,
    parts: PartsOf | None = None,
    sync: BufferBroadcast | None = None,
    outcomes: Sequence[str] | None = None,
    sizes: Sizes | None = None,
) -> tuple[Snapshot, Traced]:
    """Runs the step once on fake tensors; everything real is as before when it returns or raises.

    Args:
        decides: Python may decide on bools that are not known before the step.
        differentiable: whether results that require grad shall be differentiable outside of the step.
        parts: in the global view, what tensors without a mark are of whole ones.
        sync: in the local view, what broadcasts buffers.
        outcomes: what is known of bools that the ranks decide on together; None where they do not.
        sizes: those of tensors among the arguments that are symbols.
    """
    with _lock, new_objects() as new_ids:
        world = take(fn, args, kwargs, varying=varying)
        backward = differentiate if differentiable and world.differentiable else None
        attempt = _Attempt(varying)
        while True:
            world.new_ids = new_ids
            if sizes is not None:
                sizes.begin()
            how = decides, backward, sizes, attempt.reentrant, sync.begin if sync else None, outcomes
            following, done = attempt, None
            try:
                _thread.tracing = True
                world.substitutes.put(parts, world.differentiable)
                step = collecting(world.substitutes.aliases.exchange(fn))
                traced = trace_step(step, args, kwargs, world, attempt.shared, *how)
                done = traced if sync is None or not sync.again() else None
            except Exception as request:
                after = attempt.after(request, world.called)
                if after is None:
                    raise
                following = after
            finally:
                _thread.tracing = False
                to_its_end(world.restore)
            if done is not None and world.extend():
                return world, done
            if done is not None or (following.varying, following.walks) != (attempt.varying, attempt.walks):
                world = take(fn, args, kwargs, varying=following.varying, called=world.called)
            attempt = following


@dataclass(frozen=True)
class _Attempt:
    """How a step is traced, by what earlier attempts have found out.

    Attributes:
        varying: paths of numbers that are inputs, and of lists that are only appended to.
        shared: memories that several inputs share.
        reentrant: whether checkpoints run as written.
        walks: how often something has come into reach while the step ran: a module, a function.
    """

    varying: frozenset[str]
    shared: frozenset[int] = frozenset()
    reentrant: bool = True
    walks: int = 0

    def after(self, request: Exception, called: CalledCode) -> _Attempt | None:
        """The next attempt; None where none would help. (Raised here, the error would hold itself by its traceback.)"""
        if isinstance(request, SharedMemory):
            return replace(self, shared=request.memories)
        if isinstance(request, FirstImportError):
            return replace(self, walks=self.walks + 1) if self.walks < _MOST_WALKS else None
        if isinstance(request, UnmetCode):
            if self.walks == _MOST_WALKS or request.code in {f.__code__ for f in called.functions}:
                what, code = "is code that each call makes anew", request.code
                raise UnsupportedError(f"{code.co_qualname} {what}", "make it once, outside of the step",
                                       where=f"{code.co_filename}:{code.co_firstlineno}")
            functions = functions_of(request.code)
            called.functions += functions
            called.places |= places_of(functions)
            return replace(self, walks=self.walks + 1)
        if isinstance(request, ReentrantCheckpoint):
            return replace(self, reentrant=False)
        if not isinstance(request, LeakError) or request.grown <= self.varying:  # none, or none that can stay unseen
            return None
        return replace(self, varying=self.varying | request.grown)
