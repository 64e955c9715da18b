"""Chains of elementwise operators in one compiled kernel: torch's bits, operator by operator and as whole steps."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wholestep as ws
from tests.lower.test_interpreter import compare
from tests.support.lower_programs import OPTIMIZERS, Builder, program
from wholestep.lower.fusion import chains, execution_order

aten = torch.ops.aten
UNARY = [aten.neg.default, aten.abs.default, aten.sqrt.default]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor]
EXTREMES = [aten.maximum.default, aten.minimum.default]


def optimizer_builder() -> Builder:
    b = Builder()
    b.phase = "optimizer"
    torch.manual_seed(0)
    return b


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"adamw_fused"}))
def test_an_optimizer_runs_as_chains(optimizer: str) -> None:
    """All arithmetic on parameters and state, whatever their shapes."""
    step, inputs = program("mlp", optimizer)
    fast = compare(step, inputs)
    assert "chain_" in fast.code and "addcdiv_(" not in fast.code and "torch.sqrt(" not in fast.code


@pytest.mark.parametrize("fused", [False, True])
def test_the_steps_of_all_parameters_are_counted_by_one_chain(fused: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = torch.optim.AdamW(model.parameters(), fused=fused)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        opt.step()

    compiled = ws.compile(step, fullgraph=True)
    for _ in range(3):
        compiled(torch.randn(2, 4))
    assert [float(state["step"]) for state in opt.state.values()] == [3.0] * 4
    lines = [index for index, line in enumerate(compiled.code.splitlines()) if "_step = add(" in line]
    assert lines == [*range(lines[0], lines[0] + 4)] and "_step.add_(" not in compiled.code


def test_another_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are of float32 whatever a script has chosen."""
    monkeypatch.setitem(chains.__dict__, "_FOUND", {})
    step, inputs = program("mlp", "adamw")
    torch.set_default_dtype(torch.float64)
    try:
        assert "chain_" in compare(step, inputs).code
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_operator_whose_bits_no_kernel_has_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chains.__dict__, "_FOUND", {})
    monkeypatch.setitem(chains._KERNELS, aten.lerp.Scalar, (("lerp",), 2))  # torch fuses its product with its sum
    monkeypatch.setitem(chains._KERNELS, aten.addcmul.default, (("addcdiv",), 3))
    fast = compare(*program("mlp", "adamw"))
    words = [line for line in fast.code.splitlines() if line.lstrip().startswith("#   ")]
    assert any(" = mul(" in w for w in words) and not any(" = addcmul(" in w for w in words)


@st.composite
def chained(draw: Any) -> tuple[Any, list[Any]]:
    """Elementwise programs over one shape, with numbers of every kind, values read twice and inputs written over."""
    b = optimizer_builder()
    b.phase = draw(st.sampled_from(["forward", "optimizer"]))
    shape = draw(st.sampled_from([(1,), (7, 3), (64, 64), (513,), (200, 351)]))
    kinds = draw(st.lists(st.sampled_from(["parameter", "state", "tensor"]), min_size=1, max_size=4))
    values = [b.input(f"x{i}", torch.randn(shape), kind) for i, kind in enumerate(kinds)]
    host = b.input("lr", 0.25, "number")
    single = b.input("scale", torch.tensor(0.7), "state")
    numbers = [0.5, -1.25, 2, host, b.call(operator.neg, host)]
    pick = st.integers(0, 100)
    for _ in range(draw(st.integers(1, 12))):
        x, y, z = (values[draw(pick) % len(values)] for _ in range(3))
        number = draw(st.sampled_from(numbers))
        choice = draw(st.integers(0, 7))
        if choice == 0:
            made = b.call(draw(st.sampled_from(UNARY)), x)
        elif choice == 1:
            made = b.call(draw(st.sampled_from([*BINARY, *EXTREMES])), x, y)
        elif choice == 2:
            made = b.call(draw(st.sampled_from(BINARY)), x, number)
        elif choice == 3:
            made = b.call(aten.mul.Tensor, x, single)
        elif choice == 4:
            made = b.call(aten.add.Tensor, x, y, alpha=number)
        elif choice == 5:
            made = b.call(aten.lerp.Scalar, x, y, number)
        else:
            made = b.call(aten.addcmul.default if choice == 6 else aten.addcdiv.default, x, y, z, value=number)
        values.append(made)
    targets = draw(st.lists(st.integers(0, len(kinds) - 1), unique=True))
    outs = [values[draw(pick) % len(values)] for _ in targets]
    outs += [values[draw(pick) % len(values)] for _ in range(draw(st.integers(0, 2)))]
    return b.finish(outs, dict(enumerate(targets)))


