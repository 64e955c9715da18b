"""What the seed about compiled wrappers asks, test by test: of capture in one process, and of wrappers on two ranks.

`SEED` names each test of the seed that is about capture, and the one here that stands for it; those with wrappers are
the cases of `tests/support/seed_000_ranks.py`, by the seed's names. Graphs are not split at the bounds of buckets, as
communication is in them, except where a backend wants it: `test_seed_000_split.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tests.support.seed_000_ranks as ranks
import wholestep as ws
from wholestep.testing import CompileCounter, run_ranks

SEED = {
    "test_issue90375": "test_a_forward_of_no_arguments",
    "test_symbol_splitting": "test_sizes_that_are_symbols_through_several_weights",
    "test_call_method_forward": "test_forward_called_as_a_method",
    "test_fsdp_setattr": "test_attributes_set_in_the_step",
    "test_graph_split_ctx_manager": "test_context_managers_across_a_break",
    "test_empty_graph_inductor": "test_a_step_without_tensors",
    "test_higher_order_op": "test_checkpoints_in_the_graph",
    "test_fsdp_activation_checkpointing": "test_checkpoints_in_the_graph",
    "test_fsdp_skip_guards": "test_guards_with_their_sources",
    "test_fsdp_skip_register_attr_or_module": "test_parameters_are_inputs_and_no_attributes",
    "test_fsdp_dup_tensors_same_source": "test_a_tensor_used_twice_is_one_input",
    "test_fsdp_dup_tensors_diff_source": "test_a_tensor_in_two_modules",
    "test_fsdp_staticmethod": "test_static_methods",
    "test_async_subclass_no_specialize": "test_one_capture_for_two_sizes",
}


def test_the_table_names_tests_that_exist() -> None:
    assert all(name in globals() for name in SEED.values())


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(ranks.everything, 2, "shm", ([*ranks.CASES],), timeout=400)


@pytest.mark.parametrize("name", ranks.CASES)
def test_compiled_wrappers_are_as_in_eager(name: str, both: list[dict[str, Any]]) -> None:
    for found in both:
        assert set(found[name].values()) == {True}


def test_sharded_parameters_are_no_attributes(both: list[dict[str, Any]]) -> None:
    assert all(found["test_fsdp_skip_register_attr_or_module"] for found in both)


class Toy(nn.Module):
    """The seed's, with its context manager."""

    def __init__(self, context: Callable[[], Any] = nullcontext) -> None:
        super().__init__()
        self.context, self.state = context, 1
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        with self.context():
            return self.net(inputs)  # type: ignore[no-any-return]


def counted(fn: Any, **options: Any) -> tuple[Any, CompileCounter]:
    counter = CompileCounter()
    return ws.compile(fn, backend=counter, **options), counter


