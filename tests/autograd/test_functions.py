"""`wholestep.autograd`'s functions: the user's compilers, joint graphs, decompositions, module wrappers."""

from __future__ import annotations

import copy
import cProfile
import fractions
import functools
import inspect
import io
import os
import pickle
import profile
import pstats
import subprocess
import sys
import textwrap
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import functorch.compile
import numpy
import pytest
import torch
import torch._inductor.decomposition
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.nn.utils.parametrizations import spectral_norm

import wholestep as ws
from wholestep import comm
from wholestep.autograd import (
    aot_function,
    aot_module,
    compiled_backward,
    default_partition,
    dynamo_backend,
    export_joint,
    min_cut_partition,
)
from wholestep.errors import UnsupportedError
from wholestep.ir import check, info
from wholestep.testing import CompileCounter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.scale = 2.0

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        hidden = torch.dropout(self.norm(self.fc1(x)).relu(), 0.5, self.training)
        out = self.fc2(hidden) * self.scale
        return out if bias is None else out + bias

    def double(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self(x) * 2


def nop(gm: Any, inputs: Any) -> Any:
    return gm


def train(model: Any, steps: int = 3) -> list[Any]:
    """Losses, gradients and buffers of a few steps."""
    torch.manual_seed(0)
    seen: list[Any] = []
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        x = torch.randn(5, 6, requires_grad=True)
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), x.grad, *(p.grad for p in model.parameters()), *map(torch.clone, model.buffers())]
        opt.step()
        opt.zero_grad()
    return seen


def same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("partition", [default_partition, min_cut_partition])
@pytest.mark.parametrize("compiler", ["aten", "naive", nop])
def test_a_module_trains_as_in_eager_to_the_bit(compiler: Any, partition: Any) -> None:
    torch.manual_seed(1)
    model = Net()
    other = aot_module(copy.deepcopy(model), compiler, partition_fn=partition)
    assert same(train(model), train(other))


def test_both_compilers_see_their_graphs_once() -> None:
    seen: list[str] = []

    def compiler(name: str) -> Any:
        def compile(gm: Any, inputs: Any) -> Any:
            assert [n.op for n in gm.graph.nodes].count("placeholder") == len(inputs)
            seen.append(name)
            return gm

        return compile

    fn = aot_function(lambda x, w: (x @ w).sin().sum(), compiler("forward"), compiler("backward"))
    for _ in range(2):
        x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
        fn(x, w).backward()
        again = w.grad
        w.grad = None
        (x @ w).sin().sum().backward()
        assert torch.equal(w.grad, again)
    assert seen == ["forward", "backward"]
    with torch.no_grad():
        assert fn(x, w).requires_grad is False
    assert seen == ["forward", "backward", "forward"]


