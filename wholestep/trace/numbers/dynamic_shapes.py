"""Dynamic shapes: one capture for many sizes of the batch.

The step is traced once with symbols for sizes of the tensors among its arguments (`symbolic_sizes.py`): for those that
have differed between captures, or for all. A call with other sizes is given that trace at its sizes
(`specialize.py`), as long as everything that Python and the operators decided on sizes holds for them: the step's
Python does not run again. From there on all is as for a capture of these sizes: passes, lowering, guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from wholestep.capture import Guard, Snapshot, compare, sharing
from wholestep.errors import CaptureError, LazyError
from wholestep.trace import Traced
from wholestep.trace.numbers.decisions import outcomes_of
from wholestep.trace.numbers.specialize import OtherLayouts, at_sizes
from wholestep.trace.numbers.symbolic_sizes import Dims, Sizes

# Called as `capture_call.capture` is, with the sizes to take as symbols, or none.
Capture = Callable[..., tuple[Snapshot, Traced]]


@dataclass
class Template:
    """One trace with symbolic sizes, and what else must hold for it to serve.

    Attributes:
        grown: paths of lists that the step only appends to.
    """

    traced: Traced
    sizes: Sizes
    guards: list[Guard]
    names: frozenset[str]
    varying: frozenset[str]
    shares: frozenset[tuple[str, str]]
    grown: frozenset[str]

    @property
    def outcomes(self) -> tuple[str, ...]:
        """What Python went on with at each decision."""
        return outcomes_of(self.traced.step.graph)

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the tensors whose sizes are symbols."""
        return frozenset(source.path for source, _, _ in self.sizes.layouts)

    @property
    def written(self) -> frozenset[str]:
        """Paths of the inputs that the step writes."""
        items = [self.traced.inputs[i] for i in self.traced.step.signature.mutations.values()]
        return frozenset(item.source.path for item in items)

    def misfit(self, world: Snapshot) -> str | None:
        """Why the trace does not serve a call; None when it does."""
        failure = compare(self.guards, world.guards(self.paths))
        if failure is not None:
            return failure.reason
        missing = self.paths - _sizable(world).keys()
        if missing:
            return f"{min(missing)} shares its memory, or has a history, which it had not"
        if sharing(world, self.written) != self.shares:
            return "tensors that the step writes share memory with others than before"
        return self.sizes.misfit(_sizable(world)) or self._decided_otherwise(world)

    def _decided_otherwise(self, world: Snapshot) -> str | None:
        """The first decision, of those that are known before the step, which a call takes otherwise."""
        given = _given(world)
        paths = [item.source.path for item in self.traced.inputs]
        for predicate in self.traced.predicates:
            if not predicate.holds({index: given.get(paths[index]) for index in predicate.inputs}):
                return predicate.reason
        return None

    def at(self, world: Snapshot, many: bool) -> Traced:
        """The trace at the sizes of a call that it serves; whether one program may be made of it for many sizes."""
        inputs = _given(world)
        return at_sizes(self.traced, self.sizes, self.sizes.values(inputs), inputs, many)

    def forget(self) -> None:
        """Lets go of the first call's tensors."""
        for item in self.traced.inputs:
            if not item.members:
                item.value, item.ref, item.fake = 0.0, None, None