def test_a_forward_of_no_arguments() -> None:
    class Model(nn.Module):
        def forward(self) -> Tensor:
            return torch.randn(3) * torch.randn(3)

    compiled, counter = counted(Model(), fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = torch.randn(3) * torch.randn(3)
        torch.manual_seed(seed)
        assert torch.equal(compiled(), expected)
    assert counter.frame_count == 1


def test_sizes_that_are_symbols_through_several_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight1, self.weight2 = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([x, x])
            return x + (x @ self.weight1) @ self.weight2

    model = Model()
    compiled = ws.compile(model, dynamic=True, fullgraph=True)
    for size in (20, 7, 12):
        x = torch.randn(size, 16)
        assert torch.equal(compiled(x), model(x))
    assert compiled.recompiles == []


def test_forward_called_as_a_method() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = ([nn.LayerNorm(24), nn.MultiheadAttention(24, 4, batch_first=True)] for _ in range(2))
            self.layers = nn.ModuleList(map(nn.ModuleList, pairs))

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape
            for norm, attention in self.layers:
                x = norm(x.reshape(size[0] * size[1], size[2], size[3]))
                x, _ = attention.forward(x, x, x)
                x = x.reshape(size)
            return x

    model = Model()
    compiled, counter = counted(model, fullgraph=True)
    for _ in range(2):
        x = torch.randn(2, 3, 5, 24)
        assert torch.equal(compiled(x), model(x))
    assert counter.frame_count == 2  # a forward, and the backward that its result may need


def test_attributes_set_in_the_step() -> None:
    class Mutating(Toy):
        def forward(self, inputs: Tensor) -> Tensor:
            self.state = 2
            return self.net(inputs) * self.state  # type: ignore[no-any-return]

    model = Mutating()
    compiled, x = ws.compile(model, fullgraph=True), torch.rand(20, 10)
    assert torch.equal(compiled(x), copy.deepcopy(model)(x)) and model.state == compiled.state == 2
    model.state = 7
    assert torch.equal(compiled(x), copy.deepcopy(model)(x)) and model.state == 2
    assert compiled.breaks == []


@pytest.mark.parametrize("context", [lambda: torch.autocast("cpu", torch.bfloat16), torch.enable_grad, torch.no_grad])
def test_context_managers_across_a_break(context: Callable[[], Any]) -> None:
    """The context holds on both sides of a read, and of a break that is asked for."""

    class Breaking(Toy):
        def forward(self, inputs: Tensor) -> Tensor:
            with self.context():
                x = self.net[1](self.net[0](inputs))
                ws.graph_break()
                if x.sum() > 0:  # a read
                    x = self.net[2](x)
                return self.net[4](self.net[3](x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Breaking(context)
    compiled, x = ws.compile(model), torch.rand(20, 10)
    for outside in (True, False, True, True):
        with torch.set_grad_enabled(outside):
            expected, found = model(x), compiled(x)
            assert torch.equal(expected, found)
            assert (expected.dtype, expected.requires_grad) == (found.dtype, found.requires_grad)
            assert torch.is_grad_enabled() is outside
    assert compiled.breaks and not torch.is_autocast_enabled("cpu")
    told = compiled.explain(x)
    assert told.breaks == compiled.breaks and "test_seed_000.py" in told.breaks[0]
    if not told.eager:  # which it is where that was faster
        assert told.graph_count == len(told.segments) and told.graph_break_count == told.graph_count - 1


def test_a_step_without_tensors() -> None:
    compiled = ws.compile(lambda: (torch.get_num_threads(),), fullgraph=True)
    assert compiled() == compiled() == (torch.get_num_threads(),)


def test_checkpoints_in_the_graph() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cos(checkpoint(self.first, x, use_reentrant=False))
            return torch.cos(checkpoint(self.second, x, use_reentrant=False))

    model = Model()
    compiled, counter = counted(model, fullgraph=True)
    found = []
    for run in (model, compiled):
        x = torch.ones(4, 10, requires_grad=True)
        loss = run(x).sum()
        found.append([loss, *torch.autograd.grad(loss, [x, *model.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert counter.frame_count == 2  # a forward and its backward


def test_guards_with_their_sources() -> None:
    class Scaled(Toy):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs) * self.state  # type: ignore[no-any-return]

    compiled, x = ws.compile(Scaled(), fullgraph=True), torch.rand(20, 10)
    assert compiled.guards == []
    compiled(x)
    said = [*map(str, compiled.guards)]
    wanted = {"": "Sequential", ".0": "Linear", ".0.weight": "Parameter"}
    places = [said.index(f"L['self'].net{below} type: {kind}") for below, kind in wanted.items()]
    assert places == sorted(places)  # what holds others comes first
    by_key = {(str(g.source), g.kind): g for g in compiled.guards if g.source is not None}
    assert by_key["L['inputs']", "tensor"].expected[-2] == (20, 10)
    assert str(by_key["L['inputs']", "tensor"]).endswith("is_leaf True, shape [20, 10], stride (10, 1)")
    assert str(by_key["L['self'].net", "structure of attributes"]).startswith(
        "L['self'].net structure of attributes: Sequential with 'training', '_parameters'"
    )
    assert str(by_key["L['self'].state", "value"]) == "L['self'].state value: 1"
    compiled.state = 3
    compiled(x)
    assert compiled.recompiles == ["L['self'].state: expected 1, found 3"]  # the guard that said so before it failed


def test_guards_of_other_kinds_and_steps() -> None:
    def fn(x: Tensor, items: list[Any], table: dict[str, Any]) -> Tensor:
        return x + items[0] * table["scale"] if x.sum() > 0 else x

    compiled = ws.compile(fn)
    x = torch.ones(3)
    compiled(x, [x, 2], {"scale": 0.5})
    said = "\n".join(map(str, compiled.guards))
    for wanted in (
        "global state grad mode: True", "global state arguments: 3 by position and none by name",
        "L['items'][0] is L['x']", "L['items'] structure of list: list of 2", "L['items'][1] value: 2",
        "L['table'] structure of dict: dict with 'scale'", "L['table']['scale'] value: 0.5",
    ):  # fmt: skip
        assert wanted in said.splitlines(), wanted
    (decision,) = (g for g in compiled.guards if g.kind.startswith("decided at"))
    assert "test_seed_000.py" in decision.kind and decision.expected is True and "L['x']" in str(decision.source)
    deferring = ws.compile(lambda x: print(end="") or x + 1)
    deferring(x)
    assert deferring.guards == [] and deferring.breaks


def test_parameters_are_inputs_and_no_attributes() -> None:
    model, graphs = Toy(), []

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm

    x = torch.rand(20, 10)
    assert torch.equal(ws.compile(model, backend=backend, fullgraph=True)(x), model(x))
    assert not any(node.op == "get_attr" for gm in graphs for node in gm.graph.nodes)


def test_a_tensor_used_twice_is_one_input() -> None:
    class Duplicate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._param = torch.randn(3)
            self.register_buffer("_buf", torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            z = x + self._buf + self._buf
            z += self._param + self._param
            return z

    model = Duplicate()
    compiled, counter = counted(model, fullgraph=True)
    x = torch.randn(2, 3)
    assert torch.equal(compiled(x), model(x))
    assert sum(node.op == "placeholder" for node in counter.graphs[0].graph.nodes) == 3


def test_a_tensor_in_two_modules() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("_buf", torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self._buf

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._param, self.inner = nn.Parameter(torch.randn(1)), Inner()
            self.register_buffer("_buf", self.inner._buf)

        def forward(self, x: Tensor) -> Tensor:
            self._buf.mul_(2)
            z = self.inner(x + self._buf)
            z += self._param
            return z

    model = Model()
    other = copy.deepcopy(model)
    compiled, counter = counted(model, fullgraph=True)
    x = torch.randn(2, 3)
    for _ in range(15):
        assert torch.equal(compiled(x), other(x)) and torch.equal(model._buf, other._buf)
    assert counter.frame_count == 2 and compiled.recompiles == []
    assert "L['self'].inner._buf is L['self']._buf" in [*map(str, compiled.guards)]


@pytest.mark.parametrize("use_self", [False, True])
def test_static_methods(use_self: bool) -> None:
    class Static(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._param = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            z = self._add(x, self._param) if use_self else Static._add(x, self._param)
            z *= 2
            return z

        @staticmethod
        def _add(x: Tensor, y: Tensor) -> Tensor:
            return x + y

    model = Static()
    compiled, counter = counted(model, fullgraph=True)
    x = torch.randn(2, 3)
    assert all(torch.equal(compiled(x), model(x)) for _ in range(2)) and counter.frame_count == 2


def test_one_capture_for_two_sizes() -> None:
    compiled, counter = counted(lambda x: x + 1, dynamic=True, fullgraph=True)
    for size in (10, 12):
        x = torch.randn(size)
        assert torch.equal(compiled(x), x + 1)
    assert compiled.recompiles == []
    assert counter.frame_count == 2  # the capture is one; a program is for one size


FACTOR, TABLE = 2.0, {"scale": [3.0]}


def test_lists_dicts_globals_and_closures_are_guarded() -> None:
    offset = [1.0]

    def fn(x: Tensor, options: dict[str, Any]) -> Tensor:
        return x * FACTOR + TABLE["scale"][0] + offset[0] + sum(options["more"])  # type: ignore[no-any-return]

    x, options = torch.randn(3), {"more": [1, 2]}
    compiled = ws.compile(fn, fullgraph=True)
    assert torch.equal(compiled(x, options), fn(x, options))
    sources = {str(g.source) for g in compiled.guards}
    assert {"L['options']['more'][1]", "G['FACTOR']", "G['TABLE']['scale'][0]", "L['offset'][0]"} <= sources
    options["more"].append(4)
    assert torch.equal(compiled(x, options), fn(x, options))
    assert compiled.recompiles == ["L['options']['more']: expected length 2, found 3"]
    for change in (TABLE["scale"], offset):
        change[0] += 1
        assert torch.equal(compiled(x, options), fn(x, options))
    assert ["TABLE" in compiled.recompiles[1], "offset" in compiled.recompiles[2]] == [True, True]
