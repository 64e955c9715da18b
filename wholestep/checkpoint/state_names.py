"""The state of a model and an optimizer by parameter names without wrappers' prefixes (DDP, FSDP, torch.compile)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from wholestep.errors import CheckpointError
from wholestep.tensor_parts import Part, mark_states, part_of

# Class of a wrapper -> the child that it wraps, whose name is left out of others' names.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
EXTRA = "_extra_state"


@dataclass(frozen=True)
class TensorPart:
    """One tensor, or the part of it that this rank holds.

    Attributes:
        part: all of it for a whole tensor.
        per_rank: whether ranks that hold all of it may have different contents; the lowest one's counts.
    """

    tensor: torch.Tensor
    part: Part
    per_rank: bool = False


@dataclass
class Contents:
    """What is saved of one object.

    Attributes:
        tensors: by name: for a model, that in the bare model's `state_dict()`; for an optimizer, ``parameter.key``.
        tree: all else, as JSON takes it (`describe`): aliases and extra state of a model, groups and state of an
            optimizer.
        extra_names: of a model: path of a module with extra state -> its name.
    """

    tensors: dict[str, TensorPart] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    extra_names: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor, per_rank: bool = False) -> None:
        """Takes in one tensor.

        Raises:
            CheckpointError: it is sparse, quantized, not there yet, of a type that the files have not, or the second of
                its name.
        """
        if name in self.tensors:
            raise CheckpointError(f"two tensors would be saved as {name}")
        kind = "a lazy" if is_lazy(tensor) else ""
        kind = kind or ("a quantized" if tensor.is_quantized else "a sparse" if tensor.layout != torch.strided else "")
        if kind:
            raise CheckpointError(f"{name} is {kind} tensor: a dense one, with its shape, is required")
        if tensor.dtype in (torch.complex128, torch.float4_e2m1fn_x2):
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which safetensors files cannot give back: keep a view of it"
            )
        self.tensors[name] = TensorPart(tensor, part_of(tensor) or Part.whole(tensor.shape), per_rank)


def bare_name(model: nn.Module, modules: Mapping[str, nn.Module], name: str) -> str:
    """A dotted name without the wrappers on its way."""
    kept, path = [], ""
    for step in name.split("."):
        module = modules.get(path)
        wraps = [WRAPPERS.get(kind.__name__) for kind in type(module).__mro__] if module is not None else []
        if step not in wraps:
            kept.append(step)
        path = f"{path}.{step}" if path else step
    return ".".join(kept)


def model_contents(model: nn.Module) -> Contents:
    """A model's parameters, persistent buffers and extra state.

    Raises:
        CheckpointError: extra state that is neither a tensor nor plain data.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    buffers = {id(buffer) for buffer in model.buffers()}
    found = Contents(tree={"aliases": {}, "extra": {}})
    first: dict[int, str] = {}
    for raw, value in model.state_dict(keep_vars=True).items():
        name = bare_name(model, modules, raw)
        path, _, last = raw.rpartition(".")
        if last == EXTRA or not isinstance(value, torch.Tensor):
            found.tree["extra"][name] = describe(value, name, found.add)
            found.extra_names[path] = name
        elif id(value) in first:
            found.tree["aliases"][name] = first[id(value)]
        else:
            first[id(value)] = name
            found.add(name, value, per_rank=id(value) in buffers)
    return found


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """id of each parameter that an optimizer updates -> its name.

    Raises:
        CheckpointError: one is not in the model.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {id(p): bare_name(model, modules, raw) for raw, p in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer's param_groups[{index}]['params'][{place}], {list(parameter.shape)}, is no "
                    "parameter of the model: give the whole model (several as an nn.ModuleDict)"
                )
    return names


def optimizer_contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Contents:
    """An optimizer's state, by the names of parameters, and its groups.

    Raises:
        CheckpointError: a parameter that is not the model's, or state that is neither tensors nor plain data.
    """
    names = parameter_names(model, optimizer)
    mark_states(optimizer)
    found = Contents()
    found.tree["state"] = {
        names[id(parameter)]: describe(dict(optimizer.state[parameter]), names[id(parameter)], found.add)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    }
    found.tree["param_groups"] = [
        describe(
            {key: value for key, value in group.items() if key not in ("params", "param_names")},
            f"param_groups.{index}",
            found.add,
        )
        | {"params": [names[id(p)] for p in group["params"]]}
        for index, group in enumerate(optimizer.param_groups)
    ]
    return found


def extra_contents(extra: Any) -> Contents:
    """What a run keeps besides.

    Raises:
        CheckpointError: something that is neither tensors nor plain data.
    """
    found = Contents()
    found.tree["value"] = describe(extra, "extra", found.add)
    return found


# Plain data -------------------------------------------------------------------------------------------------------


def describe(value: Any, name: str, add: Callable[[str, torch.Tensor], None]) -> Any:
    """A value as JSON takes it: tensors by name, tuples marked, and dicts whose keys are not all text as pairs.

    Args:
        add: takes the tensors.

    Raises:
        CheckpointError: something is no tensor, number, text, None, list, tuple or dict of such.
    """
    if isinstance(value, torch.Tensor):
        add(name, value)
        return {"$tensor": name}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):  # a Counter, as schedulers hold, comes back as a dict
        inner = {key: describe(v, f"{name}.{key}", add) for key, v in value.items()}
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        return inner if plain else {"$items": [[describe(k, f"{name}.key", add), v] for k, v in inner.items()]}
    if type(value) in (list, tuple):
        inner_list = [describe(v, f"{name}.{index}", add) for index, v in enumerate(value)]
        return inner_list if type(value) is list else {"$tuple": inner_list}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which cannot be saved: tensors, numbers, texts, lists, tuples and "
        "dicts can"
    )


def rebuild(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """What `describe` described.

    Args:
        tensor: gives a tensor by its name.
    """
    if isinstance(tree, list):
        return [rebuild(v, tensor) for v in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensor(tree["$tensor"])
    if "$tuple" in tree:
        return tuple(rebuild(v, tensor) for v in tree["$tuple"])
    if "$items" in tree:
        return {rebuild(k, tensor): rebuild(v, tensor) for k, v in tree["$items"]}
    return {key: rebuild(v, tensor) for key, v in tree.items()}


def tensors_of(tree: Any) -> list[str]:
    """The names of all tensors in what `describe` gave."""
    found: list[str] = []
    rebuild(tree, found.append)
    return found
