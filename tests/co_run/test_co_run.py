"""What is around the segments: which way serves a step, what it says, and that nothing stays behind."""

import builtins
import io
import subprocess
import sys
import threading
import time
from contextlib import redirect_stdout
from types import SimpleNamespace

import markupsafe._speedups
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.onnx.operators import shape_as_tensor

import wholestep as ws
from tests.co_run.test_steps import co_run
from wholestep import comm
from wholestep.co_run import is_deferring
from wholestep.co_run.queue import Queue
from wholestep.co_run.reads import ExtensionWatch
from wholestep.co_run.segment import Segment
from wholestep.errors import CaptureError
from wholestep.testing import run_ranks
from wholestep.trace.patches.engine_hook import handled


@pytest.fixture
def deferring(monkeypatch):
    monkeypatch.setattr("wholestep.co_run.step.TIMED", 10**9)
    monkeypatch.setattr("wholestep.co_run.step.MANY", 10**9)


def regression():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(6, 4)


def reading(model, opt, x, log):
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    log.append(loss.item())


def test_a_step_that_can_be_replayed_is(deferring):
    model, opt, x = regression()

    def step(x):
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss

    compiled = ws.compile(step)
    for _ in range(3):
        compiled(x)
    assert compiled.captures == 1 and not compiled.breaks


def test_whole_graphs_are_asked_for_by_name():
    with pytest.raises(CaptureError, match=r"test_co_run\.py:\d+"):
        ws.compile(lambda x: x[x > 0].tolist(), fullgraph=True)(torch.ones(2))


def test_the_reason_is_said_once_and_names_the_line(deferring):
    compiled = ws.compile(lambda x: print("a step") or x + 1)
    out = io.StringIO()
    with redirect_stdout(out):
        for _ in range(3):
            compiled(torch.ones(2))
    assert out.getvalue() == "a step\n" * 3
    (reason,) = compiled.breaks
    assert "print()" in reason and "test_co_run.py" in reason and "to do:" in reason


def test_a_reason_that_the_step_catches_counts(deferring):
    def step(x):
        try:
            print("a step")
        except Exception:
            x = x * 100
        return x + 1

    compiled, out = ws.compile(step), io.StringIO()
    with redirect_stdout(out):
        assert [compiled(torch.ones(())).item() for _ in range(2)] == [2, 2]
    assert out.getvalue() == "a step\n" * 2


def test_one_segment_a_step_where_values_are_read_at_its_end(deferring):
    model, opt, x = regression()
    step, log = co_run(reading), []
    for _ in range(6):
        step(model, opt, x, log)
    assert len(step.segments) == 1 and not step.refused


def test_who_watches_backwards_ends_no_segment(deferring):
    model, opt, x = regression()
    step, log, seen = co_run(reading), [], []

    def handler(run, *args, **kwargs):
        seen.append(1)
        return run(*args, **kwargs)

    for _ in range(6):
        with handled(handler):
            step(model, opt, x, log)
    assert len(step.segments) == 1 and not step.refused and len(seen) == 6


def test_a_schedule_compiles_nothing_more(deferring):
    model, opt, x = regression()
    step, log = co_run(reading), []
    for call in range(12):
        opt.param_groups[0]["lr"] = 0.01 / (call + 1)
        step(model, opt, x, log)
    assert len(step.segments) == 1 and not step.refused


OPTIMIZERS = {
    **{kind.__name__: {} for kind in (torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
                                      torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
                                      torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD)},
    "SGD, momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam, amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW, rate in a tensor": {"lr": torch.tensor(0.01)},
    "RMSprop, centered": {"centered": True, "momentum": 0.5},
    "AdamW, foreach": {"foreach": True},
}  # fmt: skip


def trained(optimizer, compiled):
    """What a step, which reads the count of updates too, leaves; rates and decays change from call to call."""
    model, _, x = regression()
    options = {"lr": 0.01} | OPTIMIZERS[optimizer]
    opt, log = getattr(torch.optim, optimizer.partition(",")[0])(model.parameters(), **options), []

    def counting(model, opt, x, log):
        reading(model, opt, x, log)
        log.extend(float(state["step"]) for state in opt.state.values() if "step" in state)

    step = co_run(counting) if compiled else counting
    for call in range(9):
        if call > 5 and "tensor" not in optimizer:
            opt.param_groups[0]["lr"] = 0.01 / call
        if call > 6:
            opt.param_groups[0]["weight_decay"] = 0.01 * call
        step(model, opt, x, log)
    tensors = [*model.parameters(), *(v for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor))]
    return log, [t.tolist() for t in tensors], [t._version for t in tensors], step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_are_as_in_eager_with_their_counts_of_writes(deferring, optimizer):
    *eager, _ = trained(optimizer, False)
    *ours, step = trained(optimizer, True)
    assert ours == eager and not step.refused


