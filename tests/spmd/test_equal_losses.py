"""Ranks under plans have one device's losses over twenty steps: a handful of cells of `spmd_equal`'s table."""

from __future__ import annotations

import copy
import math

import pytest

import tests.support.spmd_equal as equal

FEW = {
    "2": [
        ("float64", "convnet", "FullyShard(gather='cheaper')"),
        ("float64", "t5", "TensorParallel, embedding"),
        ("float64", "mlp", "ShardedOptimizer(reduce='sum')"),
        ("float32", "bert", "FullyShard"),  # all ranks decide on its mask
        ("float32", "llama", "TensorParallel, sequence"),
        ("float64", "mlp", "DataParallel"),
    ],
    "2x2": [
        ("float64", "convnet", "[TensorParallel, ShardedOptimizer]"),  # a momentum that the first step makes
        ("float64", "gpt", "[TensorParallel embedding, FullyShard cheaper]"),  # 19 words: other sizes on other lines
        ("float64", "mlp", "[DataParallel(reduce='sum'), ShardedOptimizer(reduce='sum')]"),  # keeps its gradients
    ],
}


@pytest.mark.parametrize("shape", FEW)
def test_losses_are_one_devices(shape):
    axes = len(equal.sizes_of(shape))
    cells = [equal.cells_of(axes, [model], dtype, [plan])[0] for dtype, model, plan in FEW[shape]]
    wrong = copy.deepcopy(cells[-1])
    wrong.losses[-1][0] *= 1 + 1e-6
    *found, caught = equal.on_mesh([*cells, wrong], shape)
    for cell in found:
        assert not cell.trouble and cell.worst <= equal.LIMITS[cell.dtype], cell
    assert caught.worst == pytest.approx(1e-6, rel=0.1), "a loss that is not one device's"


def test_the_table_has_the_worst_of_all_meshes(tmp_path):
    found = {("2", "float64", "gpt", "FullyShard"): 1e-15, ("4", "float64", "gpt", "FullyShard"): 3e-15,
             ("4", "float32", "gpt", "FullyShard"): math.nan}  # fmt: skip
    assert list(equal.table(found))[-1] == "| FullyShard | 2, 4 |  |  | 3e-15, fails (4) |  |  |  |"
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{equal.HEAD}\n|---|\n| old |\n\nafter\n")
    equal.write_into(page, found)
    assert page.read_text().splitlines() == ["before", "", *equal.table(found), "", "after"]
