"""The judge: a compiled training step against the same step run eagerly, everything compared bit for bit.

A test gives a function ``make(seed) -> World``. The judge builds the world twice from the same seed, runs
one eagerly and one compiled, step by step from the same random state, and after each step walks through
everything that can be observed from outside: results, parameters, buffers, gradients, optimizer state,
counters, who shares memory with whom, and the state of the random generator.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import wholestep as ws
from tests.support.walk_values import Leaf, leaves
from tests.support.worlds import Compile, Make, Outcome, Step, World, build, call, modes, pair, random_state
from wholestep.errors import CaptureError


@dataclass
class Run:
    """A finished comparison: both worlds, the compiled step, all results, and recompile reasons per call."""

    eager: World
    compiled: World
    step: Step
    results: list[tuple[Any, Any]]
    recompiles: list[list[Any]]


class Different(AssertionError):
    """The compiled world differs from the eager one."""


def identity(step: Step) -> Step:
    """The compile function that changes nothing: for judging the worlds and the judge."""
    return step


def default_compile() -> Compile:
    """`ws.compile` of whole steps, or `identity` when WHOLESTEP_TEST_COMPILE=identity."""
    whole = functools.partial(ws.compile, fullgraph=True)
    return identity if os.environ.get("WHOLESTEP_TEST_COMPILE") == "identity" else whole


def reasons(step: Step) -> list[Any]:
    """Recompile reasons so far."""
    return list(getattr(step, "recompiles", []))


def assert_same_run(make: Make, steps: int = 5, compile: Compile | None = None, poke: bool = False) -> Run:
    """Runs ``steps`` calls eagerly and compiled, from equal beginnings, and compares everything after each.

    Args:
        make: builds a fresh world from a seed; called twice.
        steps: number of calls.
        compile: what to judge; default `default_compile()`.
        poke: at the end, also write into every tensor in reach of each world, one after the other, and
            compare who sees the write.

    Raises:
        Different: naming the first thing that differs, with the maximal absolute difference.
    """
    eager, other = build(make), build(make)
    compiled = (compile or default_compile())(other.step)
    views = View(eager), View(other)
    _compare(views, "before the first call")
    results: list[tuple[Any, Any]] = []
    recompiles: list[list[Any]] = []
    for i in range(steps):
        one, two = pair(eager.step, eager, compiled, other, i)
        recompiles.append(reasons(compiled))
        _compare_outcome(one, two, f"call {i}")
        results.append((one.result, two.result))
        for view, outcome in zip(views, (one, two), strict=True):
            view.results.append(outcome.result)
        _compare(views, f"call {i}")
        if i > 2 and not eager.changing and len(recompiles[-1]) > len(recompiles[2]):
            raise Different(f"call {i}: recompiled when nothing had changed: {recompiles[-1][len(recompiles[2]) :]}")
        if eager.after is not None:
            _after(eager, other, i, one, two)
            _compare(views, f"after call {i}", identity_too=False)
    if poke:
        _poke(views)
    return Run(eager, other, compiled, results, recompiles)


def assert_same_failure(make: Make, compile: Compile | None = None, calls_before: int = 0) -> None:
    """The eager step raises: the compiled one must raise the same type and leave its world untouched.

    Args:
        make: builds a fresh world from a seed; called three times.
        compile: what to judge; default `default_compile()`.
        calls_before: how many calls succeed before the one that raises.
    """
    eager, other, untouched = build(make), build(make), build(make)
    compiled = (compile or default_compile())(other.step)
    for i in range(calls_before):
        rng = random_state()
        for step, world in ((eager.step, eager), (compiled, other), (untouched.step, untouched)):
            outcome = call(step, world, i, rng)
            if outcome.error is not None:
                raise outcome.error
    rng = random_state()
    one, two = call(eager.step, eager, calls_before, rng), call(compiled, other, calls_before, rng)
    if one.error is None:
        raise Different("eager raises nothing: not a world for this check")
    if type(one.error) is not type(two.error):
        raise Different(f"eager raises {one.error!r}, compiled {two.error!r}") from two.error
    if compile is None and default_compile() is identity:
        return  # eager itself leaves what it did before it failed
    if two.rng.same(rng):
        raise Different("a failed call moved the random state")
    _compare((View(untouched), View(other)), "after a failed call", names=("untouched", "after"))


def assert_same_or_refused(make: Make, steps: int = 5, compile: Compile | None = None) -> bool:
    """As eager, or a `CaptureError` that leaves the world untouched by the refused call. True when as eager."""
    try:
        assert_same_run(make, steps, compile)
    except CaptureError as error:
        assert_refused(make, type(error), compile, calls_before=int(error.__notes__[-1].split()[-1]))
        return False
    return True


def assert_refused(
    make: Make, error: type[CaptureError], compile: Compile | None = None, calls_before: int = 0
) -> CaptureError:
    """A call raises ``error`` (by default the first) and leaves world, random state and modes untouched.

    Returns:
        The error, for its words.
    """
    other, untouched = build(make), build(make)
    compiled = (compile or default_compile())(other.step)
    for i in range(calls_before):
        pair(untouched.step, untouched, compiled, other, i)
    rng, mode = random_state(), modes()
    outcome = call(compiled, other, calls_before, rng)
    if type(outcome.error) is not error:
        raise Different(f"expected {error.__name__}, found {outcome.error!r}") from outcome.error
    assert isinstance(outcome.error, CaptureError)
    if outcome.rng.same(rng) or outcome.modes != mode:
        raise Different("a refused call moved the random state or a mode")
    _compare((View(untouched), View(other)), "after a refused call", names=("untouched", "after"))
    return outcome.error


class View:
    """A world and what was seen of it last, kept alive so that no address is ever reused."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.results: list[Any] = []
        self.last: dict[str, Leaf] = {}
        self.kept: list[dict[str, Leaf]] = []

    def look(self) -> dict[str, Leaf]:
        """All leaves by path, now. Earlier results stay in sight: a later call must not overwrite them."""
        roots = {**self.world.watch, "args": list(self.world.args), "results": self.results}
        found: dict[str, Leaf] = {}
        seen: dict[int, Any] = {}
        for name, value in roots.items():
            for leaf in leaves(value, name, seen):
                found[leaf.path] = leaf
        return found

    def keep(self, found: dict[str, Leaf]) -> None:
        self.last = found
        self.kept.append(found)


