"""The wrappers of `wholestep.parallel` where frameworks look for theirs: Lightning, Accelerate, transformers.

Each file needs its framework and is imported by nothing here: the user's script names it, in the one line that changes.
"""

from __future__ import annotations

from typing import Any

import torch

from wholestep import comm
from wholestep.tensor_parts import Part, part_of


def extra_needed(framework: str) -> ImportError:
    """What a file here raises where its framework is missing."""
    return ImportError(
        f"wholestep.parallel.integrations.{framework} needs {framework}, which is not installed: "
        f"pip install 'wholestep[{framework}]'"
    )


def join_world(device: torch.device, size: int) -> None:
    """Makes comm's default group, unless there is one; over the process group's store that a framework has made.

    Args:
        device: of this rank's model.
        size: ranks that the framework knows.

    Raises:
        ValueError: no engine serves such devices, or comm knows another number of ranks.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"wholestep.parallel serves models on cpu and cuda, found {device}: use the framework's own")
    if not comm.is_initialized():
        comm.init_process_group("cpu:shm,cuda:nccl" if device.type == "cuda" else None)
    if comm.get_world_size() != size:
        raise ValueError(
            f"the framework knows {size} ranks, wholestep.comm {comm.get_world_size()}: start as many processes as the "
            "framework is told of (Trainer's devices times num_nodes, accelerate's num_processes)"
        )


def take_parts(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Has an optimizer's `load_state_dict` take whole tensors, as a pre-hook of it: of each, the parameter's part."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    own = dict(zip(keys, (one for group in optimizer.param_groups for one in group["params"]), strict=True))
    parts = {key: part for key, one in own.items() if (part := part_of(one)) is not None}
    taken = {
        key: {name: _part(value, parts[key]) if key in parts else value for name, value in of.items()}
        for key, of in state["state"].items()
    }
    return {**state, "state": taken}


def _part(value: Any, part: Part) -> Any:
    whole = isinstance(value, torch.Tensor) and value.shape == part.shape
    return value[part.slices].clone() if whole else value