@given(chained())
def test_random_chains(made: tuple[Any, list[Any]]) -> None:
    step, real = made
    for index, tensor in enumerate(real):
        if isinstance(tensor, torch.Tensor) and tensor.dim():
            tensor.view(-1)[index :: 5] = 0.0  # as in a dead unit's gradient
    with torch.no_grad(), patch.object(execution_order, "LARGE", 1):
        compare(step, [t.abs() if isinstance(t, torch.Tensor) else t for t in real], calls=2)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_big_tensors_are_shared_among_torchs_threads(two_threads: None, phase: Literal["forward", "optimizer"]) -> None:
    b = optimizer_builder()
    b.phase = phase
    x, y = (b.input(name, torch.randn(411, 1021), "parameter") for name in "xy")
    size = b.call(aten.sqrt.default, b.call(aten.mul.Tensor, y, y))
    new = b.call(aten.addcdiv.default, b.call(aten.mul.Tensor, x, 0.9), y, size)
    step, real = b.finish([new], {0: 0})
    code = compare(step, real, calls=2).code
    assert "chain_0(" in code and "torch.mul(" not in code


def test_without_torchs_openmp(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Big tensors are left to torch's kernels, which run on several threads."""
    monkeypatch.setattr(chains, "_has_threads", lambda: False)
    b = optimizer_builder()
    x = b.input("x", torch.randn(411, 1021), "parameter")
    step, real = b.finish([b.call(aten.mul.Tensor, x, b.call(aten.neg.default, x))], {0: 0})
    assert "chain_" not in compare(step, real).code


def test_wrong_chains_are_refused() -> None:
    x = torch.ones(4)
    place = (0, x.data_ptr())
    for places, steps in [
        ([place], [(10_000, 0, 0, -1, -1, -1, -1, 0)]),
        ([place], [(0, 0, 1, -1, -1, -1, -1, 0)]),
        ([place], [(0, -1, 0, -1, -1, -1, -1, 0)]),
        ([(4, 0)], []),
        ([place], [(0, 0, 0)]),
    ]:
        with pytest.raises(ValueError):
            chains.native.chain(4, places, steps)
    made = chains.native.chain(4, [(2, 0)], [(chains.native.KERNELS["neg"], 0, 0, -1, -1, -1, -1, 0)])
    with pytest.raises(TypeError):
        chains.native.run(made)
    chains.native.run(made, x.data_ptr())
    assert torch.equal(x, -torch.ones(4))


def test_pairs_of_operators_run_as_one() -> None:
    steps = [
        ("mul_number", "w", ("w",), "decay"),
        ("mul_number", "v", ("v",), "beta"),
        ("addcmul_fused", "v", ("v", "g", "g"), "rest"),
        ("sqrt", "s", ("v",), None),
        ("div_number", "s", ("s",), "bias"),
        ("add_number", "s", ("s",), "eps"),
        ("addcdiv", "w", ("w", "m", "s"), "rate"),
    ]
    found = chains.paired(steps, {"w", "v", "g", "m"}, ())
    assert found == [
        ("mul_addcmul_fused", "v", ("v", "g", "g"), "rest", "beta"),
        ("sqrt", "s", ("v",), None, None),
        ("div_add_number", "s", ("s",), "eps", "bias"),
        ("mul_addcdiv", "w", ("w", "m", "s"), "rate", "decay"),
    ]


def test_operators_that_must_run_alone() -> None:
    first, second = ("mul_number", "r", ("x",), "n"), ("add", "y", ("r", "x"), None)
    write, read = ("neg", "x", ("x",), None), ("neg", "z", ("r",), None)
    assert [s[0] for s in chains.paired([first, second], {"x", "y"}, ())] == ["mul_add"]
    alone = [
        ([first, second], {"r", "x", "y"}, ()),  # somebody reads the product
        ([first, read, second], {"x", "y", "z"}, ()),
        ([first, second, read], {"x", "y", "z"}, ()),
        ([first, write, second], {"x", "y"}, ()),  # x is another one by then
        ([first, ("neg", "q", ("q",), None), second], {"x", "y", "q"}, {"q"}),  # and so it is if q is x
        ([first, ("add", "y", ("r", "r"), None)], {"x", "y"}, ()),
        ([first, ("add", "y", ("x", "r"), None)], {"x", "y"}, ()),
    ]
    for steps, lasting, shared in alone:
        assert [s[:4] for s in chains.paired(steps, lasting, shared)] == steps


@pytest.mark.parametrize("pair", chains._PAIRS, ids=" ".join)
def test_a_pair_has_the_bits_of_both(pair: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: chains._trial(generator) for name in "xyz"}
    numbers = {"n": torch.tensor(0.37), "k": torch.tensor(-0.9)}
    more = {"add_number": (), "addcmul": ("y", "z"), "addcmul_fused": ("y", "z"), "addcdiv": ("y", "z")}
    operands = ("r", *more.get(pair[1], ("y",)))
    steps = [(pair[0], "r", ("x",), "n"), (pair[1], "r", operands, None if pair[1] == "add" else "k")]
    results = []
    for alone in (True, False):
        memory = {**tensors, **numbers, "r": torch.empty_like(tensors["x"])}
        for some in [steps[:1], steps[1:]] if alone else [steps]:
            chains.chain(memory["r"].numel(), some, memory)()
        results.append(memory["r"])
    assert len(chains.paired(steps, "r", ())) == 1
    assert torch.equal(results[0].nan_to_num(7.5), results[1].nan_to_num(7.5))
