"""What a step would send and hold, said before it runs: against what it then does, and against counts by hand."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import wholestep as ws
from tests.support.lower_programs import arena_bytes
from tests.support.spmd_unsharded import Cut, by_rules
from wholestep import comm
from wholestep.comm.ops import functional_collectives
from wholestep.errors import CaptureError, UnsupportedError
from wholestep.parallel import deferred
from wholestep.report import Traffic
from wholestep.report.traffic_and_memory import COSTS
from wholestep.spmd.preflight.contract import communication
from wholestep.testing import run_ranks


@pytest.fixture
def world():
    """Starts a null world of some ranks; gives its mesh."""

    def start(*shape, rank=0, names=("dp", "zero")):
        comm.init_process_group("null", rank=rank, world_size=torch.Size(shape).numel())
        return ws.init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])

    yield start
    if comm.is_initialized():
        comm.destroy_process_group()


def net(width=32):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.Tanh(), nn.Linear(2 * width, width))


def train_step(model, opt, x):
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def nbytes(tensors):
    return sum(t.numel() * t.itemsize for t in tensors)


def test_every_collective_has_a_cost():
    names = {name.removesuffix("_") for name in functional_collectives.SCHEMAS} - {"wait"}
    assert names == set(COSTS)


def test_data_parallel_sends_each_gradient_as_all_reduces_do(world):
    mesh, model = world(8), net()
    step = ws.compile(
        train_step, mesh=mesh, plan=ws.DataParallel("dp", first_bucket_bytes=9000, bucket_bytes=9000), fullgraph=True
    )
    found = step.explain(model, adamw(model), torch.randn(16, 32))
    assert found.bytes_sent == 2 * 7 / 8 * nbytes(model.parameters()) + nbytes(model.buffers())
    assert [s.tensors for s in found.collectives if s.kind == "broadcast"] == [len(list(model.buffers()))]
    gradients = [s for s in found.collectives if s.kind != "broadcast"]
    assert all((s.kind, s.axis, s.ranks, s.phase) == ("all_reduce", "dp", 8, "backward") for s in gradients)
    assert sum(s.tensors for s in gradients) == len(list(model.parameters()))
    assert {s.module for s in gradients} == {"model.0", "model.3"}
    assert all(s.where.startswith(__file__) for s in found.collectives)


def test_memory_by_class(world):
    mesh, model = world(4), net()
    opt, x = adamw(model), torch.randn(16, 32)
    parameters, buffers = nbytes(model.parameters()), nbytes(model.buffers())
    whole = ws.compile(train_step, mesh=mesh, plan=ws.DataParallel("dp"), fullgraph=True).explain(model, opt, x).memory
    parts = (
        ws.compile(train_step, mesh=mesh, plan=ws.ShardedOptimizer("dp", min_bytes=1), fullgraph=True)
        .explain(model, opt, x)
        .memory
    )
    for found, kept in ((whole, 1), (parts, 4)):  # a gradient that is reduce-scattered is free then
        held = found.by_class
        assert (held["parameters"], held["buffers"], held["batch"]) == (parameters, buffers, nbytes([x]))
        assert nbytes([model[0].weight]) <= kept * held["gradients"] <= 2 * parameters, "one gradient, none twice"
        assert found.total == sum(held.values()) and found.arena > 0
    counts = 4 * len(list(model.parameters()))  # a step count for each
    assert whole.by_class["states"] == 2 * parameters + counts
    assert parts.by_class["states"] == 2 * parameters // 4 + counts


def test_activations_are_those_that_wait_for_the_backward():
    """n values of one size are saved for the backward of n squares; little else is held."""

    def squares(x):
        for _ in range(10):
            x = x * x
        x.sum().backward()

    x = torch.rand(1000, requires_grad=True)
    found = ws.compile(squares, fullgraph=True).explain(x).memory
    assert 9 * 4000 <= found.by_class["activations"] <= 12 * 4000
    assert found.where.startswith(__file__)


def test_the_arena_is_what_the_program_takes():
    model, x = net(), torch.randn(16, 32)
    opt, step = adamw(model), ws.compile(train_step, fullgraph=True)
    said = step.explain(model, opt, x)
    step(model, opt, x)
    program = next(iter(step._capturer.known.programs.values()))
    assert said.memory.arena == arena_bytes(program.run)
    live = sum(v for k, v in said.memory.by_class.items() if k in ("activations", "gradients", "other"))
    assert live > 0.8 * arena_bytes(program.run)  # and what kernels allocate besides


def explained_and_run() -> tuple[list[str], list[str], str, bool]:
    """Rank 0 alone asks, and nobody waits for it; then all run."""
    mesh = ws.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "zero"))
    generator = torch.Generator().manual_seed(0)
    model = net(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1, generator=generator)
    step = ws.compile(
        train_step, mesh=mesh, plan=[ws.DataParallel("dp"), ws.ShardedOptimizer("zero", min_bytes=1)], fullgraph=True
    )
    opt, x = adamw(model), torch.ones(4, 8)
    before = copy.deepcopy(model.state_dict())
    said, same = "", True
    if comm.get_rank() == 0:
        found = step.explain(model, opt, x)
        kinds = [kind for s in found.collectives for kind in [s.kind] * s.count]
        same = all(torch.equal(before[k], v) for k, v in model.state_dict().items()) and not opt.state
        said = str(found)
    step(model, opt, x)
    ran = communication(step._capturer.known.programs[next(iter(step._capturer.known.programs))].step, {})
    ran = [call.what.split("::")[1].split("(")[0] for call in ran]
    return sorted(kinds) if said else [], sorted(ran), said, same


def test_one_rank_may_ask_and_what_is_said_is_what_all_run():
    (kinds, ran, said, same), *others = run_ranks(explained_and_run, 4, "thread")
    assert kinds == ran and same
    assert all(other[1] == ran for other in others)
    assert "axis dp, 2 ranks" in said and "axis zero, 2 ranks" in said and "captures: none yet" in said


def test_nothing_changes_and_no_capture_is_kept():
    model, x = net(), torch.randn(16, 32)
    opt, calls = adamw(model), []

    class Counts(ws.Override):
        def transform(self, gm, flat_state):
            calls.append(len(flat_state))
            return gm

    step = ws.compile(train_step, module_override=[Counts()], fullgraph=True)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert step.explain(model, opt, x).captures == 0
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not opt.state and torch.equal(torch.get_rng_state(), state) and model[0].weight.grad is None
    step(model, opt, x)
    assert len(calls) == 1, "the graph that was explained is the one that runs"
    step(model, opt, torch.randn(3, 32))
    found = step.explain(model, opt, x)
    assert found.captures == 2 and found.recompiles == step.recompiles and len(calls) == 2
    assert "again: L['x'] shape: expected [16, 32], found [3, 32]" in str(found)
    compiled = ws.compile(model, fullgraph=True)
    assert compiled.explain(x).calls["backward"] > 0


def test_fake_models_in_a_world_of_256(world):
    mesh = world(16, 16, rank=37)
    with FakeTensorMode():
        model = net(4096)
        opt, x = adamw(model), torch.randn(8, 4096)
    step = ws.compile(train_step, mesh=mesh, plan=[ws.DataParallel("dp"), ws.ShardedOptimizer("zero")], fullgraph=True)
    found = step.explain(model, opt, x)
    parameters = nbytes(model.parameters())
    large = nbytes(p for p in model.parameters() if p.dim() == 2)
    by_kind: dict[tuple[str, str], float] = {}
    for one in found.collectives:
        by_kind[one.axis, one.kind] = by_kind.get((one.axis, one.kind), 0) + one.nbytes
    assert by_kind["dp", "all_reduce"] == 2 * 15 / 16 * parameters
    assert by_kind["zero", "reduce_scatter"] == by_kind["zero", "share_rows"] == 15 / 16 * large
    assert 2 * large / 16 <= found.memory.by_class["states"] <= 2 * large / 16 + 2 * (parameters - large) + 100
    title = "train_step on rank 37 of DeviceMesh('cpu', dp=16, zero=16), under DataParallel('dp'), ShardedOptim"
    assert str(found).startswith(title)
    assert all(isinstance(one, Traffic) for one in found.collectives)


def test_models_without_values_are_explained_and_stay_without(world):
    mesh, steps = world(4), []
    for making in (nullcontext, deferred):
        with making():
            model = net(128)
        step = ws.compile(train_step, mesh=mesh, plan=ws.FullyShard("dp", min_bytes=1), fullgraph=True)
        steps.append(str(step.explain(model, adamw(model), torch.randn(8, 128))))
    assert steps[0] == steps[1] and not model[0].weight.untyped_storage().nbytes()


def test_fake_tensors_that_cannot_be_looked_at():
    with FakeTensorMode():
        model, x = nn.Linear(3, 2), torch.randn(4, 3)
    step = ws.compile(lambda x: model(x).sum(), fullgraph=True)
    with pytest.raises(CaptureError, match="fake tensor of shape .* from outside[^$]*as arguments of the step"):
        step.explain(x)
    with pytest.raises(CaptureError, match="fake tensor of shape .* from outside"):
        ws.compile(lambda model, x: model(x).sum(), fullgraph=True)(model, x)
    with FakeTensorMode():
        elsewhere = torch.empty(3, device="cuda")
    with pytest.raises(UnsupportedError, match="on cuda:0, torch.strided: only those of the CPU"):
        ws.compile(torch.sin, fullgraph=True).explain(elsewhere)


def test_parameters_are_gathered_for_those_who_read_them(world):
    mesh, model = world(4), net()
    step = ws.compile(train_step, mesh=mesh, plan=ws.FullyShard("dp", min_bytes=1), fullgraph=True)
    found = step.explain(model, adamw(model), torch.randn(4, 32))
    gathers = {one.module for one in found.collectives if one.kind == "all_gather" and one.phase == "forward"}
    assert gathers and gathers <= {"model.0", "model.1", "model.3"}, "one gather may be for several"
    assert found.memory.by_class["states"] < nbytes(model.parameters())
    assert found.missing_rules == []


library = torch.library.Library("wholestep_report", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")


def test_operators_without_a_rule_are_named(world):
    mesh, x = world(4), torch.randn(8, 6)

    def step(x):
        return torch.ops.wholestep_report.twice(x.exp()).sum()

    found = ws.compile(step, mesh=mesh, plan=Cut("dp", how=by_rules), fullgraph=True).explain(x)
    (one,) = found.missing_rules
    assert (one.operator, one.count, one.nbytes) == ("wholestep_report.twice", 1, 4 * 8 * 6 * 4)
    assert "wholestep_report.twice" in str(found) and one.where.startswith(__file__)
    assert ws.compile(step, fullgraph=True).explain(x).missing_rules is None
