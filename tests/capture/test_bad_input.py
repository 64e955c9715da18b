"""What bad input gets: a clear error that names the user's line, and a world left as it was.

Each refused step marks its offending line with a comment; the error must name exactly that line.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pickle
import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.support.equal import World, assert_refused, assert_same_run
from tests.zoo.models import labelled, training
from tests.zoo.nets import MLP
from wholestep.errors import CaptureError, DataDependentError, LeakError, UnsupportedError

KEPT: list[Any] = []


@torch.library.custom_op("zoo::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    """An operator without a fake rule."""
    return x * 2


def marked_line(function: Callable[..., Any]) -> str:
    """``file.py:line`` of the line marked HERE in a function's source."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = [i for i, line in enumerate(lines) if "# HERE" in line]
    return f"test_bad_input.py:{first + offset}"


def item_in_a_condition(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    if loss.item() > 0:  # HERE
        loss = loss * 2
    return loss


def tensor_in_a_condition(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    if loss > 0:  # HERE
        loss = loss * 2
    return loss


def nan_check(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    assert not torch.isnan(loss)  # HERE
    return loss


def allclose(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    return loss * 2 if torch.allclose(model.fc1(x), torch.zeros(())) else loss  # HERE


def equal(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    return loss * 2 if torch.equal(model.fc1(x), x) else loss  # HERE


def printed(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    model.fc1.name = repr(loss)  # HERE
    return loss


def formatted(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    model.fc1.name = f"{loss:.3f}"  # HERE
    return loss


def formatted_number(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    model.fc1.name = f"{loss.item():.3f}"  # HERE
    return loss


def as_list(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    return logits.sum() * (2.0 if max(logits[0].tolist()) > 0 else 1.0)  # HERE


def as_numpy(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    return logits.sum() * float(logits.detach().numpy().sum())  # HERE


def as_range(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    for _ in range(int(y.max() + 1)):  # HERE
        loss = loss + 1
    return loss


def as_shape(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y) + torch.zeros(int(y.max()) + 1).sum()  # HERE


def as_index(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y) + [1.0, 2.0, 3.0, 4.0][y[0]]  # HERE


def boolean_mask(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    return logits[logits > 0].sum()  # HERE


def nonzero(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    return logits.sum() + (y > 1).nonzero().shape[0]  # HERE


def unique(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y) + torch.unique(y).float().mean()  # HERE


def caught(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    try:
        factor = 0.5 if loss.item() > 1e9 else 1.0  # HERE
    except RuntimeError:
        factor = 2.0  # a way that eager never takes
    return loss * factor


def shown_if_it_can_be(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    """As `logging` does, which prints what its handlers raise, and goes on."""
    loss = model(x, y)
    with contextlib.suppress(Exception):
        str(loss)  # HERE
    return loss


DATA_DEPENDENT = (
    item_in_a_condition,
    tensor_in_a_condition,
    nan_check,
    allclose,
    equal,
    printed,
    formatted,
    formatted_number,
    as_list,
    as_numpy,
    as_range,
    as_shape,
    as_index,
    boolean_mask,
    nonzero,
    unique,
    caught,
    shown_if_it_can_be,
)


@pytest.mark.parametrize("forward", DATA_DEPENDENT, ids=lambda f: f.__name__)
def test_data_dependent(forward: Callable[..., Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    error = assert_refused(training(forward), DataDependentError)
    assert marked_line(forward) in str(error)
    assert "to do" in str(error)
    assert capsys.readouterr().out == ""


def operator_without_fake_rule(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(no_fake(x), y)  # HERE


def test_operator_without_fake_rule() -> None:
    error = assert_refused(training(operator_without_fake_rule), UnsupportedError)
    assert marked_line(operator_without_fake_rule) in str(error)
    assert "no_fake" in str(error)


def kept_in_a_global_list(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    KEPT.append(loss.detach())
    return loss / len(KEPT)  # HERE


def test_result_kept_elsewhere() -> None:
    KEPT[:] = [0.0]  # a step may append to a list, or clear and fill it; one that it also reads is refused
    try:
        error = assert_refused(training(kept_in_a_global_list), LeakError)
    finally:
        KEPT.clear()
    assert marked_line(kept_in_a_global_list) in str(error)  # where it is read


def kept_number(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    KEPT.append(loss.item())  # HERE
    return loss * KEPT[-1]


def test_number_kept_elsewhere() -> None:
    KEPT[:] = [0.0]  # a step may append to a list, or clear and fill it; one that it also reads is refused
    try:
        error = assert_refused(training(kept_number), LeakError)
    finally:
        KEPT.clear()
    assert "test_bad_input.py" in str(error)


def test_nothing_is_saved_while_a_step_is_traced() -> None:
    with pytest.raises(UnsupportedError, match="calls torch.save"):
        ws.compile(lambda x: torch.save(x, "never"), fullgraph=True)(torch.ones(2))
    with pytest.raises(UnsupportedError, match="calls pickle.dumps"):
        ws.compile(lambda x: (pickle.dumps(x + 1), x)[1], fullgraph=True)(torch.ones(2))


def resizing(x: Tensor, size: int) -> Tensor:
    y = x * 2
    y.resize_(size, 3)  # HERE
    return y[:2] + 1


def test_a_tensor_that_the_step_made_and_resizes() -> None:
    """In the memory that it has by a replay; where it takes more, what is there is nobody's to know."""
    x = torch.randn(4, 3)
    whole = ws.compile(resizing, fullgraph=True)
    assert all(torch.equal(whole(x, 2), resizing(x, 2)) for _ in range(3))
    compiled = ws.compile(resizing)
    assert all(torch.equal(compiled(x, 5), resizing(x, 5)) for _ in range(3)) and "aten.resize_" in compiled.breaks[0]
    with pytest.raises(UnsupportedError, match="aten.resize_.default changes which memory a tensor uses") as raised:
        ws.compile(resizing, fullgraph=True)(x, 5)
    assert "test_bad_input.py:" in raised.value.where and raised.value.remedy.startswith("make a new tensor")


def lbfgs(seed: int) -> World:
    model = MLP()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = model(x, y)
            loss.backward()
            return loss

        return opt.step(closure)  # HERE

    return World(step, labelled(1), {"model": model, "opt": opt})


def test_lbfgs() -> None:
    error = assert_refused(lbfgs, UnsupportedError)
    assert "LBFGS" in str(error)
    assert marked_line(lbfgs) in str(error)


def test_who_wraps_a_refusing_function_finds_the_real_one_afterwards() -> None:
    before = torch.optim.LBFGS.step

    def step(x: Tensor) -> Tensor:
        found = torch.optim.LBFGS.step
        torch.optim.LBFGS.step = lambda *args: found(*args)  # type: ignore[method-assign]  # as Dynamo's import does
        return x + 1 if torch.rand(()) > 0.5 else x

    try:
        with pytest.raises(ws.errors.CaptureError):
            ws.compile(step, fullgraph=True)(torch.ones(3))
        p = torch.nn.Parameter(torch.ones(2))
        opt = torch.optim.LBFGS([p])
        assert opt.step(lambda: p.square().sum()).item() == 2
    finally:
        torch.optim.LBFGS.step = before  # type: ignore[method-assign]


def test_optimizer_over_foreign_parameters() -> None:
    """Parameters that no model of the step uses: they are updated or left exactly as eager does."""

    def make(seed: int) -> World:
        model, other = MLP(), MLP()
        free = nn.Parameter(torch.ones(3))
        opt = torch.optim.Adam([*model.parameters(), *other.parameters(), free])

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = model(x, y) + free.pow(2).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return World(step, labelled(), {"model": model, "other": other, "free": free, "opt": opt})

    assert_same_run(make)


def test_model_on_two_devices() -> None:
    def make(seed: int) -> World:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta"))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x).sum()
            loss.backward()
            opt.step()
            return loss

        return World(step, [(torch.randn(2, 3),)], {"model": model, "opt": opt})

    error = assert_refused(make, UnsupportedError)
    assert "meta" in str(error)
    assert "cpu" in str(error)
    assert "test_bad_input.py" in str(error)


def test_mistakes_in_calling_compile() -> None:
    with pytest.raises(TypeError, match="int"):
        ws.compile(3, fullgraph=True)
    with pytest.raises(ValueError, match="backend"):
        ws.compile(lambda x: x, backend="nonsense", fullgraph=True)(torch.ones(1))
    with pytest.raises(TypeError, match="argument"):
        ws.compile(lambda x: x, fullgraph=True)(torch.ones(1), torch.ones(1))


def test_data_assigned_to_a_parameter() -> None:
    """The content arrives; a value of another form is refused."""

    @ws.compile(fullgraph=True)
    def decay(model: nn.Module, new: Callable[[Tensor], Tensor]) -> None:
        for p in model.parameters():
            p.data = new(p.data)

    model = nn.Linear(3, 2)
    weight, expected, version = model.weight, model.weight.detach() * 0.5, model.weight._version
    decay(model, lambda p: p * 0.5)
    assert model.weight is weight and weight._version == version
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=0)
    before = weight.detach().clone()
    with pytest.raises(UnsupportedError, match="shape"):
        decay(model, lambda p: p * torch.ones(2, *p.shape))
    assert torch.equal(weight, before)
    decay(model, lambda p: torch.stack([p, p])[0] * 1)
    decay(model, lambda p: torch.stack([p, p])[1])  # one of the parts of what the step made
    assert torch.equal(weight, before) and model.weight is weight


def test_a_parameter_is_given_its_own_memory() -> None:
    """`module.to(…)` in a step gives each parameter the data that it has."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model.to(torch.float32)(x).square().mean()
        loss.backward()
        model.cpu()
        for p in model.parameters():
            p.data = p.data[:]
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None
        return loss.detach()

    seen = []
    for run in (step, ws.compile(step, fullgraph=True)):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2), torch.randn(4, 3)
        losses = [run(model, x).item() for _ in range(3)]
        seen.append((losses, [(p.tolist(), p._version) for p in model.parameters()]))
    assert seen[0] == seen[1]


def test_one_hot() -> None:
    """Classes out of range end in an error at the call; a count of classes that is left to the data is refused."""
    step = ws.compile(lambda y: nn.functional.one_hot(y, 3) * 2, fullgraph=True)
    assert torch.equal(step(torch.tensor([2, 0])), nn.functional.one_hot(torch.tensor([2, 0]), 3) * 2)
    with pytest.raises(RuntimeError, match="out of bounds"):
        step(torch.tensor([3, 0]))
    with pytest.raises(DataDependentError, match="num_classes"):
        ws.compile(lambda y: nn.functional.one_hot(y) * 2, fullgraph=True)(torch.tensor([2, 0]))


MOVING: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "count": (lambda: itertools.count(3), next),
    "cycle": (lambda: itertools.cycle([3, 4]), next),
    "list iterator": (lambda: iter([3, 4]), next),
    "generator": (lambda: (i for i in (3, 4)), next),
    "zip": (lambda: zip([3, 4], [5, 6], strict=True), lambda pairs: next(pairs)[0]),
    "random": (lambda: random.Random(3), lambda r: r.random()),
    "numpy": (lambda: numpy.random.default_rng(3), lambda r: r.random()),
    "numpy of old": (lambda: numpy.random.RandomState(3), lambda r: r.rand()),
}


@pytest.mark.parametrize("kind", MOVING)
def test_what_moves_on_unseen_is_refused(kind: str) -> None:
    """A replay would repeat the value of the first call; the iterator or generator stays where it is."""
    make, take = MOVING[kind]
    moving, other = make(), make()

    def step(x: Tensor) -> Tensor:
        return x * take(moving)

    with pytest.raises((UnsupportedError, DataDependentError), match="a replay would repeat|numbers a replay"):
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert take(moving) == take(other)
    passed = ws.compile(lambda x, it: (x + 1, it), fullgraph=True)
    assert all(passed(torch.ones(2), moving)[1] is moving for _ in range(2)), "itself when it is only passed on"


def test_refusals_of_iterators_name_the_line() -> None:
    numbers = itertools.count()

    def step(x: Tensor) -> Tensor:
        return x * next(numbers)  # HERE

    with pytest.raises(UnsupportedError) as caught:
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert marked_line(step) in str(caught.value) and "count" in str(caught.value)


def test_values_of_the_standard_library_are_guards() -> None:
    compiled = ws.compile(lambda x, d: x * float(d), fullgraph=True)
    for value in (Decimal("0.5"), Decimal("0.25"), Fraction(1, 8), Fraction(1, 16), Decimal("0.5")):
        assert compiled(torch.ones(1), value) == float(value)


def test_integers_that_decide_on_shapes() -> None:
    """A number that is only known when the step runs is no size; one that follows from a small argument is a guard."""

    def ones(x: Tensor, n: Tensor) -> Tensor:
        return x.new_ones(2, n.item())  # HERE

    compiled = ws.compile(ones, fullgraph=True)
    for n in (3, 4, 3):
        assert compiled(torch.ones(1), torch.tensor(n)).shape == (2, n)
    weight = nn.Parameter(torch.ones(9))
    with pytest.raises(DataDependentError, match="only known when the step runs"):
        ws.compile(lambda x: x.new_ones(2, (x @ weight).long().item()), fullgraph=True)(torch.ones(9))


@pytest.mark.parametrize(
    ("step", "x"),
    [
        (lambda x: x[:, 2], torch.ones(2, 2)),
        (lambda x: x.select(1, -3), torch.ones(2, 2)),
        (lambda x: x[0], torch.ones(0, 3)),
        (lambda x: x[0], torch.tensor(1.0)),
        (lambda x: x.clone().div_(2), torch.arange(3)),
        (lambda x: torch.dropout(x, 0.5, True), torch.arange(3, dtype=torch.uint8)),
        (lambda x: x.clone().div_(2, rounding_mode="floor"), torch.arange(3)),
        (lambda x: x.clone().index_fill_(0, torch.tensor([0]), 1), torch.ones(0, 3)),
        (lambda x: x[:, 3:].index_fill(1, torch.tensor([0]), 1), torch.ones(2, 3)),
        (lambda x: x[2:].index_fill(1, torch.tensor([7]), 1), torch.ones(2, 3)),
    ],
)
def test_kernels_errors_in_eagers_words(step: Any, x: Tensor) -> None:
    try:
        expected: Any = step(x)
    except (IndexError, RuntimeError) as error:
        with pytest.raises(type(error)) as caught:
            ws.compile(step, fullgraph=True)(x)
        assert str(caught.value).splitlines()[0] == str(error).splitlines()[0]
    else:
        assert torch.equal(ws.compile(step, fullgraph=True)(x), expected)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_made_in_the_step(layout: torch.layout) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        made = torch.nested.nested_tensor([x[:2] * 2, x[2:]], layout=layout)
        return (made * 3).to_padded_tensor(0.0)

    x = torch.randn(5, 4)
    with pytest.raises(UnsupportedError, match="calls torch.nested.nested_tensor") as caught:
        ws.compile(step, fullgraph=True)(x)
    assert __file__ in caught.value.where and "without fullgraph=True" in caught.value.remedy
    run = ws.compile(step, fullgraph=False)
    for _ in range(4):
        assert torch.equal(run(x), step(x))


def test_nested_tensors() -> None:
    """`nn.TransformerEncoder` makes them of padded batches by itself."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()

    def step(x: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            return encoder(x, src_key_padding_mask=mask)  # HERE

    with pytest.raises(UnsupportedError, match="_nested_tensor_from_mask") as caught:
        ws.compile(step, fullgraph=True)(torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False] * 3]))
    assert marked_line(step) in str(caught.value)


def test_ctc_with_lengths_in_a_tensor_runs_its_python() -> None:
    """CTC's table has a shape that depends on the lengths."""
    lengths, targets = torch.full((2,), 6), torch.randint(1, 5, (2, 3))

    def step(x: Tensor, n: Tensor) -> Tensor:
        return nn.functional.ctc_loss(x.log_softmax(-1), targets, lengths, n).detach()

    compiled = ws.compile(step)
    x = torch.randn(6, 2, 5)
    for n in (torch.tensor([3, 2]), torch.tensor([2, 3]), torch.tensor([2, 2]), torch.tensor([3, 2])):
        assert torch.equal(compiled(x, n), step(x, n))
    assert len(compiled.breaks) == 1


WORDS = {
    "matmul": (lambda a: a @ a, (3, 4)),
    "linear": (nn.Linear(3, 4), (2, 5)),
    "broadcast": (lambda a: a + a.new_ones(5, 6), (3, 4)),
    "view": (lambda a: a.t().view(12), (3, 4)),
    "overlapping view": (lambda a: a.unfold(1, 2, 2).view(-1), (2, 3)),
    "reshape": (lambda a: a.reshape(5), (3, 4)),
    "cat": (lambda a: torch.cat([a, a[:, :2], a.t()]), (3, 4)),
    "convolution": (nn.Conv2d(3, 4, 3), (1, 2, 8, 8)),
    "layer norm": (nn.LayerNorm(4), (3, 5)),
    "target": (lambda a: nn.functional.cross_entropy(a, torch.zeros(4, dtype=torch.long)), (3, 5)),
    "inverse": (torch.linalg.inv, (3, 4)),
    "index": (lambda a: a[:, 7], (3, 4)),
    "dimension": (lambda a: a.softmax(4), (3, 4)),
    "written": (lambda a: a.detach().copy_(torch.ones(5)), (3, 4)),
}


@pytest.mark.parametrize("what", WORDS)
def test_what_a_kernel_refuses_is_said_in_its_words(what: str) -> None:
    fn, shape = WORDS[what]
    words = []
    flexible = ws.compile(fn, dynamic=True, fullgraph=True)
    for call in (fn, ws.compile(fn, fullgraph=True), *([flexible] if what == "matmul" else [])):
        with pytest.raises((RuntimeError, IndexError, ValueError)) as caught:
            call(torch.randn(shape, requires_grad=True))
        words.append((caught.type, str(caught.value)))
    assert len(set(words)) == 1


def test_tensors_in_a_set_that_is_new_at_each_call() -> None:
    def step(batch: set[Tensor]) -> Tensor:
        return batch.pop() * batch.pop()

    with pytest.raises(UnsupportedError, match="a tensor in a set that is another at each call"):
        ws.compile(step, fullgraph=True)({torch.full((2,), 2.0), torch.full((2,), 3.0)})
    served = ws.compile(step, fullgraph=False)
    assert all(served({torch.full((2,), 2.0), torch.full((2,), 3.0)}).tolist() == [6.0, 6.0] for _ in range(3))


QUANTIZED = torch.quantize_per_tensor(torch.ones(2, 2), 0.5, 0, torch.qint8)
OPAQUE: dict[str, Callable[[Tensor], Any]] = {
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8).dequantize(),
    "by channels": lambda x: torch.quantize_per_channel(x, x[0] + 1, x[0].int(), 0, torch.qint8).int_repr(),
    "compressed": lambda x: x.to_sparse_csr() @ x,
    "of oneDNN": lambda x: x.to_mkldnn().to_dense(),
    "quantized outside": lambda x: QUANTIZED.dequantize() @ x,
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_tensors_for_which_no_fake_one_stands(kind: str) -> None:
    step = OPAQUE[kind]
    with pytest.raises(UnsupportedError, match="quantized"):
        ws.compile(step, fullgraph=True)(torch.eye(2))
    compiled = ws.compile(step)
    for x in torch.arange(12.0).reshape(3, 2, 2):
        assert torch.equal(compiled(x), step(x))


def test_an_error_of_what_a_step_leaves_behind_names_the_steps_line() -> None:
    holder = SimpleNamespace()

    def step(x: Tensor) -> Tensor:
        holder.made = MappingProxyType({"x": x})
        return x

    with pytest.raises(CaptureError, match=f"at: {__file__}:{step.__code__.co_firstlineno}"):
        ws.compile(step, fullgraph=True)(torch.ones(2))
