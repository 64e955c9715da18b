"""Gradients computed by some rows at a time, right where the optimizer reads them: bits, memory, who qualifies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from tests.lower.test_interpreter import compare
from tests.support.equal import World, assert_same_run
from tests.support.lower_programs import Builder, arena_bytes, training_step
from wholestep.lower.fusion import blocked_matmuls

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wide_step(keep_grads: bool = False, optimizer: str = "adamw") -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 1501), nn.ReLU(), nn.Linear(1501, 1499), nn.ReLU(), nn.Linear(1499, 3))
    batch = [torch.randn(20, 30), torch.randn(20, 3)]
    loss = lambda call, x, y: nn.functional.mse_loss(call(x), y)  # noqa: E731
    return training_step(model, loss, batch, optimizer, keep_grads=keep_grads)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "momentum", "sgd"])
def test_a_wide_layers_gradient_is_never_whole(optimizer: str) -> None:
    fast = compare(*wide_step(optimizer=optimizer), calls=2)
    assert fast.code.count("in parts_") == 1  # of the three layers, one has a gradient of 2 M elements
    assert arena_bytes(fast) < 1501 * 1499 * 4 / 2


FUSED: dict[str, Any] = {
    "adam": lambda params: optim.Adam(params, amsgrad=True, weight_decay=0.1, fused=True),
    "adamw": lambda params: optim.AdamW(params, lr=torch.tensor(0.01), maximize=True, fused=True),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_update_by_rows(name: str) -> None:
    """In eager's bits, the ends of vectors included; other parameters of the same optimizer stay in one call."""

    def make(seed: int) -> World:
        model = nn.Sequential(nn.Linear(7, 1451), nn.ReLU(), nn.Linear(1451, 1449), nn.ReLU(), nn.Linear(1449, 3))
        opt = FUSED[name](model.parameters())

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        batches = [(torch.randn(5, 7, generator=torch.Generator().manual_seed(i)),) for i in range(2)]
        return World(step, batches, {"model": model, "opt": opt})

    code = assert_same_run(make, steps=3).step.code  # type: ignore[attr-defined]
    assert code.count("[part]") == 1 and "grads=list_" in code


def test_fused_updates_that_must_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are kept, or kernels that round the rows of a block otherwise."""
    assert "parts_" not in compare(*wide_step(keep_grads=True, optimizer="adamw_fused")).code
    monkeypatch.setattr(blocked_matmuls, "_SAME_BITS", {})
    monkeypatch.setattr(blocked_matmuls, "_tried", lambda *_: False)
    assert "parts_" not in compare(*wide_step(optimizer="adamw_fused")).code


def test_a_gradient_that_stays_is_whole() -> None:
    assert "parts_" not in compare(*wide_step(keep_grads=True)).code


def test_a_whole_gradient_is_written_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_matmuls, "WHOLE", blocked_matmuls.LEAST)
    fast = compare(*wide_step(keep_grads=True), calls=2)
    assert fast.code.count("in parts(") == 1
    torch.set_num_threads(2)
    try:
        assert "in parts(" not in compare(*wide_step(keep_grads=True)).code
    finally:
        torch.set_num_threads(1)


def test_several_threads_share_a_gradient() -> None:
    torch.set_num_threads(2)
    try:
        assert "parts_" not in compare(*wide_step()).code
    finally:
        torch.set_num_threads(1)


def test_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rows(left: torch.Tensor, piece: torch.Tensor) -> Any:
        return ((first, some * (1 + 2**-20), part) for first, some, part in real(left, piece))

    real = blocked_matmuls.by_rows
    monkeypatch.setattr(blocked_matmuls, "_SAME_BITS", {})
    monkeypatch.setattr(blocked_matmuls, "by_rows", by_rows)
    assert "parts_" not in compare(*wide_step()).code


@st.composite
def updates(draw: Any) -> tuple[Any, list[Any]]:
    """Parameters changed by products of batches, results and parameters; some read by others, too."""
    b = Builder()
    torch.manual_seed(0)
    kinds = st.sampled_from(["parameter", "batch"])
    rows = draw(st.sampled_from([32, 37]))
    wide = [b.input(f"w{i}", torch.randn(rows, 16), "parameter") for i in range(2)]
    lefts = [b.input(f"l{i}", torch.randn(rows, 2), draw(kinds)) for i in range(2)]
    rights = [b.input(f"r{i}", torch.randn(2, 16), draw(kinds)) for i in range(2)]
    flipped = b.input("f", torch.randn(2, rows), draw(kinds))
    lefts += [b.call(aten.relu.default, lefts[0]), b.call(aten.t.default, flipped)]
    b.phase = "backward"
    pick = st.integers(0, 100)
    chosen = [b.call(aten.mm.default, lefts[draw(pick) % len(lefts)], rights[draw(pick) % 2]) for _ in range(3)]
    b.phase = "optimizer"
    values = [*wide, *chosen]
    for _ in range(draw(st.integers(1, 8))):
        x, y = (values[draw(pick) % len(values)] for _ in range(2))
        values.append(draw(st.sampled_from([
            lambda: b.call(aten.add.Tensor, x, y, alpha=0.5),  # noqa: B023
            lambda: b.call(aten.mul.Tensor, x, 0.75),  # noqa: B023
            lambda: b.call(aten.addcmul.default, x, y, y, value=-0.1),  # noqa: B023
            lambda: b.call(aten.lerp.Scalar, x, y, 0.1),  # noqa: B023
        ]))())  # fmt: skip
    new = [values[-1 - draw(pick) % 3], values[draw(pick) % len(values)]]
    outs = [
        *new,
        *(b.call(aten.mul.Tensor, one, 0.9) for one in rights),
        *(draw(st.permutations(values))[: draw(st.integers(0, 1))]),
    ]
    mutations = {0: 0, 1: 1}
    mutations |= {2 + i: 4 + i for i in range(2) if b.inputs[4 + i].kind == "parameter"}
    return b.finish(outs, mutations)


@given(updates())
def test_random_updates(made: tuple[Any, list[Any]]) -> None:
    before = blocked_matmuls.PIECE, blocked_matmuls.LEAST, blocked_matmuls.WHOLE, blocked_matmuls.INNER
    blocked_matmuls.PIECE, blocked_matmuls.LEAST, blocked_matmuls.WHOLE = 32, 64, 64  # pieces of sixteen rows
    try:
        with torch.no_grad():
            compare(*made, calls=2)
    finally:
        blocked_matmuls.PIECE, blocked_matmuls.LEAST, blocked_matmuls.WHOLE, blocked_matmuls.INNER = before