def test_an_update_of_a_list_of_parameters_is_one_call(deferring):
    model, opt, x = regression()

    def without(model, opt, x, log):
        loss = model(x).square().mean()
        loss.backward()
        opt.zero_grad()
        log.append(loss.item())

    counts = []
    for step in map(co_run, (without, reading)):
        for _ in range(4):
            step(model, opt, x, [])
        ((calls, *_),) = step.segments
        counts.append(calls)
    assert counts[1] == counts[0] + 1


def test_memory_of_results_is_not_shared_between_calls(deferring):
    step = co_run(lambda x: (x.sum().item(), x * 2, x.t() + 1))
    found = [step(torch.full((2, 3), float(i))) for i in range(5)]
    for i, (total, double, more) in enumerate(found):
        assert total == 6 * i and (double == 2 * i).all() and (more == i + 1).all()


def test_branches_that_never_end_run_all_the_same(deferring, monkeypatch):
    monkeypatch.setattr("wholestep.co_run.step.MAX_PROGRAMS", 3)
    monkeypatch.setattr("wholestep.co_run.prefix_tree.MAX_NODES", 30)

    def step(x, n):
        for _ in range(n):
            x = x * 1.5 + 1
        return x.sum().item()

    served = co_run(step)
    for n in [*range(1, 12), *range(1, 12)]:
        assert served(torch.ones(3), n) == step(torch.ones(3), n)
    assert len(served.segments) <= 3


def test_a_compiled_function_inside_is_part_of_the_step(deferring):
    inner = ws.compile(lambda x: x.sin() * 2)
    step = co_run(lambda x: inner(x + 1).sum().item())
    x = torch.arange(4.0)
    assert {step(x) for _ in range(4)} == {((x + 1).sin() * 2).sum().item()}
    assert inner.captures == 0


def test_a_module_is_served_and_differentiated_outside(deferring):
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(3, 2), []

        def forward(self, x):
            x = self.linear(x)
            self.seen.append(x.sum().item())
            return x if self.seen[-1] > 0 else -x

    torch.manual_seed(0)
    eager, x = Logs(), torch.randn(5, 3)
    served = ws.compile(Logs())
    served.load_state_dict(eager.state_dict())
    for _ in range(4):
        for model in (eager, served):
            model.zero_grad()
            model(x).square().sum().backward()
        assert torch.equal(eager.linear.weight.grad, served.linear.weight.grad)
    assert eager.seen == served.seen and served.breaks


def test_the_steps_own_error_comes_after_what_it_did(deferring):
    counts = torch.zeros(3)

    def step(x):
        counts.add_(x)
        if counts[0].item() > 1:
            raise ValueError("enough")
        return counts * 2

    served = ws.compile(step)
    served(torch.ones(3))
    for expected in (2, 3):
        with pytest.raises(ValueError, match="enough"):
            served(torch.ones(3))
        assert counts.tolist() == [expected] * 3


def test_an_error_of_a_kernel_comes_where_its_operator_runs(deferring):
    weight = torch.randn(4, 2)
    served = co_run(lambda i: nn.functional.embedding(i, weight).sum().item())
    served(torch.tensor([1, 2]))
    served(torch.tensor([1, 3]))
    with pytest.raises(IndexError, match="out of range"):
        served(torch.tensor([1, 9]))
    assert served(torch.tensor([1, 3])) == weight[[1, 3]].sum().item()


def test_nothing_is_patched_afterwards():
    before = torch.Tensor.tolist, torch.Tensor.__repr__, threading.Thread.start, print
    step = co_run(lambda x: (x + 1).tolist())
    for _ in range(3):
        step(torch.ones(2))
    assert (torch.Tensor.tolist, torch.Tensor.__repr__, threading.Thread.start, print) == before


def test_the_faster_way_is_taken():
    model, opt, x = regression()
    step, log = co_run(reading), []
    for _ in range(16):
        step(model, opt, x, log)
    assert step.eager  # a few operators on a few numbers


