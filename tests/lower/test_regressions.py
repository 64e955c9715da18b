"""One small program for each mistake that whole training steps once found in the lowering."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.lower.test_interpreter import compare, equal
from tests.support.lower_programs import Builder, clone_inputs
from wholestep import comm
from wholestep.functional import HIDDEN_VIEWS, Functionalized, UnderGrad, get_rng_state, set_rng_state
from wholestep.ir import GETITEM
from wholestep.lower.backends.aten import lower_aten
from wholestep.lower.backends.interpreter import interpret
from wholestep.lower.fusion import blocking_collectives
from wholestep.testing import run_ranks

aten = torch.ops.aten


def test_parts_of_an_unsafe_split_keep_their_whole_alive() -> None:
    """The GRU: the schema says that the parts are fresh, but they lie in the operand's memory."""
    b = Builder()
    torch.manual_seed(0)
    x = b.input("x", torch.randn(3, 8), "tensor")
    whole = b.call(
        aten.mm.default,
        x,
        b.call(aten.t.default, b.call(aten.sin.default, b.input("w", torch.randn(8, 8), "parameter"))),
    )
    left, right = b.items(b.call(aten.unsafe_split.Tensor, whole, 4, 1))
    later = b.call(aten.mm.default, x, b.call(aten.cos.default, b.call(aten.mm.default, b.call(aten.t.default, x), x)))
    out = b.call(aten.add.Tensor, b.call(aten.exp.default, left), right)
    compare(*b.finish([b.call(aten.sum.default, later), out], {}))


def test_operators_with_hidden_views_share_their_operands_memory() -> None:
    x = torch.randn(4, 6)
    arguments: dict[str, tuple[Any, ...]] = {
        "_unsafe_view": ([24],), "unsafe_split": (2,), "unsafe_split_with_sizes": ([1, 3],)
    }  # fmt: skip
    assert set(arguments) == HIDDEN_VIEWS
    for name, rest in arguments.items():
        made = getattr(aten, name)(x, *rest)
        for part in made if isinstance(made, (list, tuple)) else [made]:
            assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), name


def test_a_public_function_with_another_default_is_not_called() -> None:
    """``torch.binary_cross_entropy_with_logits`` reduces nothing by default, its overload takes the mean."""
    b = Builder()
    x, y = (b.input(name, torch.rand(5, 1), "tensor") for name in "xy")
    compare(*b.finish([b.call(aten.binary_cross_entropy_with_logits.default, x, y)], {}))


def test_a_keyword_that_python_reserves() -> None:
    b = Builder()
    x = b.input("x", torch.rand(4), "state")
    drawn = b.call(GETITEM, b.call(Functionalized(aten.uniform_.default), x, -1.0, 2.0), 0)
    compare(*b.finish([drawn], {0: 0}))


def test_setting_the_random_state_gives_nothing() -> None:
    """A checkpoint draws again what it drew."""
    b = Builder()
    x = b.input("x", torch.rand(4), "tensor")
    state = b.call(get_rng_state)
    first = b.call(GETITEM, b.call(Functionalized(aten.bernoulli_.float), x, 0.5), 0)
    b.call(set_rng_state, state)
    second = b.call(GETITEM, b.call(Functionalized(aten.bernoulli_.float), x, 0.5), 0)
    step, real = b.finish([first, second], {})
    for node in step.graph.nodes:  # as the recorder writes it: a call that gives nothing
        if node.target is set_rng_state:
            node.meta["info"].value = ()
    compare(step, real)
    first_value, second_value = lower_aten(step)(*clone_inputs(real))
    assert torch.equal(first_value, second_value)


def test_hidden_writes_of_batch_norm_reach_its_buffers() -> None:
    b = Builder()
    torch.manual_seed(0)
    x = b.input("x", torch.randn(6, 3, 4), "tensor")
    mean, var = b.input("mean", torch.zeros(3), "buffer"), b.input("var", torch.ones(3), "buffer")
    call = Functionalized(aten.native_batch_norm.default, written=(3, 4))
    y, _, _, new_mean, new_var = b.items(b.call(call, x, None, None, mean, var, True, 0.1, 1e-5))
    again = b.items(b.call(call, y, None, None, new_mean, new_var, True, 0.1, 1e-5))
    fast = compare(*b.finish([again[0], again[3], again[4]], {1: 1, 2: 2}))
    assert ".clone()" not in fast.code and ".copy_(" not in fast.code


