"""A sharded optimizer against DataParallel: the same results, of which each rank keeps a part of the state."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tests.support.spmd_programs as programs
import tests.support.spmd_sharded as sharded
import wholestep as ws
from tests.support.lower_programs import Builder
from tests.support.spmd_passes import rank_graph
from wholestep import comm
from wholestep.errors import PlanError
from wholestep.ir import info
from wholestep.lower import lower
from wholestep.lower.backends.aten import plan_of
from wholestep.spmd.preflight.contract import communication
from wholestep.tensor_parts import Part
from wholestep.testing import run_ranks


@pytest.fixture(scope="module")
def found():
    return run_ranks(sharded.everything, 2, "shm", timeout=300)


@pytest.mark.parametrize("name", programs.CASES)
def test_steps_are_those_of_data_parallel_bit_for_bit(name, found):
    for each in found:
        unlike, parts = each["cases"][name]
        assert unlike == [] and parts > 0


@pytest.mark.parametrize("name", sharded.OPTIMIZERS)
def test_optimizers_give_the_same_bits(name, found):
    for each in found:
        unlike, parts = each["optimizers"][name]
        assert unlike == [] and (parts > 0) == (name not in sharded.WHOLE)


@pytest.mark.parametrize("how", ["eager first", "whole", "file", "to eager"])
def test_state_comes_from_anywhere_and_goes_anywhere(how, found):
    for each in found:
        assert all(each["resumed"][how])
    assert found[0]["resumed"]["parts"] == 8
    (reason,) = found[0]["resumed"]["recompiles"]  # whole state was loaded; the program is the same
    assert reason.endswith("['exp_avg'] shape: expected [5, 6], found [10, 6]")


def test_a_step_that_does_not_share_the_state_out_alike_refuses_it(found):
    for rank, each in enumerate(found):
        for how in ("other plan", "no plan"):
            text = each["resumed"][how]
            assert f"holds rows {5 * rank} to {5 * rank + 5} of [10, 6]" in text and "full_state_dict" in text
        assert each["resumed"]["untouched"]
        assert "ws.full_state_dict(optimizer)" in each["resumed"]["whole by torch"]


def test_rows_that_do_not_divide_over_gloo_and_over_shared_memory():
    for transport, names in (("shm", ["accumulated"]), ("gloo", ["mlp"])):
        for each in run_ranks(sharded.cases, 3, transport, (names, False), timeout=300):
            assert {name: unlike for name, (unlike, _) in each.items()} == dict.fromkeys(each, [])
            assert all(parts > 0 for _, parts in each.values())


def test_bad_settings():
    with pytest.raises(PlanError, match="ShardedOptimizer: reduce='max'"):
        ws.ShardedOptimizer("dp", reduce="max")


# The graph --------------------------------------------------------------------------------------------------------


def spread(step, args, min_bytes=1):
    return rank_graph(step, args, ws.ShardedOptimizer("dp", min_bytes=min_bytes))


def small(kind=torch.optim.AdamW, **settings):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 1))
    return model, kind(model.parameters(), lr=0.1, **settings), torch.randn(2, 8)


def train(model, opt, x):
    model(x).sum().backward()
    opt.step()
    opt.zero_grad()


def clipped(model, opt, x):
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()


def kinds(step):
    return [re.match(r"wholestep::(\w+)", call.what)[1] for call in communication(step, {})]


def test_each_large_parameter_is_reduced_and_shared_by_rows():
    step = spread(train, small())
    assert sorted(kinds(step)) == ["all_reduce", *["reduce_scatter"] * 2, *["share_rows"] * 2]
    held = [info(n).placement for n in step.placeholders if isinstance(info(n).placement, Part)]
    assert sorted(set(held)) == [Part.rows((6,), 3, 6), Part.rows((6, 8), 3, 6)], "one row cannot be shared out"


def test_a_gradient_that_is_the_sum_of_two_uses_is_reduced_before_it_is_cut():
    def twice(model, opt, x):
        (model(x).sum() + model(x + 1).square().sum()).backward()
        opt.step()
        opt.zero_grad()

    step = spread(twice, small())
    reduced = [node for node in step.graph.nodes if "reduce_scatter" in str(node.target)]
    assert {tuple(info(node.args[0]).value.shape) for node in reduced} == {(6,), (6, 8)}


def test_small_parameters_are_updated_everywhere():
    step = spread(train, small(), min_bytes=100)
    assert sorted(kinds(step)) == ["all_reduce", "reduce_scatter", "share_rows"]


def test_gradients_that_somebody_else_reads_are_reduced_whole():
    step = spread(clipped, small())
    assert sorted(kinds(step)) == ["all_reduce", "share_rows", "share_rows"]


FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


@pytest.mark.parametrize(("kind", "fused"), [(torch.optim.AdamW, False), *((kind, True) for kind in FUSED)])
def test_new_rows_are_computed_in_the_parameter_and_gradients_reduced_where_they_are(kind, fused):
    code = lower(spread(train, small(kind, fused=fused)), "aten").code
    for operand in (r"share_rows_(blocking)?\(model_0_weight", r"reduce_scatter(_blocking)?\(mm"):
        assert re.search(operand, code)
    assert "slice_Tensor(model_0_weight, 0, 3, 6).copy_" not in code and ".clone()" not in code


@pytest.mark.parametrize("read_again", [False, True])
def test_a_reduced_gradient_lies_in_the_rows_that_were_this_ranks_own(monkeypatch, read_again):
    """So that gradients under way take their own memory alone; not where somebody reads them whole later on."""
    monkeypatch.setattr(comm, "is_initialized", lambda: True)
    group = SimpleNamespace(backend_name="gloo", size=lambda: 2, rank=lambda: 1)
    monkeypatch.setattr(comm, "get_group", lambda _: group)
    monkeypatch.setattr("wholestep.comm.ops.functional_collectives.get_group", comm.get_group)
    operators, aten = torch.ops.wholestep, torch.ops.aten
    b = Builder()
    made = b.call(aten.sin.default, b.input("x", torch.randn(64, 64), "batch"))
    started = b.call(operators.reduce_scatter.default, made, "sum", "")
    reduced = b.call(aten.cos.default, b.call(operators.wait.default, started))
    whole = [b.call(aten.exp.default, made)] if read_again else []
    plan = plan_of(b.finish([reduced, *whole], {})[0])
    offset = plan.reuse.offset.get(next(n for n in plan.live.nodes if "reduce_scatter" in n.name))
    assert offset == (None if read_again else 32 * 64 * 4)
    assert plan.arena == {"cpu": (64 * 64 if not read_again else 64 * 64 + 32 * 64) * 4}


def test_a_parameter_that_is_read_again_after_its_update_is_whole_then():
    def twice(model, opt, x):
        train(model, opt, x)
        return model(x)

    step = spread(twice, small())
    waits = [n for n in step.graph.nodes if getattr(n.target, "_schema", None) and "wait" in str(n.target)]
    shared = [n for n in waits if "share_rows" in str(n.args[0].target)]
    last = [n for n in step.graph.nodes if n.target is torch.ops.aten.addmm.default][-2:]
    inputs = {operand for node in last for operand in node.all_input_nodes}
    behind = {o for node in inputs for o in (node, *node.all_input_nodes)}
    assert set(shared) & behind


def test_an_average_of_the_parameters_reads_them_whole():
    model, opt, x = small(torch.optim.SGD)
    average = [p.detach().clone() for p in model.parameters()]

    def step(model, opt, average, x):
        train(model, opt, x)
        with torch.no_grad():
            for old, new in zip(average, model.parameters(), strict=True):
                old.lerp_(new, 0.1)

    made = spread(step, (model, opt, average, x))
    assert sorted(kinds(made)).count("share_rows") == 2