@pytest.mark.parametrize(("eager", "taken"), [(99, False), (90, True)])  # of deferred calls that take 100
def test_eager_is_taken_where_it_is_clearly_faster(eager, taken, monkeypatch):
    clock = [0]

    def step(x):
        clock[0] += 100 if is_deferring() else eager
        return (x + 1).sum().item()

    monkeypatch.setattr("wholestep.co_run.step.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    served = co_run(step)
    for _ in range(16):
        served(torch.ones(2))
    assert bool(served.eager) is taken


# What 122 operators take one by one, and what the step takes in eager, where to defer one takes 1.
@pytest.mark.parametrize(("kernels", "eager", "pays"), [
    (0, 1, False), (100, 130, False), (400, 480, True), (1000, 1100, True),
])  # fmt: skip
def test_many_operators_are_compiled_where_that_can_pay(kernels, eager, pays, monkeypatch):
    clock, dispatch, run = [0], Queue._dispatch, Segment.run

    def dispatched(*args):
        clock[0] += 1
        return dispatch(*args)

    def run_one_by_one(segment, tensors, numbers):
        clock[0] += kernels
        run(segment, tensors, numbers)

    def step(x):
        clock[0] += 0 if is_deferring() else eager
        for _ in range(60):
            x = (x * 0.5).sin()
        return x.sum().item()

    monkeypatch.setattr(Queue, "_dispatch", dispatched)
    monkeypatch.setattr(Segment, "run", lambda self, *args: (run if len(args) > 2 else run_one_by_one)(self, *args))
    monkeypatch.setattr("wholestep.co_run.step.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    served, x = co_run(step), torch.ones(2)
    for _ in range(5):
        assert served(x) == step(x)
    assert bool(served.segments) is pays and bool(served.eager) is not pays


def test_the_package_s_own_work_is_not_watched(deferring, monkeypatch):
    seen, events = ExtensionWatch._seen, []
    monkeypatch.setattr(ExtensionWatch, "_seen", lambda self, *event: (events.append(event[1]), seen(self, *event))[1])

    def in_one_call(layers):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        opt = torch.optim.AdamW(model.parameters())

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss.item()  # runs what was deferred

        served = co_run(step)
        for _ in range(6):
            events.clear()
            served(torch.ones(2, 4))
        return len(events)

    assert in_one_call(12) == in_one_call(2) > 0


def _ranks_reduce():
    step = co_run(lambda x, log: log.append((comm.all_reduce(t := x * 2), t.sum().item())[1]))
    log = []
    for call in range(5):
        step(torch.full((3,), float(comm.get_rank() + call)), log)
    return log


@pytest.mark.parametrize("engine", ["thread", "shm"])
def test_collectives_see_what_was_deferred(engine):
    for log in run_ranks(_ranks_reduce, 2, engine):
        assert log == [3 * 2 * (2 * call + 1) for call in range(5)]


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("make", [Marked, lambda t: t.as_subclass(Marked)])
def test_a_tensor_of_a_subclass_made_inside(make):
    def step(x):
        return make(x + 1)

    x = torch.ones(3)
    with pytest.raises(CaptureError, match="makes a tensor of a subclass"):
        ws.compile(step, fullgraph=True)(x)
    served = ws.compile(step)
    for _ in range(4):
        found = served(x)
        assert type(found) is Marked and found.tolist() == [2.0] * 3


MADE = [Marked, lambda t: Marked([1.0, 2.0]), lambda t: Marked(2).fill_(3), lambda t: Marked()]


@pytest.mark.parametrize("make", MADE)
def test_a_tensor_of_a_subclass_made_in_a_branch_of_its_own(make):
    def step(x, branch):
        y = x * 2 + 1
        return make(y.detach()) if branch else y

    served, x = co_run(step), torch.ones(3)
    for branch in (0, 0, 0, 1, 0, 1, 1):
        found, expected = served(x, branch), step(x, branch)
        assert type(found) is type(expected) and found.tolist() == expected.tolist()
    assert not served.eager


def test_torchscript_is_traced_as_in_eager():
    def step(x):
        return torch.jit.trace(torch.nn.Hardtanh(-2.0, 0.5), x)(x)

    x = torch.linspace(-4, 4, 9)
    assert torch.equal(ws.compile(step)(x), step(x))
    with pytest.raises(CaptureError, match="calls torch.jit.trace.*\n.*\n.*make it outside of the step"):
        ws.compile(step, fullgraph=True)(x)


def test_both_biases_of_a_recurrent_layer_have_gradients_of_their_own():
    def trained(compile):
        torch.manual_seed(0)
        model = torch.nn.LSTM(4, 4, batch_first=True)

        def step(x):
            loss = model(x)[0].pow(2).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss.item()

        compiled = compile(step)
        for _ in range(4):
            model.zero_grad()
            compiled(torch.ones(2, 5, 4))
            yield from (p.grad for p in model.parameters())

    assert all(map(torch.equal, trained(co_run), trained(lambda step: step)))


def test_torchscript_of_a_subclass_changes_its_backward_when_it_does_in_eager():
    """Its first calls are profiled; those after them have gradients that are rounded otherwise."""

    def trained(compile):
        function = torch.jit.CompilationUnit("def f(x):\n  return x.tanh() * x.sigmoid() / (1 + x.pow(2).sum(-1))\n").f
        weight = torch.linspace(-2, 2, 36).view(6, 6).as_subclass(Marked).requires_grad_()

        def step():
            function(weight).pow(2).sum().backward()

        compiled = compile(step)
        for _ in range(6):
            weight.grad = None
            compiled()
            yield weight.grad.as_subclass(torch.Tensor)

    assert [*map(torch.equal, trained(ws.compile), trained(lambda step: step))] == [True] * 6


@pytest.mark.parametrize("fullgraph", [True, False])
def test_who_overrides_torch_functions_is_told_as_in_eager(fullgraph):
    overrides, x, marked = torch.overrides, torch.ones(3), torch.ones(3).as_subclass(Marked)

    def step(value):
        return [overrides.has_torch_function_unary(value), overrides.has_torch_function_variadic(value, 3),
                overrides.has_torch_function((value,))]

    for value in (x, marked, 3):
        assert ws.compile(step, fullgraph=fullgraph)(value) == step(value)


def test_nested_tensors_are_asked_for_their_sizes():
    def step(x):
        return x.sin() * 2

    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, requires_grad=True)
    expected = step(x).values()
    with pytest.raises(CaptureError, match="holds a nested tensor"):
        ws.compile(step, fullgraph=True)(x)
    served = ws.compile(step)
    for _ in range(4):
        found = served(x).values()
        assert torch.equal(found, expected)
        torch.autograd.grad(found.sum(), x)


def test_a_namespace_with_the_builtins_in_it_can_be_looked_at():
    space = dict(vars(builtins))  # as the globals of code that was run by `exec` have it
    space["scale"] = 2.0

    def step(x, space):
        return x * space["scale"]

    compiled, x = ws.compile(step), torch.ones(3)
    for _ in range(3):
        assert torch.equal(compiled(x, space), x * 2)
    assert compiled.captures == 1 and not compiled.breaks and space["print"] is print


def test_explain_does_nothing_outside():
    compiled, out = ws.compile(lambda x: print("a step") or x + 1), io.StringIO()
    with redirect_stdout(out):
        report = compiled.explain(torch.ones(2))
    assert not out.getvalue() and "print()" in report.breaks[0]


def _shift(x):
    x.add_(1)


OPERATORS = torch.library.Library("wholestep_co_run", "DEF")
OPERATORS.define("squared(Tensor x) -> Tensor")
OPERATORS.define("shifted_(Tensor(a!) x) -> ()")
OPERATORS.impl("squared", lambda x: x * x, "CompositeExplicitAutograd")
OPERATORS.impl("shifted_", _shift, "CPU")
torch.library.register_fake("wholestep_co_run::squared", torch.empty_like, lib=OPERATORS)
torch.library.register_fake("wholestep_co_run::shifted_", lambda x: None, lib=OPERATORS)


def test_an_operator_without_a_formula_is_differentiated_by_what_it_calls():
    def step(x):
        return torch.ops.wholestep_co_run.squared(x + 1)

    with pytest.raises(CaptureError, match="has no formula for its gradient"):
        ws.compile(step, fullgraph=True)(torch.ones(3, requires_grad=True))
    assert ws.compile(step)(torch.ones(3)).tolist() == [4.0] * 3
    served = ws.compile(step, fullgraph=False)
    for _ in range(4):
        x = torch.ones(3, requires_grad=True)
        served(x).sum().backward()
        assert x.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("compiled", [ws.compile, co_run])
def test_writes_of_an_operator_without_a_formula_are_counted(compiled):
    def step(x):
        torch.ops.wholestep_co_run.shifted_(x)

    served, x, other = compiled(step), torch.ones(3), torch.ones(3)
    for _ in range(4):
        served(x)
        step(other)
        assert x.tolist() == other.tolist() and x._version == other._version


@pytest.mark.parametrize("compiled", [lambda fn: ws.compile(fn, fullgraph=False), co_run])
@pytest.mark.parametrize("sizes", [torch._shape_as_tensor, shape_as_tensor])
def test_sizes_written_to_memory_by_cpp(compiled, sizes):
    def step(x):
        return x + sizes(x)[0]

    served = compiled(step)
    assert all(served(torch.ones(5)).tolist() == [6.0] * 5 for _ in range(4))


@pytest.mark.parametrize("options", [{"passes": [lambda g: g.nothing]}, {"backend": lambda gm, inputs: gm.nothing}])
def test_what_passes_and_backends_raise_is_raised(options):
    for _ in range(2):
        with pytest.raises(AttributeError, match="nothing"):
            ws.compile(lambda x: x + 1, **options)(torch.ones(2))


def test_a_step_that_calls_a_c_extension_runs_in_eager(deferring):
    from_c = markupsafe._speedups._escape_inner

    def step(x):
        y = x * 2
        print(from_c("<"), end="")
        return y + 1

    compiled, x, out = ws.compile(step), torch.ones(3), io.StringIO()
    with redirect_stdout(out):
        for _ in range(4):
            assert torch.equal(compiled(x), x * 2 + 1)
    assert out.getvalue() == "&lt;" * 4 and sys.getprofile() is None
    assert "markupsafe._speedups._escape_inner of a C extension" in str(compiled.explain(x))


def test_a_c_extension_in_a_branch_is_seen(deferring):
    def step(x, calls_it):
        y = x * 2
        if calls_it.item():
            markupsafe._speedups._escape_inner("<")
            return y - 1
        return y + 1

    served = co_run(step)
    for calls_it in (False, False, False, False, True):
        assert not served.eager
        assert torch.equal(served(torch.ones(3), torch.tensor(calls_it)), torch.full((3,), 1.0 if calls_it else 3.0))
    assert "C extension" in served.eager and sys.getprofile() is None


def test_warnings_are_said_once_and_keep_no_step_from_a_replay():
    script = """
import warnings, torch, wholestep as ws
@ws.compile
def step(x):
    warnings.warn("the step's own")
    return torch.nn.functional.mse_loss(x, torch.zeros(3))  # torch warns that it broadcasts
for _ in range(3):
    step(torch.ones(2, 3))
print(step.captures, step.breaks)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "1 []\n" and done.stderr.count("UserWarning: the step's own") == 1
    assert done.stderr.count("target size") == 1


@pytest.mark.parametrize("reads", [True, False])
def test_a_model_under_torch_compile_runs_as_it_is_written(deferring, reads):
    found, ran = [], []

    def backend(gm, _):
        return lambda *args: ran.append(1) or gm(*args)

    for wrap in (lambda fn: fn, ws.compile if reads else ws.compile(fullgraph=True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        opt, inside = torch.optim.Adam(model.parameters()), torch.compile(model, backend=backend, fullgraph=True)
        inside(torch.ones(3, 4))  # what is known to Dynamo since reads memory that may not be written yet
        ran.clear()

        @wrap
        def step(x, opt=opt, inside=inside):
            loss = inside(x).square().mean()
            loss.backward()
            if reads:
                print(f"{loss.item():.4f}")
            opt.step()
            opt.zero_grad()
            return loss.detach()

        out = io.StringIO()
        with redirect_stdout(out):
            losses = [step(torch.full((3, 4), float(call))) for call in range(6)]
        found.append((torch.stack(losses), out.getvalue()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] and not ran


def test_quantized_tensors_are_not_deferred(deferring):
    def step(x):
        print("quantizes")
        quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
        return quantized.dequantize(), quantized.int_repr()

    compiled = ws.compile(step)
    for x in torch.randn(4, 3):
        assert all(map(torch.equal, compiled(x), step(x)))


def test_what_fake_tensors_are_computed_from_runs_at_once(deferring):
    def step(x):
        with FakeTensorMode():
            a = torch.ones(3, 4)
            shape = (a @ a.T).shape
        print(shape)
        return x * 2, tuple(shape)

    compiled = ws.compile(step)
    for x in torch.randn(4, 3):
        assert str(compiled(x)) == str(step(x))


def test_forward_mode_differentiation_makes_zeros_without_memory(deferring):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def step(x):
        print("differentiates")
        out, tangent = torch.func.jvp(model, (x,), (x.flip(0),))
        curvature = torch.func.vmap(torch.func.hessian(lambda z: model(z)[0]))(x)
        (out.sum() + tangent.square().sum() + curvature.square().sum()).backward()
        found = out.detach(), curvature.detach(), *[p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    compiled = ws.compile(step)
    for x in torch.randn(4, 2, 3):
        assert all(map(torch.equal, compiled(x), step(x)))


def test_views_that_negate_are_no_other_name_of_what_they_view(deferring):
    def step(x):
        values = x * 3
        negative = torch._neg_view(values)  # the same elements of the same memory
        more = values + 1
        print(time.time() > 0, file=sink)
        return more, negative

    compiled, x, sink = ws.compile(step), torch.randn(4, 4), io.StringIO()
    for _ in range(3):
        assert all(map(torch.equal, compiled(x), step(x)))
    assert compiled.breaks