def test_an_operator_run_as_if_gradients_were_wanted() -> None:
    b = Builder()
    x = b.input("x", torch.randn(4, 4), "tensor")
    compare(*b.finish([b.call(aten.neg.default, b.call(UnderGrad(aten.sin.default), x))], {}))


def test_a_source_of_several_lines_stays_in_its_comment() -> None:
    layer = nn.Linear(3, 3)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return layer(batch["a\nb = nonsense("]).sum()

    x = torch.randn(2, 3)
    assert torch.equal(ws.compile(step, fullgraph=True)({"a\nb = nonsense(": x}), layer(x).sum())


def test_a_part_that_only_a_constant_is_like() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x.sum().view(1).unbind(0)[0])

    assert torch.equal(ws.compile(step, fullgraph=True)(torch.ones(3)), torch.zeros(()))


def test_constants_are_never_written() -> None:
    b = Builder()
    x = b.input("x", torch.randn(4), "tensor")
    constant = b.constant(torch.ones(4))
    drawn = b.call(GETITEM, b.call(Functionalized(aten.bernoulli_.float), constant, 0.5), 0)
    compare(
        *b.finish([b.call(aten.mul.Tensor, constant, x), drawn, b.call(aten.alias.default, constant), constant], {})
    )


def bucket(kind: str) -> list[Any]:
    """Gradients in one bucket, reduced while other work goes on, as a data-parallel plan writes it."""
    operators = torch.ops.wholestep
    rank = comm.get_rank()
    b = Builder()
    x = b.input("x", torch.arange(6.0).view(2, 3) + rank, "tensor")
    p = b.input("p", torch.ones(3, 3), "parameter")
    b.input("g", torch.ones(3, 3), "grad")
    g = b.call(aten.mm.default, b.call(aten.t.default, x), x)
    flat = b.call(aten.cat.default, [b.call(aten.view.default, g, [9]), b.call(aten.view.default, x, [6])])
    if kind == "all_reduce":
        started = b.call(operators.all_reduce.default, flat, "sum", "")
    else:
        started = b.call(operators.all_gather.default, flat, "")
    meanwhile = b.call(aten.mm.default, x, p)
    for _ in range(3):  # would take the bucket's memory if it were free
        meanwhile = b.call(aten.sin.default, b.call(aten.mm.default, meanwhile, p))
    done = b.call(operators.wait.default, started)
    first = b.call(aten.view.default, b.call(aten.slice.Tensor, done, 0, 0, 9), [3, 3])
    new = b.call(aten.add.Tensor, p, first, alpha=-0.1)
    whole = b.call(operators.wait.default, b.call(operators.all_reduce.default, first, "avg", ""))
    step, real = b.finish(
        [b.call(aten.sum.default, meanwhile), new, whole, b.call(aten.sum.default, done)], {1: 1, 2: 2}
    )
    ours, theirs = clone_inputs(real), clone_inputs(real)
    program = lower_aten(step)
    for _ in range(3):
        got, expected = program(*ours), interpret(step, theirs)
        assert all(map(equal, got, expected)) and all(map(equal, ours, theirs))
    return [program.code]


@pytest.mark.parametrize("little", [-1, 1 << 20])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_collectives_run_beside_other_work_or_at_once(kind: str, little: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_collectives, "LITTLE", little)  # bytes of work worth overlapping with
    for (code,) in run_ranks(bucket, 2, "thread", (kind,)):
        assert ("wholestep_wait" in code) == (little < 0)
        assert (f"{kind}_blocking(" in code) == (little > 0)
        assert ("wholestep_all_reduce_(cat_default" in code) == (kind == "all_reduce" and little < 0)


