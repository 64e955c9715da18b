"""Results lie in memory as eager's kernels lay them, whatever torch's rules for fake tensors say, and round alike.

The quick form takes one layout of one sample of every sixteenth operator of torch's own test table; the long form
(`make test-ops`) takes all operators, all layouts and three samples of each.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import wholestep as ws
from tests.support.equal import World, assert_same_run
from tests.support.operators import OPERATORS, UNDEFINED, gapped, operator_cases, turned
from wholestep import fake_layouts
from wholestep.errors import CaptureError, DataDependentError, UnsupportedError
from wholestep.nested import tensors_of

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))
OTHERS = list(itertools.islice(sorted(OPERATORS), 0, None, 1 if LONG else 16))


def _like(make: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """A tensor's values in memory that `make` lays out."""
    make = make if tensor.dim() else torch.clone
    with torch.no_grad():
        return make(tensor).to(tensor.dtype).copy_(tensor).requires_grad_(tensor.requires_grad)


def _margin(like: Tensor) -> Tensor:
    return torch.zeros((*like.shape[:-1], like.shape[-1] + 3), dtype=like.dtype)[..., 1:-2]


def _last(like: Tensor) -> Tensor:
    if like.dim() < 3:
        return turned(like)
    return torch.zeros_like(like.movedim(1, -1), memory_format=torch.contiguous_format).movedim(-1, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": turned, "gapped": gapped, "margin": _margin, "channels last": _last,
}  # fmt: skip


def step_of(fn: Callable[..., Any], layout: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Forward, and backward of gradients in a layout; what both give, and the strides that Python sees of it."""

    def step(*tensors: Tensor) -> Any:
        results = [leaf for leaf in tree_leaves(fn(*tensors)) if isinstance(leaf, Tensor)]
        outs = [out for out in results if out.requires_grad]
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        if outs and inputs:
            weights = [torch.linspace(-1, 1, out.numel()).to(out.dtype).view(out.shape) for out in outs]
            weights = [_like(layout, weight) for weight in weights]
            grads = torch.autograd.grad(outs, inputs, weights, allow_unused=True)
            results += [grad for grad in grads if grad is not None]
        return results, [_strides(result) for result in results if result.layout is torch.strided]

    return step


def difference(step: Callable[..., Any], tensors: list[Tensor], layout: Callable[[Tensor], Tensor]) -> str:
    """What differs between a step compiled and eager, on tensors in a layout."""
    seen = []
    for run in (step, ws.compile(step, fullgraph=True), ws.compile(step)):
        given = [_like(layout, t) if t.layout is torch.strided else t for t in tensors]
        torch.manual_seed(0)
        try:
            seen.append((*run(*given), given))
        except DataDependentError:  # then Python runs
            continue
        except Exception as error:
            if run is step:
                return ""
            return f"compiled: {error!r:.300}"
        if len(seen) == 2:
            break
    for what, one, two in zip(("result", "strides", "input"), *seen, strict=True):
        if what == "strides":
            if one != two:
                return f"strides {one} and {two}"
            continue
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            if a.layout is torch.strided and (_strides(a) != _strides(b) or not _same(a, b)):
                return f"{what} {index}: {a.stride()} and {b.stride()}, {(a - b).abs().max()}"
    return ""


def _strides(tensor: Tensor) -> list[int]:
    """Strides of dimensions that have several elements; those of others lead nowhere."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _same(one: Tensor, two: Tensor) -> bool:
    if one.dtype is torch.complex32:
        one, two = one.to(torch.complex64), two.to(torch.complex64)
    return one.dtype == two.dtype and torch.allclose(one, two, 0, 0, equal_nan=True)


# What differs from eager, with the reason; a name that works in the long form fails its test.
EXCEPTIONS = {
    **dict.fromkeys(("sparse.mm.reduce", "sparse.sampled_addmm"), "sparse tensors between calls are refused"),
    "masked.median": "its result is whatever lay in memory",
    **dict.fromkeys(
        ("linalg.householder_product", "masked_select", "ormqr"),
        "autograd's own formula lays the gradient out otherwise under a mode; values are eager's",
    ),
}


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in EXCEPTIONS and name not in UNDEFINED])
def test_operators_on_operands_of_any_layout(name: str) -> None:
    found = []
    for number, case in enumerate(itertools.islice(operator_cases(name), 3 if LONG else 1)):
        fn, tensors, _ = case.make()
        for index, layout in enumerate(LAYOUTS if LONG else ["turned"]):
            other = list(LAYOUTS.values())[(index + number) % len(LAYOUTS)]
            said = difference(step_of(fn, other), tensors, LAYOUTS[layout])
            found += [f"sample {number}, {layout}: {said}"] if said else []
    assert not found, "\n".join(found)


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "hardswish_": lambda x: F.hardswish(x * 1, inplace=True),
    "hardtanh_": lambda x: F.hardtanh(x * 1, inplace=True),
    "hardsigmoid_": lambda x: F.hardsigmoid(x * 1, inplace=True),
    "leaky_relu_": lambda x: F.leaky_relu(x * 1, inplace=True),
    "softplus": F.softplus,
    "logit": lambda x: torch.logit(x, 0.1),
    "gelu": F.gelu,
    "mish": F.mish,
    "half of them": lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


