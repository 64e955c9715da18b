"""Loading: each rank reads what it needs into the objects that it has, whatever blocks it was written in."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from wholestep.checkpoint.saving_ranks import Ranks, progress
from wholestep.checkpoint.state_names import (
    Contents,
    model_contents,
    optimizer_contents,
    parameter_names,
    rebuild,
    tensors_of,
)
from wholestep.checkpoint.transformers_conversions import Conversion, converted
from wholestep.checkpoint.transformers_format import index_of, omitted_aliases
from wholestep.deferred_init import read_from, record_of
from wholestep.errors import CheckpointError
from wholestep.tensor_parts import Part, mark_part, part_of

SHOWN = 8  # names of each kind of mistake


class Reader:
    """A checkpoint, opened.

    Attributes:
        index: as `docs/checkpoints.md` describes it; of a checkpoint in the form of transformers, made for it.
        nbytes: read so far; advance: told how many were read, each time.

    Raises:
        CheckpointError: there is no complete checkpoint at the path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.index = index_of(Path(path))
        self.nbytes = 0
        self.advance: Callable[[int], None] = lambda nbytes: None
        self._open: dict[str, Any] = {}
        self._last: tuple[Conversion, dict[str, torch.Tensor]] | None = None

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
        if "conversion" in saved:
            with torch.no_grad():
                return into.copy_(self._converted(saved["conversion"])[name][part.slices])
        for block in saved["blocks"]:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part.spans, block["spans"], strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            there = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, block["spans"], strict=True))
            here = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, part.spans, strict=True))
            file = self._file(block["file"])
            key = saved.get("tensor", name)
            found = file.get_slice(key)[there] if there else file.get_tensor(key)
            self.nbytes += found.nbytes
            self.advance(found.nbytes)
            with torch.no_grad():
                into[here].copy_(found)
        return into

    def _converted(self, conversion: Conversion) -> dict[str, torch.Tensor]:
        """What a conversion makes, which is kept until another one is asked for."""
        if self._last is None or self._last[0] is not conversion:
            self._last = None
            self._last = conversion, conversion.run(lambda name: self.whole("files", name))
        return self._last[1]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.path / self.index["shards"] / name, framework="pt")
        return self._open[name]

    def whole(self, kind: str, name: str) -> torch.Tensor:
        """All of a tensor."""
        return self.read(kind, name, self.part(kind, name))


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Loads a checkpoint into a model and its optimizer, in place.

    Also one in the form of transformers: a directory with ``model.safetensors``, or with shards of it and an index, or
    such a file. Tensors of a model made within `deferred` are read when they are divided, each rank's part alone.

    A collective when there is a process group. The ranks may be as many as they like and hold any parts; each reads
    its own alone. Values are cast to the types of the model. Optimizer state that is not there yet is made: like the
    parameter's part where it has the parameter's shape, else whole.

    Args:
        path: what `save` was given.
        model, optimizer: as they were built for training; wrapped otherwise than before as may be.

    Returns:
        The ``extra`` that `save` was given, on every rank; None without.

    Raises:
        CheckpointError: on every rank, and nothing has changed: the checkpoint is not complete, or of another model;
            then it names the tensors that are missing, not expected, or of another shape.
    """
    ranks = Ranks()
    with ranks.together():
        plan = Loading(Reader(path), model, optimizer)
        plan.check()
    with ranks.together(f"{path} cannot be read: "):
        with progress(f"loading {path}", plan.nbytes, ranks.rank == 0) as plan.reader.advance:
            extra = plan.run()
    return extra


class Loading:
    """A checkpoint and the objects that take it."""

    def __init__(self, reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.reader, self.model, self.optimizer = reader, model, optimizer
        self.held = model_contents(model)
        self.saved: dict[str, Any] = reader.index["model"]
        if reader.index.get("omits_aliases"):
            reader.index["files"] = {"tensors": self.saved["tensors"]}
            names = {*self.held.tensors, *self.held.tree["aliases"]}
            self.saved["tensors"] = converted(self.saved["tensors"], model, names)
            self.saved["aliases"] = omitted_aliases(self.held.tree["aliases"], self.saved["tensors"])
        self.state = Contents()
        self.names: dict[int, str] = {}
        if optimizer is not None:
            self.names = parameter_names(model, optimizer)
            self.state = optimizer_contents(model, optimizer)

    @property
    def nbytes(self) -> int:
        """About how much is read."""
        every = [*self.held.tensors.values(), *self.state.tensors.values()]
        return sum(held.part.numel * held.tensor.itemsize for held in every)

    # Does it fit?

    def check(self) -> None:
        """Raises:
        CheckpointError: something does not fit.
        """
        found = self._model_trouble()
        if self.optimizer is not None:
            found += self._optimizer_trouble()
        if found:
            raise CheckpointError("\n  ".join([f"{self.reader.path} does not fit:", *found]))

    def _model_trouble(self) -> list[str]:
        extra = {name for tree in (self.held.tree, self.saved) for name in tensors_of(tree["extra"])}
        here = ({*self.held.tensors, *self.held.tree["aliases"]} - extra) | set(self.held.tree["extra"])
        there = ({*self.saved["tensors"], *self.saved["aliases"]} - extra) | set(self.saved["extra"])
        found = _named("not in the checkpoint", here - there, there - here)
        found += _named("not in the model", there - here, here - there)
        common = there - extra
        wrong = [
            f"{name} is {saved} there, {list(held.part.shape)} in the model"
            for name, held in self.held.tensors.items()
            if name in common and (saved := self.saved["tensors"][self._source(name)]["shape"]) != list(held.part.shape)
        ]
        found += _some("of another shape", wrong)
        tied = self.held.tree["aliases"].items()
        found += [
            f"{name} and {alias} are one tensor in the model, two in the checkpoint"
            for alias, name in tied
            if {alias, name} <= there and self._source(alias) != self._source(name)
        ]
        return found

    def _source(self, name: str) -> str:
        return self.saved["aliases"].get(name, name)  # type: ignore[no-any-return]

    def _optimizer_trouble(self) -> list[str]:
        assert self.optimizer is not None
        if "optimizer" not in self.reader.index:
            return ["it was saved without an optimizer"]
        groups = [group["params"] for group in self.reader.index["optimizer"]["param_groups"]]
        ours = [[self.names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        here, there = ({name for group in some for name in group} for some in (ours, groups))
        found = _named("updated by the optimizer, not by the one that was saved", here - there, there - here)
        found += _named("updated by the optimizer that was saved, not by this one", there - here, here - there)
        if not found and [set(group) for group in ours] != [set(group) for group in groups]:
            sizes = ([len(group) for group in some] for some in (groups, ours))
            found = ["the optimizer's groups are {} parameters in the checkpoint, {} here; or others".format(*sizes)]
        return found

    # Then do it

    def run(self) -> Any:
        """Reads everything; gives what was saved besides model and optimizer."""
        extra = set(tensors_of(self.held.tree["extra"]))
        for name, held in self.held.tensors.items():
            if name not in extra and record_of(held.tensor) is not None:  # read when it is known which part is
                self._read_later(name, held.tensor)
            elif name not in extra:
                self.reader.read("model", self._source(name), held.part, held.tensor)
        for raw, module in self.model.named_modules(remove_duplicate=False):
            if raw in self.held.extra_names:
                tree = self.saved["extra"][self.held.extra_names[raw]]
                module.set_extra_state(rebuild(tree, lambda n: self.reader.whole("model", n)))
        if self.optimizer is not None:
            self._set_optimizer(self.optimizer)
        return rebuild(self.reader.index.get("extra", {}).get("value"), lambda n: self.reader.whole("extra", n))

    def _read_later(self, name: str, tensor: torch.Tensor) -> None:
        def source(part: Part) -> torch.Tensor:
            return self.reader.read("model", self._source(name), part, torch.empty(part.size, dtype=tensor.dtype))

        read_from(tensor, source, f"{self.reader.path}: {name}")

    def _set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        tree = self.reader.index["optimizer"]
        for group, saved in zip(optimizer.param_groups, tree["param_groups"], strict=True):
            settings = {key: value for key, value in saved.items() if key != "params"}
            group.update(rebuild(settings, lambda name: self._tensor(name, None, True)))
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                state = tree["state"].get(self.names[id(parameter)])
                if state is None:
                    optimizer.state.pop(parameter, None)
                    continue
                new = rebuild(state, lambda n, p=parameter, d=on_device: self._tensor(n, p, d))  # type: ignore[misc]
                held = optimizer.state[parameter]
                held.clear()
                held.update(new)

    def _tensor(self, name: str, parameter: torch.Tensor | None, on_device: bool) -> torch.Tensor:
        """One tensor of the optimizer: in the place of the one that it has, or made like its parameter."""
        part, known = self.reader.part("optimizer", name), self.state.tensors.get(name)
        if known is not None and known.part.shape == part.shape:
            return self.reader.read("optimizer", name, known.part, known.tensor)
        mine = part_of(parameter) if parameter is not None else None
        if mine is not None and mine.shape == part.shape:
            part = mine
        made = self.reader.read("optimizer", name, part)
        if parameter is not None and (made.dim() or on_device):  # a step count stays where Python can read it
            made = made.to(parameter.device)
        return made if part.is_whole else mark_part(made, part)


def _named(what: str, names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Names, each with the nearest of the others."""
    names, others = sorted(names), sorted(others)
    nearest = {name: difflib.get_close_matches(name, others, 1) for name in names[:SHOWN]}
    return _some(what, [f"{name} (nearest: {nearest[name][0]})" if nearest.get(name) else name for name in names])


def _some(what: str, words: Sequence[str]) -> list[str]:
    if not words:
        return []
    more = f", and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return [f"{what}: {'; '.join(words[:SHOWN])}{more}"]


# Without a model -------------------------------------------------------------------------------------------------


def state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model of a checkpoint as an ordinary state dict of whole tensors on the CPU, for `load_state_dict`.

    Raises:
        CheckpointError: there is no complete checkpoint at the path.
    """
    reader = Reader(path)
    model = reader.index["model"]
    extra = rebuild(model["extra"], lambda name: reader.whole("model", name))
    inside = set(tensors_of(model["extra"]))
    found = {name: reader.whole("model", name) for name in model["tensors"] if name not in inside}
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
