"""Where Python or C++ needs the plain number: a guard for numbers from outside, a refusal for those of tensors."""

from __future__ import annotations

import decimal
import itertools
import json
import math
import os
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import wholestep as ws
from wholestep.errors import DataDependentError

Use = Callable[[Tensor, Any], Any]
LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))

# What needs an integer, on an image [2, 3, 6, 6].
WHOLE: dict[str, Use] = {
    "pad": lambda x, p: F.pad(x, (p, p)),
    "pad_circular": lambda x, p: F.pad(x, (p, p, p, p), mode="circular"),
    "pad_reflect": lambda x, p: F.pad(x, (p, p, p, p), mode="reflect"),
    "narrow": lambda x, p: x.narrow(2, p, 2),
    "narrow_length": lambda x, p: x.narrow(2, 0, p),
    "repeat": lambda x, p: x.repeat(p, 1, 1, 1),
    "interpolate": lambda x, p: F.interpolate(x, size=(p, p), mode="bilinear"),
    "adaptive": lambda x, p: F.adaptive_avg_pool2d(x, p),
    "stride": lambda x, p: F.conv2d(x, torch.ones(1, 3, 2, 2), stride=p),
    "slice": lambda x, p: x[..., p:] + x[..., :1],
    "index": lambda x, p: x[0, :, p],
    "select": lambda x, p: x.select(2, p),
    "split": lambda x, p: x.split(p, 2)[0],
    "split_sizes": lambda x, p: x.split([p, 6 - p], 2)[1],
    "unfold": lambda x, p: x.unfold(2, p, 1),
    "unflatten": lambda x, p: x.flatten().unflatten(0, (p, -1)),
    "diagonal": lambda x, p: x.diagonal(p, 2, 3),
    "cumsum": lambda x, p: x.cumsum(p),
    "roll": lambda x, p: x.roll(p, 0),
    "full": lambda x, p: torch.full((p, 2), 1.0),
    "range": lambda x, p: sum(x * i for i in range(p)),
    "a_list": lambda x, p: x * [5.0, 6.0, 7.0, 8.0][p],
    "a_key": lambda x, p: x * {1: 0.5, 2: 2.0}.get(p, 4.0),
    "bit_length": lambda x, p: x * p.bit_length(),
    "width": lambda x, p: (x, "%*d" % (p, 3)),  # noqa: UP031
    "permutations": lambda x, p: (x, len([*itertools.permutations("ab", p)])),
    "deque": lambda x, p: (x, len(deque("abc", p))),
    "exponent": lambda x, p: (x, str(decimal.Decimal((0, (1,), p)))),
}  # fmt: skip

# What needs a number's value, whatever its type.
PLAIN: dict[str, Use] = {
    "text": lambda x, p: (x, f"{p}", str(p), f"{p:5}"),
    "scale": lambda x, p: F.interpolate(x, scale_factor=p),
    "numpy": lambda x, p: x * float(numpy.mean([p, 2])) + float(numpy.sqrt(p)),
    "struct": lambda x, p: (x, struct.pack("<d", p)),
    "json": lambda x, p: (x, json.dumps({"p": p})),
    "decimal": lambda x, p: x * float(decimal.Decimal(p)),
    "comparison": lambda x, p: x * 2 if p > 2 else x,
    "isnan": lambda x, p: x * 2 if math.isnan(p) else x,
    "isfinite": lambda x, p: x * 2 if math.isfinite(p) else x,
    "isclose": lambda x, p: x * 2 if math.isclose(p, 2.0) else x,
    "dropout": lambda x, p: F.dropout(x, p / 10),
    "type_is": lambda x, p: x * 2 if type(p) in (int, float) else x,
}

