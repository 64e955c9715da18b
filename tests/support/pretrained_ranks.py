"""Ranks that load a checkpoint of transformers into their parts, and save one of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import wholestep as ws
from tests.support.deferred_ranks import experts, llama, tokens, train_step
from wholestep import comm
from wholestep.checkpoint.load import Reader
from wholestep.errors import CheckpointError
from wholestep.parallel import deferred, fully_shard

_read: list[int] = []
_usual = Reader.read


def _counted(self: Reader, kind: str, name: str, part: Any, into: Any = None) -> torch.Tensor:
    before = self.nbytes
    found = _usual(self, kind, name, part, into)
    _read.append(self.nbytes - before)
    return found


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    return fully_shard(model)


def converted(folder: str) -> dict[str, Any]:
    """Loads what transformers converts, in two ways, and saves it."""
    given, found, reference = Path(folder) / "given", dict[str, Any](), experts()
    ws.load(given, reference)
    want = reference.state_dict()
    with deferred():
        model = experts()
    for name, one, load_first in (("deferred", model, True), ("later", experts(), False)):
        if load_first:
            ws.load(given, one)
        sharded(one)
        if not load_first:
            ws.load(given, one)
        have = ws.full_state_dict(one)
        found[name] = have.keys() == want.keys() and all(torch.equal(have[key], want[key]) for key in want)
    ws.checkpoint.save_pretrained(Path(folder) / "back", model)
    return found


def parts(folder: str) -> dict[str, Any]:
    """Loads in three ways, saves, and makes a mistake."""
    given, found, reference = Path(folder) / "given", dict[str, Any](), llama()
    ws.load(given, reference)
    want = reference.state_dict()

    def same(model: nn.Module) -> bool:
        have = ws.full_state_dict(model)
        return have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)

    with deferred():
        model, planned = llama(), llama()
    Reader.read = _counted  # type: ignore[method-assign]
    ws.load(given, model)
    sharded(model)
    Reader.read = _usual  # type: ignore[method-assign]
    found["read"], found["bytes"] = sum(_read), sum(one.nbytes for one in reference.parameters())
    found["fully_shard"] = same(model)
    ws.checkpoint.save_pretrained(Path(folder) / "back", model)
    later = sharded(llama())
    ws.load(given, later)
    found["later"] = same(later)
    ws.load(given, planned)
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.0)
    mesh = ws.init_device_mesh("cpu", (comm.get_world_size(),), mesh_dim_names=("ranks",))
    plan = ws.FullyShard("ranks", min_bytes=1024)
    ws.compile(train_step, mesh=mesh, plan=plan)(planned, optimizer, tokens(2))
    found["plan"] = same(planned)
    model.extra = nn.Linear(2, 2)
    try:
        ws.load(given, model)
    except CheckpointError as error:
        found["missing"] = str(error)
    del model.extra
    found["unchanged"] = same(model)
    return found
