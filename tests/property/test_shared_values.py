"""Property test: random objects that share parts, changed between calls, are read by a step as they are in eager.

What is in two places is what guards go wrong by: a value that one of them alone is compared for.
WHOLESTEP_TEST_LONG=1 runs many more programs.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import wholestep as ws

DEPTH = 6
Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - of any values
GENERATED = compile("def generated(depth): return digest(VALUE, depth)", "generated", "exec")


class Slots:
    __slots__ = ("a", "b")


class Plain:
    shared: Any = 1

    def read(self, depth: int) -> Any:
        return digest(vars(self).get("a"), depth)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.a, self.b = nn.Linear(1, 1, bias=False), None, None
        self.linear.weight.data.fill_(2)


def digest(value: Any, depth: int = 0) -> Any:
    """A number that each part of a value goes into, in its order."""
    if depth > DEPTH or value is None:
        return 0.5
    if isinstance(value, (int, float, Tensor)):
        return value * 1.5
    if isinstance(value, str):
        return len(value) + 0.25
    if isinstance(value, (FunctionType, MethodType, partial)):
        return value(depth + 1) * 1.25
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, (list, tuple, deque)):
        total: Any = len(value) + 0.125
        for part in value:
            total = total * 1.1 + digest(part, depth + 1)
        return total
    if isinstance(value, type):
        return digest(value.shared, depth + 1) * 1.7  # type: ignore[attr-defined]
    extra = value.linear(torch.ones(1)).sum() * (2 if value.training else 1) if isinstance(value, Layer) else 0
    return digest(value.a, depth + 1) * 0.7 + digest(value.b, depth + 1) + extra


def step(root: Any, x: Tensor) -> Tensor:
    return (x * digest(root)).detach()


def closure(value: Any) -> Callable[[int], Any]:
    return lambda depth: digest(value, depth)


def default(value: Any) -> Callable[[int], Any]:
    return lambda depth, value=value: digest(value, depth)


def generated(value: Any) -> Callable[[int], Any]:
    namespace: dict[str, Any] = {"VALUE": value, "digest": digest, "__name__": "generated"}
    exec(GENERATED, namespace)  # noqa: S102 - as libraries do that generate code
    return namespace["generated"]  # type: ignore[no-any-return]


def with_parts(made: Any, a: Any, b: Any) -> Any:
    for name, value in (("a", a), ("b", b)):
        setattr(made, name, None if isinstance(made, Layer) and isinstance(value, nn.Module) else value)
    return made


LEAVES: list[Callable[[random.Random], Any]] = [
    lambda draw: draw.randint(0, 3), lambda draw: draw.choice([0.0, 1.5]), lambda draw: draw.choice(["", "ab"]),
    lambda draw: None, lambda draw: (), lambda draw: (1, 2), lambda draw: frozenset({1, "a"}),
    lambda draw: torch.full((1,), float(draw.randint(1, 3))),
]  # fmt: skip
KINDS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: [a, b], lambda a, b: (a, b), lambda a, b: (a,), lambda a, b: {"x": a, 3: b}, Pair,
    lambda a, b: OrderedDict(x=a, y=b), lambda a, b: deque([a, b], maxlen=3), lambda a, b: {1, "b"},
    lambda a, b: with_parts(Slots(), a, b), lambda a, b: with_parts(Plain(), a, b), lambda a, b: closure(a),
    lambda a, b: with_parts(Layer(), a, b), lambda a, b: with_parts(SimpleNamespace(), a, b), lambda a, b: default(a),
    lambda a, b: generated(a), lambda a, b: partial(digest, a), lambda a, b: with_parts(Plain(), a, b).read,
    lambda a, b: type("Kind", (Plain,), {"shared": a}),
]  # fmt: skip


def built(draw: random.Random, pool: list[Any], depth: int = 0) -> Any:
    """A value, or one that is in another place already."""
    if pool and draw.random() < 0.4:
        return draw.choice(pool)
    if depth > 2 or draw.random() < 0.3:
        value = draw.choice(LEAVES)(draw)
    else:
        value = draw.choice(KINDS)(built(draw, pool, depth + 1), built(draw, pool, depth + 1))
    pool.append(value)
    return value


def change(draw: random.Random, pool: list[Any]) -> None:
    """Changes one of the values in place."""
    held, new = draw.choice(pool), built(draw, pool, 2)
    held = held.__self__ if isinstance(held, MethodType) else held
    if isinstance(held, list):
        held[draw.randrange(2) :] = [new]
    elif isinstance(held, deque):
        held.append(new)
    elif isinstance(held, dict):
        held.pop("x", None) if draw.random() < 0.3 else held.__setitem__("x", new)
    elif isinstance(held, set):
        held.symmetric_difference_update({draw.choice([1, "b", 5])})
    elif isinstance(held, FunctionType):
        if held.__closure__:
            held.__closure__[0].cell_contents = new
        elif held.__defaults__:
            held.__defaults__ = (new,)
        else:
            held.__globals__["VALUE"] = new
    elif isinstance(held, type):
        held.shared = new  # type: ignore[attr-defined]
    elif isinstance(held, (Slots, Plain, SimpleNamespace)):
        setattr(held, draw.choice("ab"), new)
    elif isinstance(held, Layer):
        held.train(not held.training)


def results(seed: int, fn: Callable[[Any, Tensor], Tensor]) -> list[float]:
    draw, pool = random.Random(seed), list[Any]()
    root = SimpleNamespace(a=built(draw, pool), b=[built(draw, pool), built(draw, pool)])
    found = []
    for _ in range(7):
        found.append(fn(root, torch.ones(1)).item())
        change(draw, pool)
        if draw.random() < 0.3:
            root.b[draw.randrange(2)] = built(draw, pool)
    return found


@given(st.integers(0, 2**32))
def test_changes_of_values_in_several_places(seed: int) -> None:
    assert results(seed, ws.compile(step, fullgraph=True)) == results(seed, step)