# What computes with the number, whatever it is, so that none needs another capture.
FREE: dict[str, Use] = {
    "alpha": lambda x, p: x.add(x, alpha=p),
    "round": lambda x, p: x * round(p, 3) + round(p) + math.floor(p) + math.ceil(p / 2) + math.trunc(p),
    "bits": lambda x, p: x * ((p << 1 | 4) ^ 3) + ~p + (7 & p) if isinstance(p, int) else x * p,
    "divmod": lambda x, p: x * divmod(p, 2)[1] + divmod(9, p)[0],
    "modulo": lambda x, p: x * pow(p, 3, 5) if isinstance(p, int) else x * p,
    "math": lambda x, p: x * math.cosh(p) + math.erf(p) + math.log(p, 3) + math.degrees(p),
    "a_size": lambda x, p: (x, torch.Size([p, 2]) if isinstance(p, int) else p),
    "fill": lambda x, p: x.masked_fill(x > 0, p).clamp(-p, p),
    "tensor": lambda x, p: x * torch.tensor(p),
    "row": lambda x, p: (x * torch.tensor([p, 2, p, 1, 0, 3]), torch.as_tensor((1.5, p), dtype=torch.float64)),
}

# Decisions on a small tensor that the step is given, which are guards without being asked for.
DECIDED = {"comparison", "isnan", "isfinite", "isclose", "type_is"}


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(_same, one, two))
    return type(one) is type(two) and bool(one == two)


