"""How tensors are walked, and what they are to a step by where they are found: parameters, buffers, state, batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from wholestep.capture import sources
from wholestep.capture.guards.compared_values import metadata
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.reachable import Reachable, TensorInput
from wholestep.errors import LazyError, UnsupportedError
from wholestep.ir import InputKind
from wholestep.torch_compat import HOOK_TABLES


def walk_tensor(found: Reachable, tensor: torch.Tensor, source: sources.Source) -> None:
    """Takes note of a tensor, of what it is to a step, and of its hooks and attributes."""
    if is_lazy(tensor):
        raise LazyError(f"{source} has no shape yet", remedy="call the module once, which gives it one")
    found.tensors[id(tensor)] = TensorInput(tensor, source, _tensor_kind(found, tensor, source))
    try:
        found.metadata[id(tensor)] = metadata(tensor)
    except RuntimeError as error:  # of a view whose base was written since, as FullyShardedDataParallel writes it
        if tensor.is_nested:
            raise UnsupportedError(f"{source} is a nested tensor", remedy="use padded tensors and masks") from error
        what = f"{source} is a view of memory that was written since, of which autograd will not speak"
        raise UnsupportedError(what, remedy="copy it; of FSDP, compile the plain module with ws.FullyShard") from error
    # hooks of a tensor that an earlier computation made belong to that computation, not to the step
    found.add(tensor, source, kinds.TENSOR, ignored=frozenset() if tensor.is_leaf else frozenset(HOOK_TABLES))
    found.add_attributes(tensor, source)


def _tensor_kind(found: Reachable, tensor: torch.Tensor, source: sources.Source) -> InputKind:
    if isinstance(source, sources.Attr) and source.key == "grad":
        return "grad"
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    steps: list[Any] = []
    step: sources.Source | None = source
    while isinstance(step, sources.Item):
        steps.append(step.key)
        step = step.base
    if len(steps) == 2 and steps[1] == "_buffers":
        return "buffer"
    if steps[-1:] == ["param_groups"] and steps[1:2] == ["params"]:
        return "parameter"
    if len(steps) >= 3 and steps[-1] == "state" and isinstance(steps[-2], sources.Source):
        return "state"
    return "batch" if _is_batch(found, source) else "tensor"


def _is_batch(found: Reachable, source: sources.Source) -> bool:
    """True for what an argument is or holds: data in containers, not what an object keeps between calls."""
    while isinstance(source, (sources.Item, sources.Vars, sources.Attr)) and source.path not in found.owners:
        if isinstance(source, sources.Attr) and source.key.startswith("__"):  # of a function
            return False
        source = source.base
    return isinstance(source, sources.Root) and source.argument is not None and source.path not in found.owners