@pytest.mark.parametrize("same_order", [False, True])
@pytest.mark.parametrize("between", ["send", "all_reduce", "nothing"])
def test_nothing_that_communicates_stands_between_what_runs_at_once(between: str, same_order: bool) -> None:
    """A rank that ran the first to its end here could be waited for, with the second, by one that starts otherwise."""
    operators = torch.ops.wholestep
    b = Builder()
    x = b.input("x", torch.randn(4, 4), "batch")
    started = b.call(operators.all_reduce.default, b.call(aten.sin.default, x), "sum", "")
    other = b.call(aten.cos.default, x)
    if between == "send":
        other = b.call(operators.wait.default, b.call(operators.send.default, other, 1, 0, ""))
    if between == "all_reduce":
        other = b.call(operators.wait.default, b.call(operators.all_reduce.default, other, "sum", ""))
    done = b.call(operators.wait.default, started)
    step, _ = b.finish([b.call(aten.neg.default, done), b.call(aten.neg.default, other)], {})
    step.signature.same_order = same_order  # what plans have made is in one order on all ranks
    code = lower_aten(step).code
    first = code.count("all_reduce_blocking(sin")
    assert first == (between == "nothing" or (same_order and between == "all_reduce"))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("start", [0, 2])
def test_an_offset_counts_from_the_operands_first_element(offset: int, start: int) -> None:
    """Wherever the memory plan, or the user, has put the operand."""
    b = Builder()
    x = b.input("x", torch.arange(12.0), "tensor")
    for_long = b.call(aten.sin.default, x)
    part = b.call(aten.slice.Tensor, b.call(aten.cos.default, x), 0, start)
    even = b.call(aten.as_strided.default, part, [3], [2], offset)
    new = b.call(aten.as_strided_scatter.default, part, b.call(aten.neg.default, even), [3], [2], offset)
    outputs = [b.call(aten.add.Tensor, even, 1), b.call(aten.mul.Tensor, new, 2), b.call(aten.mul.Tensor, for_long, 2)]
    step, real = b.finish(outputs, {})
    compare(step, real)
    whole = torch.arange(20.0)
    got = lower_aten(step)(whole[5:17])
    expected = whole[5:17].cos()[start:]
    assert torch.equal(got[0], expected[offset : offset + 5 : 2] + 1)
    expected[offset : offset + 5 : 2] *= -1
    assert torch.equal(got[1], expected * 2)


def as_given(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """A user's backend that runs the graph as it is."""
    return gm.forward


@pytest.mark.parametrize("backend", ["aten", "naive", as_given])
def test_a_strided_view_of_an_input_that_begins_late_in_its_memory(backend: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((2,), (2,), x.storage_offset() + 1).mul_(10)
        return x.as_strided((2,), (1,), x.storage_offset()).clone()

    eager, ours = torch.arange(8.0), torch.arange(8.0)
    expected = step(eager[3:])
    assert torch.equal(ws.compile(step, backend=backend, fullgraph=True)(ours[3:]), expected)
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("backend", ["aten", "naive", as_given])
@pytest.mark.parametrize("start", [0, 3])
def test_strided_copies_that_the_user_calls(start: int, backend: Any) -> None:
    """Eager counts their offsets from the start of the memory, and lets them reach outside of the operand."""

    def step(x: torch.Tensor) -> Any:
        y = x * 2
        begin, zeros = x.storage_offset(), torch.zeros(2)
        return (
            torch.as_strided_copy(y[1:], (2,), (2,), 1) * 3,
            torch.as_strided_copy(x[1:], (2,), (1,), begin),
            torch.as_strided_scatter(x[1:], zeros, (2,), (1,), begin + 2),
            torch.as_strided_scatter(x[1:], zeros, (2,), (1,), begin) + 1,
            torch.as_strided_scatter(y[1:], zeros, (2,), (1,), 2) + 1,
            torch.as_strided_scatter(y[1:], zeros, (2,), (2,), 0),
        )

    x = torch.arange(1.0, 11.0)[start : start + 6]
    expected = step(x)
    for got, want in zip(ws.compile(step, backend=backend, fullgraph=True)(x), expected, strict=True):
        assert torch.equal(got, want)


def test_groups_of_calls_keep_the_order_of_collectives():
    """The factors of p would be one group, were it not that one is sent before what the other waits for."""

    def sums(p, y):
        first = torch.ops.wholestep.wait(torch.ops.wholestep.all_reduce(p * 2, "sum", "world"))
        second = torch.ops.wholestep.wait(torch.ops.wholestep.all_reduce(y, "sum", "world"))
        return first, second * p

    if comm.is_initialized():  # a mesh of one rank, from another test
        comm.destroy_process_group()
    comm.init_process_group("null", rank=0, world_size=2)
    try:
        p, y = torch.randn(1 << 18), torch.randn(1 << 18)
        assert all(map(torch.equal, ws.compile(sums, fullgraph=True)(p, y), sums(p, y)))
    finally:
        comm.destroy_process_group()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]
)
def test_losses_leave_the_arena_where_it_is(loss: str, reduction: str) -> None:
    """Their out= forms resize what they are given to all elements, and move the memory that it is a part of."""
    function = getattr(nn.functional, loss)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return function(torch.sigmoid(x) * 0.5, torch.sigmoid(y), reduction=reduction) * 2 + 1

    x, y = torch.randn(40, 50), torch.randn(40, 50)
    compiled = ws.compile(step, fullgraph=True)
    compiled(x, y)
    program = compiled._entries[0].program.run
    before = {key: arena.untyped_storage().data_ptr() for key, arena in program._arena.items()}
    assert torch.equal(compiled(x, y), step(x, y))
    assert before == {key: arena.untyped_storage().data_ptr() for key, arena in program._arena.items()}
    assert all(arena.untyped_storage().nbytes() == program._sizes[key] for key, arena in program._arena.items())