def _held(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _values(use: str) -> list[list[Any]]:
    return [[1, 2, 3, 2]] if use in WHOLE else [[1, 2, 3, 2], [1.25, 2.0, 3.5, 2.0]]


@pytest.mark.parametrize("name", [*WHOLE, *PLAIN, *FREE])
def test_a_number_from_outside_is_what_it_is_in_eager(name: str) -> None:
    use, x = (WHOLE | PLAIN | FREE)[name], torch.randn(2, 3, 6, 6)
    for values in _values(name):
        compiled = ws.compile(lambda x, p: use(x, p), fullgraph=True)
        for value in values:
            torch.manual_seed(0)
            expected = use(x, value)
            torch.manual_seed(0)
            assert _same(expected, compiled(x, value)), value
        reasons = [reason for reason in compiled.recompiles if "expected" in reason]
        assert len(reasons) == len(compiled.recompiles) <= (1 if name in FREE else 3)


# What is done with a `numpy.float64`, and whether it is an input from its second value on.
OF_NUMPY: dict[str, tuple[Use, bool]] = {
    "on_the_left": (lambda x, p: p * x + p, True),
    "division_by_zero": (lambda x, p: x * (1 / (p - 2.0)), True),
    "root_of_a_negative": (lambda x, p: (x, (-p) ** 0.5), True),
    "with_another": (lambda x, p: x * (p * numpy.float64(3.0)), True),
    "its_type": (lambda x, p: x * 2 if isinstance(p, numpy.floating) and type(p) is numpy.float64 else x, True),
    "results": (lambda x, p: (x, p * 2, -p, round(p, 1), round(p)), True),
    "comparison": (lambda x, p: (x, p > 2), False),
    "row": (lambda x, p: torch.tensor([p, 2]), False),
    "functions": (lambda x, p: x * numpy.cos(p), False),
    "attributes": (lambda x, p: (x, p.astype(numpy.float32), p.item()), False),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OF_NUMPY)
def test_a_number_of_numpys_varies_as_pythons_and_stays_what_it_is(name: str) -> None:
    (use, varies), x = OF_NUMPY[name], torch.randn(6)
    compiled = ws.compile(lambda x, p: use(x, p), fullgraph=True)
    for value in map(numpy.float64, (1.25, 2.0, 3.5, 2.0)):
        assert repr(compiled(x, value)) == repr(use(x, value))
    assert not varies or compiled.captures == 2


@pytest.mark.parametrize("name", [*WHOLE, *PLAIN, *FREE])
def test_a_number_of_a_tensor_is_refused_or_what_it_is_in_eager(name: str) -> None:
    use, x = (WHOLE | PLAIN | FREE)[name], torch.randn(2, 3, 6, 6)
    for values in _values(name):
        # drawn: nobody knows it before the step runs
        compiled = ws.compile(lambda x, p: use(x, (p * torch.randint(1, 2, ())).item()), fullgraph=True)
        is_free = name in {*FREE, "type_is"}
        refused = dict.fromkeys(values if LONG else values[:1])  # each looks through all objects, which takes long
        for value in values if is_free else refused:
            if is_free:
                assert _same(use(x, value), compiled(x, _held(value))), value
                continue
            with pytest.raises(DataDependentError) as refusal:
                compiled(x, _held(value))
            assert refusal.value.where and refusal.value.remedy


@pytest.mark.parametrize("name", [*WHOLE, *sorted(PLAIN.keys() - {"json", "decimal"}), *FREE])
def test_a_number_of_a_tensor_is_as_in_eager(name: str) -> None:
    use, x = (WHOLE | PLAIN | FREE)[name], torch.randn(2, 3, 6, 6)
    for values in _values(name):
        compiled = ws.compile(lambda x, p: use(x, p.item()))
        for value in values:
            torch.manual_seed(0)
            expected = use(x, value)
            torch.manual_seed(0)
            assert _same(expected, compiled(x, _held(value))), value


def test_a_step_that_stops_at_a_loss_that_is_not_finite_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def step(x: Tensor) -> Tensor:
        if not math.isfinite((x @ weight).item()):
            raise FloatingPointError("the loss is not finite")
        return x * 2

    with pytest.raises(DataDependentError, match="Python decides on a value"):
        ws.compile(step, fullgraph=True)(torch.ones(2))
    compiled = ws.compile(step)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(FloatingPointError):
        compiled(torch.tensor([math.inf, 1.0]))


def test_a_learning_rate_in_a_text_is_a_guard() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([p], lr=0.5)

    def step() -> str:
        p.square().sum().backward()
        opt.step()
        opt.zero_grad()
        return f"lr {opt.param_groups[0]['lr']:.3f}"

    compiled = ws.compile(step, fullgraph=True)
    for lr in (0.5, 0.25, 0.5):
        opt.param_groups[0]["lr"] = lr
        assert compiled() == f"lr {lr:.3f}"
    assert compiled.captures == 2


def test_tensors_as_a_size() -> None:
    x, step = torch.randn(1, 1, 4, 4), lambda x, size: F.interpolate(x, size=(size, size), mode="bilinear")
    compiled = ws.compile(step, fullgraph=True)
    for n in (3, 5, 3):
        assert torch.equal(compiled(x, torch.tensor(n)), step(x, torch.tensor(n)))


def test_libraries_do_not_see_that_tensors_are_fake() -> None:
    """Transformers asks for the class by this name, and takes another kernel where it finds it."""

    def step(x: Tensor) -> Tensor:
        made = x + 1
        fake = isinstance(made, torch._subclasses.FakeTensor)  # type: ignore[attr-defined]
        return made * (5 if fake else 2)

    x = torch.ones(2)
    assert torch.equal(ws.compile(step, fullgraph=True)(x), step(x))
    assert torch._subclasses.FakeTensor is torch._subclasses.fake_tensor.FakeTensor  # type: ignore[attr-defined]


# Where C++ wants a double, the first number of a trace goes by this one.
LIKE_A_TOKEN = 0.5 + 2.0**-45


def test_a_float_of_the_users_is_never_taken_for_another_number():
    def fn(x: Tensor, p: float) -> Tensor:
        return torch.nan_to_num(x, nan=p, posinf=LIKE_A_TOKEN)

    compiled, x = ws.compile(fn, fullgraph=True), torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)
    for p in (0.25, 2.0, 3.0, 4.0):
        assert torch.equal(compiled(x, p), fn(x, p))
    assert compiled.captures <= 2

    def later(x: Tensor, p: float) -> Tensor:
        return torch.nan_to_num(torch.nan_to_num(x, nan=p), posinf=LIKE_A_TOKEN)

    compiled = ws.compile(later, fullgraph=True)  # where it cannot tell them apart, the number is a guard
    for p in (0.25, 2.0, 3.0):
        assert torch.equal(compiled(x, p), later(x, p))


