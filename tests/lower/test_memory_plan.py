"""Placement: views, swaps, old values, shared outputs, moved inputs, the arena; fixed cases and random graphs."""

from __future__ import annotations

import itertools
import operator
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wholestep as ws
from tests.lower.test_interpreter import compare
from tests.support.lower_programs import Builder, arena_bytes, clone_inputs, program
from wholestep import comm
from wholestep.functional import Functionalized
from wholestep.ir import GETITEM, info
from wholestep.lower.backends.aten import OFTEN, lower_aten
from wholestep.lower.backends.interpreter import interpret
from wholestep.lower.plan.arena import SHARED, Slot, alignment, peak, place

aten = torch.ops.aten


def inputs(b: Builder, *kinds: str, shape: tuple[int, ...] = (4, 4)) -> list[Any]:
    torch.manual_seed(0)
    return [b.input(f"x{i}", torch.randn(shape), kind) for i, kind in enumerate(kinds)]


WATCHED: list[weakref.ref[torch.UntypedStorage]] = []
SEEN: list[int] = []


@torch.library.custom_op("tests::count_alive", mutates_args=())
def count_alive(x: torch.Tensor) -> torch.Tensor:
    """Notes how many of the watched memories exist when it runs."""
    SEEN.append(sum(ref() is not None for ref in WATCHED))
    return x.clone()


@count_alive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("size", [4, 1 << 18])  # from 2**18 elements on, the products are a chain
def test_donated_inputs_are_free_after_their_last_use(size: int) -> None:
    b = Builder()
    x, y, z = [b.input(name, torch.randn(size), "tensor") for name in "xyz"]
    watch = torch.ops.tests.count_alive.default
    small = b.input("small", torch.ones(1), "tensor")
    half = b.items(b.call(aten.split.Tensor, x, size // 2))[0]  # a tuple of views holds the memory too
    one = b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, x, y), y)
    total = b.call(aten.add.Tensor, b.call(aten.sum.default, one), b.call(aten.sum.default, half))
    first = b.call(watch, b.call(aten.add.Tensor, small, total))
    last = b.call(aten.add.Tensor, first, b.call(aten.sum.default, b.call(aten.mul.Tensor, z, z)))
    step, real = b.finish([b.call(watch, last), small], {})
    want = interpret(step, real)
    step.signature.donated = frozenset([0, 1, 2])
    program_ = lower_aten(step)
    SEEN.clear()
    for _ in range(2):
        given = [value.clone() for value in real]
        WATCHED[:] = [weakref.ref(value.untyped_storage()) for value in given[:3]]
        got = program_.consume(given)
        assert given == []
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert SEEN == [1, 0, 1, 0]
    torch.testing.assert_close(program_(*real), want, rtol=0, atol=0)


def test_kept_results_are_not_recycled() -> None:
    b = Builder()
    (x,) = inputs(b, "tensor", shape=(1 << 19,))
    step, real = b.finish([b.call(aten.sin.default, x), b.call(aten.cos.default, x)], {})
    step.signature.saved = 1
    program_ = lower_aten(step)
    memories = []
    for _ in range(2):
        ours, kept = program_(*real)
        memories.append((ours.untyped_storage().data_ptr(), weakref.ref(kept.untyped_storage())))
        del ours, kept
    assert memories[0][0] == memories[1][0]
    assert all(ref() is None for _, ref in memories)


def test_swapped_inputs() -> None:
    b = Builder()
    x, y = inputs(b, "state", "state")
    compare(*b.finish([y, x], {0: 0, 1: 1}))


def test_swapped_views_and_their_sum() -> None:
    b = Builder()
    x, y = inputs(b, "state", "tensor")
    total = b.call(aten.add.Tensor, x, y)
    compare(*b.finish([b.call(aten.t.default, x), b.call(aten.t.default, y), total], {0: 1, 1: 0}))


def test_old_value_read_after_the_new_one() -> None:
    b = Builder()
    x, y = inputs(b, "parameter", "tensor")
    new = b.call(aten.mul.Tensor, x, 2.0)
    compare(*b.finish([new, b.call(aten.mm.default, b.call(aten.add.Tensor, x, new), y)], {0: 0}))


def test_update_happens_in_the_input_itself() -> None:
    b = Builder()
    x, y = inputs(b, "parameter", "tensor")
    new = b.call(aten.addcmul.default, b.call(aten.mul.Tensor, x, 0.5), y, y, value=2)
    program_ = compare(*b.finish([new], {0: 0}))
    assert arena_bytes(program_) == 0 and ".copy_(" not in program_.code


