"""Walks through any value and yields everything comparable in it, each under a readable path."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass
class Leaf:
    """One comparable thing: a tensor, a plain value, or the type and length of a container.

    Facts that a later call could change (version, shape, flags) are taken when the leaf is made.
    """

    path: str
    value: Any
    identity: int | None = None
    memory: int | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def describe(self) -> str:
        """Short text for messages."""
        if isinstance(self.value, torch.Tensor):
            return f"a {self.facts['dtype']} tensor {list(self.value.shape)}"
        return repr(self.value)[:120]

    def differences(self, other: Leaf, names: tuple[str, str]) -> Iterator[str]:
        """What differs from the leaf at the same path in the other world."""
        one, two = self.value, other.value
        if isinstance(one, torch.Tensor) != isinstance(two, torch.Tensor):
            yield f"{names[0]} {self.describe()}, {names[1]} {other.describe()}"
        elif isinstance(one, torch.Tensor):
            same = True
            for fact, expected in self.facts.items():
                if other.facts[fact] != expected:
                    same = same and fact not in ("dtype", "shape", "layout", "device")
                    yield f"{fact}: {names[0]} {expected}, {names[1]} {other.facts[fact]}"
            if same:
                yield from _bits(one, two)
        elif type(one) is not type(two) or not _plain_equal(one, two):
            yield f"{names[0]} {one!r} ({type(one).__name__}), {names[1]} {two!r} ({type(two).__name__})"


def leaves(value: Any, path: str, seen: dict[int, Any]) -> Iterator[Leaf]:
    """All leaves of a value: tensors with their gradients, numbers, container shapes, module and optimizer contents.

    Args:
        value: anything; modules, optimizers, dataclasses, mappings and sequences are walked through.
        path: the name that the value goes by.
        seen: objects already walked, by id (cuts cycles, keeps each id in use); tensors are yielded wherever met.
    """
    if isinstance(value, torch.Tensor):
        yield _tensor(value, path)
        if id(value) not in seen:
            seen[id(value)] = value
            if _is_leaf(value) is True or value.retains_grad:
                yield from leaves(value.grad, f"{path}.grad", seen)
    elif isinstance(value, PLAIN):
        yield Leaf(path, value)
    elif isinstance(value, random.Random):
        yield Leaf(path, value.getstate())
    elif not callable(value) or isinstance(value, torch.nn.Module):
        if id(value) in seen:
            yield Leaf(path, f"seen: {type(value).__name__}")
            return
        seen[id(value)] = value
        yield from _container(value, path, seen)


def _container(value: Any, path: str, seen: dict[int, Any]) -> Iterator[Leaf]:
    yield Leaf(f"{path}.<type>", type(value).__qualname__)
    items: Any
    if isinstance(value, torch.nn.Module):
        items = _module(value)
    elif isinstance(value, torch.optim.Optimizer):
        items = _optimizer(value)
    elif isinstance(value, (list, tuple)):
        yield Leaf(f"{path}.<len>", len(value))
        items = [(f"[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, dict):
        yield Leaf(f"{path}.<keys>", repr([k for k in value if isinstance(k, PLAIN)]))
        items = [(f"[{key!r}]", item) for key, item in value.items() if isinstance(key, PLAIN)]
    elif isinstance(value, (set, frozenset)):
        items = [("{}", repr(sorted(map(repr, value))))]
    elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        items = [(f".{key}", item) for key, item in value.state_dict().items()]
    else:
        items = [(f".{key}", item) for key, item in getattr(value, "__dict__", {}).items()]
    for name, item in items:
        yield from leaves(item, f"{path}{name}", seen)


def _module(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if isinstance(value, PLAIN):
            yield f".{name}", value
        elif "_hooks" in name and isinstance(value, dict):
            yield f".{name}.<len>", len(value)
    for name, value in (*module._parameters.items(), *module._buffers.items(), *module._modules.items()):
        yield f".{name}", value
    for name, value in vars(module).items():
        if isinstance(value, (torch.Tensor, list, tuple, dict)) and not name.startswith("_"):
            yield f".{name}", value


def _optimizer(opt: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    index = {}
    for g, group in enumerate(opt.param_groups):
        for p, param in enumerate(group["params"]):
            index[param] = f"{g}.{p}"
        yield f".param_groups[{g}]", {key: value for key, value in group.items() if key != "params"}
        yield f".param_groups[{g}].params", list(group["params"])
    yield ".state.<order>", repr([index.get(param, "?") for param in opt.state])
    for param, state in opt.state.items():
        yield f".state[{index.get(param, '?')}]", dict(state) if isinstance(state, dict) else state
    yield "._opt_called", getattr(opt, "_opt_called", None)


def _tensor(tensor: torch.Tensor, path: str) -> Leaf:
    strided = tensor.layout is torch.strided
    facts = {
        "type": type(tensor).__name__,
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "layout": tensor.layout,
        "device": tensor.device,
        "requires_grad": _requires_grad(tensor),
        "is_leaf": _is_leaf(tensor),
        "version": None if tensor.is_inference() else tensor._version,
    }
    memory = None
    if strided:
        facts["stride"] = _stride(tensor)
        if tensor.untyped_storage().nbytes():
            memory = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.untyped_storage().data_ptr()
    return Leaf(path, tensor, id(tensor), memory, facts)


def _is_leaf(tensor: torch.Tensor) -> bool | str:
    """Whether a tensor is a leaf; an error's name for a view that autograd has given up on."""
    try:
        return tensor.is_leaf
    except RuntimeError as error:
        return type(error).__name__


def _requires_grad(tensor: torch.Tensor) -> bool | str:
    try:
        return tensor.requires_grad
    except RuntimeError as error:
        return type(error).__name__


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions where a stride means something."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _plain_equal(one: Any, two: Any) -> bool:
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(two)
    return bool(one == two)


def _bits(one: torch.Tensor, two: torch.Tensor) -> Iterator[str]:
    one, two = one.detach(), two.detach()
    if one.is_meta:
        return
    if one.layout is not torch.strided:
        if one.is_coalesced() != two.is_coalesced():
            yield f"coalesced: eager {one.is_coalesced()}, compiled {two.is_coalesced()}"
        one, two = one.to_dense(), two.to_dense()
    a, b = one.resolve_conj().resolve_neg().contiguous(), two.resolve_conj().resolve_neg().contiguous()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    words = WORDS[a.element_size()]
    if a.numel() == 0 or torch.equal(a.view(words), b.view(words)):
        return
    wide_a, wide_b = a.double(), b.double()
    unequal = ~((wide_a == wide_b) & (wide_a.signbit() == wide_b.signbit()) | (wide_a.isnan() & wide_b.isnan()))
    if not unequal.any():
        return
    at = tuple(unequal.nonzero()[0].tolist())
    gap = (wide_a - wide_b).abs().nan_to_num(float("inf")).max().item()
    yield (
        f"values: {int(unequal.sum())} of {a.numel()} differ, max abs difference {gap:.3g}; "
        f"first at {at}: {a[at].item()!r} against {b[at].item()!r}"
    )
