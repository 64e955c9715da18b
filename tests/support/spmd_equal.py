"""One device on the whole batch beside ranks under plans: the losses of twenty steps, model by model, plan by plan.

    python -m tests.support.spmd_equal                         all models, plans, meshes and dtypes: the long form
    python -m tests.support.spmd_equal --mesh 2x2 --model gpt --plan Tensor --dtype float64
    python -m tests.support.spmd_equal --results cells.json --into docs/spmd.md     adds to results, writes the table

One launch of ranks per mesh runs all cells. A cell is the largest relative difference of a loss.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers.models.llama import modeling_llama  # noqa: F401 - loaded, for `precision`
from transformers.models.t5 import modeling_t5  # noqa: F401

import wholestep as ws
from tests.support.spmd_recipes import PLANS, RECIPES, STEPS, Batch, Recipe, plans_of, step
from wholestep import comm
from wholestep.spmd import DataParallel, Shard, ShardedOptimizer
from wholestep.testing import run_ranks

LIMITS = {"float64": 1e-10, "float32": 1e-5}
MESHES = ["2", "4", "8", "2x2", "2x2x2"]
AXES = "abc"


@dataclass
class Cell:
    """A model under a plan.

    Attributes:
        losses: of one device; of the whole batch, or, where a plan is in the local view, of the model in `eval()`.
        worst: largest relative difference of a result on any rank.
        trouble: what went wrong, if the steps did not run.
    """

    model: str
    plan: str
    dtype: str
    losses: list[list[float]] = field(default_factory=list)
    worst: float = math.nan
    trouble: str = ""
    seconds: float = 0.0
    captures: int = 0


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Computes all in a dtype: what loaded models of transformers compute in float32 always is, too, in the other."""
    loaded = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    homes, real = [module for module in loaded if vars(module).get("torch") is torch], torch.Tensor.float
    torch.set_default_dtype(dtype)
    if dtype == torch.float64:
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        for home in homes:
            home.torch = _Double(torch)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.Tensor.float = real  # type: ignore[method-assign]
        for home in homes:
            home.torch = torch  # type: ignore[attr-defined]


class _Double:
    """torch, for modules in which float32 shall be float64."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, "float64" if name == "float32" else name)


def is_local(plan: Any) -> bool:
    return isinstance(plan, (DataParallel, ShardedOptimizer))


Run = Callable[..., tuple[Tensor, ...]]


def train(recipe: Recipe, *, calm: bool, run: Run, local: Callable[[Batch], Batch]) -> list[list[float]]:
    """Twenty steps from one beginning; of each the loss, and the norm of the gradients."""
    model = recipe.model().to(torch.get_default_dtype())
    model.train(not calm)
    opt = recipe.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, recipe.rate) if recipe.rate else None
    found = []
    for number in range(STEPS):
        batch = recipe.batch(torch.Generator().manual_seed(number % 3))  # three in turn, to be learned
        if calm and "labels" in batch:  # means of means: as many on each rank
            batch["labels"] = batch["labels"].clamp(min=0)
        if number % recipe.keep == 0:
            opt.zero_grad()
        found.append([float(value) for value in run(model, opt, local(batch), recipe)])
        if schedule is not None:
            schedule.step()
    return found


def alone(name: str, dtype: str, calm: bool) -> list[list[float]]:
    """What one device computes."""
    with precision(getattr(torch, dtype)):
        torch.manual_seed(0)
        run = lambda *args: step(*args, share=1.0)  # noqa: E731
        return train(RECIPES[name], calm=calm, run=run, local=lambda batch: batch)


def together(cell: Cell, mesh: ws.DeviceMesh) -> float:
    """What a rank computes: the largest relative difference from one device."""
    recipe = RECIPES[cell.model]
    plans = plans_of(recipe, PLANS[len(mesh.mesh_dim_names)][cell.plan])
    assert plans is not None
    sizes = {plan.axis: mesh.get_group(plan.axis).size() for plan in plans}
    sums = [plan.axis for plan in plans if is_local(plan) and plan.reduce == "sum"]
    share = 1 / math.prod(sizes[axis] for axis in sums)
    # transformers decides whether all of a mask counts; ranks with parts of one do in the global view alone
    masked = "attention_mask" in recipe.batch(torch.Generator())
    parts = any(not is_local(plan) and plan.batch == Shard(0) for plan in plans) and any(map(is_local, plans))
    compiled = ws.compile(step, mesh=mesh, plan=plans, fullgraph=not (masked and parts))

    def local(batch: Batch) -> Batch:
        for plan in plans:
            if is_local(plan) or plan.batch == Shard(0):
                place = mesh.get_local_rank(plan.axis)
                batch = {key: value.chunk(sizes[plan.axis])[place] for key, value in batch.items()}
        return batch

    def run(*args: Any) -> tuple[Tensor, ...]:
        loss, *norm = compiled(*args, share=share)
        for plan in filter(is_local, plans):
            comm.all_reduce(loss, group=mesh.get_group(plan.axis))
            loss = loss / (1 if plan.axis in sums else sizes[plan.axis])
        return loss, *norm

    with precision(getattr(torch, cell.dtype)):
        torch.manual_seed(comm.get_rank())  # rank 0's model and generator are taken
        found = train(recipe, calm=any(map(is_local, plans)), run=run, local=local)
    cell.captures = compiled.captures
    ratios = torch.tensor(found, dtype=torch.float64) / torch.tensor(cell.losses, dtype=torch.float64)
    return float((ratios - 1).abs().max())  # NaN if one is


def run_cells(cells: Sequence[Cell], shape: str, quiet: bool = True) -> list[Cell]:
    """All that a rank of a mesh runs."""
    sizes = sizes_of(shape)
    mesh = ws.init_device_mesh("cpu", sizes, mesh_dim_names=tuple(AXES[: len(sizes)]))
    console = Console(stderr=True, quiet=quiet or comm.get_rank() > 0, highlight=False, soft_wrap=True)
    for number, cell in enumerate(cells):
        start = time.process_time()
        try:
            cell.worst = together(cell, mesh)
        except comm.DistError:  # the ranks have lost each other
            raise
        except Exception as error:  # noqa: BLE001 - a cell of the table
            cell.trouble = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        cell.seconds = time.process_time() - start
        good = cell.worst <= LIMITS[cell.dtype]
        said = f"{cell.worst:.1e}" if not cell.trouble else cell.trouble.splitlines()[0]
        console.print(
            f"{number + 1:3}/{len(cells)} {shape:6} {cell.dtype} {cell.model:8} {cell.plan:62} "
            f"[{'green' if good else 'red'}]{said}[/] {cell.seconds:.1f} s, {cell.captures} captures"
        )
    return list(cells)


def cells_of(axes: int, models: Sequence[str], dtype: str, plans: Sequence[str] = ()) -> list[Cell]:
    """The cells of a mesh of so many axes, with what one device computes.

    Args:
        plans: the plans that begin so; all, if there are none.
    """
    found = []
    for model in models:
        wanted: dict[bool, list[list[float]]] = {}
        for plan, makers in PLANS[axes].items():
            made = plans_of(RECIPES[model], makers)
            if made is None or (plans and not any(plan.startswith(one) for one in plans)):
                continue
            calm = any(map(is_local, made))
            if calm not in wanted:
                wanted[calm] = alone(model, dtype, calm)
            found.append(Cell(model, plan, dtype, copy.deepcopy(wanted[calm])))
    return found


def on_mesh(cells: Sequence[Cell], shape: str, quiet: bool = True) -> list[Cell]:
    """The cells as run by the ranks of a mesh; of each the worst rank's."""
    timeout = 400.0 if quiet else 600.0 * len(cells)
    everybody = run_ranks(run_cells, math.prod(sizes_of(shape)), "shm", (cells, shape, quiet), timeout)
    merged = []
    for same in zip(*everybody, strict=True):
        failed = [one for one in same if one.trouble or math.isnan(one.worst)]
        merged.append(failed[0] if failed else max(same, key=lambda one: one.worst))
    return merged


