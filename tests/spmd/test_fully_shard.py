"""FullyShard and TensorParallel from end to end: ranks that hold parts are one device with the whole batch."""

from __future__ import annotations

import pytest

import tests.support.spmd_unsharded as programs
import wholestep.errors as ws
from wholestep.spmd import FullyShard, Partial, Replicate, Shard, TensorParallel
from wholestep.testing import run_ranks

BLOCKS = {"*.qkv": "column", "*.mlp.0": "column"}
PLANS = {
    "mlp, whole batch": FullyShard("dp", min_bytes=1, gather="always", batch=Replicate()),
    "mlp, state from before": FullyShard("dp", min_bytes=1),
    "momentum": FullyShard("dp", min_bytes=1, again=False),
    "wide": FullyShard("dp", min_bytes=1, gather="always"),
    "looks": FullyShard("dp", parameters="fc1", min_bytes=1),
    "accumulated": FullyShard("dp", min_bytes=1),
    "kept": FullyShard("dp", min_bytes=1),
    "columns": FullyShard("dp", min_bytes=9 * 8),
    "one row": FullyShard("dp", min_bytes=1, batch=Replicate()),
    "gpt with dropout": FullyShard("dp", min_bytes=1),
}


def run(plans):
    cases = programs.CASES
    return {name: programs.against_one_device(programs.replace(cases[name], plan=plan), 7) for name, plan in plans}


@pytest.mark.parametrize("transport", ["thread", "shm"])
def test_fully_sharded_ranks_are_one_device(transport):
    names = ["mlp, state from before"] if transport == "thread" else list(PLANS)
    for rank, cases in enumerate(run_ranks(run, 2, transport, ([(name, PLANS[name]) for name in names],))):
        for name, found in cases.items():
            assert not found["wrong"], (transport, rank, name)
            mine, whole = found["bytes"]
            assert name in ("looks", "one row", "columns") or mine < 0.6 * whole, (rank, name)


SPLIT = {
    "mlp": TensorParallel("dp", {"fc1": "column", "fc2": "row"}),
    "sorted": TensorParallel("dp", {"fc1": "row", "fc2": "row"}),
    "spare": TensorParallel("dp", {"fc1": "column", "fc2": "row", "spare": "column"}),
    "gpt with dropout": TensorParallel(
        "dp", {**BLOCKS, "*.proj": ["row", "sequence"], "*.mlp.2": ["row", "sequence"], "norm.weight": Replicate()}
    ),
}


def test_tensor_parallel_ranks_are_one_device():
    for rank, cases in enumerate(run_ranks(run, 2, "shm", (list(SPLIT.items()),))):
        for name, found in cases.items():
            assert not found["wrong"], (rank, name)
            assert found["bytes"][0] < 0.65 * found["bytes"][1]


def refused(plans):
    found = {}
    for name, plan in plans.items():
        try:
            case = programs.CASES["sorted" if name.startswith("read") else "mlp"]
            programs.against_one_device(programs.replace(case, plan=plan), 7, steps=1)
        except ws.PlanError as error:
            found[name] = str(error)
    return found


def test_what_a_plan_cannot_mean_is_refused_on_every_rank():
    plans = {
        "nothing": FullyShard("dp", parameters="fc3.*"),
        "no module": TensorParallel("dp", {"fc4": "column"}),
        "read, no module": TensorParallel("dp", {"fc4": "column"}),
        "no dimension": TensorParallel("dp", {"fc1.bias": Shard(1)}),
        "no axis": FullyShard("tp"),
    }
    for found in run_ranks(refused, 2, "shm", (plans,)):
        assert "'fc3.*' matches no parameter" in found["nothing"] and "fc2" in found["nothing"]
        assert "'fc4' matches no parameter or module" in found["no module"]
        assert found["read, no module"] == found["no module"], "where the step's Python runs, too"
        assert "fc1.bias" in found["no dimension"] and "[10]" in found["no dimension"]
        assert "'tp'" in found["no axis"]


@pytest.mark.parametrize("make", [
    lambda: TensorParallel("tp", {"fc1": "columns"}),  # type: ignore[dict-item]
    lambda: FullyShard("dp", gather="never"),  # type: ignore[arg-type]
    lambda: FullyShard("dp", batch=Partial()),
])  # fmt: skip
def test_a_plan_with_a_word_that_it_does_not_know_is_refused(make):
    with pytest.raises(ws.PlanError, match="is required"):
        make()
