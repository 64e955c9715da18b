"""Plans as files, placements of arguments, buffers and results, and what each pass did as text."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep import comm
from wholestep.errors import PlanError
from wholestep.testing import run_ranks

PLANS = [
    ws.TensorParallel("tp", {"*.up": "column", "*.down": ["row", "sequence"], "table": ws.Shard(-1)},
                      results={"norm": ws.Shard(1)}, batch={"x": ws.Shard(0)}),
    ws.FullyShard("dp", ("layers.*", "head"), {"mask": ws.Replicate()}, gather="cheaper", again=False, min_bytes=1),
    ws.ShardedOptimizer("so", "sum", bucket_bytes=1000),
    ws.DataParallel("dp2"),
]  # fmt: skip


def test_a_plan_comes_back_from_its_file(tmp_path):
    path = tmp_path / "plan.json"
    ws.save_plan(path, PLANS)
    again = ws.load_plan(path)
    assert again[0] == ws.TensorParallel("tp", {**PLANS[0].roles}, PLANS[0].results, PLANS[0].batch)
    assert again[1] == ws.FullyShard("dp", ["layers.*", "head"], {"mask": ws.Replicate()}, "cheaper", False, 1)
    assert again[2:] == PLANS[2:]
    ws.save_plan(path, ws.FullyShard("dp"))
    assert ws.load_plan(path) == [ws.FullyShard("dp")] and [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    assert json.loads(path.read_text())["plans"] == [{"plan": "FullyShard", "axis": "dp"}]


def plans(text: str) -> str:
    return '{"wholestep": 1, "plans": [' + text + "]}"


BAD = {
    "{": "plan.json:1: no JSON",
    '{"plans": []}': '"wholestep": 1',
    plans('{"plan": "FullShard", "axis": "dp"}'): 'plan 1: "plan": "FullShard".*nearest is "FullyShard"',
    plans('{"plan": "DataParallel", "axis": "dp"}, 3'): "plan 2:",
    plans('{"plan": "DataParallel"}'): '"axis": the name',
    plans('{"plan": "DataParallel", "axis": "dp", "bucket_byte": 3}'): 'nearest is "bucket_bytes"',
    plans('{"plan": "DataParallel", "axis": "dp", "bucket_bytes": "3"}'): "a value such as 26214400",
    plans('{"plan": "TensorParallel", "axis": "dp", "roles": {"up": "colum"}}'): "'up': 'colum'",
    plans('{"plan": "FullyShard", "axis": "dp", "batch": {"x": "Shard"}}'): r"batch\['x'\]='Shard'",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=BAD[text]):
        ws.load_plan(path)


def test_a_plan_of_ones_own_is_not_written(tmp_path):
    class Mine(ws.DataParallel):
        pass

    with pytest.raises(PlanError, match="Mine"):
        ws.save_plan(tmp_path / "plan.json", Mine("dp"))
    assert not list(tmp_path.iterdir())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(24.0).reshape(6, 4) / 24)
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(self.up(x + self.table))
        self.table.mul_(0.9).add_(h.detach().mean((0, 2))[:, None])
        return self.down(torch.softmax(h @ h.transpose(1, 2) + mask, -1) @ h)


def train(model: nn.Module, opt: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    loss = model(batch["x"], batch["mask"]).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(5)
    mask = torch.full((6, 6), float("-inf")).triu(1)
    return [{"x": torch.randn(4, 6, 4), "mask": mask} for _ in range(3)]


def steps(plan: object, mine: object) -> tuple[list[float], Tensor, torch.Size]:
    torch.manual_seed(0)
    model = Net().double()
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    mesh = ws.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) if plan else None
    step = ws.compile(train, mesh=mesh, plan=plan, fullgraph=True) if plan else train
    losses = [step(model, opt, mine(batch) if plan else batch).item() for batch in batches_of_doubles()]
    return losses, ws.full_state_dict(model)["table"] if plan else model.table, model.table.shape


def batches_of_doubles() -> list[dict[str, Tensor]]:
    return [{name: value.double() for name, value in batch.items()} for batch in batches()]


def rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"x": batch["x"].chunk(2)[comm.get_rank()], "mask": batch["mask"]}


def columns(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"x": batch["x"].chunk(2, 1)[comm.get_rank()], "mask": batch["mask"]}


CASES = {
    "a mask is everybody's": (ws.FullyShard("dp", batch={"mask": ws.Replicate()}, min_bytes=1), rows, (6, 4)),
    "a batch split along the sequence": (ws.TensorParallel("dp", batch={"batch.x": ws.Shard(1)}), columns, (6, 4)),
    "rows of a buffer, and of results": (
        ws.TensorParallel("dp", {"table": ws.Shard(0), "up": "column"}, results={"norm": ws.Shard(1)}),
        lambda batch: batch, (3, 4),
    ),
}  # fmt: skip


def everything() -> dict[str, tuple]:
    return {name: steps(plan, mine) for name, (plan, mine, _) in CASES.items()}


def test_any_tensor_can_be_placed():
    losses, table, _ = steps(None, None)
    for found in run_ranks(everything, 2, "shm"):
        for name, (theirs, whole, shape) in found.items():
            assert theirs == pytest.approx(losses, rel=1e-10), name
            torch.testing.assert_close(whole, table, rtol=1e-10, atol=1e-12)
            assert shape == CASES[name][2], name


@pytest.fixture
def mesh():
    comm.init_process_group("null", rank=0, world_size=2)
    yield ws.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    comm.destroy_process_group()


def explained(mesh, plan):
    model = Net()
    return ws.compile(train, mesh=mesh, plan=plan, fullgraph=True), (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batches()[0],
    )


@pytest.mark.parametrize("plan, words", [
    (ws.FullyShard("dp", batch={"maks": ws.Replicate()}), "'maks' matches no tensor that the step.*batch.mask"),
    (ws.TensorParallel("dp", results={"nrm": ws.Shard(1)}), "'nrm' matches no module of the step.*'model.norm'"),
    (ws.FullyShard("dp", batch={"mask": ws.Shard(2)}), r"Shard\(dim=2\) of L\['batch'\]\['mask'\].*dimensions 0 to 1"),
])  # fmt: skip
def test_a_placement_that_fits_nothing_is_refused(mesh, plan, words):
    step, args = explained(mesh, plan)
    with pytest.raises(PlanError, match=f"(?s){words}"):
        step.explain(*args)


def test_what_each_pass_did_can_be_read(mesh):
    step, args = explained(mesh, CASES["a mask is everybody's"][0])
    first, *others = step.stages(*args)
    assert first.name == "trace" and "def forward" in str(first)
    assert "torch.ops.aten.addmm.default" in str(first) and "up at " in str(first) and "float32[4, 6" not in str(first)
    (expansion,) = [stage for stage in others if stage.name == "fully_shard"]
    assert f"# fully_shard: {first.calls} calls -> {expansion.calls}" in str(expansion)
    assert any(line.startswith("+") and "wholestep.all_gather" in line for line in str(expansion).splitlines())
    assert any(line.startswith("-") for line in str(expansion).splitlines())
    assert [stage.name for stage in others[1:]] == ["wait_late", "start_early", "coalesce"]
    assert step.captures == 0