def test_a_number_that_autograd_saves_is_an_input_of_the_backward_too():
    def fn(x: Tensor, p: float) -> Tensor:
        return torch.autograd.grad(torch.logit(x, eps=p).sum(), x)[0]

    compiled, x = ws.compile(fn, fullgraph=True), torch.rand(64, dtype=torch.float64, requires_grad=True)
    for p in (0.25, 0.125, 0.0625, 0.3):
        assert torch.equal(compiled(x, p), fn(x, p))
    assert compiled.captures <= 2


def test_roots_of_negative_numbers() -> None:
    """Which are complex: of the half that stands for a tensor's number while a step is traced, too."""

    def of_tensor(x: Tensor, p: Tensor) -> Tensor:
        return torch._foreach_clamp_max([x], [(p.item() - 1) ** 0.25])[0]

    compiled, x = ws.compile(of_tensor, fullgraph=True), torch.ones(3)
    for p in (2.0, 1.0, 1.5):
        assert torch.equal(compiled(x, _held(p)), of_tensor(x, _held(p)))
    assert compiled.captures == 1
    compiled = ws.compile(lambda x, p: x * p**0.5, fullgraph=True)
    for p in (-2.0, -3.0, -2.0):
        assert torch.equal(compiled(x, p), x * p**0.5)


def caught(x: Tensor, p: float) -> tuple[Tensor, list[str]]:
    total, said = 0.0, list[str]()
    for number in (lambda: 1 / p, lambda: p**-400, lambda: 7.0 % p, lambda: math.sqrt(p), lambda: math.exp(1000 * p)):
        try:
            total += number()
        except (ArithmeticError, ValueError) as error:
            said.append(type(error).__name__)
    return x * total, said


def test_errors_of_numbers_are_caught_as_in_eager() -> None:
    compiled, x = ws.compile(caught), torch.ones(3)
    for p in (2.0, 0.5, 0.0, 0.25, -1.0, 0.0, 3.0):
        assert _same(caught(x, p)[0], compiled(x, p)[0]) and caught(x, p)[1] == compiled(x, p)[1], p
    assert not compiled.breaks and compiled.captures <= 6
    with pytest.raises(ZeroDivisionError, match="float division by zero"):
        ws.compile(lambda x, p: x / (1 / p), fullgraph=True)(x, 0.0)
    with pytest.raises(DataDependentError, match="catches what may be raised where numbers are others"):
        ws.compile(lambda x, p: caught(x, p.item())[0], fullgraph=True)(x, _held(2.0))
    of_tensor = ws.compile(lambda x, p: caught(x, p.item())[0])
    for p in (2.0, 0.5, 0.0, 0.25):
        assert _same(caught(x, p)[0], of_tensor(x, _held(p))), p


@pytest.mark.parametrize("fn", [
    lambda x, n: (x + 0).random_(0, n + 5),
    lambda x, n: torch.tensordot(x, x, dims=n),
])  # fmt: skip
def test_tensors_as_bounds_and_counts(fn: Any) -> None:
    """`random_.from`, which is no name that Python can spell, and an integer taken inside of torch's own Python."""
    step = ws.compile(fn, fullgraph=True)
    for n in (1, 2, 1):
        seen = []
        for run in (fn, step):
            torch.manual_seed(0)
            seen.append(run(torch.ones(3, 3), torch.tensor(n)))
        assert torch.equal(*seen)


