"""Checkpoints in the form of transformers: safetensors files of whole tensors, with an index if there are several."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from wholestep.checkpoint import directory
from wholestep.errors import CheckpointError

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
# names of types in the header of a safetensors file
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
          "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
          "F8_E5M2FNUZ": "float8_e5m2fnuz", "U16": "uint16", "U32": "uint32", "U64": "uint64",
          "C64": "complex64"}  # fmt: skip


def index_of(path: Path) -> tuple[Path, dict[str, Any]]:
    """The directory of a checkpoint and its index; that of a checkpoint of transformers is made in our form.

    Raises:
        CheckpointError: there is none, or it is not whole.
    """
    if (path / WEIGHTS_INDEX).exists():
        try:
            places = json.loads((path / WEIGHTS_INDEX).read_text(encoding="utf8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path / WEIGHTS_INDEX} cannot be read: {error!r}") from None
        return path, _index(path, sorted(set(places.values())), places)
    if path.is_file() or (path / WEIGHTS).exists():
        file = path if path.is_file() else path / WEIGHTS
        return file.parent, _index(file.parent, [file.name], None)
    return path, directory.read_index(path)


def _index(path: Path, files: Iterable[str], places: Mapping[str, str] | None) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name in files:
        try:
            with safe_open(path / name, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - no dict
                    found = file.get_slice(key)
                    shape, dtype = found.get_shape(), _TYPES.get(found.get_dtype())
                    if dtype is None:
                        raise CheckpointError(
                            f"{path / name}: {key} is of type {found.get_dtype()}, which is not served"
                        )
                    spans = [[0, size] for size in shape]
                    tensors[key] = {"dtype": dtype, "shape": shape, "blocks": [{"file": name, "spans": spans}]}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from None
    lost = sorted(set(places or ()) - set(tensors))
    if lost:
        raise CheckpointError(f"{path / WEIGHTS_INDEX} names tensors that are in no file: {', '.join(lost[:8])}")
    return {"shards": ".", "model": {"tensors": tensors, "aliases": {}, "extra": {}}, "omits_aliases": True}


def omitted_aliases(tied: Mapping[str, str], saved: Mapping[str, Any]) -> dict[str, str]:
    """Of tied weights there is one in the files: name -> the name under which its values are saved.

    Args:
        tied: name of a tensor in the model -> the name of the same one under which it comes first.
    """
    found: dict[str, str] = {}
    for first in dict.fromkeys(tied.values()):
        names = [first, *(alias for alias, name in tied.items() if name == first)]
        there = [name for name in names if name in saved]
        found |= {name: there[0] for name in names if there and name not in saved}
    return found


class WholeFiles:
    """Files of whole tensors, of which each rank writes its parts in their places.

    Args:
        folder: where they are.
        tensors: name -> type and shape, in order.
        most: bytes of a file, about.

    Attributes:
        files: name of each file -> the places of its tensors in it: first byte, type, shape.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, tuple[str, list[int]]], most: int) -> None:
        self.folder = folder
        sizes = {name: math.prod(shape) * getattr(torch, dtype).itemsize for name, (dtype, shape) in tensors.items()}
        groups: list[list[str]] = [[]]
        for name in tensors:
            if groups[-1] and sum(sizes[one] for one in groups[-1]) + sizes[name] > most:
                groups.append([])
            groups[-1].append(name)
        self.total, count = sum(sizes.values()), len(groups)
        self.files: dict[str, tuple[bytes, dict[str, tuple[int, str, list[int]]]]] = {}
        for number, names in enumerate(groups, 1):
            names.sort(key=lambda name: -getattr(torch, tensors[name][0]).itemsize)  # each begins at a multiple of it
            file = WEIGHTS if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self.files[file] = _header(names, tensors, sizes)

    def create(self) -> None:
        """Makes the files, with no values yet, and the index."""
        for file, (header, places) in self.files.items():
            with open(self.folder / file, "wb") as made:
                made.write(header)
                ends = [at + math.prod(shape) * getattr(torch, dtype).itemsize for at, dtype, shape in places.values()]
                made.truncate(max(ends, default=len(header)))
        if len(self.files) > 1:
            where = {name: file for file, (_, places) in self.files.items() for name in places}
            text = json.dumps({"metadata": {"total_size": self.total}, "weight_map": where}, indent=2, sort_keys=True)
            (self.folder / WEIGHTS_INDEX).write_text(text + "\n", encoding="utf8")

    def write(self, parts: Mapping[str, tuple[tuple[slice, ...], torch.Tensor]]) -> None:
        """Writes parts of tensors: name -> where in the whole one, and what."""
        for file, (_, places) in self.files.items():
            here = [name for name in places if name in parts]
            if not here:
                continue
            path = self.folder / file
            flat = torch.from_file(str(path), shared=True, size=os.path.getsize(path), dtype=torch.uint8)
            for name in here:
                at, dtype, shape = places[name]
                slices, tensor = parts[name]
                kind = getattr(torch, dtype)
                if tensor.numel():
                    whole = flat[at : at + math.prod(shape) * kind.itemsize].view(kind).view(shape)
                    whole[slices] = tensor.detach().cpu()
            directory.sync(path)


def _header(
    names: list[str], tensors: Mapping[str, tuple[str, list[int]]], sizes: Mapping[str, int]
) -> tuple[bytes, dict[str, tuple[int, str, list[int]]]]:
    """The first bytes of a safetensors file, and where in it each tensor is."""
    codes = {dtype: code for code, dtype in _TYPES.items()}
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        dtype, shape = tensors[name]
        said[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [at, at + sizes[name]]}
        at += sizes[name]
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    places = {name: (first + said[name]["data_offsets"][0], *tensors[name]) for name in names}
    return len(text).to_bytes(8, "little") + text, places