def sizes_of(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


Results = dict[tuple[str, str, str, str], float]  # mesh, dtype, model, plan -> worst; NaN: the steps did not run


HEAD = "| plan | meshes | " + " | ".join(RECIPES) + " |"


def table(found: Results) -> Iterator[str]:
    """By plan and model the largest relative difference on all meshes, in float64 and in float32, as Markdown.

    Where not all meshes of a row were run, the cell names those that were.
    """
    yield HEAD
    yield "|---|---|" + "---|" * len(RECIPES)
    for plan in (plan for some in PLANS.values() for plan in some):
        meshes = [mesh for mesh in MESHES if any((mesh, plan) == (key[0], key[3]) for key in found)]
        texts = [", ".join(filter(None, (_worst(found, dtype, model, plan, meshes) for dtype in LIMITS)))
                 for model in RECIPES]  # fmt: skip
        if meshes:
            yield f"| {plan} | {', '.join(meshes).replace('x', '×')} | {' | '.join(texts)} |"


def _worst(found: Results, dtype: str, model: str, plan: str, meshes: Sequence[str]) -> str:
    some = {mesh: found[key] for mesh in meshes if (key := (mesh, dtype, model, plan)) in found}
    if not some:
        return ""
    text = "fails" if any(map(math.isnan, some.values())) else f"{max(some.values()):.0e}"
    return text if len(some) == len(meshes) else f"{text} ({', '.join(some)})"


def write_into(page: Path, found: Results) -> None:
    """Puts the table in the place of the one on a page."""
    before, head, after = page.read_text().partition(HEAD)
    _, gap, rest = after.partition("\n\n")
    assert head, f"{page} has no such table"
    page.write_text(before + "\n".join(table(found)) + gap + rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="*", default=MESHES)
    parser.add_argument("--model", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--plan", nargs="*", default=[], help="plans that begin so")
    parser.add_argument("--dtype", nargs="*", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--results", type=Path, help="a file of results, to which these are added")
    parser.add_argument("--into", type=Path, help="a page whose table of all results is written anew: docs/spmd.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(["wholestep.comm", "tests.support.spmd_equal"])
    forkserver.ensure_running()  # ranks share the memory of what it has imported
    found: Results = {}
    if given.results is not None and given.results.exists():
        found = {tuple(key): worst for *key, worst in json.loads(given.results.read_text())}  # type: ignore[misc]
    bad = 0
    for mesh in given.mesh:
        axes = mesh.count("x") + 1
        cells = [cell for dtype in given.dtype for cell in cells_of(axes, given.model, dtype, given.plan)]
        for cell in on_mesh(cells, mesh, quiet=False):
            found[mesh, cell.dtype, cell.model, cell.plan] = cell.worst
            if not cell.worst <= LIMITS[cell.dtype]:
                bad += 1
                print(f"{mesh} {cell.dtype} {cell.model} {cell.plan}: {cell.trouble or cell.worst}", file=sys.stderr)
        if given.results is not None:
            lines = ",\n".join(json.dumps([*key, worst]) for key, worst in found.items())
            given.results.write_text(f"[\n{lines}\n]\n")
    print("\n".join(table(found)))
    if given.into is not None:
        write_into(given.into, found)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
