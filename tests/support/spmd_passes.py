"""The graph that one rank of a world runs under a plan; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wholestep as ws
from wholestep import comm
from wholestep.capture import InitialState, Snapshot
from wholestep.capture_call import capture
from wholestep.ir import StepGraph, check


def rank_graph(step: Callable[..., Any], args: tuple[Any, ...], plan: Any, ranks: int = 2, rank: int = 1) -> StepGraph:
    """The step of one rank after all passes of a plan, each checked."""
    initial = InitialState(Snapshot(step, args))
    try:
        made = capture(step, args, {})[1].step
    finally:
        initial.drop()
    comm.init_process_group("null", rank=rank, world_size=ranks)
    try:
        mesh = ws.init_device_mesh("cpu", (ranks,), mesh_dim_names=(plan.axis,))
        for run in plan.passes(mesh):
            made = check(run(made), type(plan).__name__)
    finally:
        comm.destroy_process_group()
    return made
