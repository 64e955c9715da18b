"""trace/: a Python step and its snapshot -> `Traced`, a `StepGraph` with everything a replay must do.

Takes a callable, its arguments and what capture knows of the world (where tensors live, which numbers are
inputs). Gives one flat graph of pure ATen calls, results as a template, effects on Python objects,
predicates that must hold and version-counter increments.
May import: errors, ir, torch_compat. Must not import capture, autograd, spmd, passes, lower, runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from wholestep.ir import Signature, StepGraph, dead_code
from wholestep.torch_compat import FakeTensor
from wholestep.trace.predicates import Predicate
from wholestep.trace.recorder import Found, Lifted, Recorder
from wholestep.trace.results import Outlet, Slot
from wholestep.trace.where import Whereabouts
from wholestep.trace.world import CallWindow, exchanged

__all__ = ["Traced", "World", "trace_step"]


class World(Protocol):
    """What tracing needs of capture's snapshot."""

    @property
    def tensors(self) -> dict[int, Any]: ...
    @property
    def numbers(self) -> list[Any]: ...
    def find(self, tensor: torch.Tensor) -> Found | None: ...
    def lift(self, stand_ins: list[Any]) -> None: ...
    def effects(self, is_new: Callable[[torch.Tensor], bool]) -> list[Any]: ...


@dataclass
class Traced:
    """One traced run of a step.

    Attributes:
        step: the graph.
        lifted: one per placeholder: its source and the value it had.
        slots: the tensors that outlive the step.
        result: template of what the step returned.
        effects: changes of Python objects, as capture describes them; `slot_of` gives their new tensors.
        predicates: decisions that Python took on host numbers.
        versions: input index -> how many in-place writes eager execution counts.
    """

    step: StepGraph
    lifted: list[Lifted]
    slots: list[Slot]
    result: Any
    effects: list[Any]
    predicates: list[Predicate]
    versions: dict[int, int] = field(default_factory=dict)
    slot_of: dict[int, int] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)


def trace_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world: World,
    names: dict[int, str],
    new_tensors: Callable[[list[Any]], list[torch.Tensor]],
) -> Traced:
    """Runs a step once on fake tensors and records it.

    Args:
        fn: the step.
        world: capture's snapshot, taken just before; the caller restores it afterwards.
        names: id of a module -> its path.
        new_tensors: gives the tensors made in the step that a list of effects stores.

    Raises:
        CaptureError: the step cannot be captured. Anything the step itself raises passes unchanged.
    """
    whereabouts = Whereabouts(names)
    recorder = Recorder(world.find, whereabouts)
    parameters = [f.tensor for f in world.tensors.values() if f.kind == "parameter" and f.tensor.requires_grad]
    before = {key: found.tensor._version for key, found in world.tensors.items()}
    torch.clear_autocast_cache()
    with whereabouts.following(), exchanged(recorder, parameters), CallWindow(recorder), recorder:
        world.lift([recorder.lift_number(n.source, n.value) for n in world.numbers])
        result = fn(*args, **kwargs)
    torch.clear_autocast_cache()
    versions = _versions(recorder, before)
    return _finish(recorder, result, world.effects(lambda t: isinstance(t, FakeTensor)), new_tensors, versions)


def _versions(recorder: Recorder, before: dict[int, int]) -> dict[int, int]:
    """How often eager execution would have counted a write to each input."""
    return {
        index: item.value._version - before.get(id(item.value), 0)
        for index, item in enumerate(recorder.lifted)
        if isinstance(item.value, torch.Tensor) and item.value._version != before.get(id(item.value), 0)
    }


def _finish(
    recorder: Recorder, result: Any, effects: list[Any], new_tensors: Callable[..., Any], versions: dict[int, int]
) -> Traced:
    outlet = Outlet(recorder)
    template = outlet.template(result)
    for tensor in new_tensors(effects):
        outlet.slot(tensor)
    mutations: dict[int, int] = {}
    for index, item in enumerate(recorder.lifted):
        if item.ref is not None and item.ref.storage.generation > 0:
            mutations[len(outlet.outputs)] = index
            outlet.outputs.append(item.ref.storage.value)
    recorder.graph.output(tuple(outlet.outputs))
    gm = fx.GraphModule(recorder.constants, recorder.graph)
    signature = Signature(recorder.inputs, len(outlet.outputs), mutations, recorder.gradients)
    step = dead_code(StepGraph(gm, signature))
    gm.recompile()
    return Traced(
        step,
        recorder.lifted,
        outlet.slots,
        template,
        effects,
        list(recorder.predicates.values()),
        versions,
        dict(outlet.by_tensor),
        outlet.keep,
    )
