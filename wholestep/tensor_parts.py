"""Tensors of which each rank holds a part alone, such as the state of a sharded optimizer.

The mark is an attribute of the tensor, plain tuples, so that it goes with `copy.deepcopy` and `torch.save` (of a
parameter, with `torch.save` alone). While a step is traced such a tensor stands for the whole one; the program of a
rank takes the part.
May import: errors, torch_compat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from wholestep.errors import CheckpointError
from wholestep.torch_compat import asks_for_full_state

_NAME = "wholestep_part"
STATE_HOOKS = "_optimizer_state_dict_post_hooks"  # of an optimizer; not there in those that wrap another

Span = tuple[int, int]


class Part(NamedTuple):
    """A block of a tensor: a run of indices along each dimension.

    Attributes:
        shape: of the whole tensor.
        spans: (start, stop) along each of its dimensions.
    """

    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, shape: Sequence[int], spans: Sequence[Span]) -> Part:
        """A part; the shape may be a `torch.Size`."""
        return cls(tuple(map(int, shape)), tuple((int(start), int(stop)) for start, stop in spans))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        """All of a tensor."""
        return cls.of(shape, [(0, size) for size in shape])

    @classmethod
    def rows(cls, shape: Sequence[int], start: int, stop: int) -> Part:
        """Some rows: a part along the first dimension alone."""
        return cls.of(shape, [(start, stop), *((0, size) for size in shape[1:])])

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the part itself."""
        return tuple(stop - start for start, stop in self.spans)

    @property
    def numel(self) -> int:
        """How many elements the part has."""
        return math.prod(self.size)

    @property
    def is_whole(self) -> bool:
        """True when nothing is missing."""
        return self.size == self.shape

    def inside(self, outer: Part) -> Part | None:
        """This part relative to another one that contains it; None where that lacks some of it."""
        spans = [(a - first, b - first) for (a, b), (first, _) in zip(self.spans, outer.spans, strict=True)]
        has = all(0 <= a and b <= size for (a, b), size in zip(spans, outer.size, strict=True))
        return Part.of(outer.size, spans) if has else None

    @property
    def slices(self) -> tuple[slice, ...]:
        """What picks the part out of the whole: ``whole[part.slices]``."""
        return tuple(slice(start, stop) for start, stop in self.spans)

    def __str__(self) -> str:
        cut = [d for d, (span, size) in enumerate(zip(self.spans, self.shape, strict=True)) if span != (0, size)]
        if not cut:
            return f"all of {list(self.shape)}"
        names = ["rows {} to {}".format(*self.spans[d]) if d == 0 else "{} to {} of dimension {}".format(
            *self.spans[d], d) for d in cut]  # fmt: skip
        return f"{', '.join(names)} of {list(self.shape)}"


def part_of(tensor: torch.Tensor) -> Part | None:
    """What a tensor holds of a whole one; None when it is one itself."""
    mark = getattr(tensor, _NAME, None)
    return None if mark is None else Part(*mark)


def _refuse_to_checkpoints(tensor: torch.Tensor) -> Any:
    """A method by which torch.distributed.checkpoint asks a tensor for its blocks. Only parts have it, and refuse.

    Without it they would be taken for the same on all ranks. It is no attribute of the part, which is to be pickled.
    """
    part = part_of(tensor)
    if part is None or part.is_whole:
        raise AttributeError

    def refuse(name: str = "a tensor", *_: Any) -> Any:
        raise CheckpointError(
            f"{name} is {part}: torch.distributed.checkpoint does not know that other ranks have other parts\n"
            "  to do: ws.save(path, model, optimizer) and ws.load, or give it ws.full_state_dict(model)"
        )

    return refuse


@cache
def _tell_checkpoints() -> None:
    for name in ("__create_write_items__", "__create_chunk_list__"):
        setattr(torch.Tensor, name, property(_refuse_to_checkpoints))