def test_one_value_for_two_inputs_and_an_output() -> None:
    b = Builder()
    x, y = inputs(b, "parameter", "state")
    new = b.call(aten.add.Tensor, x, y)
    step, real = b.finish([new, new, new, new], {0: 0, 1: 1})
    compare(step, real)
    got = lower_aten(step)(*clone_inputs(real))
    assert len({t.data_ptr() for t in got}) == 4


def test_outputs_that_are_inputs_views_and_constants_are_copies() -> None:
    b = Builder()
    x, y = inputs(b, "parameter", "tensor")
    one = b.call(aten.ones.default, [4])
    made = b.call(aten.mm.default, x, y)
    part = b.call(aten.select.int, made, 0, 1)
    step, real = b.finish(
        [x, b.call(aten.t.default, x), y, one, made, part, b.call(aten.t.default, made), None, 3.0], {}
    )
    fast = compare(step, real)
    real = clone_inputs(real)
    first, second = fast(*real), fast(*real)
    owners = {t.untyped_storage().data_ptr() for t in [*first, *second, *real] if isinstance(t, torch.Tensor)}
    assert len(owners) == 16


@pytest.mark.parametrize("last_use", [True, False])
def test_scatters_write_into_a_view(last_use: bool) -> None:
    b = Builder()
    x, y = inputs(b, "state", "tensor")
    row = b.call(aten.select.int, y, 0, 0)
    new = b.call(aten.select_scatter.default, x, row, 0, 2)
    new = b.call(aten.slice_scatter.default, new, b.call(aten.slice.Tensor, y, 1, 0, 2), 1, 1, 3)
    outs = [new] if last_use else [new, b.call(aten.mul.Tensor, x, 2.0)]
    fast = compare(*b.finish(outs, {0: 0}))
    assert arena_bytes(fast) == 0 or not last_use


@pytest.mark.parametrize("last_use", [True, False])
def test_functionalized_operator_runs_in_place(last_use: bool) -> None:
    b = Builder()
    (x,) = inputs(b, "state")
    noise = b.call(GETITEM, b.call(Functionalized(aten.bernoulli_.float), x, 0.5), 0)
    outs = [noise] if last_use else [noise, b.call(aten.neg.default, x)]
    fast = compare(*b.finish(outs, {0: 0}))
    assert (".clone()" in fast.code) is not last_use


def test_batch_norm_updates_its_buffers() -> None:
    b = Builder()
    torch.manual_seed(0)
    x = b.input("x", torch.randn(6, 3, 4, 4), "tensor")
    mean, var = b.input("mean", torch.zeros(3), "buffer"), b.input("var", torch.ones(3), "buffer")
    out = b.call(aten._native_batch_norm_legit_functional.default, x, None, None, mean, var, True, 0.1, 1e-5)
    y, _, _, new_mean, new_var = b.items(out)
    fast = compare(*b.finish([b.call(aten.relu.default, y), new_mean, new_var], {1: 1, 2: 2}))
    assert ".clone()" not in fast.code and ".copy_(" not in fast.code


def test_several_results_of_a_view() -> None:
    b = Builder()
    x, y = inputs(b, "parameter", "tensor")
    made = b.call(aten.mm.default, x, y)
    left, right = b.items(b.call(aten.split.Tensor, made, 2, 1))
    later = b.call(aten.mul.Tensor, left, right)
    compare(*b.finish([later, b.call(aten.cat.default, [right, later, left], 1)], {}))


def test_host_numbers_follow_a_schedule() -> None:
    b = Builder()
    x, y = inputs(b, "parameter", "tensor")
    lr = b.input("lr", 0.5, "number")
    new = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, x, lr), y, alpha=b.call(operator.neg, lr))
    step, real = b.finish([new, b.call(operator.mul, lr, 2)], {0: 0})
    fast, ours, theirs = lower_aten(step), clone_inputs(real), clone_inputs(real)
    for rate in (0.5, 0.25, 1e-3):
        ours[2] = theirs[2] = rate
        got, expected = fast(*ours), interpret(step, theirs)
        assert torch.equal(got[0], expected[0]) and got[1] == expected[1] == 2 * rate
    assert fast.rebinds == 1


def test_moved_parameters_bind_again() -> None:
    step, real = program("mlp")
    fast, ours, theirs = lower_aten(step), clone_inputs(real), clone_inputs(real)
    for call in range(4):
        if call == 2:
            ours[0] = ours[0].clone()
        if call == 3:
            ours[1].set_(ours[1].clone())
        got, expected = fast(*ours), interpret(step, theirs)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert fast.rebinds == 3


