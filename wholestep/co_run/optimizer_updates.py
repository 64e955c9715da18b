"""torch's functions that update a list of parameters one by one, each deferred as one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from wholestep.patches import Replacement
from wholestep.torch_compat import function_modes_enabled
from wholestep.trace.patches.like_updates import single_tensor_updates


@dataclass(frozen=True)
class Update:
    """Such a function, as an operator: where torch's optimizers find it, a recorder has put another one."""

    owner: Any
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with function_modes_enabled(), torch.no_grad():  # a recorder's mode
            getattr(self.owner, self.name)(*args, **kwargs)


_update = cache(Update)  # one object a function, in signatures


def deferring(defer: Callable[..., None]) -> Iterator[Replacement]:
    """Replacements that call ``defer(update, function, arguments...)``."""
    for owner, name, function in single_tensor_updates():
        yield owner, name, partial(defer, _update(owner, name), function)