@pytest.mark.parametrize("given", LAYOUTS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_gradients_of_any_layout(name: str, given: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(5, 13, 38, requires_grad=True)
    for coming in LAYOUTS.values():
        assert difference(step_of(ELEMENTWISE[name], coming), [x], LAYOUTS[given]) == ""


def _normalized(x: Tensor) -> Tensor:
    """Its workspace, of which the backward reads, has no elements on a CPU."""
    channels = torch.ones(x.shape[1])
    settings = channels, channels, channels * 0, channels.clone(), 0.1, 1e-5
    return torch.ops.aten._batch_norm_with_update(x, *settings)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("fn", [torch.nanmean, lambda x: x.prod(0), _normalized], ids=["mean", "product", "norm"])
def test_gradients_of_reductions_lie_as_eagers(fn: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, layouts = torch.rand(5, 4, 6, requires_grad=True), list(LAYOUTS.values())
    for given, coming in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        assert difference(step_of(fn, coming), [x], given) == ""


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "nearest-exact", "bicubic"])
def test_gradients_of_enlarged_views_are_at_their_places(mode: str) -> None:
    def fn(p: Tensor) -> Tensor:
        return F.interpolate(p.permute(0, 3, 1, 2), scale_factor=2, mode=mode)

    p = torch.randn(1, 2, 2, 3, requires_grad=True)
    for coming in LAYOUTS.values():
        assert difference(step_of(fn, coming), [p], torch.clone) == ""
    weights = torch.randn(1, 3, 4, 4)
    one, two = (torch.autograd.grad((run(p) * weights).sum(), p)[0] for run in (fn, ws.compile(fn, fullgraph=True)))
    assert torch.equal(one, two) and one.stride() == two.stride()


WRITES: dict[str, Callable[..., Any]] = {
    "product into a transposed result": lambda x, a, b: x.t().addmm_(a, b),
    "product given a transposed out": lambda x, a, b: torch.mm(a, b, out=x.t()),
    "sigmoid given a transposed out": lambda x, a, b: torch.sigmoid(a @ b, out=x.t()),
    "random numbers in a column": lambda x, a, b: x[:, 0].normal_(),
    "random numbers in every other column": lambda x, a, b: x[:, ::2].uniform_(),
    "random numbers across": lambda x, a, b: x.t()[1:].bernoulli_(0.3),
    "sums of products": lambda x, a, b: x.t().addbmm_(a.view(1, *a.shape), b.view(1, *b.shape)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_memory_of_any_layout(name: str) -> None:
    seen = []
    for run in (WRITES[name], ws.compile(WRITES[name], fullgraph=True)):
        torch.manual_seed(0)
        given = [torch.rand(*shape) for shape in ((33, 47), (47, 60), (60, 33))]
        run(*given)
        seen.append(given)
    assert all(map(torch.equal, *seen))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a last size of one": lambda x: x.as_strided((1, 2, 4, 1), (4, 4, 1, 4), 3).view(1, 2, 4),
    "a size of one after": lambda x: x[3:12].view(3, 3).t().view(1, 3, 3, 1),
    "a size of one before": lambda x: x[2:8].view(2, 3).t()[:, None].view(3, 2),
    "a product": lambda x: torch.einsum("aij,ajk->aik", x[:6].view(1, 2, 3), x[:12].view(1, 3, 4)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_sizes_of_one_have_the_strides_that_views_give_them(name: str) -> None:
    def fn(x: Tensor) -> tuple[Any, ...]:
        view = VIEWS[name](x)
        return view.detach(), view + 1, view.stride(), view.detach().stride(), view.storage_offset()

    x = torch.arange(20.0)
    for one, two in zip(fn(x), ws.compile(fn, fullgraph=True)(x), strict=True):
        same = torch.equal(one, two) and one.stride() == two.stride() if isinstance(one, Tensor) else one == two
        assert same


def in_place(function: Callable[..., Any], written: list[Tensor], *others: Any) -> Tensor:
    function(written, *others)
    return written[0]


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, y: (x * y * y).mul(y),
    "div": lambda x, y: x / y / y,
    "mul_": lambda x, y: (x * 2).mul_(y),
    "div_": lambda x, y: (x * 2).div_(y),
    "list": lambda x, y: torch._foreach_mul([x], [y])[0] / y,
    "list in place": lambda x, y: in_place(torch._foreach_mul_, [x * 2], [y]),
    "polar": lambda x, y: torch.polar(x.real.t(), x.imag.t()).contiguous().t() * y,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_complex_products_round_by_where_their_results_lie(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 33, dtype=torch.complex64, requires_grad=True)
    y = torch.randn(33, 16, dtype=torch.complex64).t()

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        result = PRODUCTS[name](x, y)
        return (result, *torch.autograd.grad(result.real.sum() + result.abs().sum(), x))

    assert all(map(torch.equal, fn(x, y), ws.compile(fn, fullgraph=True)(x, y)))


HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "a list by a number": lambda x: in_place(torch._foreach_mul_, [x, x.float()], 0.128),
    "a list by integers": lambda x: in_place(torch._foreach_mul_, [x, x + 1], [257, 0.3]),
    "one": lambda x: torch.ops.aten.mul_.Scalar(x, 0.128),
    "by the dispatcher": lambda x: x.mul_(0.128),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_place_round_numbers_to_half_precision_first(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-2, 3, 33).to(dtype)
    assert torch.equal(HALVES[name](x + 0), ws.compile(lambda x: HALVES[name](x + 0), fullgraph=True)(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_lists_of_operators_decay_round_as_in_eager(dtype: torch.dtype) -> None:
    def trained(call: Callable[..., Any]) -> list[Tensor]:
        weight = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6).to(dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.3, foreach=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

        def step() -> None:
            weight.sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = call(step)
        for _ in range(4):
            run()
            schedule.step()
        return [weight.detach()]

    assert all(map(torch.equal, trained(lambda step: step), trained(partial(ws.compile, fullgraph=True))))


def test_values_saved_for_a_backward_lie_as_in_eager() -> None:
    """A `chunk` has gaps between its rows; the gradient of its GELU rounds otherwise without them."""
    torch.manual_seed(0)
    first, second, x = nn.Linear(24, 74), nn.Linear(37, 24), torch.randn(5, 3, 24, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        one, two = first(x).chunk(2, dim=-1)
        return second(F.gelu(one) * two)

    given = [x, *first.parameters(), *second.parameters()]
    for run in (ws.compile(fn, fullgraph=True), ws.compile(fn, backend="naive", fullgraph=True)):
        pairs = [torch.autograd.grad(call(x).exp().sum(), given) for call in (fn, run)]
        assert all(map(torch.equal, *pairs))

    def gated(x: Tensor) -> Tensor:  # its chunks' rows are one
        one, two = x.chunk(2, 1)
        return F.gelu(one) * two

    x = torch.randn(1, 4, 6, 6).expand(2, 4, 6, 6).requires_grad_()
    for run in (ws.compile(gated, fullgraph=True), ws.compile(gated, backend="naive", fullgraph=True)):
        assert torch.equal(*(torch.autograd.grad(call(x).exp().sum(), x)[0] for call in (gated, run)))


@pytest.mark.filterwarnings("ignore:where received a uint8")
def test_masks_of_bytes_choose_as_in_eager() -> None:
    """torch's rule for fake tensors refuses them, its kernel does not."""
    mask, x = torch.tensor([1, 0, 1], dtype=torch.uint8), torch.randn(3, requires_grad=True)

    def fn(x: Tensor, mask: Tensor) -> Any:
        return torch.autograd.grad(torch.where(mask, x.sin(), x * 2).sum(), x)

    assert torch.equal(*fn(x, mask), *ws.compile(fn, fullgraph=True)(x, mask))


def test_a_kernel_is_asked_once_for_each_signature() -> None:
    aten, x, gaps = torch.ops.aten, torch.zeros(4, 6).t(), torch.zeros(4, 12)[:, ::2]
    state = torch.get_rng_state()
    for given in (x, gaps, x.to(torch.float64)):
        real = aten.softplus_backward(given, given, 1, 20)
        for _ in range(2):
            assert fake_layouts.layouts(aten.softplus_backward.default, (given, given, 1, 20), {}) == (
                (real.shape, real.stride(), real.dtype, real.device),
            )
    count = len(fake_layouts._known)
    fake_layouts.layouts(aten.softplus_backward.default, (gaps, gaps, 1, 20), {})
    assert len(fake_layouts._known) == count
    assert fake_layouts.layouts(aten.native_dropout.default, (x, 0.5, True), {}) is None  # it would draw
    assert fake_layouts.layouts(aten.nonzero.default, (x,), {}) is None  # its shape is the data's
    assert fake_layouts.layouts(aten.mul_.Tensor, (x, x), {}) is None
    assert fake_layouts.layouts(aten.t.default, (x,), {}) is None
    empty = torch.empty_strided((0, 5, 0), (10, 2, 2))  # of which nothing is drawn
    assert fake_layouts.layouts(aten.rand_like.default, (empty,), {}) == (
        (empty.shape, torch.rand_like(empty).stride(), torch.float32, empty.device),
    )
    place = fake_layouts.layouts(aten.normal.Tensor_float, (x, 1.0), {})  # draws from a generator of its own
    assert place is not None and torch.equal(state, torch.get_rng_state())
    assert place[0] is not None and place[0][1] == torch.normal(x, 1.0).stride()


def test_symbols_are_given_up_where_kernels_lay_results_out_otherwise() -> None:
    def fn(x: Tensor) -> Any:
        out = F.softplus(x.t())
        (grad,) = torch.autograd.grad(out, x, torch.linspace(0, 1, x.numel()).view(out.shape))
        return grad, grad.stride()

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    for size in (37, 41):
        x = torch.randn(size, 53, requires_grad=True)
        (one, seen), (two, traced) = fn(x), compiled(x)
        assert torch.equal(one, two) and one.stride() == two.stride() and seen == traced
    (reason,) = compiled.specialized
    assert "softplus_backward" in reason and __file__ in reason


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "svd": lambda x: torch.linalg.svd(x)[1],
    "spectral norm": lambda x: torch.linalg.norm(x, 2),
    "matrix norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "nuclear norm": lambda x: x.norm("nuc"),
    "cond": lambda x: torch.linalg.cond(x),
    "rank": lambda x: torch.linalg.matrix_rank(x).double(),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.mT, "U"),
    "eigh": lambda x: torch.linalg.eigh(x @ x.mT)[0],
    "eigvals": lambda x: torch.linalg.eigvals(x).abs(),
    "pinv": torch.linalg.pinv,
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_singular_and_eigenvalues_round_as_eager_takes_them(name: str, requires_grad: bool) -> None:
    """Without vectors where no gradient is wanted, with them where one is."""

    def step(x: Tensor) -> Any:
        with torch.no_grad():
            unseen = VALUES[name](x * 1)
        found = VALUES[name](x)
        grads = torch.autograd.grad(found.sum(), x) if found.requires_grad else ()
        return unseen, found.detach(), *grads

    def broken(x: Tensor) -> Any:
        ws.graph_break()
        return step(x)

    compiled, co_run = ws.compile(step, fullgraph=True), ws.compile(broken)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(6, 6, requires_grad=requires_grad)
        expected = step(x)
        for run in (compiled, co_run):
            assert all(map(torch.equal, expected, run(x)))


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_whose_rule_for_fake_tensors_takes_no_none(affine: bool) -> None:
    def step(x: Tensor, mean: Tensor, var: Tensor, weight: Any) -> Any:
        given = x, weight, weight, mean, var, 0.1, 1e-5
        functional = torch.ops.aten._batch_norm_with_update_functional(*given)
        return *torch.ops.aten._batch_norm_with_update(*given)[:3], *functional[:3]

    weight = torch.randn(3) if affine else None
    states = [(torch.zeros(3), torch.ones(3)) for _ in range(2)]
    for run, state in zip((step, ws.compile(step, fullgraph=True)), states, strict=True):
        torch.manual_seed(0)
        state += tuple(run(torch.randn(2, 4, 3).transpose(1, 2), *state, weight))
        states[run is not step] = state
    for found, expected in zip(*states, strict=True):
        assert torch.equal(found, expected) and found.stride() == expected.stride()


OUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.t()[:2, :2], "flat": lambda y: y.view(-1)[5:9].view(2, 2),
    "later": lambda y: y[1:3, 1:3], "strided": lambda y: y.as_strided((2, 2), (6, 3), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTS)
@pytest.mark.parametrize("offset", [0, 3, None])
def test_strided_copies_into_views(name: str, offset: int | None) -> None:
    """Their offset counts from the beginning of memory, also before their operand, and what they copy is
    computed before it is written."""
    def step(x: Tensor) -> list[Tensor]:
        y = x * 2
        for source in (y + 1, y, y.t(), y.clone(), (y + 1)[1:, 1:], y[2:]):
            torch.as_strided_copy(source, (2, 2), (1, 2), offset, out=OUTS[name](y))
        torch.as_strided_copy(x, (2, 2), (1, 2), offset, out=OUTS[name](x))
        torch.as_strided_copy(x[1:], (2, 2), (1, 2), offset, out=OUTS[name](x))
        return [x, y]

    x = torch.randn(4, 6)
    mine, theirs = x.clone(), x.clone()
    for found, expected in zip(ws.compile(step, fullgraph=True)(mine), step(theirs), strict=True):
        assert torch.equal(found, expected)


RESIZING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda x, out: torch.add(x, x, out=out),
    "of no dimension": lambda x, out: torch.dot(x, x, out=out),
    "product": lambda x, out: torch.mv(x[:, None] * x, x, out=out),
    "new": lambda x, out: torch.zeros(4, out=out),
    "drawn": lambda x, out: torch.rand(4, out=out),
}


@pytest.mark.parametrize("shape", [(0,), (2, 4), (5,)])
@pytest.mark.parametrize("name", RESIZING)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_result_that_does_not_fit_into_its_out_resizes_it_as_in_eager(name: str, shape: tuple[int, ...]) -> None:
    fn, found = RESIZING[name], []
    with pytest.raises(UnsupportedError, match=r"resized L\['out'\] from .* to .*\n.*\n.*of the right shape"):
        ws.compile(fn, fullgraph=True)(torch.ones(4), torch.full(shape, 7.0))
    for call in (fn, ws.compile(fn)):
        torch.manual_seed(0)
        outs = [torch.full(shape, 7.0) for _ in range(3)]
        for out in outs:
            call(torch.arange(4.0), out)
        found.append(outs)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("op", [partial(torch.cumprod, dim=0), torch.atanh])
@pytest.mark.parametrize("out", [torch.empty(400, dtype=torch.float64), torch.empty(800)[::2]])
def test_kernels_round_by_the_dtype_and_the_strides_of_an_out(op: Callable[..., Tensor], out: Tensor) -> None:
    def fn(x: Tensor, out: Tensor) -> Tensor:
        return op(x, out=out)

    x = torch.rand(400)
    expected = fn(x, out).clone()
    assert torch.equal(ws.compile(fn, fullgraph=True)(x, out.zero_()), expected) and torch.equal(out, expected)


def _laid_out(*shape: int) -> list[Tensor]:
    """Tensors of a shape: contiguous, and with their dimensions in other orders in memory, with gaps, expanded."""
    found = [torch.randn(shape[-1]).expand(shape)]
    for order in itertools.permutations(range(len(shape))):
        for gap in (0, 3):
            sizes = [shape[d] for d in order]
            tensor = torch.randn(*sizes[:-1], sizes[-1] + gap)[..., : sizes[-1]]
            found.append(tensor.permute([order.index(d) for d in range(len(shape))]))
    return found


SHAPES = [(3, 4, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1), (1, 1, 1), (64, 32, 16), (0, 3, 2), (2, 0, 3), (2, 3, 0)]


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_products_are_contiguous_whatever_their_factors_are(rows: int, inner: int, columns: int) -> None:
    aten, expected = torch.ops.aten, torch.empty(2, rows, columns).stride()
    for x, y in itertools.product(_laid_out(rows, inner), _laid_out(inner, columns)):
        assert aten.mm(x, y).stride() == expected[1:]
        assert all(aten.addmm(s, x, y).stride() == expected[1:] for s in (torch.randn(rows, columns), torch.randn(1)))
    for x, y in itertools.product(_laid_out(2, rows, inner), _laid_out(2, inner, columns)):
        assert aten.bmm(x, y).stride() == expected


@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 3, 1), (2, 3, 1, 1), (1, 1, 1, 1)])
def test_operators_that_keep_contiguous_what_is(shape: tuple[int, ...]) -> None:
    aten, x, rows = torch.ops.aten, torch.randn(shape), max(1, torch.tensor(shape[:-1]).prod().item())
    norm = x, [shape[-1]], *map(torch.ones, (shape[-1:], shape[-1:]))
    normed = aten.native_layer_norm(*norm, 1e-5)
    flat, picks = torch.randn(int(rows), max(2, shape[-1])), torch.zeros(int(rows), dtype=torch.int64)
    index, weight = torch.zeros(shape, dtype=torch.int64), torch.randn(4, 6)
    loss = flat, picks, None, 1, -100
    total = aten.nll_loss_forward(*loss)[1]
    loss_backward = torch.ones(()), *loss, total
    looked_up = aten.embedding(weight, index)
    norm_backward = x, *norm[:2], *normed[1:], *norm[2:], [True] * 3
    calls = [
        (aten.embedding.default, (weight, index)), (aten.native_layer_norm.default, (*norm, 1e-5)),
        (aten.embedding_dense_backward.default, (looked_up, index, 4, -1, False)),
        (aten.native_layer_norm_backward.default, norm_backward),
        (aten._softmax.default, (x, 0, False)), (aten._softmax_backward_data.default, (x, x, 0, x.dtype)),
        (aten._log_softmax.default, (x, 1, False)), (aten._log_softmax_backward_data.default, (x, x, 1, x.dtype)),
        (aten.nll_loss_forward.default, loss), (aten.nll_loss_backward.default, loss_backward),
        (aten.sum.dim_IntList, (x, [1], False)), (aten.mean.dim, (x, [0], True)),
        (aten.stack.default, ([x, x], 1)), (aten.cat.default, ([x, x], 1)),
        (aten.clone.default, (x,)), (aten.empty_like.default, (x,)), (aten._unsafe_view.default, (x, [x.numel()])),
        (aten.new_empty.default, (x, [2, 3])),
    ]  # fmt: skip
    assert {op for op, _ in calls} == fake_layouts.CONTIGUOUS
    for op, args in calls:
        results = tensors_of(op(*args))
        assert all(one.stride() == torch.empty(one.shape).stride() for one in results), op


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 3, 5, 4), (2, 1, 5, 4), (2, 3, 1, 4), (2, 3, 5, 1)])
def test_the_order_of_attentions_gradients_is_its_kernels_own(shape: tuple[int, ...]) -> None:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert {backward} == fake_layouts.ORDERED
    order, several = torch.empty_permuted(shape, (0, 2, 1, 3)), [d for d in range(4) if shape[d] > 1]
    for q, g in itertools.product(_laid_out(*shape)[1:], repeat=2):  # the first is expanded
        if q.stride(3) == g.stride(3) == 1:
            out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
            for grad in backward(g, q, q, q, out, sums, 0.0, False):
                assert [grad.stride(d) for d in several] == [order.stride(d) for d in several]