@pytest.mark.parametrize("draw", [
    lambda t, p: t.geometric_(p), lambda t, p: t.geometric_(p.item()), lambda t, p: t.geometric_(1 - p),
    lambda t, p: t.exponential_(p), lambda t, p: t.bernoulli_(p.item()), lambda t, p: t.uniform_(p, 2),
])  # fmt: skip
def test_a_number_of_a_tensor_may_be_any_that_an_operator_takes(draw: Any) -> None:
    def step(p: Tensor) -> Tensor:
        return draw(torch.empty(50), p)

    compiled = ws.compile(step, fullgraph=True)
    for value in (0.25, 0.5, 0.75):
        torch.manual_seed(0)
        expected = step(torch.tensor(value))
        torch.manual_seed(0)
        assert torch.equal(compiled(torch.tensor(value)), expected)
    assert compiled.recompiles == []
    if "geometric" in str(draw.__code__.co_names):
        for run in (step, compiled):
            with pytest.raises(RuntimeError, match=r"geometric_ expects p to be in \(0, 1\)"):
                run(torch.tensor(5.0))


@pytest.mark.parametrize("function", [
    lambda n: torch.sym_min(n, 0.3),
    lambda n: torch.sym_max(0.3, n * float("nan")),
    lambda n: torch._sym_sqrt(n) + torch.sym_float(n),
    lambda n: torch.sym_sum([n, 1, n]),
])
def test_functions_of_torch_on_numbers(function: Callable[[Any], Any]) -> None:
    """As Dynamo writes Python's own: `min` of a number of a tensor is `torch.sym_min`."""
    compiled = ws.compile(lambda x: x * function(x.sum().item()), fullgraph=True)
    for x in (torch.tensor([0.1, 0.1]), torch.tensor([0.5, 0.25])):
        assert torch.equal(compiled(x), x * function(x.sum().item()))
    assert compiled.captures == 1


@pytest.mark.parametrize("power", [lambda n: n**0.5, lambda n: 2**n, lambda n: n**3, lambda n: (-2.0) ** n],
                         ids=["root", "of two", "cube", "of a negative number"])  # fmt: skip
def test_powers_of_numbers_are_of_the_type_that_eager_gives(power: Callable[[Any], Any]) -> None:
    compiled = ws.compile(lambda x, n: x * power(n), fullgraph=True)
    x = torch.tensor([1, 2])
    for n in (4, 2, -2, -1):
        expected = x * power(n)
        got = compiled(x, n)
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    for value in (4.0, 2.0, -2.0, 0.5):
        assert torch.equal(compiled(x.float(), value), x.float() * power(value))


def test_a_decision_on_a_power_of_a_negative_number() -> None:
    compiled, x = ws.compile(lambda x, n: x * (3 if (-2.0) ** n < 0 else 5), fullgraph=True), torch.ones(2)
    assert [float(compiled(x, n)[0]) for n in (3, 5, 4, 6)] == [3, 3, 5, 5]


def test_powers_that_are_none_are_refused_as_in_eager() -> None:
    compiled, x = ws.compile(lambda x, n: x * n**-1, fullgraph=True), torch.ones(2)
    assert torch.equal(compiled(x, 4.0), x / 4)
    with pytest.raises(ZeroDivisionError):
        compiled(x, 0.0)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("power", [
    lambda x, k: x**k.item(), lambda x, k: k.item() ** x, lambda x, k: (x * 1).pow_(-k.item()),
    lambda x, k: torch._foreach_pow([x], k.item() - 2)[0],
], ids=["exponent", "base", "in place", "list"])  # fmt: skip
def test_gradients_of_integer_powers_that_only_the_step_knows(power: Use, outside: bool) -> None:
    def step(x: Tensor, k: Tensor) -> Tensor:
        y = power(x, k).sum()
        if not outside:
            y.backward()
        return y

    compiled = ws.compile(step)
    for value in (2, 1, 3):
        x = torch.arange(1.0, 4.0)
        ends = []
        for form in (step, compiled):
            leaf = x.clone().requires_grad_()
            y = form(leaf, torch.tensor(value))
            if outside:
                y.backward()
            ends.append((y.detach(), leaf.grad))
        assert all(map(torch.equal, *ends))
