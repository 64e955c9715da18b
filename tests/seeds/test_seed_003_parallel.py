"""The seed's tests of DistributedDataParallel, its hooks and its logging (003), on two CPU ranks.

Those of SyncBatchNorm, of dataclasses as outputs and of bucket assignment stand in tests/parallel (`TABLE`).
"""

import copy
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wholestep import comm
from wholestep.parallel import DistributedDataParallel, GradBucket, allreduce_hook, fp16_compress_hook
from wholestep.testing import run_ranks

PARALLEL = "parallel/test_distributed_data_parallel"
TABLE = {
    "test_ddp_checkpointing_once": "seeds/test_seed_003_parallel::test_checkpoints",
    "test_ddp_checkpointing_unused_params": "seeds/test_seed_003_parallel::test_checkpoints",
    "test_ddp_checkpointing_twice (static, not, non-static)": f"{PARALLEL}::test_all_cases_are_torchs_bit_for_bit",
    "test_ddp_checkpointing_dynamic_module, _dynamic_weight_sharing": "seeds/test_seed_003_parallel::test_checkpoints",
    "test_ddp_checkpointing_weight_sharing": "seeds/test_seed_003_parallel::test_checkpoints",
    "test_ddp_checkpointing_twice_weight_sharing": "seeds/test_seed_003_parallel::test_checkpoints",
    "test_invalid_powerSGD_state": "parallel/test_comm_hooks::test_power_sgd_starts_after_two_backwards",
    "_test_ddp_with_process_group": "seeds/test_seed_003_parallel::test_two_iterations_and_logging",
    "_run_and_verify_hook, _simple_hook": "seeds/test_seed_003_parallel::test_hooks",
    "_gpu_model_with_builtin_ddp_comm_hook": "seeds/test_seed_003_parallel::test_hooks",
    "test_sync_batch_norm_only_empty_input": "parallel/test_sync_batchnorm::test_empty_inputs_of_the_seed",
    "test_sync_batch_norm_empty_input": "parallel/test_sync_batchnorm::test_empty_inputs_of_the_seed",
    "test_dataclass_output, _unused_param": f"{PARALLEL}::test_gradients_are_those_of_the_naive_form",
    "ComputeBucketAssignmentTest (all four)": f"{PARALLEL}::test_bucket_assignment",
}


@pytest.mark.parametrize("place", sorted(set(TABLE.values())))
def test_every_row_names_a_test(place):
    file, name = place.split("::")
    assert f"def {name}(" in (Path(__file__).parents[1] / f"{file}.py").read_text(encoding="utf8")


class Once(nn.Module):
    """The second layer under a checkpoint, ``times`` times; with ``dynamic``, by turns one layer or the other alone."""

    def __init__(self, use_reentrant=True, times=1, shared=False, dynamic=False):
        super().__init__()
        self.l1, self.l2 = nn.Linear(20, 20), nn.Linear(20, 20)
        self.use_reentrant, self.times, self.dynamic, self.count = use_reentrant, times, dynamic, 0
        if shared:
            self.l1.weight = self.l2.weight

    def forward(self, x):
        if self.dynamic:
            self.count += 1
            return checkpoint(self.l2 if self.count % 2 else self.l1, x, use_reentrant=self.use_reentrant)
        x = self.l1(x)
        for _ in range(self.times):
            x = checkpoint(self.l2, x, use_reentrant=self.use_reentrant)
        return x


def equal_gradients(module, whole_checkpointed=None, **settings):
    """Trains the module on all rows and the wrapper on this rank's: whether gradients are near in five iterations."""
    torch.manual_seed(31415)
    model, wrapped = copy.deepcopy(module), DistributedDataParallel(module, bucket_cap_mb=1, **settings)
    assert wrapped.logging_data().get("static_graph") == settings.get("static_graph", False)
    x, y = torch.rand(32, 20, requires_grad=True), torch.randn(32, 20)
    mine = slice(16 * comm.get_rank(), 16 * comm.get_rank() + 16)
    for _ in range(5):
        for one, rows in ((model, slice(None)), (wrapped, mine)):
            one.zero_grad(set_to_none=False)
            given = x[rows]
            out = one(given) if whole_checkpointed is None else checkpoint(one, given, use_reentrant=whole_checkpointed)
            nn.functional.mse_loss(out, y[rows]).backward()
        for a, b in zip(model.parameters(), wrapped.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1.3e-6, atol=5e-5)
    return True


