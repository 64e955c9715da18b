"""Data parallelism against stock DDP and against one process on the whole batch."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import tests.support.spmd_programs as programs
import wholestep as ws
from tests.support.spmd_passes import rank_graph
from wholestep import comm
from wholestep.errors import PlanError
from wholestep.lower import lower
from wholestep.spmd.preflight.contract import communication
from wholestep.testing import run_ranks


@pytest.fixture
def alone():
    """A world of one rank in this process, ended afterwards."""
    yield
    comm.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks saw: all programs in one world, since starting processes costs most of the time."""
    return run_ranks(programs.everything, 2, "gloo", (str(tmp_path_factory.mktemp("stock")),))


@pytest.mark.parametrize("name", programs.CASES)
def test_steps_are_ddps_bit_for_bit(name, found):
    assert [each["ddp"][name] for each in found] == [[], []]


def test_steps_over_shared_memory_are_ddps_bit_for_bit(tmp_path):
    for each in run_ranks(programs.differences_from_ddp, 2, "shm", (str(tmp_path / "means"), ["gpt"])):
        assert each == {"gpt": []}


def test_sums_are_world_size_times_ddps_means(found):
    for each in found:
        assert each["sums"] == dict.fromkeys(each["sums"], True) and len(each["sums"]) == 5


def test_sums_that_are_read_between_two_backward_passes_count_once(found):
    for each in found:
        assert each["sums read between"] == dict.fromkeys(each["sums read between"], True)
        assert len(each["sums read between"]) == 12


def test_halves_on_two_ranks_are_the_whole_on_one(found):
    for each in found:
        assert each["whole batch"] == dict.fromkeys(each["whole batch"], True)


def test_a_rank_may_get_a_batch_of_another_size(found):
    (one, mine), (two, other) = (each["uneven"] for each in found)
    assert all(map(torch.equal, one, two))
    assert other == mine + 1


def test_other_programs_on_other_ranks_are_named_on_every_rank(found):
    one, two = (each["other model"] for each in found)
    assert one == two
    assert "rank 0 has" in one and "rank 1 has" in one and "L['model'].bias" in one


def test_a_rank_that_cannot_capture_is_named_at_once(found):
    one, two = (each["one cannot"] for each in found)
    assert two.startswith("DataDependentError") and "spmd_programs.py:" in two
    assert one.startswith("PlanError: rank 1 could not capture the step: DataDependentError") and two[20:60] in one


def test_refusals_say_what_and_what_to_do(found):
    for each in (each["refusals"] for each in found):
        assert "sparse=False" in each["sparse"] and "L['table'].weight" in each["sparse"]
        assert "L['layer'].weight" in each["by_grad"] and "spmd_programs.py:" in each["by_grad"]
        assert "not reduced" in each["in_hook"]
        assert "no axis 'tp'" in each["axis"] and "'dp'" in each["axis"]
        assert "needs 3 ranks, the world has 2" in each["shape"]


def test_two_axes_reduce_over_both():
    found = run_ranks(programs.on_two_axes, 4, "gloo")
    assert [place for place, _, _ in found] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [sums for _, sums, _ in found] == [[2, 1], [4, 1], [2, 5], [4, 5]]
    assert all(same for _, _, same in found)


def test_one_rank_is_one_process(alone):
    torch.manual_seed(0)
    models = [programs.MLP() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    opts = [programs.sgd(model) for model in models]
    mesh = ws.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    step = ws.compile(programs.plain, mesh=mesh, plan=ws.DataParallel("dp"), fullgraph=True)
    for _ in range(2):
        batch = programs.rows()
        assert torch.equal(step(models[0], opts[0], *batch), programs.plain(models[1], opts[1], *batch))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert mesh.size() == mesh["dp"].size("dp") == 1 and mesh.get_local_rank("dp") == 0
    assert "all_reduce" not in step.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"plan": ws.DataParallel("dp")}, "needs a mesh"),
        ({"mesh": True}, "without a plan"),
    ],
)
def test_mesh_and_plan_go_together(arguments, words, alone):
    mesh = ws.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with pytest.raises(PlanError, match=words):
        ws.compile(programs.plain, **arguments | ({"mesh": mesh} if "mesh" in arguments else {}))
    with pytest.raises(TypeError, match="ws.DataParallel is required"):
        ws.compile(programs.plain, mesh=mesh, plan="dp", fullgraph=True)


@pytest.mark.parametrize("settings", [{"reduce": "max"}, {"bucket_bytes": 0}])
def test_bad_settings(settings):
    with pytest.raises(PlanError):
        ws.DataParallel("dp", **settings)


@pytest.mark.parametrize(
    ("shape", "names"), [((), ()), ((0,), ("dp",)), ((1,), ("a", "b")), ((1, 1), ("a", "a")), ((True,), ("a",))]
)
def test_bad_meshes(shape, names):
    with pytest.raises(PlanError):
        ws.init_device_mesh("cpu", shape, mesh_dim_names=names)


# The graph --------------------------------------------------------------------------------------------------------


def spread(step, args, caps=(1 << 20, 25 << 20)):
    return rank_graph(step, args, ws.DataParallel("dp", first_bucket_bytes=caps[0], bucket_bytes=caps[1]))


def deep():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 8)


def train(model, opt, x):
    model(x).sum().backward()
    opt.step()
    opt.zero_grad()


def kinds(step):
    """The order of communication and matrix products, as a string of a, w and m."""
    letters = {"all_reduce": "a", "wait": "w", "mm": "m"}
    names = (
        re.sub(r".*::", "", node.target._schema.name) for node in step.graph.nodes if hasattr(node.target, "_schema")
    )
    return "".join(letters.get(name, "") for name in names)


def test_one_bucket_is_one_collective():
    step = spread(train, deep())
    assert kinds(step).count("a") == kinds(step).count("w") == 1
    assert len(communication(step, {})) == 1


def test_buckets_fill_in_the_order_of_the_backward_and_overlap_it():
    step = spread(train, deep(), caps=(256, 512))
    lines = [call.for_axis("") for call in communication(step, {})]
    weights = [re.findall(r"\.(\d)\.weight", line) for line in lines]
    assert weights == [["5"], ["4", "3"], ["2", "1"], ["0"]]
    order = kinds(step)
    assert "w" not in order[: order.rindex("m")], "no wait before the backward's last product"
    assert order.index("a") < order.rindex("m") - 3, "the first all-reduce starts early in the backward"


def test_parameters_without_a_gradient_are_left_alone():
    model, opt, x = deep()
    model[2].requires_grad_(False)
    (line,) = (call.for_axis("") for call in communication(spread(train, (model, opt, x)), {}))
    assert re.findall(r"\.(\d)\.weight", line) == ["5", "4", "3", "1", "0"]


def test_accumulation_is_reduced_once():
    def accumulate(model, opt, x):
        for part in x:
            model(part).sum().backward()
        opt.step()

    step = spread(accumulate, deep())
    assert kinds(step).count("a") == 1
    assert len(step.signature.gradients) == 6


def test_gradients_read_between_two_backwards_are_reduced_for_that_reader():
    def clip_each(model, opt, x):
        for part in x:
            model(part).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    assert kinds(spread(clip_each, deep())).count("a") == 2


def test_gradients_are_computed_in_their_bucket():
    code = lower(spread(train, deep()), "aten").code
    assert "all_reduce_blocking(cat" in code, "the collective works in place, and nothing is left to do meanwhile"
    assert "torch.cat(" not in code and "_part_" not in code, "no gradient is copied"
