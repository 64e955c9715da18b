"""Communication hooks: ours and torch's, each on both wrappers."""

import itertools

import pytest
import torch

import tests.support.parallel_ranks as programs
from wholestep.parallel import PeriodicModelAverager, PowerSGDState
from wholestep.parallel.comm_hooks.power_sgd import orthogonalize
from wholestep.testing import run_ranks


def test_hooks_train_as_torchs(tmp_path):
    for each in run_ranks(programs.hooks_as_stock, 2, args=(str(tmp_path / "store"),)):
        assert each == {name: [True] * (5 if "PowerSGD" in name else 3) for name in programs.HOOKS}


@pytest.mark.parametrize("size", [2, 3])
def test_quantized_gradients_have_the_bits_of_torchs_arithmetic(size):
    assert run_ranks(programs.quantized, size, "thread") == [{"tensor": True, "channel": True}] * size


def test_post_local_sgd_averages_weights_now_and_then():
    for each in run_ranks(programs.averaged, 2, "thread"):
        assert each["equal"] == [True, True, False, True, False] and each["step"] == 5 and each["host"] == 2
    with pytest.raises(ValueError, match="period"):
        PeriodicModelAverager(0)
    with pytest.raises(ValueError, match="non-negative"):
        PeriodicModelAverager(2, -1)


@pytest.mark.parametrize(
    ("transport", "hook"), [("shm", "powerSGD_hook"), ("shm", "batched_powerSGD_hook"), ("thread", "powerSGD_hook")]
)
def test_power_sgd_with_many_buckets(transport, hook):
    (compressed, plain, state), (others, _, _) = run_ranks(programs.many_power_sgd_buckets, 2, transport, (hook,))
    assert compressed == others and compressed != plain
    assert compressed[6] < compressed[0] and compressed[7] < compressed[1]
    rate, before, after = state.compression_stats()
    assert rate == before / after > 1 and len(state.error_dict) > 1
    if transport == "shm":  # one seed a process; the state came pickled
        assert compressed[:2] == plain[:2] and state.process_group is None


def test_power_sgd_starts_after_two_backwards():
    for start, feedback, warm in itertools.product([0, 1], [True, False], [True, False]):
        if feedback or warm:
            with pytest.raises(ValueError, match="Expect `start_powerSGD_iter` > 1"):
                PowerSGDState(None, 1, start, use_error_feedback=feedback, warm_start=warm)


@pytest.mark.parametrize(("rank", "dtype"), [(1, torch.float32), (2, torch.float64), (5, torch.float32)])
def test_orthogonalize(rank, dtype):
    matrices = torch.randn(3, 9, rank, dtype=dtype)
    before = matrices.clone()
    orthogonalize(matrices)
    assert torch.allclose(
        matrices.transpose(1, 2) @ matrices, torch.eye(rank, dtype=dtype).expand(3, -1, -1), atol=1e-5
    )
    assert torch.allclose(matrices @ (matrices.transpose(1, 2) @ before), before, atol=1e-5)


def test_a_column_of_zeros_stays_one():
    matrices = torch.zeros(1, 4, 2)
    orthogonalize(matrices)
    assert not matrices.any()
