"""The minimum-cut partition: least bytes by an oracle that tries everything, and the bits of the default partition."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Node

from tests.support.joints import joint_of, run_halves
from wholestep.aot_autograd.min_cut import GAP, Value, cheapest, within_budget
from wholestep.aot_autograd.min_cut_partition import lasting
from wholestep.autograd import Joint, Partitioned, default_partition, min_cut_partition
from wholestep.ir import info, is_effectful

PRICES = st.one_of(st.none(), st.sampled_from([0, 1, 2, 5, 9, 2**31, 2**40]))
SMALL = st.one_of(st.none(), st.sampled_from([0, 1, 2, 5, 9]))


@st.composite
def problems(draw: st.DrawFn, keep: st.SearchStrategy = SMALL, remake: st.SearchStrategy = SMALL) -> list[Value]:
    """Up to eight values, each made from some of those before it."""
    values = []
    for index in range(draw(st.integers(1, 8))):
        operands = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        values.append(Value(tuple(sorted(operands)), draw(keep), draw(remake), draw(st.booleans())))
    return values


def made_again(values: Sequence[Value], kept: Iterable[int]) -> set[int] | None:
    """What must be made again when these are kept; None when that cannot be."""
    again: set[int] = set()
    queue = [i for i, v in enumerate(values) if v.wanted]
    while queue:
        index = queue.pop()
        if index not in kept and index not in again:
            if values[index].remake is None:
                return None
            again.add(index)
            queue += values[index].operands
    return again


def choices(values: Sequence[Value]) -> Iterable[tuple[tuple[int, ...], set[int]]]:
    """Every set that can be kept and suffices, with what is then made again."""
    able = [i for i, v in enumerate(values) if v.keep is not None]
    for count in range(len(able) + 1):
        for kept in itertools.combinations(able, count):
            again = made_again(values, kept)
            if again is not None:
                yield kept, again


def price(values: Sequence[Value], kept: Iterable[int], again: Iterable[int]) -> int:
    return sum(values[i].keep for i in kept) + sum(values[i].remake for i in again)


@given(problems())
def test_the_cut_is_the_cheapest_of_all_choices(values: list[Value]) -> None:
    prices = [price(values, *choice) for choice in choices(values)]
    if not prices:
        with pytest.raises(ValueError, match="neither kept nor made again"):
            cheapest(values)
        return
    kept = cheapest(values)
    assert price(values, kept, made_again(values, kept)) == min(prices)


@given(problems(keep=PRICES))
def test_prices_beyond_32_bits_are_rounded_not_wrapped(values: list[Value]) -> None:
    prices = [price(values, *choice) for choice in choices(values)]
    if prices:
        kept = cheapest(values)
        unit = sum((v.keep or 0) + (v.remake or 0) for v in values) // 2**29 + 1
        assert price(values, kept, made_again(values, kept)) <= min(prices) + unit * 2 * len(values)


def test_of_equal_cuts_the_one_that_makes_least_again() -> None:
    chain = [Value((), 0, None), Value((0,), 4, None), Value((1,), 4, 0), Value((2,), 4, 0, wanted=True)]
    assert cheapest(chain) == [3]


@given(problems(remake=st.sampled_from([None, 0, 0])), st.sampled_from([0.0, 0.3, 0.5, 0.8]), st.randoms())
def test_a_budget_is_kept_in_the_least_time(values: list[Value], budget: float, random: object) -> None:
    seconds = [random.choice([0.0, 1e-6, 5e-6, 1e-4]) for _ in values]  # type: ignore[attr-defined]
    able = list(choices(values))
    if not able:
        return
    full = min(able, key=lambda choice: sum(seconds[i] for i in choice[1]))[0]
    least = min(price(values, kept, ()) for kept, _ in able)
    limit = least + budget * max(0, price(values, full, ()) - least)
    within = [sum(seconds[i] for i in again) for kept, again in able if price(values, kept, ()) <= limit]
    kept = within_budget(values, seconds, full, budget)
    again = made_again(values, kept)
    assert again is not None
    assert price(values, kept, ()) <= limit * (1 + 1e-6)
    assert sum(seconds[i] for i in again) <= min(within) * (1 + GAP) + 1e-8


def activations(x: Tensor, w: Tensor) -> list[Tensor]:
    """Elementwise operators between two products: made again, not kept."""
    return [(F.gelu(x @ w) @ w).sum()]


def normalised(x: Tensor, w: Tensor) -> list[Tensor]:
    return [F.softmax(F.layer_norm(x @ w, (8,)) @ w, -1)]


def pieces(x: Tensor, w: Tensor) -> list[Tensor]:
    a, b = (x @ w).chunk(2, -1)
    return [(a.sigmoid() * b).sum(0), (a - b).exp()]


def dropped(x: Tensor, w: Tensor) -> list[Tensor]:
    return [F.dropout(F.relu(F.dropout(x @ w, 0.5) @ w), 0.25)]


def written(x: Tensor, w: Tensor, buffer: Tensor) -> list[Tensor]:
    """Copies a buffer, then writes it: the backward may copy it again only from what it was before."""
    out = (x * buffer.clone()).sin() @ w
    buffer.mul_(0.5).add_(out.detach().mean(0))
    return [out * buffer]


def square(x: Tensor, w: Tensor) -> list[Tensor]:
    return [x @ w @ w.t(), (x * x).sum()]


CASES = {fn.__name__: fn for fn in (activations, normalised, pieces, dropped, written, square)}
SHAPES = {"x": (4096, 8), "w": (8, 8), "buffer": (8,)}
PARTITIONS = {
    "default": default_partition,
    "min_cut": min_cut_partition,
    "half": partial(min_cut_partition, memory_budget=0.5),
    "least": partial(min_cut_partition, memory_budget=0.0),
}


def inputs_of(name: str) -> list[Tensor]:
    count = CASES[name].__code__.co_argcount
    shapes = list(SHAPES.values())[:count]
    return [torch.randn(shape, requires_grad=index < 2) for index, shape in enumerate(shapes)]


def bytes_kept(joint: Joint, parts: Partitioned) -> int:
    """Bytes that the saved values hold beyond what is held anyway."""
    at_hand = {node.name for node in lasting(joint)}
    saved = zip(parts.saved, parts.backward.placeholders, strict=False)
    return sum(info(node).value.nbytes for name, node in saved if name not in at_hand)


@pytest.mark.parametrize("backend", ["naive", "aten"])
@pytest.mark.parametrize("name", CASES)
def test_every_partition_gives_the_same_bits(name: str, backend: str) -> None:
    inputs = inputs_of(name)
    joint, primals = joint_of(CASES[name], inputs)
    results = {}
    for kind, partition in PARTITIONS.items():
        torch.manual_seed(3)
        given = [inputs[i].detach().clone() for i in primals]
        outs, grads = run_halves(joint, partition(joint), given, backend)
        results[kind] = [*outs, *grads]
    for kind, found in results.items():
        for one, two in zip(results["default"], found, strict=True):
            torch.testing.assert_close(two, one, rtol=0, atol=0, msg=lambda text, kind=kind: f"{kind}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_fewer_bytes_with_less_budget_and_never_more_than_the_default(name: str) -> None:
    joint, _ = joint_of(CASES[name], inputs_of(name))
    kept = [bytes_kept(joint, partition(joint)) for partition in PARTITIONS.values()]
    assert kept == sorted(kept, reverse=True)


def made_twice(parts: Partitioned) -> list[Node]:
    """What the backward makes again of the forward, in order."""
    return [n for n in parts.backward.graph.nodes if n.op == "call_function" and info(n).phase == "forward"]


def test_activations_are_made_again_and_products_are_not() -> None:
    joint, _ = joint_of(activations, inputs_of("activations"))
    parts = min_cut_partition(joint)
    again = {str(node.target) for node in made_twice(parts)}
    assert "aten.gelu.default" in again and "aten.mm.default" not in again
    assert bytes_kept(joint, parts) < bytes_kept(joint, default_partition(joint))
    assert "aten.mm.default" in {str(node.target) for node in made_twice(min_cut_partition(joint, memory_budget=0.0))}


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_random_numbers_are_drawn_once(budget: float) -> None:
    joint, _ = joint_of(dropped, inputs_of("dropped"))
    parts = min_cut_partition(joint, memory_budget=budget)
    halves = (parts.forward, parts.backward)
    assert [sum(is_effectful(n) and n.op == "call_function" for n in half.graph.nodes) for half in halves] == [2, 0]


def test_masks_are_kept_as_booleans_and_the_graph_given_is_left_alone() -> None:
    joint, _ = joint_of(dropped, inputs_of("dropped"))
    before = str(joint.step.graph)
    parts = min_cut_partition(joint)
    kinds = [info(node).value.dtype for node in parts.backward.placeholders[: len(parts.saved)]]
    assert kinds.count(torch.bool) == 2
    assert str(joint.step.graph) == before


def test_what_is_made_again_stands_before_its_first_reader() -> None:
    joint, _ = joint_of(activations, inputs_of("activations"))
    parts = min_cut_partition(joint, memory_budget=0.0)
    nodes = list(parts.backward.graph.nodes)
    again = set(made_twice(parts))
    for node in again:
        start, reader = nodes.index(node), min(nodes.index(user) for user in node.users)
        assert again.issuperset(nodes[start:reader])


@pytest.mark.parametrize("budget", [-0.1, 1.5])
def test_a_budget_outside_of_its_range(budget: float) -> None:
    joint, _ = joint_of(square, inputs_of("square"))
    with pytest.raises(ValueError, match=f"memory_budget is {budget}; it must be between 0"):
        min_cut_partition(joint, memory_budget=budget)