def test_memory_that_is_elsewhere_at_each_call_is_not_bound() -> None:
    step, real = program("mlp")
    fast, ours, theirs = lower_aten(step), clone_inputs(real), clone_inputs(real)
    for _ in range(OFTEN + 6):
        ours[:3] = [value.clone() if isinstance(value, torch.Tensor) else value for value in ours[:3]]
        got, expected = fast(*ours), interpret(step, theirs)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, torch.Tensor))
    assert fast.rebinds == OFTEN + 1


def zeroed(p: torch.Tensor, product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    p.zero_()
    p.add_(product)


def added(p: torch.Tensor, product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    p.addmm_(a, b)


def put(p: torch.Tensor, product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b, out=p)


@pytest.mark.parametrize("write", [zeroed, added, put])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_products_are_computed_in_memory_of_eagers_alignment(write: Any, start: int) -> None:
    """Where memory begins decides in which order MKL sums; parts of flat memory begin anywhere."""
    torch.manual_seed(0)
    a, b = torch.randn(20, 16).t(), torch.randn(20, 8)

    def step(p: torch.Tensor) -> None:
        write(p, a @ b, a, b)

    flat = [torch.ones(start + 128) for _ in range(2)]
    compiled = ws.compile(step, fullgraph=True)
    for _ in range(2):
        for fn, memory in zip((step, compiled), flat, strict=True):
            fn(memory[start:].view(16, 8))
        assert torch.equal(*flat)


def test_inputs_that_share_memory_are_still_right() -> None:
    b = Builder()
    x, y = inputs(b, "parameter", "parameter")
    new = b.call(aten.mul.Tensor, x, 2.0)
    step, _ = b.finish([new, b.call(aten.add.Tensor, y, new)], {0: 0})
    base, other = torch.arange(32.0), torch.arange(32.0)
    ours = [base[:16].view(4, 4), base[8:24].view(4, 4)]
    theirs = [other[:16].view(4, 4), other[8:24].view(4, 4)]
    got, expected = lower_aten(step)(*ours), interpret(step, theirs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) and torch.equal(base, other)


def test_results_of_earlier_calls_stay() -> None:
    step, real = program("mlp", keep_grads=True)
    fast = lower_aten(step)
    first = [t for i, t in enumerate(fast(*real)) if i not in step.signature.mutations]
    kept = [t.clone() for t in first]
    fast(*real)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


UNARY = [
    aten.neg.default,
    aten.relu.default,
    aten.t.default,
    aten.clone.default,
    aten.detach.default,
    aten.tanh.default,
]
BINARY = [aten.add.Tensor, aten.mul.Tensor, aten.mm.default, aten.sub.Tensor, aten.copy.default, aten.maximum.default]
SIDE = 4


@st.composite
def graphs(draw: Any) -> tuple[Any, list[Any]]:
    """Programs of views, elementwise calls and products over square matrices, with mutations and outputs."""
    b = Builder()
    kinds = draw(st.lists(st.sampled_from(["parameter", "state", "tensor"]), min_size=1, max_size=3))
    side = draw(st.sampled_from([SIDE, 520]))
    values = inputs(b, *kinds, shape=(side, side))
    b.phase = draw(st.sampled_from(["forward", "optimizer"]))
    for _ in range(draw(st.integers(1, 14))):
        pick = st.integers(0, len(values) - 1)
        choice = draw(st.integers(0, 9))
        x, y = values[draw(pick)], values[draw(pick)]
        if choice < 3:
            values.append(b.call(draw(st.sampled_from(UNARY)), x))
        elif choice < 7:
            values.append(b.call(draw(st.sampled_from(BINARY)), x, y))
        elif choice == 7:
            values.append(b.call(aten.mul.Tensor, x, draw(st.sampled_from([0.5, -1.25, 2]))))
        elif choice == 8:
            values.append(
                b.call(aten.select_scatter.default, x, b.call(aten.select.int, y, 0, 1), draw(st.integers(0, 1)), 0)
            )
        else:
            corner = b.call(aten.select.int, b.call(aten.select.int, x, 0, 1), 0, 1)
            values.append(b.call(aten.add.Tensor, y, corner))
    pick = st.integers(0, len(values) - 1)
    targets = draw(st.lists(st.integers(0, len(kinds) - 1), unique=True))
    outs = [values[draw(pick)] for _ in targets]
    outs += [values[i] for i in draw(st.lists(pick, max_size=3))]
    return b.finish(outs, dict(enumerate(targets)))


@given(graphs())
def test_random_programs(made: tuple[Any, list[Any]]) -> None:
    step, real = made
    with torch.no_grad():
        compare(step, real, calls=2)


LIVES = st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 10), st.booleans(), st.booleans())