def mark_part(tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Says what a tensor holds of a whole one; None takes the mark away."""
    if part is not None:
        _tell_checkpoints()
        setattr(tensor, _NAME, tuple(part))
    elif hasattr(tensor, _NAME):
        delattr(tensor, _NAME)
    return tensor


def _unmarked_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, Part]]:
    """The tensors in the state of parts, with the part, that do not say which part they are."""
    for parameter, state in vars(optimizer).get("state", {}).items():  # none: a wrapper
        part = part_of(parameter) if isinstance(parameter, torch.Tensor) else None
        if part is None or parameter.shape != part.size:  # as in a call, where it stands for the whole one
            continue
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() and part_of(value) is None:
                yield value, part


def mark_states(optimizer: torch.optim.Optimizer) -> None:
    """Says of the state that an optimizer has made beside a part that it is the same part: what has its shape."""
    for value, part in list(_unmarked_states(optimizer)):
        if value.shape == part.size:
            mark_part(value, part)


def say_whole(owners: Iterable[Any]) -> bool:
    """Says of optimizers' state beside parts that it is whole, where nothing has said which part it is.

    A row or column of Adafactor's may have the shape of some rank's part.

    Returns:
        Whether there was any.
    """
    found = [value for one in owners if isinstance(one, torch.optim.Optimizer) for value, _ in _unmarked_states(one)]
    for value in found:
        mark_part(value, Part.whole(value.shape))
    return bool(found)


def say_parts(owners: Iterable[Any]) -> bool:
    """Has the state dicts of the modules that have parts, and of optimizers, say so, for what saves and loads them.

    Modules load whole tensors, too.

    Returns:
        Whether one did not say so before.
    """
    new: dict[Any, Any] = {}
    for one in owners:
        if isinstance(one, torch.nn.Module) and any(part_of(p) for p in one._parameters.values() if p is not None):
            new |= {one: _give_parts} if _give_parts not in one._state_dict_hooks.values() else {}
        elif isinstance(one, torch.optim.Optimizer) and STATE_HOOKS in vars(one):  # its states may become parts later
            new |= {one: _give_states} if _give_states not in vars(one)[STATE_HOOKS].values() else {}
    for one, hook in new.items():
        one.register_state_dict_post_hook(hook)
        if hook is _give_parts:
            one.register_load_state_dict_pre_hook(_take_parts)
    return bool(new)


def _give_states(optimizer: torch.optim.Optimizer, _: Any) -> None:
    mark_states(optimizer)
    if any(part_of(value) for state in optimizer.state.values() for value in state.values()):
        refuse_torchs_full_state()


def _give_parts(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        value, part = state.get(prefix + name), None if parameter is None else part_of(parameter)
        if part is not None and isinstance(value, torch.Tensor):
            refuse_torchs_full_state()
            mark_part(value, part)


def own_part(value: torch.Tensor, part: Part, what: str) -> torch.Tensor:
    """What of a tensor in a state belongs to this rank's part: of a whole one the part, else all of it.

    Raises:
        RuntimeError: it is another part.
    """
    if value.shape == part.shape:
        return value[part.slices]
    if part_of(value) not in (None, part):
        raise RuntimeError(
            f"{what} is {part_of(value)}, this rank has {part}: load what this rank saved, or whole "
            "tensors (ws.full_state_dict)"
        )
    return value


def _take_parts(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Of whole tensors that are loaded, this rank takes its parts.

    Raises:
        RuntimeError: one has another size, or is another part.
    """
    for name, parameter in module._parameters.items():
        key, part = prefix + name, None if parameter is None else part_of(parameter)
        if part is None or not isinstance(state.get(key), torch.Tensor):
            continue
        state[key] = value = own_part(state[key], part, f"{key} in the state")
        if value.shape != part.size:
            raise RuntimeError(
                f"size mismatch for {key}: {list(value.shape)} in the state, {list(part.shape)} in the model, of which "
                f"this rank has {list(part.size)}: load a state of this model, whole or its parts"
            )


def refuse_torchs_full_state() -> None:
    """torch's ``get_model_state_dict(full_state_dict=True)`` would take the parts for whole tensors.

    Raises:
        CheckpointError: it is what asks.
    """
    if asks_for_full_state():
        raise CheckpointError(
            "full_state_dict=True: torch.distributed.checkpoint does not know tensors of which each rank has a part\n"
            "  to do: ws.full_state_dict(model) and ws.full_state_dict(optimizer)"
        )


def narrow_to(tensor: torch.Tensor, part: Part, held: Part | None = None) -> None:
    """Makes a tensor a part of itself: the object stays, the rest of its memory is free.

    Args:
        held: what it is of the whole one; None: all of it.
    """
    local = part if held is None else part.inside(held)
    assert local is not None, f"{held} has not {part}"
    give_data(tensor, tensor.detach()[local.slices].clone(memory_format=torch.contiguous_format))
    mark_part(tensor, part)


def give_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Gives a tensor data of another shape; autograd forgets where it was to accumulate gradients of the old one.

    The node that accumulates a leaf's gradients lives as long as a graph that leads to it, knows the shape, and is left
    behind only when the type changes.
    """
    if tensor.requires_grad and tensor.is_leaf:
        other = torch.float32 if tensor.dtype is not torch.float32 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data