# What is left out where a world does not compare versions: counters, and what autograd says of a view that it forbids
# to use after a write to what it is a view of.
ASIDES = (
    ": version: ",
    "is_leaf: eager RuntimeError",
    "is_leaf: eager True, compiled RuntimeError",
    ".grad: in eager None, missing in compiled",
    ".grad: in compiled None, missing in eager",
)


def differences(one: dict[str, Leaf], two: dict[str, Leaf], names: tuple[str, str]) -> Iterator[str]:
    """All differences between two looks at worlds, in walking order: contents, then sharing, then versions."""
    later = []
    for path, leaf in one.items():
        if path not in two:
            yield f"{path}: in {names[0]} {leaf.describe()}, missing in {names[1]}"
        else:
            for what in leaf.differences(two[path], names):
                if what.startswith("version"):
                    later.append(f"{path}: {what}")
                else:
                    yield f"{path}: {what}"
    for path, leaf in two.items():
        if path not in one:
            yield f"{path}: in {names[1]} {leaf.describe()}, missing in {names[0]}"
    for what in ("object", "memory"):
        groups = [_groups(look, what) for look in (one, two)]
        for path in groups[0]:
            first, second = groups[0][path], groups[1].get(path, path)
            if first != second:
                yield f"{path}: same {what} as {first} in {names[0]}, as {second} in {names[1]}"
    yield from later


def _groups(look: dict[str, Leaf], what: str) -> dict[str, str]:
    first: dict[Any, str] = {}
    groups = {}
    for path, leaf in look.items():
        key = leaf.identity if what == "object" else leaf.memory
        if key is not None:
            groups[path] = first.setdefault(key, path)
    return groups


def _moved(before: dict[str, Leaf], now: dict[str, Leaf]) -> dict[str, tuple[bool, bool]]:
    """Path -> (same object as before, same memory as before), for tensors seen at both times."""
    return {
        path: (leaf.identity == before[path].identity, leaf.memory == before[path].memory)
        for path, leaf in now.items()
        if path in before and leaf.identity is not None and before[path].identity is not None
    }


def _compare(
    views: tuple[View, View],
    when: str,
    names: tuple[str, str] = ("eager", "compiled"),
    identity_too: bool = True,
) -> None:
    looks = views[0].look(), views[1].look()
    found = list(differences(looks[0], looks[1], names))
    if not views[0].world.versions:
        found = [what for what in found if not any(aside in what for aside in ASIDES)]
    if identity_too and not found:
        moved = [_moved(view.last, look) for view, look in zip(views, looks, strict=True)]
        for path, (same_object, same_memory) in moved[0].items():
            if moved[1].get(path) != (same_object, same_memory):
                found.append(
                    f"{path}: (same object, same memory) as before the call: "
                    f"{names[0]} {(same_object, same_memory)}, {names[1]} {moved[1].get(path)}"
                )
    for view, look in zip(views, looks, strict=True):
        view.keep(look)
    if found:
        more = "" if len(found) <= 8 else f"\n  … and {len(found) - 8} more"
        raise Different(f"{when}: " + "\n  ".join(found[:8]) + more)


def _compare_outcome(one: Outcome, two: Outcome, when: str) -> None:
    if one.error is not None:
        raise Different(f"{when}: the eager step itself raises {one.error!r}") from one.error
    if two.error is not None:
        raise two.error
    if generator := one.rng.same(two.rng):
        raise Different(f"{when}: random state: the {generator} generator was left in different states")
    if one.modes != two.modes:
        raise Different(f"{when}: modes (grad, autocast, dtype): eager {one.modes}, compiled {two.modes}")


def _after(eager: World, other: World, i: int, one: Outcome, two: Outcome) -> None:
    rng = random_state()
    for world, outcome in ((eager, one), (other, two)):
        rng.restore()
        if world.after is not None:
            world.after(i, outcome.result)


def _poke(views: tuple[View, View]) -> None:
    """Writes into each tensor of both worlds in turn; all others must see or not see it alike."""
    looks = views[0].last, views[1].last
    pairs = [(path, leaf.value, looks[1][path].value) for path, leaf in looks[0].items()]
    for path, one, two in pairs:
        if isinstance(one, Tensor):
            errors = _write(one), _write(two)
            if errors[0] != errors[1]:
                raise Different(f"writing into {path} afterwards: eager {errors[0]}, compiled {errors[1]}")
            _compare(views, f"after writing into {path}", identity_too=False)


def _write(tensor: torch.Tensor) -> str:
    try:
        with torch.no_grad():
            if tensor.dtype is torch.bool:
                tensor.logical_not_()
            else:
                tensor.add_(3)
    except RuntimeError as error:
        return type(error).__name__
    return ""
