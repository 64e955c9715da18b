"""Gradients from before a step that it replaces unread, as a `zero_grad()` before the backward does.

Whether such a gradient is there is no matter: a step captured at its first call, where `.grad` is None, serves later
ones too. What decides is the first thing that happens to a `.grad` in the step: that it is set, or is read by
`zero_grad`, which sets it to None whatever it finds.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

GET, SET, DELETE = (getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__"))  # type: ignore[attr-defined]
_OWN = f"{__name__.partition('.')[0]}."
_ZERO_GRAD = {inspect.unwrap(kind.zero_grad).__code__ for kind in (torch.optim.Optimizer, torch.nn.Module)}


class ReplacedGradients:
    """Follows the `.grad` of tensors from outside through one run of a step.

    Args:
        parameters: those of which each backward says whether it has changed their gradients.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._read: set[int] = set()
        self._replaced: dict[int, torch.Tensor] = {}
        self._ran_backward = False

    def accessed(self, func: Any, tensor: torch.Tensor, caller: FrameType) -> None:
        """Notes that `.grad` was read, set or deleted."""
        key = id(tensor)
        if key in self._read or key in self._replaced or caller.f_globals.get("__name__", "").startswith(_OWN):
            return
        unknown = self._ran_backward and key not in self._parameters
        if unknown or (func == GET and not _sets_to_none(caller)):
            self._read.add(key)
        else:
            self._replaced[key] = tensor

    def accumulated(self, parameters: Iterable[torch.Tensor]) -> None:
        """Notes that a backward has run, and which parameters' gradients it has changed."""
        self._ran_backward = True
        self._read.update(id(p) for p in parameters if id(p) not in self._replaced)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors whose gradients from before are replaced unread."""
        return list(self._replaced.values())


def _sets_to_none(caller: FrameType) -> bool:
    return caller.f_code in _ZERO_GRAD and caller.f_locals.get("set_to_none") is True
