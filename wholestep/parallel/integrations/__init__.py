"""The wrappers of `wholestep.parallel` where frameworks look for theirs: Lightning, Accelerate, transformers.

Each file needs its framework and is imported by nothing here: the user's script names it, in the one line that changes.
"""

from __future__ import annotations

import torch

from wholestep import comm


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
