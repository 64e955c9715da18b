"""Reading: any block of any tensor, whatever blocks it was written in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from wholestep.checkpoint.state_names import rebuild, tensors_of
from wholestep.checkpoint.transformers_format import index_of
from wholestep.errors import CheckpointError
from wholestep.tensor_parts import Part


class Reader:
    """A checkpoint, opened.

    Attributes:
        index: as `docs/checkpoints.md` describes it; of a checkpoint in the form of transformers, made for it.
        nbytes: read so far.

    Raises:
        CheckpointError: there is no complete checkpoint at the path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.index = index_of(Path(path))
        self.nbytes = 0
        self._open: dict[str, Any] = {}

    def part(self, kind: str, name: str) -> Part:
        """All of a tensor as a part."""
        return Part.whole(self.index[kind]["tensors"][name]["shape"])

    def read(self, kind: str, name: str, part: Part, into: torch.Tensor | None = None) -> torch.Tensor:
        """A part of a tensor; only the blocks that it touches are read, and of those only what it needs.

        Args:
            into: takes it, cast to its own type; a new tensor on the CPU where None.
        """
        saved = self.index[kind]["tensors"][name]
        if into is None:
            into = torch.empty(part.size, dtype=getattr(torch, saved["dtype"]))
        for block in saved["blocks"]:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part.spans, block["spans"], strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            there = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, block["spans"], strict=True))
            here = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, part.spans, strict=True))
            file = self._file(block["file"])
            found = file.get_slice(name)[there] if there else file.get_tensor(name)
            self.nbytes += found.numel() * found.itemsize
            with torch.no_grad():
                into[here].copy_(found)
        return into

    def read_as(self, kind: str, name: str, dtype: torch.dtype, part: Part) -> torch.Tensor:
        """A part of a tensor, cast to a type."""
        return self.read(kind, name, part, torch.empty(part.size, dtype=dtype))

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.path / self.index["shards"] / name, framework="pt")
        return self._open[name]

    def whole(self, kind: str, name: str) -> torch.Tensor:
        """All of a tensor."""
        return self.read(kind, name, self.part(kind, name))

    def extra(self) -> Any:
        """What was saved besides model and optimizer."""
        return rebuild(self.index.get("extra", {}).get("value"), lambda name: self.whole("extra", name))


def state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model of a checkpoint as an ordinary state dict of whole tensors on the CPU, for `load_state_dict`.

    Raises:
        CheckpointError: there is no complete checkpoint at the path.
    """
    reader = Reader(path)
    model = reader.index["model"]
    found: dict[str, Any] = {}
    extra = rebuild(model["extra"], lambda name: reader.whole("model", name))
    inside = set(tensors_of(model["extra"]))
    for name in model["tensors"]:
        if name not in inside:
            found[name] = reader.whole("model", name)
    return found | {alias: found[name] for alias, name in model["aliases"].items()} | extra


def optimizer_state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The optimizer of a checkpoint as its own `state_dict()` would be, whole tensors on the CPU.

    Parameters are numbered as in the groups of the optimizer that was saved.

    Raises:
        CheckpointError: there is no complete checkpoint at the path, or it has no optimizer.
    """
    reader = Reader(path)
    if "optimizer" not in reader.index:
        raise CheckpointError(f"{path} was saved without an optimizer")
    tree = rebuild(reader.index["optimizer"], lambda name: reader.whole("optimizer", name))
    names = [name for group in tree["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in tree["param_groups"]]
    return {"state": {number[name]: held for name, held in tree["state"].items()}, "param_groups": groups}
