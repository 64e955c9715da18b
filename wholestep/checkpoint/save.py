"""Saving: each rank writes what it holds, every byte once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from wholestep.checkpoint import directory
from wholestep.checkpoint.saving_ranks import Ranks, progress
from wholestep.checkpoint.state_names import Contents, extra_contents, model_contents, optimizer_contents
from wholestep.checkpoint.transformers_format import WholeFiles
from wholestep.errors import CheckpointError
from wholestep.tensor_parts import Part

MAX_FILE = 1 << 30  # bytes of a file, about: progress shows after each


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, extra: Any = None
) -> None:
    """Saves a model and its optimizer in a directory, in the place of the checkpoint that is there.

    A collective when there is a process group: every rank calls it with its own objects, on a file system that all
    share. Each writes the parts that it holds; what several ranks hold alike is written by one of them. Interrupted at
    any instant, the directory still holds the last complete checkpoint.

    Names are those of the bare model, whatever wraps it; optimizer state goes by the names of parameters. Buffers are
    those of the lowest rank.

    Args:
        path: a directory of its own; made where it is not there.
        model: its parameters, persistent buffers and extra state.
        optimizer: of parameters of the model; its state and groups.
        extra: what else a run needs, which `load` gives back: tensors, numbers, texts, lists, tuples and dicts of such,
            as ``{"step": 7, "scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}``. Rank 0's counts.

    Raises:
        CheckpointError: on every rank, and what was there before still is: something cannot be saved, the ranks hold
            different models, or a rank could not write.
    """
    path, ranks = Path(path), Ranks()
    contents: dict[str, Contents] = {}
    with ranks.together():
        contents["model"] = model_contents(model)
        if optimizer is not None:
            contents["optimizer"] = optimizer_contents(model, optimizer)
        contents["extra"] = extra_contents(extra if ranks.rank == 0 else None)
        name = directory.begin(path) if ranks.rank == 0 else ""
    name = ranks.gather(name)[0]
    try:
        _write_all(path, name, contents, ranks)
    except BaseException:
        if ranks.rank == 0:
            directory.discard(path, name)
        raise


def _write_all(path: Path, name: str, contents: dict[str, Contents], ranks: Ranks) -> None:
    everybody = ranks.gather({kind: _announced(content) for kind, content in contents.items()})
    blocks = [block for kind in contents for block in share_out(kind, [one[kind] for one in everybody])]
    mine = [block for block in blocks if block.writer == ranks.rank]
    _name_files(blocks, ranks.size)
    with ranks.together(f"could not write to {path}: "):
        written = _write(path / f".{name}", mine, contents, ranks)
    sizes = {file: size for one in ranks.gather(written) for file, size in one.items()}
    with ranks.together(f"could not finish {path}: "):
        if ranks.rank == 0:
            directory.commit(path, name, _index(blocks, contents, sizes))


@dataclass
class Block:
    """A part of a tensor, or all of it, that one rank writes."""

    kind: str
    name: str
    dtype: str
    part: Part
    writer: int
    file: str = ""

    @property
    def nbytes(self) -> int:
        """How much is written."""
        return self.part.numel * getattr(torch, self.dtype).itemsize


Announced = tuple[str, str, Part, bool]


def _announced(contents: Contents) -> list[Announced]:
    """What this rank holds, as `share_out` takes it."""
    return [
        (name, str(held.tensor.dtype).removeprefix("torch."), held.part, held.per_rank)
        for name, held in contents.tensors.items()
    ]


def share_out(kind: str, everybody: Sequence[Sequence[Announced]]) -> list[Block]:
    """Which rank writes what: each block once, by a rank that holds it and has the least to write so far.

    Args:
        everybody: by rank: name, type, part, and whether the lowest rank that holds all of it must write it.

    Raises:
        CheckpointError: ranks hold different tensors under one name, or not all of one.
    """
    holders: dict[str, dict[Part, list[int]]] = {}
    first: dict[str, tuple[str, tuple[int, ...], int]] = {}
    alone = {name for said in everybody for name, _, _, per_rank in said if per_rank}
    for rank, said in enumerate(everybody):
        for name, dtype, part, _ in said:
            known = first.setdefault(name, (dtype, part.shape, rank))
            if known[:2] != (dtype, part.shape):
                raise CheckpointError(
                    f"{kind}: {name} is {known[0]} {list(known[1])} on rank {known[2]}, {dtype} {list(part.shape)} on "
                    f"rank {rank}: save the same model on every rank"
                )
            holders.setdefault(name, {}).setdefault(part, []).append(rank)
    blocks: list[Block] = []
    load = [0] * len(everybody)
    for name, parts in sorted(holders.items(), key=lambda item: -max(part.numel for part in item[1])):
        for part, ranks in _cover(kind, name, parts):
            writer = ranks[0] if name in alone else min(ranks, key=load.__getitem__)
            blocks.append(Block(kind, name, first[name][0], part, writer))
            load[writer] += blocks[-1].nbytes
    order = {name: index for index, name in enumerate(first)}
    return sorted(blocks, key=lambda block: (order[block.name], block.part.spans))


def _cover(kind: str, name: str, parts: dict[Part, list[int]]) -> Iterable[tuple[Part, list[int]]]:
    """The parts that together are the tensor, once."""
    whole = [(part, ranks) for part, ranks in parts.items() if part.is_whole]
    if whole:
        return whole
    filled = {part: ranks for part, ranks in parts.items() if part.numel}
    if not _is_grid(list(filled)):
        held = "; ".join(f"rank {ranks[0]} {part}" for part, ranks in parts.items())
        todo = "\n  to do: give the model and optimizer themselves, or ws.full_state_dict(…)" if kind == "extra" else ""
        raise CheckpointError(
            f"{kind}: the parts of {name} do not make up the whole of it, each element once: {held}{todo}"
        )
    return filled.items()


def _is_grid(parts: list[Part]) -> bool:
    """True for all the blocks that cuts through every dimension leave, each once: what meshes make of a tensor."""
    if not parts:
        return False
    count = 1
    for dim, size in enumerate(parts[0].shape):
        spans = sorted({part.spans[dim] for part in parts})
        starts, stops = [0, *(stop for _, stop in spans)], [*(start for start, _ in spans), size]
        if starts != stops:
            return False
        count *= len(spans)
    return count == len(parts)


def _name_files(blocks: list[Block], ranks: int) -> None:
    """Gives each block its file: one for each rank and kind, more where it grows large."""
    sizes: dict[tuple[str, int], int] = {}
    for block in blocks:
        size = sizes.get((block.kind, block.writer), 0)
        sizes[block.kind, block.writer] = size + block.nbytes
        block.file = f"{block.kind}-rank{block.writer}-of-{ranks}-{size // MAX_FILE}.safetensors"


def _write(folder: Path, mine: list[Block], contents: dict[str, Contents], ranks: Ranks) -> dict[str, int]:
    """Writes this rank's files; gives their sizes."""
    if not folder.is_dir():
        raise OSError(f"{folder}, which rank 0 made, is not there: a file system that all ranks share is required")
    sizes: dict[str, int] = {}
    with progress(f"saving {folder.parent}", sum(b.nbytes for b in mine), ranks.rank == 0) as advance:
        for name in dict.fromkeys(block.file for block in mine):
            here = [block for block in mine if block.file == name]
            tensors = {block.name: contents[block.kind].tensors[block.name].tensor for block in here}
            taken: set[int] = set()
            save_file({key: _plain(t, taken) for key, t in tensors.items()}, folder / name, {"format": "pt"})
            directory.sync(folder / name)
            sizes[name] = (folder / name).stat().st_size
            advance(sum(block.nbytes for block in here))
    return sizes


def _plain(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """What the file takes: contiguous, in memory of its own.

    Args:
        taken: addresses of what it has already; weights that were tied by their `data` have one.
    """
    tensor = tensor.detach().cpu()
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    if not alone or tensor.data_ptr() in taken:
        return tensor.clone(memory_format=torch.contiguous_format)
    taken.add(tensor.data_ptr())
    return tensor


def _index(blocks: list[Block], contents: dict[str, Contents], sizes: dict[str, int]) -> dict[str, Any]:
    index: dict[str, Any] = {kind: {"tensors": {}} | content.tree for kind, content in contents.items()}
    for block in blocks:
        entry = {"dtype": block.dtype, "shape": list(block.part.shape), "blocks": []}
        into = index[block.kind]["tensors"].setdefault(block.name, entry)["blocks"]
        into.append({"file": block.file, "spans": [list(span) for span in block.part.spans]})
    return {"files": sizes} | index


def save_pretrained(path: str | os.PathLike[str], model: nn.Module, max_shard_size: int = 5 * 10**9) -> None:
    """Saves a model in the form of transformers, for its ``from_pretrained``; `load` reads it, too.

    A collective as `save` is. Each rank writes the parts that it holds into files of whole tensors; of tied weights one
    is written. The configuration of a model of transformers goes along. The files are complete when the directory is
    there.

    Args:
        path: a directory that is not there yet.
        model: its parameters and persistent buffers.
        max_shard_size: bytes of a file, about.

    Raises:
        CheckpointError: on every rank, and there is no such directory: it was there before, the model has state that is
            no tensor, ranks hold different models, or one could not write.
    """
    path, ranks = Path(path), Ranks()
    made = path.with_name(f".{path.name}.new")
    with ranks.together():
        contents = model_contents(model)
        if contents.tree["extra"]:
            raise CheckpointError(f"{', '.join(contents.tree['extra'])}: state that is no tensor has no place there")
        if ranks.rank == 0 and path.exists():
            raise CheckpointError(f"{path} is there already: give a new path")
    blocks = share_out("model", ranks.gather(_announced(contents)))
    files = WholeFiles(made, {one.name: (one.dtype, list(one.part.shape)) for one in blocks}, max_shard_size)
    with ranks.together(f"could not write to {made}: "):
        if ranks.rank == 0:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
            files.create()
            for one in (getattr(model, "config", None), getattr(model, "generation_config", None)):
                getattr(one, "save_pretrained", lambda _: None)(made)
    with ranks.together(f"could not write to {made}: "):
        mine = [one for one in blocks if one.writer == ranks.rank]
        files.write({one.name: (one.part.slices, contents.tensors[one.name].tensor) for one in mine})
    with ranks.together(f"could not finish {path}: "):
        if ranks.rank == 0:
            directory.sync(made)
            os.rename(made, path)
            directory.sync(path.parent)
