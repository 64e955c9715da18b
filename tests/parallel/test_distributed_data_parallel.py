"""The wrapper's gradients, weights and buffers are those of torch's wrapper, bit for bit on two ranks."""

import pytest
import torch

import tests.support.parallel_ranks as programs
from wholestep.errors import UnsupportedError
from wholestep.parallel import DistributedDataParallel
from wholestep.parallel.buckets import bucket_assignment, views_of
from wholestep.testing import run_ranks


def test_all_cases_are_torchs_bit_for_bit(tmp_path):
    for each in run_ranks(programs.as_stock, 2, args=(str(tmp_path / "store"),)):
        assert each == dict.fromkeys(programs.CASES, [True] * len(programs.WAYS))


def test_wrappers_join_the_process_group_of_torch(tmp_path):
    assert run_ranks(programs.in_the_world_of_torch, 2, args=(str(tmp_path / "store"),)) == [[True] * 10] * 2


@pytest.mark.parametrize(("transport", "size"), [("shm", 3), ("thread", 2), ("gloo", 2)])
def test_gradients_are_those_of_the_naive_form(transport, size):
    for each in run_ranks(programs.as_naive, size, transport):
        assert len(each) == 4 and max(each) < 1e-12


@pytest.mark.parametrize("transport", ["shm", "thread"])
def test_mistakes_are_errors_with_names_on_all_ranks(transport):
    one, two = run_ranks(programs.mistakes, 2, transport)
    assert one["differ"] == two["differ"]
    for each in (one, two):
        assert "DistMismatchError" in each["differ"] and "1.weight float32 [5, 3] on rank 1" in each["differ"]
        assert "bias float32 [3] on rank 0 (2 in all), none on rank 1 (1)" in each["fewer"]
        assert each["frozen"].startswith("RuntimeError") and "not needed" in each["frozen"]
        assert "weight, bias is on the meta device, without values" in each["meta"]
        assert "['cuda:0']" in each["device_ids"] and "['cpu']" in each["device_ids"]
        assert "did not receive grad for rank" in each["unused"] and "layers.1.weight, layers.1.bias" in each["unused"]
        for times in ("used twice", "later twice"):
            assert "mark a variable ready only once. Parameter second." in each[times]
        for name in ("not static", "not static, as said"):
            assert "training graph has changed in this iteration: parameter second." in each[name]
        assert "should be called before training loop starts" in each["said late"]
        assert "optimizers that step in the backward" in each["optimizer"]
        assert "call optimizer.step() after the backward" in each["optimizer"]
        assert "found sparse ones of weight: make these layers with sparse=False" in each["sparse"]
        assert "sparse=True, found those of rows: use such a layer" in each["made sparse"]
        assert "a part of its own of weight, bias: fully_shard reduces the gradients itself" in each["parts"]
        for change in ("loaded", "loaded, unused", "converted"):
            assert "gradients of 0.weight, 0.bias are not reduced: when the module was wrapped" in each[change]
        assert "gradients of 1.weight are not reduced" in each["unfrozen"]
        assert "must be callable, found int" in each["no hook"]


@pytest.mark.parametrize("transport", ["shm", "thread"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "ValueError: no more of bucket 0"),
        ("raises on one", "ValueError: no more of bucket 0"),  # also where another rank's hook raised
        ("shape", "one tensor of 18 elements, the size of bucket.buffer(), found [3]"),
        ("short on one", "one tensor of 18 elements"),
        ("no future", "must return a torch.futures.Future, found Tensor"),
    ],
)
def test_hooks_that_fail_are_errors_on_all_ranks(transport, name, words):
    for each in run_ranks(programs.failing_hook, 2, transport, (name,)):
        assert words in each


def test_logging_data_are_torchs(tmp_path):
    ours_alone = {"backend_name", "bucket_sizes"}  # torch's first buckets hold everything
    for each in run_ranks(programs.logs_as_stock, 2, args=(str(tmp_path / "store"),)):
        assert len(each) == 8
        for number, fields in enumerate(each):
            assert all(ours not in (None, "missing") for _, ours in fields.values()), fields
            if number in (0, 1, 6, 7):
                differing = {name for name, (stock, ours) in fields.items() if stock != ours}
                assert differing <= ours_alone, fields


def newer_arguments():
    made, same = DistributedDataParallel, {"skip_all_reduce_unused_params": True, "batched_grad_copy": True}
    ddp = made(programs.Net(), bucket_cap_mb_list=[0.0001, 1], **same)
    sizes = [bucket.nbytes for bucket in ddp.reducer.buckets]
    for settings in ({"mixed_precision": object()}, {"param_to_hook_all_reduce": object()}):
        with pytest.raises(UnsupportedError, match=f"(?s){next(iter(settings))}.*to do: "):
            made(programs.Net(), **settings)
    ddp(programs.rows(0, 0))
    (next(ddp.parameters()) ** 2).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished") as failure:
        ddp(programs.rows(0, 0))
    said = ddp.logging_data()
    assert (said["has_error"], said["error"], said["bucket_cap_bytes"]) == (1, str(failure.value), 2**20)
    return sizes, sum(p.nbytes for p in ddp.parameters())


def test_arguments_of_newer_releases_are_served_or_refused():
    ((sizes, total),) = run_ranks(newer_arguments, 1, "thread")
    assert len(sizes) > 1 and sum(sizes) == total and sizes[0] < sizes[1]


def test_ignored_parameters_saved_states_and_later_buffers():
    one, two = run_ranks(programs.ignores_and_saves, 2, "thread")
    assert one == [[0.0, 0.0], [1.0, 1.0], "module.0.weight", [7.0], [2.0]]
    assert two == [[1.0, 1.0], [2.0, 2.0], "module.0.weight", [7.0], [2.0]]


def test_gradients_that_somebody_asks_for_are_each_ranks_own():
    for rank, each in enumerate(run_ranks(programs.asked_for_gradients, 2, "thread")):
        assert each == [[rank + 1.0], [1.5]] * 3


F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("sizes", "limits", "members", "limit_of_each"),
    [
        ([(100, F32), (200, F32), (100, F32), (50, F32)], [400], [[0], [1], [2], [3]], [400] * 4),
        ([(50, F32), (25, F64)] * 3, [400], [[0, 2], [1, 3], [4], [5]], [400] * 4),
        ([(10, F32)] * 4, [40, 80], [[0], [1, 2], [3]], [40, 80, 80]),
        ([(50, F32), (25, F64)] * 3, [200, 400], [[0], [1], [2, 4], [3, 5]], [200, 200, 400, 400]),
    ],
)
def test_bucket_assignment(sizes, limits, members, limit_of_each):
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in sizes]
    assert bucket_assignment(tensors, limits) == (members, limit_of_each)


def test_views_have_the_strides_of_what_they_are_for():
    like = [torch.empty(3, 4).t(), torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.ones(4)]
    flat = torch.arange(136.0)
    views = views_of(flat, like)
    assert [view.stride() for view in views] == [one.stride() for one in like]
    assert torch.equal(torch.cat([view.t().flatten() for view in views[:1]]), flat[:12])
    assert sorted(torch.cat([view.flatten() for view in views]).tolist()) == flat.tolist()


def test_parameters_that_only_the_code_around_the_module_uses():
    means = [[1.5], False, [1.5], [1.5] * 3, [1.5], [0.5] * 3]
    assert run_ranks(programs.used_around, 2, "thread") == [means] * 2