class Templates:
    """Captures that serve many sizes; called as `capture_call.capture` is, it gives a trace of the sizes of that call.

    Args:
        capture: `capture_call.capture`.
        all_sizes: whether all sizes are symbols from the beginning, instead of those that have differed.
        many: whether one program may be made for many sizes: each trace is to be that of one size otherwise.

    Attributes:
        known: captures with symbols.
        reason: why the last call was captured anew: "" where it was not, None where nothing was there to serve it.
        notes: of the last call, which sizes are no symbols, and why.
        captures: how many there were.
        specialized: all notes: sizes that only one value serves, and captures that could not have symbols.
        decided: what is known of the next call's decisions, in order.
    """

    def __init__(self, capture: Capture, all_sizes: bool = True, many: bool = False) -> None:
        self._capture, self._all_sizes, self._many = capture, all_sizes, many
        self.known: list[Template] = []
        self.reason: str | None = ""
        self.notes: list[str] = []
        self.captures = 0
        self.specialized: list[str] = []
        self.decided: tuple[str, ...] = ()
        self._shapes: dict[str, torch.Size] = {}  # by path, at the last capture
        self._differed: Dims = frozenset()  # between captures
        self._fixed: Dims = frozenset()  # that cannot be symbols, or would serve one value alone

    def __call__(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, varying: frozenset[str], decides: bool,
        differentiable: bool, look: Callable[..., Snapshot], *rest: Any,
    ) -> tuple[Snapshot, Traced]:  # fmt: skip
        reasons: list[str] = []
        world, self.notes = None, []
        for template in self.known:
            if template.outcomes[: len(self.decided)] != self.decided:
                continue
            world = look(fn, args, kwargs, names=template.names, varying=varying | template.grown)
            misfit = template.misfit(world) if template.varying == varying else "another number varies"
            if misfit is None:
                try:
                    found = template.at(world, self._many)
                except OtherLayouts as error:
                    misfit = str(error)
                else:
                    self.reason = ""
                    return world, found
            reasons.append(misfit)
        self.reason = reasons[0] if reasons else None
        attempts: list[Dims | None] = [None]
        if not self._all_sizes:
            attempts = self._attempts(world or look(fn, args, kwargs, varying=varying)) if self._shapes else []
        capture = partial(self._capture, fn, args, kwargs, varying, decides, differentiable, look, *rest)
        world, traced = self._anew(attempts, capture, varying)
        self.captures += 1
        self._shapes |= {f.source.path: f.tensor.shape for f in world.sizable()}
        self.specialized += [note for note in self.notes if note not in self.specialized]
        return world, traced

    def _attempts(self, world: Snapshot) -> list[Dims | None]:
        """The sizes to take as symbols: those that have differed, then those alone that were symbols before."""
        now = {(f.source, dim): size for f in world.sizable() for dim, size in enumerate(f.tensor.shape)}
        for (source, dim), size in now.items():
            before = self._shapes.get(source.path, ())
            if dim < len(before) and size != before[dim]:
                self._differed |= {(source, dim)}
        possible = frozenset(dim for dim in self._differed - self._fixed if now.get(dim, 0) > 1)
        served = possible.intersection(*(template.sizes.dims for template in self.known if template.sizes.dims))
        return [dims for dims in dict.fromkeys((possible, served)) if dims]

    def _anew(self, attempts: list[Dims | None], capture: Capture, varying: frozenset[str]) -> tuple[Snapshot, Traced]:
        failed: list[tuple[Dims | None, str]] = []  # not the errors, whose tracebacks hold what is made here
        for dims in attempts:
            try:
                found = self._with_symbols(dims, capture, varying)
                break
            except LazyError:
                raise
            except Exception as error:  # the step's own error comes again
                failed.append((dims, _words(error)))
        else:
            dims, found = frozenset(), capture()
        for tried, why in failed:
            if tried is not None:
                self._fixed |= tried - (dims or frozenset())
            self.notes.append(f"{_named(tried)} ended in {why}")
        return found

    def _with_symbols(self, dims: Dims | None, capture: Capture, varying: frozenset[str]) -> tuple[Snapshot, Traced]:
        sizes = Sizes(dims)
        world, traced = capture(sizes=sizes)
        paths = frozenset(source.path for source, _, _ in sizes.layouts)
        template = Template(traced, sizes, world.guards(paths), world.names, varying, frozenset(), frozenset())
        template.shares, template.grown = sharing(world, template.written), world.varying - varying
        found = template.at(world, self._many)
        for dim, note in sizes.specialized().items():
            self._fixed |= {dim}
            self.notes.append(note)
        self.known.insert(0, template)
        template.forget()
        return world, found


def _named(dims: Dims | None) -> str:
    if dims is None:
        return "all sizes, as symbols"
    names = sorted(f"{source}.shape[{dim}]" for source, dim in dims)
    return f"{', '.join(names)} as {'symbols' if len(names) > 1 else 'a symbol'}"


def _words(error: Exception) -> str:
    """An error's type and text; those of torch's C++ carry their stack."""
    text = str(error) if isinstance(error, CaptureError) else str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"


def _given(world: Snapshot) -> dict[str, Any]:
    """By path, the tensors and numbers of a call."""
    return {f.source.path: f.tensor for f in world.tensors.values()} | {n.source.path: n.value for n in world.numbers}


def _sizable(world: Snapshot) -> dict[str, torch.Tensor]:
    return {found.source.path: found.tensor for found in world.sizable()}


def shapes(values: Any, depth: int = 6) -> Any:
    """The shapes of the tensors in nested arguments: calls that differ in them cannot share a program.

    Args:
        depth: how far to look; a container may hold itself.
    """
    if isinstance(values, torch.Tensor):
        return values.shape
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, (tuple, list)) and depth:
        return tuple([shapes(value, depth - 1) for value in values])
    return None