def checkpoints():
    for reentrant, view in product((True, False), (False, True)):
        view = {"gradient_as_bucket_view": view}
        for static in (False, True):
            equal_gradients(Once(reentrant), static_graph=static, **view)
            both = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
            both[0].weight = both[1].weight
            equal_gradients(both, reentrant, static_graph=static, **view)
        equal_gradients(Once(reentrant), static_graph=True, find_unused_parameters=True, **view)
        equal_gradients(Once(reentrant, 2, shared=True), static_graph=True, **view)
        if reentrant:
            with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
                equal_gradients(Once(reentrant), find_unused_parameters=True, **view)
        else:
            equal_gradients(Once(reentrant), find_unused_parameters=True, **view)
            for shared in (False, True):
                equal_gradients(Once(reentrant, shared=shared, dynamic=True), find_unused_parameters=True, **view)
    return True


def test_checkpoints():
    assert run_ranks(checkpoints, 2) == [True, True]


def two_iterations():
    found = []
    for view in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 10, bias=False), nn.ReLU(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 4))
        wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.001, gradient_as_bucket_view=view)
        x, y = torch.randn(2, 2), torch.randn(2, 4)
        for iteration in range(2):
            for one, rows in ((model, slice(None)), (wrapped, slice(comm.get_rank(), comm.get_rank() + 1))):
                nn.functional.mse_loss(one(x[rows]), y[rows]).backward()
                with torch.no_grad():
                    for parameter in one.parameters():
                        parameter -= parameter.grad
                        parameter.grad = None
            pairs = zip(model.parameters(), wrapped.parameters(), strict=True)
            assert all(torch.allclose(a, b, rtol=1.3e-6, atol=5e-5) for a, b in pairs)
            torch.manual_seed(1337 + iteration)
            x = x[torch.randperm(2)]
        found.append(wrapped.logging_data()["is_multi_device_module"])
    return found


def test_two_iterations_and_logging():
    assert run_ranks(two_iterations, 2) == [[0, 0], [0, 0]]


class Scaled(nn.Module):
    """The seed's module for hooks: gradients are the rank's number, whatever the input."""

    def __init__(self):
        super().__init__()
        self.t0 = nn.Parameter(torch.ones(2, 2))

    def forward(self, x, rank):
        return self.t0 ** (1 + rank) * x


def simple_hook(state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(torch.ones_like(bucket.buffer()))
    return future.then(lambda done: done.value() + torch.ones_like(done.value()))


def hooks():
    x, seen = torch.ones(2, 2), []
    for view, (name, hook) in product((False, True), [("none", None), ("simple", simple_hook), ("own", allreduce_hook),
                                                      ("half", fp16_compress_hook), ("ALLREDUCE", ""),
                                                      ("FP16_COMPRESS", "")]):  # fmt: skip
        model = DistributedDataParallel(Scaled(), gradient_as_bucket_view=view)
        if hook:
            model.register_comm_hook(None, hook)
        elif hook is not None:
            model._register_builtin_comm_hook(name)
        model(x, comm.get_rank()).mean().backward()
        seen.append((name, view, model.module.t0.grad.unique().tolist(), model.logging_data().get("comm_hook")))
    with pytest.raises(ValueError, match="ALLREDUCE, FP16_COMPRESS is required, found OTHER"):
        DistributedDataParallel(Scaled()).register_builtin_comm_hook("OTHER")
    return seen


def test_hooks():
    for seen in run_ranks(hooks, 2):
        for name, _, gradients, logged in seen:
            assert gradients == ([2.0] if name == "simple" else [0.375])  # the mean of 1 / 4 and 2 / 4
            assert (logged is None) == (name == "none")
        assert {logged for *_, logged in seen} == {
            None, "simple_hook", "allreduce_hook", "fp16_compress_hook",
            "BuiltinCommHookType.ALLREDUCE", "BuiltinCommHookType.FP16_COMPRESS",  # as torch's logger has them
        }  # fmt: skip
