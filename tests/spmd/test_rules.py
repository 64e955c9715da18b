"""Sharding rules: every row of every rule, on samples of each operator, against the whole call."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import wholestep as ws
from tests.support.spmd_rules import Sample, call_of, close, failures, part_of, parts_of, shown, trials_of
from tests.support.spmd_samples import collectives, random_samples, samples
from tests.support.spmd_table import lines
from wholestep import comm
from wholestep.nested import tensors_of
from wholestep.spmd import rules
from wholestep.spmd.expand.strategy import Strategy
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Partial, Replicate, Shard
from wholestep.spmd.rules.pointwise import is_on_lists
from wholestep.testing import run_ranks

aten = torch.ops.aten
R = Replicate()
LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))
DOCS = Path(__file__).parents[2] / "docs"

# Kernels that the CPU does not have, and results without a value.
NOT_SHOWN = {"aten._fused_rms_norm", "aten._fused_rms_norm_backward", "aten.new_empty_strided"}


@pytest.mark.parametrize("ranks", [3, *([2] if LONG else [])])  # on three, some parts are uneven
def test_every_row_of_every_rule(ranks: int) -> None:
    wrong = failures(samples(), ranks)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "row",
    [
        Strategy((Shard(0),), (Shard(0),)),  # softmax along that dimension
        Strategy((Shard(1),), (Shard(0),)),
        Strategy((Partial(),), (Partial(),)),  # not linear
        Strategy((R,), (Partial(),)),
        Strategy((Shard(1),), (R,)),
    ],
    ids=shown,
)
def test_a_wrong_row_is_found(row: Strategy) -> None:
    sample = Sample(aten._softmax.default, (torch.randn(4, 4, dtype=torch.float64), 0, False))
    assert not failures([sample], 2)
    assert len(failures([sample], 2, lambda _: [row])) == 1


def _with_gaps(x: torch.Tensor) -> torch.Tensor:
    """A copy that is a slice of a larger tensor, as parts of what is whole are."""
    larger = torch.full((*x.shape[:-1], x.shape[-1] + 3), 1).to(x.dtype)
    return larger[..., 1 : x.shape[-1] + 1].copy_(x)


def _ignores_strides(sample: Sample) -> bool:
    """Whether an operand with gaps gives other values, which no kernel says."""
    flat, tree = tree_flatten((sample.args, sample.kwargs))

    def results(operands: list[Any]) -> list[torch.Tensor]:
        args, kwargs = tree_unflatten(operands, tree)
        return tensors_of(sample.target(*args, **kwargs))

    for place, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
            with contextlib.suppress(RuntimeError):  # views say so; some kernels the CPU does not have
                pairs = zip(results([*flat[:place], _with_gaps(leaf), *flat[place + 1 :]]), results(flat), strict=True)
                if not all(torch.allclose(*pair, equal_nan=True) for pair in pairs):
                    return True
    return False


def test_kernels_that_ignore_strides_are_given_no_gaps() -> None:
    other = aten._linalg_det.default  # whose factors are those of another order, and fit each other
    with torch.no_grad():
        of_any_strides = (one for one in samples() if not rules.reads_flat_memory(one.target) and one.target != other)
        assert not {str(one.target) for one in of_any_strides if _ignores_strides(one)}
        assert any(_ignores_strides(one) for one in samples() if one.target == aten.native_layer_norm_backward.default)


def test_every_rule_has_a_sample() -> None:
    seen = {rules.name_of(sample.target) for sample in [*samples(), *random_samples(), *collectives("")]}
    kinds = {id(rules.TABLE[name]) for name in seen if name in rules.TABLE}
    unseen = [name for name, rule in rules.TABLE.items() if id(rule) not in kinds and name not in NOT_SHOWN]
    assert not unseen


def test_every_sample_can_be_split() -> None:
    for sample in samples():
        assert any(list(rules.strategies(call)) for call in call_of(sample, AxisGroup("", 2, 0))[1]), str(sample)


def test_what_has_no_lists_is_no_operator_on_lists() -> None:
    assert all(map(is_on_lists, [aten._foreach_add.List, aten._foreach_pow.ScalarAndTensor, aten._fused_adamw.default]))
    assert not any(map(is_on_lists, [aten._fused_rms_norm.default, aten._fused_dropout.default, aten.cat.default]))


def test_the_document_has_the_table() -> None:
    written = (DOCS / "spmd_rules.md").read_text()
    assert written == "\n".join(lines()) + "\n", "python -m tests.support.spmd_table > docs/spmd_rules.md"


def test_the_documents_own_rule() -> None:
    blocks = [block.split("```")[0] for block in (DOCS / "spmd.md").read_text().split("```python\n")]
    exec(next(block for block in blocks if "@ws.register_sharding" in block), {})
    sample = Sample(torch.ops.mylib.scale.default, (torch.randn(5, 4).double(), torch.randn(4).double()))
    assert [shown(trial.strategy) for trial in trials_of(sample, 2)] == ["S0 R → S0", "S1 S0 → S1"]
    assert not failures([sample], 2)
    assert len(failures([sample], 2, lambda _: [Strategy((Shard(0), R), (Partial(),))])) == 1


def collected() -> list[str]:
    """In every rank of a mesh: collectives along one axis, on parts along the other, that are wrong."""
    mesh = ws.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    (row, column), line, group = mesh.coordinates, mesh.axis_group("b"), mesh.get_group("a").group_name
    wrong = []
    for sample in collectives(group):
        node, (call,) = call_of(sample, line)
        whole = torch.randn(sample.args[0].shape, generator=torch.Generator().manual_seed(row)).double()
        wanted = wait(sample.target(whole, *sample.args[1:]))
        for one in rules.strategies(call):
            parts = parts_of(whole, one.ins[0], 2, torch.Generator().manual_seed(9 + row))
            got = wait(sample.target(parts[column], *sample.args[1:]))
            if isinstance(one.outs[0], Partial):
                got = wait(torch.ops.wholestep.all_reduce(got, "sum", line.name))
            if not torch.allclose(got, part_of(wanted, one.outs[0], 2, column)):
                wrong.append(f"{sample}: {shown(one)}")
    return wrong


def wait(started: torch.Tensor) -> torch.Tensor:
    return torch.ops.wholestep.wait(started)


def test_collectives_of_another_axis() -> None:
    assert run_ranks(collected, 4, "thread") == [[]] * 4


def drawn() -> list[str]:
    """In every rank: what is wrong with its part of what random operators draw."""
    size, rank = comm.get_world_size(), comm.get_rank()
    wrong = []
    for sample in random_samples():
        for trial in trials_of(sample, size):
            torch.manual_seed(3)
            wanted = list(tensors_of(sample.target(*sample.args, **sample.kwargs)))
            after = torch.rand(())
            program, parts = trial.program(AxisGroup("", size, rank)), trial.parts[rank]
            torch.manual_seed(3)
            found = program(*parts)
            try:
                for got, want, placement in zip(found, wanted, trial.strategy.outs, strict=True):
                    close(got, part_of(want, placement, size, rank))
                assert torch.equal(torch.rand(()), after), "the generator is elsewhere"
            except AssertionError as error:
                wrong.append(f"{trial}: {error}")
    return wrong


def test_random_operators_draw_as_one_device() -> None:
    for wrong in run_ranks(drawn, 2):
        assert not wrong, "\n".join(wrong)
