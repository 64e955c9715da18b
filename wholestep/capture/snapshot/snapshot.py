"""The snapshot: what a step could see before it ran, so that all of it can be put back and compared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from wholestep.capture.effects.differences import differences
from wholestep.capture.effects.effects import CallMethod, Effect
from wholestep.capture.effects.values import Value
from wholestep.capture.exchange.detached_aliases import Twins
from wholestep.capture.exchange.exchange import Exchanged
from wholestep.capture.guards import guards as guarding
from wholestep.capture.guards.guards import Guard
from wholestep.capture.outside.lr_schedulers import Deferred
from wholestep.capture.snapshot.visible import Replace
from wholestep.capture.sources import Attr, Call, Source, lineage
from wholestep.torch_compat import set_versions


class Snapshot(Exchanged):
    """Everything that one call of a step can see, before it runs."""

    def __init__(self, call: Call, names: frozenset[str] = frozenset(),
                 varying: frozenset[str] = frozenset(), replace: Replace | None = None) -> None:
        super().__init__(call, names, varying, replace)
        self._grad_mode = torch.is_grad_enabled()
        self._guards: list[Guard] | None = None

    def guards(self) -> list[Guard]:
        """What must hold in a later call: derived from the contents at the time of the snapshot."""
        if self._guards is None:
            self._guards = [g for g in guarding.guards(self.walk) if not self._is_replaced(g.source)]
        return self._guards

    def replaces_gradient_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that the walk found is one of those."""
        grads = self.replaced_gradients
        return bool(grads) and Attr(self.tensors[id(tensor)].source, "grad").path in grads

    def _is_replaced(self, source: Source | None) -> bool:
        """Whether a source is a gradient that the step replaces unread, or something of it."""
        return bool(self.replaced_gradients) and any(s.path in self.replaced_gradients for s in lineage(source))

    def replaces_gradients(self, tensors: Sequence[torch.Tensor]) -> None:
        """Whether these tensors have a ``.grad`` before the step is no matter: it replaces them unread."""
        found = [self.tensors[id(tensor)] for tensor in tensors if id(tensor) in self.tensors]
        self.replaced_gradients = frozenset(Attr(f.source, "grad").path for f in found)

    def outcome(self, is_new: Callable[[torch.Tensor], bool], result: Any = None) -> tuple[list[Effect], Value]:
        """What has changed in the Python world since the snapshot, and the step's result in the same terms.

        Args:
            is_new: tells tensors that the step made from those that were there before.
            result: what the step returned.

        Raises:
            LeakError: a new tensor is held where a replay cannot put its successor.
        """
        for array in self.walk.arrays.values():
            array.refuse_changed()
        self.walk.stoppers.refuse_moved()
        for error in self.walk.outside.settings.refused:  # the step went on past it
            raise error
        self.names |= self.walk.outside.names
        if self.replaced:
            self._hand_back_training()
        for scheduler, _ in self.walk.schedulers:
            if isinstance(vars(scheduler).get("step"), Deferred):
                del vars(scheduler)["step"]
        effects, described = differences(self, is_new, result)
        return [*effects, *(CallMethod(n.source, "step", n.args) for n in self.noted)], described

    def _hand_back_training(self) -> None:
        """A `train()` or `eval()` in the step has met the replacement; it was meant for the module itself."""
        for old, new in self.replaced:
            if new.training is not old.training:
                for module in old.modules():
                    vars(module)["training"] = new.training
        self.train_alike()

    def restore(self) -> None:
        """Puts everything back: contents and their order, gradients, flags, hooks, versions, lifted numbers."""
        torch.set_grad_enabled(self._grad_mode)
        torch.clear_autocast_cache()
        self.wholes.back()
        for array in self.walk.arrays.values():
            array.restore()
        failures: list[Exception] = []
        for place in self.places:
            try:
                if not same(place.box.read(place.holder), place.before):
                    place.box.write(place.holder, place.before)
            except Exception as error:  # an object that refuses: the rest must come back all the same
                failures.append(error)
        moved = [(tensor, version) for tensor, version, _ in self._versions if tensor._version != version]
        if moved:
            set_versions(tuple(t for t, _ in moved), tuple(v for _, v in moved))
        self.walk.sinks.restore()
        self._patches.restore()
        self.lifted.clear()
        self.stand_ins.clear()
        self.noted.clear()
        self.twins = Twins(())
        if failures:
            raise failures[0]


def same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """True when two views of a holder have the same keys in the same order with the very same values."""
    return len(now) == len(before) and all(
        k is j or (type(k) is type(j) and type(k) in (str, int) and k == j) for k, j in zip(now, before, strict=True)
    ) and all(v is w for v, w in zip(now.values(), before.values(), strict=True))


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector away from code that makes many small objects and drops none.

    A full collection in the middle of a walk of BERT-base costs 170 ms, the walk itself 20 ms.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def snapshot(fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None,
             names: frozenset[str] = frozenset(), varying: frozenset[str] = frozenset(),
             replace: Replace | None = None) -> Snapshot:
    """Walks what a call of ``fn`` could see and records it.

    Args:
        names: attributes that count as named by the step's code, besides those that are.
        varying: paths of numbers that are inputs rather than guards.
        replace: gives the modules to trace in the place of others.

    Raises:
        CaptureError: something is in reach that cannot be captured.
    """
    with no_collection():
        return Snapshot(Call(fn, tuple(args), dict(kwargs or {})), names, varying, replace)