@pytest.mark.parametrize("between", [lambda x: x, torch.neg, lambda x: x.view(2, 4).view(-1)], ids=["", "neg", "views"])
def test_a_bucket_in_a_bucket_is_filled(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The inner one's parts lie in its own memory, from where the outer one has to be filled."""

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        inner = torch.cat([x * 2, y * 3])
        return torch.cat([z * 5, between(inner), z * 4]).view(4, 4).exp().sum(0)

    given = torch.randn(3, 4).unbind(0)
    compiled = ws.compile(step, fullgraph=True)
    assert all(torch.equal(compiled(*given), step(*given)) for _ in range(2))


USES: dict[str, Any] = {
    "multiplied": lambda x, n: x * n,
    "added": lambda x, n: x.sum() + n,
    "in a chain": lambda x, n: (x * n + 1) * n - x,
    "divided": lambda x, n: n / x,
    "filled": lambda x, n: x.masked_fill(x > 0, n) + torch.full((3,), n),
    "clamped": lambda x, n: x.clamp(min=n),
    "imaginary": lambda x, n: x * complex(n, 1),
    "both zeros": lambda x, n: torch.stack([x * 0.0, x * -0.0, x * n]),
}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -0.0, 0.1])
@pytest.mark.parametrize("use", USES)
def test_any_number_is_an_operand(use: str, number: float) -> None:
    compiled = ws.compile(USES[use], fullgraph=True)
    for dtype in (torch.float32, torch.float64):
        found = []
        for run in (USES[use], compiled):
            x = torch.tensor([1.0, -2.0, 0.5], dtype=dtype, requires_grad=True)
            out = run(x, number)
            out.abs().sum().backward()
            parts = torch.view_as_real(out.detach()) if out.is_complex() else out.detach()
            found.append([parts, parts.signbit() & ~parts.isnan(), x.grad])
        torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.div])
def test_a_number_may_be_the_first_operand(op: Any) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [op(3.0, x), op(2, x.exp()).tanh(), op(x.sum().item(), x), op(input=4, other=x), op(1.5, w)]

    x, w = torch.randn(4, 5), torch.randn(3, requires_grad=True)
    for found, expected in zip(ws.compile(step, fullgraph=True)(x, w), step(x, w), strict=True):
        assert torch.equal(found, expected) and found.requires_grad == expected.requires_grad