def test_a_contiguous_result_is_asked_for_by_name() -> None:
    aten = torch.ops.aten
    for x in _laid_out(2, 3, 4):
        for op in (aten.clone.default, aten.empty_like.default):
            assert op(x, memory_format=torch.contiguous_format).is_contiguous()
            assert not fake_layouts.is_asked(op, (x,), {"memory_format": torch.contiguous_format})


def test_statistics_of_fake_quantisation_take_their_size_at_once() -> None:
    def make(seed: int) -> World:
        on, low, high = torch.ones(1, dtype=torch.long), torch.tensor([]), torch.tensor([])
        scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int)

        def step(x: Tensor) -> Tensor:
            settings = on, on, low, high, scale, zero, 0.1, -8, 7, 0, True, False
            return torch.fused_moving_avg_obs_fake_quant(x, *settings)

        return World(step, [(torch.randn(3, 4),) for _ in range(4)], {"s": [low, high, scale, zero]}, versions=False)

    assert_same_run(make, 4, ws.compile)
    with pytest.raises(CaptureError, match="by rows resizes its statistics"):
        assert_same_run(make)


def test_kernels_are_tried_on_indices_and_pivots_that_are_in_bounds() -> None:
    """Not all of them check: of int32, an index of 1 is out of bounds in one row, a pivot of 0 in LAPACK."""
    fake_layouts._known.clear()

    def lookup(weight: Tensor, rows: Tensor) -> Tensor:
        return F.embedding_bag(rows, weight, torch.zeros_like(rows), mode="sum").sum()

    def solve(a: Tensor) -> Tensor:
        factors, pivots = torch.linalg.lu_factor(a)
        return torch.linalg.lu_solve(factors, pivots, a).sum() + torch.lu_unpack(factors, pivots)[1].sum()

    row, rows = torch.zeros(1, dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    cases = (lookup, (torch.ones(1, 1), row)), (lookup, (torch.randn(3, 2), rows)), (solve, (torch.eye(3),))
    for fn, args in cases:

        def make(seed: int, fn: Any = fn, args: tuple[Tensor, ...] = args) -> World:
            leaf = args[0].clone().requires_grad_()

            def step() -> Tensor:
                fn(leaf, *args[1:]).backward()
                return leaf.grad

            return World(step=step, watch={"leaf": leaf})

        assert_same_run(make, 3, partial(ws.compile, fullgraph=True))