def test_a_decomposition_table_reaches_forward_and_backward() -> None:
    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))

    aten = torch.ops.aten
    targets: list[Any] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        targets.extend(n.target for n in gm.graph.nodes)
        return gm

    table = {aten.silu.default: silu, aten.silu_backward.default: silu_backward}
    fn = aot_function(nn.functional.silu, compiler, decompositions=table)
    x = torch.randn(7, requires_grad=True)
    fn(x).sum().backward()
    expected = torch.autograd.grad(nn.functional.silu(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    assert not {aten.silu.default, aten.silu_backward.default} & set(targets) and aten.sigmoid.default in targets


def test_torchs_own_decomposition_table_serves() -> None:
    """Named tuples, factories, functions that decline (NotImplemented), and lists that they change."""
    table = torch._inductor.decomposition.select_decomp_table()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = nn.functional.layer_norm(x, [4], w)[:, [0, 2, 1]] + torch.arange(3)
        return torch.ops.aten._unsafe_masked_index(y.relu(), torch.ones(3, 3) > 0, [torch.tensor([0, 1, 0]), None], 0.0)

    names: list[str] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        names.extend(str(n.target) for n in gm.graph.nodes)
        return gm

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    found = aot_function(fn, compiler, decompositions=table)(x, w)
    torch.testing.assert_close(found, fn(x, w))
    for one, two in zip(*(torch.autograd.grad(y.sum(), [x, w]) for y in (found, fn(x, w))), strict=True):
        torch.testing.assert_close(one, two)
    assert "aten.native_layer_norm.default" not in names and "aten.add.Tensor" in names


def test_a_compiler_may_give_a_callable_that_takes_one_list() -> None:
    """Marked as torch's own compilers mark theirs."""
    taken: list[list[Any]] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        def boxed(values: list[Any]) -> Any:
            taken.append(list(values))
            result = gm(*values)
            values.clear()
            return result

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    x = torch.randn(4, requires_grad=True)
    aot_function(lambda x: x.sin().exp(), compiler)(x).sum().backward()
    assert torch.equal(x.grad, x.sin().exp().detach() * x.cos().detach()) and len(taken) == 2


def test_export_joint_names_its_inputs_and_runs_nothing() -> None:
    model = Net()
    x = torch.randn(5, 6)
    before = [t.clone() for t in model.state_dict().values()]
    joint = export_joint(model, x)
    assert same(before, list(model.state_dict().values())) and all(p.grad is None for p in model.parameters())
    sources = [i.source for i in joint.step.signature.inputs]
    assert "L['self'].fc1.weight" in sources and "L['x']" in sources
    assert {sources[i] for i in joint.gradient_of} == {f"L['self'].{name}" for name, _ in model.named_parameters()}
    assert len(joint.tangents) == 1 and len(joint.gradients) == len(joint.gradient_of)
    phases = [info(n).phase for n in joint.step.graph.nodes if n.op == "call_function"]
    assert phases == sorted(phases, reverse=True) and set(phases) == {"forward", "backward"}
    halves = default_partition(joint)
    check(halves.forward, "forward")
    check(halves.backward, "backward")
    with pytest.raises(ValueError, match="no result of the function requires grad"):
        export_joint(lambda x: x + 1, x)


def test_views_of_inputs_are_made_again_and_not_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    halves = default_partition(export_joint(model, torch.ones(2, 4)))
    own = halves.forward.signature.n_outputs - 1
    assert own == 1, "of the forward's own values, only the hidden layer is saved"


class Named(nn.Module):
    """A module with names of its own that a compiled step has, too."""

    captures = 7

    def __init__(self) -> None:
        super().__init__()
        self.stages, self.state = nn.ModuleList([nn.Linear(3, 3)]), torch.zeros(3)
        self.code = nn.Parameter(torch.ones(3))

    def reset(self) -> str:
        self.state = torch.zeros(3)
        return "reset"

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state + self.stages[0](x).detach().sum(0) * self.code.detach()
        return self.stages[0](x) * self.state  # type: ignore[no-any-return]


def test_what_a_compiled_module_has_by_a_name_comes_before_what_is_said_of_its_programs() -> None:
    module = Named()
    compiled = ws.compile(module)
    compiled(torch.ones(2, 3))
    assert module.state.any() and compiled.reset() == "reset" and not module.state.any()
    assert compiled.stages is module.stages and compiled.code is module.code and compiled.captures == 7
    assert not compiled.recompiles and ws.compile(nn.Linear(3, 3)).captures == 0


def test_a_compiled_module_is_the_module_in_all_but_calls() -> None:
    model = Net()
    compiled = ws.compile(model, fullgraph=True)
    assert isinstance(compiled, Net) and list(compiled.state_dict()) == list(model.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    x = torch.randn(5, 6)
    compiled.eval()
    assert not model.training and not model.fc1.training
    assert torch.equal(compiled(x), model(x)) and torch.equal(compiled.double(x), model.double(x))
    compiled.train()
    assert model.training
    compiled(x)
    assert compiled.recompiles == ["L['self'].training: expected False, found True"]
    compiled.extra = 3
    assert model.extra == 3
    model.scale = 5.0
    compiled.eval()
    assert torch.equal(compiled(x), model(x))
    assert "addmm" in compiled.code
    twin = copy.deepcopy(compiled)
    assert twin.fc1.weight is not model.fc1.weight and isinstance(twin, Net)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        twin.fc1.weight.zero_()
    assert not torch.equal(twin(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(compiled))(x), model(x))


def test_another_object_of_a_compiled_modules_class_is_a_module_as_any_other() -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    compiled = ws.compile(model)
    expected = compiled(x)

    class Sub(type(compiled)):  # type: ignore[misc]  # as libraries make of what they patch
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1  # type: ignore[no-any-return]

    for other, more in ((type(compiled)(4, 3), 0), (Sub(4, 3), 1)):
        plain = nn.functional.linear(x, other.weight, other.bias) + more
        assert torch.equal(other(x), plain) and torch.equal(copy.deepcopy(other)(x), plain)
        again = ws.compile(other)
        assert torch.equal(again(x), plain) and again.captures == 1
    assert torch.equal(compiled(x), expected)


@ws.compile(fullgraph=True)
def decorated(x: Tensor) -> Tensor:
    return x * 2


def tripled(x: Tensor) -> Tensor:
    return x * 3


class Holding(Net):
    """Has its own compiled method as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = ws.compile(self.double, fullgraph=True)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy,
          "pickle": lambda v: pickle.loads(pickle.dumps(v)), "save": saved}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_what_is_compiled_are_compiled_anew(how: str) -> None:
    again, x = COPIES[how], torch.randn(5, 6)
    assert again(decorated) is decorated
    function = ws.compile(tripled, fullgraph=True)
    function(x)
    other = again(function)
    assert other is not function and other.captures == 0
    assert torch.equal(other(x), x * 3) and other.captures == 1
    for make in (Net, lambda: ws.compile(Net()), lambda: nn.Sequential(ws.compile(Net())), Holding):
        model = make().eval()  # type: ignore[operator]
        expected = model(x)
        found = again(model)
        assert torch.equal(found(x), expected)
        assert (found is model) is False
        shared = [p is q for p, q in zip(found.parameters(), model.parameters(), strict=True)]
        assert shared == [how == "copy"] * len(shared)
    holding = Holding().eval()
    bound = again(holding.compiled)  # a copy of a method comes with a copy of its module
    assert torch.equal(bound(x), holding.double(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_of_a_module_under_a_plan_have_the_plan(how: str) -> None:
    comm.init_process_group("null", rank=0, world_size=1)
    try:
        mesh = ws.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        model, x = Net().eval(), torch.randn(5, 6)
        compiled = ws.compile(model, mesh=mesh, plan=ws.DataParallel("dp"))
        assert torch.equal(compiled(x), model(x))
        again = COPIES[how](compiled)
        assert torch.equal(again(x), model(x)) and again.captures == 1
        assert again.fc1.weight is not model.fc1.weight
    finally:
        comm.destroy_process_group()


class Methods(Net):
    @ws.compile(fullgraph=True)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2

    @classmethod
    @ws.compile(fullgraph=True)
    def of_class(cls, x: Tensor) -> Tensor:
        return x * len(cls.__name__)

    @staticmethod
    @ws.compile(fullgraph=True)
    def of_none(x: Tensor) -> Tensor:
        return x * 4

    @property
    @ws.compile(fullgraph=True)
    def doubled(self) -> Tensor:
        return self.fc1.weight * 2

    of_partial = ws.compile(functools.partial(torch.mul, 3.0), fullgraph=True)


def test_a_compiled_function_in_a_class_is_a_method() -> None:
    x, models = torch.randn(5, 6), [Methods().eval(), Methods().eval()]
    for model in (*models, copy.deepcopy(models[0]), pickle.loads(pickle.dumps(models[1]))):
        assert torch.equal(model(x), Net.forward(model, x) * 2)
        assert torch.equal(model.doubled, model.fc1.weight * 2)
        assert torch.equal(model.of_class(x), x * 7) and torch.equal(Methods.of_class(x), x * 7)
        assert torch.equal(model.of_none(x), x * 4) and torch.equal(model.of_partial(x), x * 3)
        model(x).sum().backward()
        assert model.fc1.weight.grad is not None
    assert isinstance(Methods.forward, ws.Compiled) and "addmm" in models[0].forward.code


def test_compiling_twice_is_compiling_once() -> None:
    model, x = Net().eval(), torch.randn(5, 6)
    twice, plain = ws.compile(ws.compile(model)), ws.compile(ws.compile(tripled))
    assert torch.equal(twice(x), model(x)) and isinstance(twice, Net) and twice.captures == 1
    assert torch.equal(plain(x), x * 3) and plain.captures == 1
    twice(x).sum().backward()
    assert model.fc1.weight.grad is not None and twice.fc1 is model.fc1
    assert torch.equal(aot_module(twice, nop)(x), model(x))


def test_a_compiled_module_is_part_of_another_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), ws.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), fullgraph=True))
    plain = copy.deepcopy(model)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    x = torch.randn(2, 4)
    whole = ws.compile(step, fullgraph=True)
    assert torch.equal(whole(model, x), step(plain, x))
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("options", [None, {"memory_budget": 0.5}, {"partition_fn": min_cut_partition}])
def test_dynamos_front_end_gives_its_graphs_to_our_backend(options: Any) -> None:
    torch.manual_seed(1)
    torch._dynamo.reset()
    model = Net()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=dynamo_backend, options=options)
    assert same(train(plain), train(compiled))


class ByRate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor, rate: float) -> Any:
        def inner(x: Tensor) -> Tensor:
            return self.drop(self.linear(x)) * rate

        return torch.utils.checkpoint.checkpoint(inner, self.drop(x), use_reentrant=False)


def test_floats_that_dynamo_hands_on_as_tensors() -> None:
    """`nn.Dropout`'s probability is one where sizes are symbols, read by C++; in checkpoints, too."""
    torch._dynamo.reset()
    model, found, captures = ByRate(), [], []

    def backend(gm: Any, inputs: Any) -> Any:
        run = dynamo_backend(gm, inputs)
        captures.append(run.__closure__[0].cell_contents)
        return run

    for run in (model, torch.compile(model, backend=backend, dynamic=True, fullgraph=True)):
        torch.manual_seed(0)
        for k in range(1, 5):
            run(torch.ones(3, 6), 1 / k).square().sum().backward()
        found += [[p.grad for p in model.parameters()], torch.rand(3)]
        model.zero_grad()
    assert same(found[0], found[2]) and torch.equal(found[1], found[3])
    assert sum(compiled.captures for compiled in captures) <= 2


def test_arrays_that_dynamo_hands_on_as_tensors() -> None:
    torch._dynamo.reset()
    scaled = torch.compile(lambda array: numpy.sin(array) * 2, backend=dynamo_backend)
    for k in range(2):
        assert numpy.array_equal(scaled(numpy.arange(4.0) + k), numpy.sin(numpy.arange(4.0) + k) * 2)


@functools.cache
def cached(size: int) -> Any:
    return lambda x: x * size


def moved(x: Tensor) -> Tensor:
    y = x.detach()
    y.set_(torch.ones(2))
    return x * y.sum()


@pytest.mark.parametrize("fn", [
    lambda x: x[x > 0].exp(),
    lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    lambda x: cached(len(x))(x),
    moved,
])  # fmt: skip
def test_graphs_of_dynamos_that_cannot_be_replayed_run_as_they_are(fn: Any) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(fn, (graph.placeholder("x"),)))
    found: list[list[Any]] = [[], []]
    for run, seen in zip((fn, dynamo_backend(fx.GraphModule({}, graph), [])), found, strict=True):
        for k in range(3):
            x = (torch.arange(4.0) - k).requires_grad_()
            y = run(x)
            y.sum().backward()
            seen += [y, x.grad]
    assert same(*found)


@pytest.mark.parametrize("asked, said", [
    ({"options": {"memroy_budget": 0.5}}, "has no option 'memroy_budget'; it has backend,"),
    ({"options": {"memory_budget": 0.5, "partition_fn": min_cut_partition}}, "a setting of min_cut_partition"),
    ({"mode": "max-autotune"}, "is a setting of Inductor"),
])  # fmt: skip
def test_options_that_the_backend_does_not_have_are_refused_by_name(asked: Any, said: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=said):
        torch.compile(Net(), backend=dynamo_backend, **asked)(torch.randn(5, 6))


@pytest.mark.parametrize("inner", [lambda fn: fn, ws.compile], ids=["", "calls a compiled function"])
def test_a_backward_inside_of_what_dynamo_compiles(inner: Any) -> None:
    """The engine calls our Python from there, which Dynamo would trace."""
    seen = []
    for run in (lambda fn: fn, functools.partial(torch.compile, backend=dynamo_backend)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        p, x = torch.randn(4, requires_grad=True), torch.randn(4)
        weighted = inner(lambda p, x: (p * x).sin())

        def step(x: Tensor) -> Tensor:
            p.grad = None  # noqa: B023
            loss = weighted(p, x).cos().sum()  # noqa: B023
            loss.backward()
            return loss.detach()

        compiled = run(step)
        seen.append([value for _ in range(3) for value in (compiled(x), p.grad)])
    assert same(*seen)


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_may_script_its_graph() -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    scripted = aot_module(model, functorch.compile.ts_compile)
    assert torch.equal(scripted(x), model(x))
    scripted(x).square().sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    assert same(found, [p.grad for p in model.parameters()])


BY_NAME = """
import torch
import torch._inductor.decomposition
import torch.utils.checkpoint
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
x, found = torch.randn(5, 4), []
for run in (model, torch.compile(model, backend="wholestep")):
    run(x).square().sum().backward()
    found.append([p.grad for p in model.parameters()])
    model.zero_grad()
assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
from wholestep.compiled import Compiled
import gc
assert any(type(o) is Compiled and o.captures for o in gc.get_objects()), "another backend ran"
"""


def test_dynamo_knows_the_backend_by_name_where_the_package_is_installed(tmp_path: Path) -> None:
    """As installers write it: the entry points of pyproject.toml beside the package on the path."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf8"))["project"]
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items())
             for group, names in project["entry-points"].items()]
    installed = tmp_path / "wholestep_test-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: wholestep-test\nVersion: 0\n", encoding="utf8")
    (installed / "entry_points.txt").write_text("\n".join(lines), encoding="utf8")
    paths = os.pathsep.join([str(tmp_path), str(Path(ws.__file__).parent.parent)])
    done = subprocess.run([sys.executable, "-c", BY_NAME], env=os.environ | {"PYTHONPATH": paths}, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def leaf_result_and_views() -> list[Tensor]:
    leaf = torch.arange(6.0).view(2, 3).requires_grad_()
    base = leaf * 1
    view = base.view(-1)
    return [leaf, base, view, view.view(6)]


def write_to_a_view(base: Tensor, view: Tensor, again: Tensor) -> Tensor:
    """The base is given, but only the view is used."""
    view.mul_(2)
    return again.square()


def gradient_between_inputs(base: Tensor, view: Tensor, again: Tensor) -> Tensor:
    """One input is a view of another, which is a view of a third."""
    grad = torch.autograd.grad(again.square().sum(), view, retain_graph=True)[0]
    again += 1
    return grad


@pytest.mark.parametrize("fn", [write_to_a_view, gradient_between_inputs])
def test_inputs_that_are_views_of_views(fn) -> None:
    """Gradients come by the operators that made them: their Python runs."""
    seen, compiled = [], ws.compile(fn)
    for run in (fn, compiled, compiled):
        leaf, *inputs = leaf_result_and_views()
        result = run(*inputs)
        loss = sum(t.sum() for t in (*inputs, result))
        seen.append([*inputs, result, *torch.autograd.grad(loss, leaf)])  # type: ignore[arg-type]
    assert same(*seen[:2]) and same(*seen[1:]) and len(compiled.breaks) == 1


def test_a_capture_leaves_the_histories_of_views_alone() -> None:
    leaf, *inputs = leaf_result_and_views()
    nodes = [t.grad_fn for t in inputs]
    with pytest.raises(UnsupportedError, match="has a history, and is a view of a tensor that the step can see"):
        ws.trace(gradient_between_inputs, *inputs)
    assert all(t.grad_fn is node for t, node in zip(inputs, nodes, strict=True))


@pytest.mark.parametrize("written", [False, True])
def test_one_of_several_views_is_guarded_as_in_eager(written: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        part = y.unbind(0)[1]
        if written:
            y.add_(1)
        return part

    errors = []
    for run in (fn, ws.compile(fn, fullgraph=True)):
        part = run(torch.ones(2, 3, requires_grad=True))
        with pytest.raises(RuntimeError) as error:
            part.sum() if written else part.add_(1)
        errors.append(str(error.value).split(" is a view and ")[1])
    assert errors[0] == errors[1]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_results_that_share_memory_share_counters_as_in_eager(requires_grad: bool) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y.detach(), y[0], y, y.data, y[0].detach()

    seen = []
    for run in (fn, ws.compile(fn, fullgraph=True)):
        results = run(torch.ones(3, 2, requires_grad=requires_grad))
        with torch.no_grad():
            results[0].mul_(2)
            results[3].mul_(2)
        seen.append([(t._version, t._is_view()) for t in results])
    assert seen[0] == seen[1]


def _gradients_kept(fn: Any, after: Any) -> list[list[Any]]:
    seen: list[list[Any]] = []
    for call in (fn, compiled := ws.compile(fn, fullgraph=True), compiled):
        x = torch.arange(4.0, requires_grad=True)
        y = call(x)
        after(y)
        seen.append([y.retains_grad, y.requires_grad, y.is_leaf, y.grad, x.grad])
    return seen


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (2, 0), (0, 2)])
def test_of_results_that_are_one_memory_the_one_with_a_history_is_it(order: tuple[int, ...]) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        both = torch.stack([x, x]).relu_()
        found = [both.data, both, both[1:].detach()]
        return [found[i] for i in order]

    x, seen = torch.tensor([1.0, -2.0], requires_grad=True), []
    for call in (fn, ws.compile(fn, fullgraph=True)):
        results = call(x)
        seen.append([[r._version for r in results]])
        seen[-1] += [torch.autograd.grad(r.sum(), x)[0].tolist() for r in results if r.requires_grad]
        seen[-1] += [[*(r._version for r in results), r.detach().mul_(2)._version, r.tolist()] for r in results]
    assert seen[0] == seen[1]


def test_an_expanded_tensor_is_copied_to_itself() -> None:
    def fn(x: Tensor) -> Tensor:
        wide, same = x.expand(2, 3), x.expand(2, 3)
        return wide.copy_(same)

    x, other = torch.ones(3), torch.ones(3)
    found, expected = ws.compile(fn)(x), fn(other)
    assert torch.equal(found, expected) and found._base is x and x._version == other._version == 1


def test_gradients_that_results_keep() -> None:
    """`retain_grad()` inside, and the gradient of a leaf made inside, with the backward outside and inside."""

    def kept(x: Tensor) -> Tensor:
        y = x.sin()
        y.retain_grad()
        return y

    def differentiated(x: Tensor) -> Tensor:
        y = kept(x)
        (y * y).sum().backward()
        return y

    def leaf(x: Tensor) -> Tensor:
        y = nn.Parameter(x.detach() + 1)
        (y * y).sum().backward()
        return y

    cases: list[tuple[Any, Any]] = [(kept, lambda y: (y * y).sum().backward()), (differentiated, lambda y: None)]
    for fn, after in [*cases, (leaf, lambda y: None), (leaf, lambda y: (y * 3).sum().backward())]:
        eager, *ours = _gradients_kept(fn, after)
        for found in ours:
            assert found[:3] == eager[:3] and same([g for g in eager[3:] if g is not None],
                                                   [g for g in found[3:] if g is not None])
            assert [g is None for g in eager] == [g is None for g in found]


def test_a_gradient_that_only_the_inside_would_see_is_refused() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        y.retain_grad()
        return y, (y * y).sum()

    with pytest.raises(UnsupportedError, match=r"retain_grad\(\) on a result that other results"):
        ws.compile(fn, fullgraph=True)(torch.ones(3, requires_grad=True))


def test_a_view_that_is_written_before_its_base_is_met() -> None:
    def fn(view: Tensor, base: Tensor, x: Tensor) -> Tensor:
        view.mul_(2).copy_(x)
        return base * 3

    seen = []
    for call in (fn, ws.compile(fn, fullgraph=True)):
        base, x = torch.arange(3.0), torch.ones(2, requires_grad=True)
        out = call(base[:2], base, x)
        seen.append([out.detach(), base.detach(), *torch.autograd.grad(out.sum() + base.sum(), x)])
    assert same(*seen)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(40, 24), spectral_norm(nn.Linear(24, 24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(x)
        return nn.functional.linear(torch.tanh(self.inner(hidden)), self.embed.weight), hidden.flatten(1)


def test_gradients_of_weights_used_twice_are_summed_use_by_use_with_what_reaches_them_outside() -> None:
    seen: list[Any] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, found = Tied(), []
        called = ws.compile(model, fullgraph=True) if compiled else model
        for _ in range(2):
            (one, flat), (two, _) = (called(torch.randint(40, (3, 7))) for _ in range(2))
            loss = one.logsumexp(-1).mean() + two.pow(2).mean() + flat.sin().sum()
            (loss + sum(p.pow(3).sum() for p in model.parameters())).backward()
            found += [p.grad for p in model.parameters()]
            model.zero_grad()
        seen.append(found)
    assert same(*seen)


def test_a_result_that_keeps_its_gradient_outside_gets_all_of_it_or_an_error() -> None:
    w = torch.ones(3, requires_grad=True)
    compiled = ws.compile(lambda x: (hidden := x.tanh(), hidden * w))
    hidden, out = compiled(w)
    (hidden.sum() + out.sum()).backward()
    hidden, out = compiled(w)
    hidden.retain_grad()
    hidden.sum().backward()
    assert torch.equal(hidden.grad, torch.ones(3))
    hidden, out = compiled(w)
    hidden.retain_grad()
    with pytest.raises(UnsupportedError, match="retain_grad.. on a result of a compiled function that other results"):
        out.sum().backward()
    hidden, out = compiled(w)
    hidden.register_hook(lambda grad: grad * 2)
    with pytest.raises(UnsupportedError, match="a hook on a result of a compiled function that other results"):
        (hidden.sum() + out.sum()).backward()
    hidden, out = compiled(w)
    out.sum().backward()


def written(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(w)
    return x, x.tanh()


def hooked_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    made = hooked(x * w, lambda grad: grad * 3)
    return made, made


@pytest.mark.parametrize("function", [
    lambda x, w: (hidden := x.tanh(), hidden * w), lambda x, w: (hidden := (x * w).view(3, 2), hidden.tanh()), written,
    hooked_inside,
])  # fmt: skip
@pytest.mark.parametrize("ask", [
    lambda hidden, out: torch.autograd.grad(out.sum(), hidden, allow_unused=True),
    lambda hidden, out: hidden.retain_grad(),
    lambda hidden, out: torch.autograd.grad((out * hidden).sum(), torch.autograd.graph.get_gradient_edge(hidden)),
    lambda hidden, out: out.sum().backward(inputs=[hidden]), lambda hidden, out: hooked(hidden, lambda grad: grad),
])  # fmt: skip
def test_gradients_of_results_that_others_are_made_of_are_not_given_in_part(function: Any, ask: Any) -> None:
    x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    hidden, out = ws.compile(function)(x * 1, x)
    with pytest.raises(UnsupportedError, match="a result of a compiled function that other results of it are made of"):
        ask(hidden, out)
        out.sum().backward()


def test_gradients_of_results_alone_are_as_in_eager() -> None:
    def asked(compile: Any) -> list[Any]:
        def function(x: Tensor) -> tuple[Tensor, ...]:
            base = x.tanh()
            return base.view(3, 2), base * x, x.sin()

        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        view, out, other = compile(function)(x)
        losses = view.sum(), out.exp().sum(), (other * out).sum()
        results = (view, out, other, x)
        return [torch.autograd.grad(loss, results, retain_graph=True, allow_unused=True) for loss in losses]

    for mine, theirs in zip(asked(ws.compile), asked(lambda function: function), strict=True):
        assert [*map(type, mine)] == [*map(type, theirs)]
        assert same([m for m in mine if m is not None], [t for t in theirs if t is not None])


FLAGS: dict[str, float] = {}
SCALE = 1.0
SCALES = [1.0]
HELD: dict[str, dict[str, float]] = {}


def set_scale(value: float) -> None:
    global SCALE
    SCALE = FLAGS["scale"] = SCALES[0] = Scaled.scale = value
    os.environ["WHOLESTEP_TESTS_SCALE"] = str(value)
    for held in HELD.values():
        held["scale"] = value


class Scaled(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Scaled.scale


class ScaledByContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.flags, ctx.own = FLAGS, {"one": 1.0}
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        flags = ctx.flags
        return grad * flags["scale"] * ctx.own["one"]


class ScaledByItem(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scales, ctx.own = SCALES, [1.0]
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.scales[0] * ctx.own[0]


class ScaledByWhatIsHeld(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.flags = HELD["made"] = {"scale": 1.0}
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.flags["scale"]


def unpacked(h: Tensor, hook: Any) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, hook):
        return h.sin()


def hooked(h: Tensor, hook: Any) -> Tensor:
    h.register_hook(hook)
    return h


@pytest.mark.parametrize("inner", [
    Scaled.apply, lambda h: hooked(h, lambda g: g * FLAGS["scale"]), lambda h: hooked(h, lambda g: g * SCALE),
    ScaledByContext.apply, lambda h: unpacked(h, lambda t: t * FLAGS["scale"]),
    ScaledByItem.apply, ScaledByWhatIsHeld.apply,
    lambda h: hooked(h, lambda g: g * float(os.environ["WHOLESTEP_TESTS_SCALE"])),
])  # fmt: skip
def test_a_backward_outside_sees_what_python_that_runs_in_it_reads(inner: Any) -> None:
    def trained(compile: Any) -> list[Tensor]:
        model, found = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh()), []
        nn.init.eye_(model[0].weight)
        model[0].register_forward_hook(lambda *args: inner(args[2]))
        compiled = compile(model)
        for scale in (2.0, 3.0, 4.0):
            set_scale(1.0)
            loss = compiled(torch.ones(2, 3)).sum()
            set_scale(scale)
            loss.backward()
            found.append(model[0].weight.grad.clone())
        return found

    assert same(trained(lambda model: model), trained(ws.compile))
    with pytest.raises(UnsupportedError, match="runs in the backward of a compiled function and reads"):
        trained(lambda model: ws.compile(model, fullgraph=True))


def test_calls_are_watched_in_a_backward_with_hooks_or_functions_alone(monkeypatch: Any) -> None:
    """To see each call of Python's takes half as long as the capture of a module again."""
    watched, before = [], sys.setprofile
    monkeypatch.setattr(sys, "setprofile", lambda function: (watched.append(function), before(function)))
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    ws.compile(plain, fullgraph=True)(torch.ones(2, 3)).sum().backward()
    assert watched == []
    plain[0].register_forward_hook(lambda *args: hooked(args[2], lambda g: g * 2))
    ws.compile(plain, fullgraph=True)(torch.ones(2, 3)).sum().backward()
    assert watched != []


def test_what_a_hook_takes_back_of_what_the_forward_set_is_taken_back_outside() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.running = nn.Parameter(torch.ones(2)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.running = 1
            return hooked(x * self.weight, lambda grad: setattr(self, "running", 0)) * 2

    model = Counted()
    compiled = ws.compile(model)
    for _ in range(3):
        loss = compiled(torch.ones(2)).sum()
        assert model.running == 1
        loss.backward()
        assert model.running == 0
    with pytest.raises(UnsupportedError, match="runs in the backward of a compiled function changes"):
        ws.compile(model, fullgraph=True)(torch.ones(2))


SCRIPT = """
scale, weight, found = 2.0, torch.ones(2, requires_grad=True), []
compiled = compile(lambda w: hooked(w * 1, lambda grad: grad * scale))
for value in (2.0, 3.0, 4.0):
    scale = 1.0
    loss = compiled(weight).sum()
    scale = value
    loss.backward()
    found.append(weight.grad.clone())
"""
CLOSURE = f"def trained():{textwrap.indent(SCRIPT, '    ')}    return found\nfound = trained()"
SETTER = """
def pair():
    scale = 1.0
    def hook(grad):
        return grad * scale
    def put(value):
        nonlocal scale
        scale = value
    return hook, put
(hook, put), weight, found = pair(), torch.ones(2, requires_grad=True), []
compiled = compile(lambda w: hooked(w * 1, hook))
for value in (2.0, 3.0, 4.0):
    loss = compiled(weight).sum()
    put(value)
    loss.backward()
    found.append(weight.grad.clone())
"""


@pytest.mark.parametrize("text", [SCRIPT, CLOSURE, SETTER])
def test_a_backward_outside_sees_variables_that_are_set_anew(text: str, tmp_path: Path) -> None:
    def trained(text: str, compile_: Any) -> list[Tensor]:
        names: dict[str, Any] = {"torch": torch, "hooked": hooked, "compile": compile_}
        exec(compile(text, str(tmp_path / "script.py"), "exec"), names)
        return names["found"]  # type: ignore[no-any-return]

    assert same(trained(text, lambda function: function), trained(text, ws.compile))
    if text is not SETTER:
        once = "\n".join(line for line in text.split("\n") if "  scale = " not in line or "found" in line)
        trained(once, lambda function: ws.compile(function, fullgraph=True))


@pytest.mark.parametrize("preserve", [False, True])
def test_reentrant_checkpoints_inside_of_a_module_whose_backward_runs_outside(preserve: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())

    def fn(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=True, preserve_rng_state=preserve).exp()

    compiled, seen = ws.compile(fn, fullgraph=True), []
    for call in (fn, compiled, compiled):
        inner.zero_grad()
        torch.manual_seed(0)
        x = torch.ones(3, 4, requires_grad=True)
        out = call(x)
        torch.manual_seed(0)
        out.sum().backward()
        seen.append([out.detach(), x.grad, *(p.grad for p in inner.parameters())])
    assert same(seen[0], seen[1]) and same(seen[0], seen[2])


def test_what_reentrant_checkpoints_are_given_has_gradients_as_leaves_have() -> None:
    """Summed within each, and laid out as the tensor: sums over a dimension round by the layout."""
    inner, outer = nn.Linear(8, 16), nn.Linear(8, 8)

    def block(x: Tensor, c: Tensor) -> Tensor:
        scale, shift = inner(c).chunk(2, 1)
        return x * (1 + scale.unsqueeze(1)) + (shift * c.sin()).unsqueeze(1)

    def fn(x: Tensor, c: Tensor) -> Tensor:
        x, c = outer(x).transpose(1, 2).contiguous().transpose(1, 2), c * 2
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(block, x, c, use_reentrant=True)
        return outer(x)

    compiled, x, seen = ws.compile(fn, fullgraph=True), torch.randn(4, 33, 8), []
    for call in (fn, compiled, compiled):
        c = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        params = [*inner.parameters(), *outer.parameters()]
        inner.zero_grad(), outer.zero_grad()
        call(x, c).square().sum().backward()
        seen.append([c.grad, *(p.grad for p in params)])
    assert same(seen[0], seen[1]) and same(seen[0], seen[2])


def packing(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return (x * 2).t().prod() + x.view(2, 14).prod(1).sum()


def checkpointed(x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x: x.sin().prod(1), x, use_reentrant=False)


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("fn", [lambda x: x.prod(), lambda x: x.prod(1), lambda x: (x * 2).prod(0, keepdim=True),
                                lambda x: x.t().prod(0), lambda x: x.t().prod(1), lambda x: x.cumprod(-1),
                                lambda x: x.t().cumprod(0)])  # fmt: skip
def test_a_product_is_differentiated_by_the_formula_that_eager_chooses(fn: Any, zeros: int) -> None:
    x = torch.randn(4, 7)
    compiled, backwards = aot_function(fn, "aten"), compiled_backward(CompileCounter())

    def gradient(run: Any, given: Tensor, context: Any = None) -> Tensor:
        given = given.clone().requires_grad_()
        with context or nullcontext():
            run(given).sum().mul(1.7).backward()
        assert given.grad is not None
        return given.grad

    for places in (0, zeros):  # the program is made for data of the first kind
        x.view(-1)[:places] = 0
        eager = gradient(fn, x)
        assert torch.equal(gradient(compiled, x), eager)
        assert torch.equal(gradient(fn, x, backwards), eager)
    assert backwards.captures and not backwards.eager


@pytest.mark.parametrize("fn", [packing, checkpointed])
def test_a_product_of_what_a_hook_has_packed_is_differentiated_in_eager(fn: Any) -> None:
    x = torch.randn(4, 7, requires_grad=True)
    with pytest.raises(UnsupportedError, match="the gradient of a product of what a hook of saved tensors has packed"):
        aot_function(fn, "aten")(x)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    assert torch.equal(*torch.autograd.grad(ws.compile(fn)(x).sum(), x), expected)


def filled(x: Tensor) -> Tensor:
    return torch.masked_fill(x, x > 0, x[0, 0] * 2) * torch.linspace(0, 1, x.numel()).view(x.shape)


def smoothed(x: Tensor) -> Tensor:
    target = torch.where(torch.arange(len(x)) % 3 == 0, -100, torch.arange(len(x)) % x.shape[1])
    weight = torch.linspace(0.3, 1.7, x.shape[1])
    return torch.nn.functional.cross_entropy(x, target, weight, label_smoothing=0.1)


@pytest.mark.parametrize("fn", [
    filled, smoothed, lambda x: torch.utils.checkpoint.checkpoint(filled, x, use_reentrant=False),
    *(lambda x, f=f: f(x.t()) * torch.inf for f in (torch.max, torch.min, torch.median, torch.nanmedian)),
])  # fmt: skip
def test_sums_and_shares_are_of_what_counts_alone_as_in_eager(fn: Any) -> None:
    compiled = ws.compile(fn, fullgraph=True)
    for seed in range(8):
        x = torch.randn(50, 11, generator=torch.Generator().manual_seed(seed))
        if seed > 5:
            x[3, 3] = torch.nan
        found = []
        for run in (fn, compiled):
            given = x.clone().requires_grad_()
            out = run(given)
            out.sum().backward()
            found.append([out.detach(), given.grad])
        torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=0.0, equal_nan=True, check_stride=True)


def test_views_of_nothing_begin_where_eagers_do() -> None:
    def views(x: Tensor) -> list[Tensor]:
        end = x[3:]
        return [end.view(0), end.view(-1), end.view(0, 2), end.reshape(-1, 2)]

    x = torch.randn(3, requires_grad=True)
    expected, found = views(x), ws.compile(views, fullgraph=True)(x)
    assert [v.storage_offset() for v in found] == [v.storage_offset() for v in expected] == [3] * 4
    assert all(v._base is x for v in found)


@pytest.mark.parametrize("fn, written", [
    (lambda x: x.exp(), 0), (lambda x: (x.sigmoid(), x.exp()), 1), (lambda x: (x.exp().tanh(), x.tanh()), 0),
])  # fmt: skip
def test_a_result_written_before_its_backward_is_named_as_in_eager(fn: Any, written: int) -> None:
    said = []
    for run in (fn, ws.compile(fn, fullgraph=True)):
        out = run(torch.ones(3, requires_grad=True) * 1)
        outputs = out if isinstance(out, tuple) else (out,)
        outputs[written].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            outputs[written].sum().backward()
        said.append(str(error.value))
    assert said[0] == said[1]


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def _of_a_leaf(x: Tensor) -> Tensor:
    return x.detach() * torch.ones(3, requires_grad=True)


def _of_a_function_of_a_leaf(x: Tensor) -> Tensor:
    return Shifted.apply(torch.ones(3, requires_grad=True))  # type: ignore[no-any-return, no-untyped-call]


def _of_both(x: Tensor) -> tuple[Tensor, Tensor]:
    return _of_a_leaf(x), x.sin()


def _written(x: Tensor) -> Tensor:
    return x.detach().clone().add_(torch.ones(3, requires_grad=True)).sum()


def _differentiated_inside(x: Tensor) -> Tensor:
    out = torch.ones(3, requires_grad=True).exp()
    out.sum().backward()
    return out


class Attributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.factor = x.detach() * 2
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.factor  # type: ignore[no-any-return]


def test_a_result_of_a_function_that_saves_nothing_and_was_differentiated() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        out = Attributed.apply(x)  # type: ignore[no-untyped-call]
        return out, torch.autograd.grad(out.sum(), x)[0]

    x = torch.randn(3, requires_grad=True)
    for call in (fn, ws.compile(fn, fullgraph=True)):
        out, grad = call(x)
        assert torch.equal(grad, 2 * x) and torch.equal(torch.autograd.grad(out.sum(), x)[0], 2 * x)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("fn", [_of_a_leaf, _of_a_function_of_a_leaf, _of_both, _written, _differentiated_inside])
def test_results_of_leaves_that_nobody_keeps(fn: Any, differentiable: bool) -> None:
    """They require grad, and their backward reaches nobody, or fails as in eager."""
    seen = []
    for call in (fn, ws.compile(fn)):
        for _ in range(2):
            x = torch.ones(3, requires_grad=differentiable)
            out = call(x)
            first = out[0] if isinstance(out, tuple) else out
            said = ""
            try:
                first.sum().backward()
            except RuntimeError as error:
                said = str(error)[:46]
            seen.append((first.tolist(), first.requires_grad, first.is_leaf, x.grad, said))
    assert seen[0] == seen[1] == seen[2] == seen[3] and seen[0][1]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise AssertionError("not today")


def test_a_backward_that_raises_an_error_of_its_own_is_not_captured() -> None:
    def fn(x: Tensor) -> Tensor:
        return Failing.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedError, match="its backward raises AssertionError: not today"):
        ws.compile(fn, fullgraph=True)(x)
    out = ws.compile(fn, fullgraph=False)(x)
    with pytest.raises(AssertionError, match="not today"):
        out.sum().backward()


@pytest.mark.parametrize("fn", [lambda x: x + 1, lambda x: x.t().unsqueeze(0), lambda x: x * 2, lambda x: x.sin()])
def test_a_backward_runs_again_where_nothing_was_freed(fn: Any) -> None:
    seen = []
    for call in (fn, ws.compile(fn)):
        x = torch.ones(3, 2, requires_grad=True)
        out, said = call(x), ""
        out.sum().backward()
        try:
            out.sum().backward()
        except RuntimeError as error:
            said = str(error)[:46]
        assert x.grad is not None
        seen.append((x.grad.tolist(), said))
    assert seen[0] == seen[1]


def test_an_input_that_is_made_to_require_grad_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        kept = x + 4
        x.requires_grad = True
        return x * kept

    with pytest.raises(UnsupportedError, match="is made to require grad"):
        ws.compile(fn, fullgraph=True)(torch.ones(3))
    seen = []
    for call in (fn, ws.compile(fn, fullgraph=False)):
        x = torch.ones(3)
        call(x).sum().backward()
        seen.append([x.grad])
    assert same(*seen)


def test_torchscript_traces_through_what_is_compiled() -> None:
    traced = torch.jit.trace(ws.compile(lambda x: x * 2), torch.ones(3))
    assert traced(torch.full((3,), 2.0)).tolist() == [4.0, 4.0, 4.0]


def _doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore")
def test_torchscript_compiles_what_a_compiled_function_or_module_is_made_of() -> None:
    x = torch.ones(3)
    for compiled in (ws.compile(_doubled), ws.compile(nn.Linear(3, 3)), nn.Sequential(ws.compile(nn.Linear(3, 3)))):
        assert torch.equal(torch.jit.script(compiled)(x), compiled(x))


def test_fx_traces_through_what_is_compiled() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: Tensor, more: float = 1.0) -> Tensor:
            return x * 2 + more

    module, function = ws.compile(Doubled()), ws.compile(lambda x: x.sin() + 1)
    assert [*inspect.signature(module.forward).parameters] == ["x", "more"]
    for traced in (module, torch.nn.Sequential(module), torch.nn.Sequential(torch.nn.ReLU(), module)):
        assert torch.equal(fx.symbolic_trace(traced)(torch.ones(3)), torch.full((3,), 3.0))
    assert [n.name for n in fx.symbolic_trace(lambda x: function(x)).graph.nodes] == ["x", "sin", "add", "output"]


@pytest.mark.parametrize("bias", [None, 0.5])
def test_statistics_that_a_step_makes_are_saved_as_they_are_given(bias: float | None) -> None:
    """The operator counts a write to them in a program, and none in eager."""

    def normalized(x: Tensor) -> list[Tensor]:
        mean, var, weight = torch.zeros(3), torch.ones(3), torch.full((3,), 2.0)
        shift = None if bias is None else torch.full((3,), bias)
        result = torch.ops.aten._batch_norm_with_update(x, weight, shift, mean, var, 0.1, 1e-5)
        return [*result[:3], mean, var]

    found = []
    for fn in (normalized, ws.compile(normalized, fullgraph=True)):
        x = torch.arange(12.0).view(4, 3).sin().requires_grad_()
        results = fn(x)
        results[0].square().sum().backward()
        found.append([*results, x.grad, *(torch.tensor(r._version) for r in results)])
    assert all(map(torch.equal, *found))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("profiler", [cProfile.Profile, profile.Profile])
def test_a_profiler_goes_on_after_a_capture_that_looks_at_functions_backwards(profiler: Any) -> None:
    compiled = ws.compile(lambda x: Doubled.apply(x), fullgraph=True)
    seen = profiler()
    value = seen.runcall(lambda: (compiled(torch.ones(2, requires_grad=True)), fractions.Fraction(1, 2) + 1)[1])
    assert value == 1.5 and any(name == "_add" for _, _, name in pstats.Stats(seen).stats)