@given(st.lists(LIVES, max_size=40), st.sampled_from(["cpu", "cuda:0"]))
def test_arena_never_overlaps(lives: list[tuple[int, int, int, bool, bool]], device: str) -> None:
    slots = [
        Slot(
            size,
            start,
            start + length,
            SHARED if shared and host else device,
            guest=guest or shared,
            pieces=[(0, size // 3, start), (size // 3, size - size // 3, start + length)] * (shared and host and guest),
        )
        for (size, start, length, shared, guest), host in zip(lives, [len(lives) % 2] * len(lives), strict=True)
    ]
    at_home = [slot.device == SHARED or not slot.guest for slot in slots]
    devices = [slot.device for slot in slots]
    needed = sum(-(-slot.nbytes // 64) * 64 for slot in slots if slot.device == SHARED)
    totals = place(slots)
    for i, a in enumerate(slots):
        assert a.offset % alignment(a.device) == 0 and 0 <= a.offset and a.offset + a.nbytes <= totals[a.device]
        assert a.device == devices[i] or not at_home[i]
        for c in slots[:i]:
            for one, two in itertools.product(a.parts(), c.parts()):
                apart_in_time = one.end < two.start or two.end < one.start or a.device != c.device
                assert apart_in_time or one.offset + one.nbytes <= two.offset or two.offset + two.nbytes <= one.offset
    alive, _ = peak([part for slot in slots for part in slot.parts()])
    assert alive <= sum(totals.values()) and totals.get(SHARED, 0) <= needed


def test_the_transports_arena_is_used_while_nothing_waits_there() -> None:
    bucket, activation, both = Slot(4096, 5, 9, SHARED), Slot(4096, 0, 4), Slot(6000, 0, 4)
    lent = Slot(4096, 0, 4, guest=False)
    assert place([activation, both, bucket, lent]) == {SHARED: 4096, "cpu": 6016 + 4096}
    assert activation.device == SHARED and both.device == lent.device == "cpu"
    bucket = Slot(4096, 5, 9, SHARED, pieces=[(0, 1024, 5), (1024, 3072, 8)])
    early, late, last = Slot(3072, 4, 7), Slot(3072, 4, 8), Slot(1024, 1, 4)
    assert place([bucket, early, late, last]) == {SHARED: 4096, "cpu": 3072}
    assert (early.device, early.offset, last.device, last.offset) == (SHARED, 1024, SHARED, 0)


def test_strides_of_intermediates_are_the_planned_ones() -> None:
    b = Builder()
    x, y = inputs(b, "parameter", "tensor")
    turned = b.call(aten.add.Tensor, b.call(aten.t.default, x), b.call(aten.t.default, y))
    made = b.call(aten.mul.Tensor, turned, 3.0)
    assert info(made).value.stride() == (1, 4)
    compare(*b.finish([made, b.call(aten.mm.default, turned, made)], {}))


def test_big_results_take_memory_that_nobody_holds() -> None:
    """Two blocks take turns while the last result is still held; a held one is never written."""
    b = Builder()
    x, y = inputs(b, "parameter", "tensor", shape=(512, 512))
    step, real = b.finish([b.call(aten.mm.default, x, y)], {})
    fast = compare(step, real)
    first = fast(*real)[0]
    expected, seen = first.clone(), set()
    for _ in range(6):
        last = fast(*real)[0]
        seen.add(last.data_ptr())
    assert len(seen) <= 2 and first.data_ptr() not in seen and torch.equal(first, expected)
    window = first[:1].numpy()
    address = first.data_ptr()
    del first
    assert address not in {fast(*real)[0].data_ptr() for _ in range(4)} and window.sum() == expected[:1].numpy().sum()
    storage = fast(*real)[0].untyped_storage()
    assert storage.data_ptr() not in {fast(*real)[0].data_ptr() for _ in range(4)}


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
def test_what_a_collective_takes_lies_where_others_can_read_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(backend_name="shm", size=lambda: 2, rank=lambda: 0)
    monkeypatch.setattr(comm, "get_group", lambda _: group)
    monkeypatch.setattr(comm, "is_initialized", lambda: True)
    monkeypatch.setattr("wholestep.comm.ops.functional_collectives.get_group", comm.get_group)
    operators = torch.ops.wholestep
    b = Builder()
    x = b.input("x", torch.randn(64, 64), "batch")
    made = b.call(aten.sin.default, x)
    reduction = ["sum"] if name == "reduce_scatter" else []
    started = b.call(getattr(operators, name).default, made, *reduction, "")
    step, _ = b.finish([b.call(aten.cos.default, b.call(operators.wait.default, started))], {})
    assert "arena['shared'], 0, (64, 64)" in lower_aten(step).code
