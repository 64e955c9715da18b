"""trace/: a Python step and its snapshot -> `Traced`, a `StepGraph` with everything a replay must do.

Takes a callable, its arguments and what capture knows of the world (where tensors live, which numbers are
inputs). Gives one flat graph of pure ATen calls, results as a template, effects on Python objects,
predicates that must hold and version-counter increments.
May import: errors, ir, torch_compat. Must not import capture, autograd, spmd, passes, lower, runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx

from wholestep.errors import LeakError, UnsupportedError
from wholestep.ir import Input, InputKind, Phase, Signature, StepGraph, dead_code, info, set_info
from wholestep.parts import Part
from wholestep.torch_compat import FakeTensor, lazy_graph_module, no_modes
from wholestep.trace.canonical import fingerprint, first_uses, order_inputs
from wholestep.trace.hoist import Hoisted, hoist
from wholestep.trace.predicates import Predicate
from wholestep.trace.recorder import Recorder
from wholestep.trace.results import Derivative, Differentiated, Made, Outlet, Slot
from wholestep.trace.sizes import Sizes, is_made
from wholestep.trace.tape import Found, Lifted, ReshapedInput, memory_of
from wholestep.trace.where import Whereabouts
from wholestep.trace.window import CallWindow
from wholestep.trace.world import exchanged, same_python_randomness

__all__ = ["ReentrantCheckpoint", "ReshapedInput", "SharedMemory", "Traced", "World", "trace_step"]


class World(Protocol):
    """What tracing needs of capture's snapshot."""

    @property
    def tensors(self) -> dict[int, Any]: ...
    @property
    def numbers(self) -> list[Any]: ...
    @property
    def twin_ids(self) -> Container[int]: ...
    def versions(self) -> dict[int, int]: ...
    def find(self, tensor: torch.Tensor) -> Found | None: ...
    def lift(self, stand_ins: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    @property
    def parts(self) -> dict[int, Part]: ...
    @property
    def spread(self) -> bool: ...
    @property
    def generators(self) -> Mapping[int, tuple[torch.Generator, Any]]: ...
    def homes(self, effects: list[Any]) -> dict[int, tuple[str, InputKind]]: ...
    def sizable(self) -> list[Any]: ...
    def exchange(self, tensors: dict[int, torch.Tensor]) -> None: ...
    def outcome(self, is_new: Callable[[torch.Tensor], bool], result: Any) -> tuple[list[Any], Any]: ...


# Traces the backward of a step, given what its forward left behind; see `autograd.differentiate`.
Differentiate = Callable[
    [Recorder, Outlet, list[Any], Callable[[], AbstractContextManager[Any]]], Differentiated | None
]


class SharedMemory(Exception):  # noqa: N818 - a request, not an error
    """Inputs that the step writes lie in memory that other inputs share; trace again, knowing that."""

    def __init__(self, memories: frozenset[int]) -> None:
        super().__init__(f"{len(memories)} shared memories")
        self.memories = memories


class ReentrantCheckpoint(Exception):  # noqa: N818 - a request, not an error
    """A checkpoint's backward would run another one inside; trace again, with checkpoints of the other kind."""


@dataclass
class Traced:
    """One traced run of a step.

    Attributes:
        step: the graph; its placeholders are the first of `lifted`.
        lifted: the inputs; those after the placeholders serve results and predicates alone.
        slots: the tensors that outlive the step.
        result: what the step returned, as capture describes it.
        effects: changes of Python objects, as capture describes them.
        made: where to find the new values that result and effects hold, in the order in which they count them.
        predicates: decisions that Python took on host numbers, and with `guard_data` on data.
        hoisted: beginnings of the state that the step makes.
        versions: input index -> how many in-place writes eager execution counts.
        fingerprint: equal for programs that compute the same.
        derivative: what makes results differentiable; the graph is then a joint one, and its last placeholders, the
            tangents, are not in `lifted`.
        memories: (input index, bytes on entry, bytes afterwards) where the step asks for or changes an input's memory.
        grad_mode: what the step leaves grad mode at, None when that is what it found.
        refused: (input, output, why) of each input whose new history cannot be differentiated.
        reshaped: (input, size, stride) of each input that the step makes a view of what it was.
    """

    step: StepGraph
    lifted: list[Lifted]
    slots: list[Slot]
    result: Any
    effects: list[Any]
    made: list[Made]
    predicates: list[Predicate]
    hoisted: Hoisted
    versions: dict[int, int]
    fingerprint: str
    derivative: Derivative | None = None
    memories: list[tuple[int, int, int]] = field(default_factory=list)
    grad_mode: bool | None = None
    refused: list[tuple[int, int, str]] = field(default_factory=list)
    reshaped: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    @property
    def n_inputs(self) -> int:
        """How many placeholders are inputs; those after them are tangents."""
        return len(self.step.signature.inputs) - (len(self.derivative.outputs) if self.derivative else 0)


def trace_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world: World,
    names: dict[int, str],
    new_values: Callable[[list[Any], Any], list[Any]],
    shared: frozenset[int] = frozenset(),
    guard_data: bool = False,
    differentiate: Differentiate | None = None,
    sizes: Sizes | None = None,
    reentrant: bool = True,
) -> Traced:
    """Runs a step once on fake tensors and records it.

    Args:
        fn: the step.
        world: capture's snapshot, taken just before; the caller restores it afterwards.
        names: id of a module -> its path.
        new_values: gives the values made in the step that effects and result hold.
        shared: memories that an earlier attempt found to be shared.
        guard_data: numbers and shapes that depend on data are read from the real inputs and become guards.
        differentiate: traces the backward of what the step leaves behind.
        sizes: takes the sizes of tensors among the arguments as symbols.
        reentrant: False to run checkpoints with ``use_reentrant=True`` as those without: gradients are the same.

    Raises:
        CaptureError: the step cannot be captured. Anything the step itself raises passes unchanged.
        SharedMemory, ReshapedInput, ReentrantCheckpoint: restore the world and try again.
    """
    recorder = Recorder(world.find, Whereabouts(names), shared, guard_data, world.parts, sizes)
    recorder.generators = world.generators
    recorder.twins = world.twin_ids
    parameters = [f.tensor for f in world.tensors.values() if f.kind == "parameter" and f.tensor.requires_grad]
    if sizes is not None:
        world.exchange({id(found.tensor): recorder.stand_in(found) for found in world.sizable()})
    before = world.versions()
    torch.clear_autocast_cache()

    @contextmanager
    def recording() -> Iterator[None]:
        exchange = exchanged(recorder, parameters, reentrant)
        with recorder.whereabouts.following(), exchange, CallWindow(recorder), recorder:
            yield

    grad_mode = torch.is_grad_enabled()
    with recording():
        args, kwargs = world.lift([recorder.lift_number(n.source, n.value) for n in world.numbers])
        with same_python_randomness():
            try:
                result = fn(*args, **kwargs)
            except Exception:
                with no_modes():
                    _refuse_shared_writes(recorder)  # had it been known, another error may have come first
                raise
    torch.clear_autocast_cache()
    recorder.refuse_changed()
    _refuse_shared_writes(recorder)
    _refuse_memories(recorder, world)
    outlet = Outlet(recorder, world.spread)
    try:
        effects, value = world.outcome(is_made, result)
    except LeakError as error:
        leak = LeakError(error.what, error.where or recorder.made_at(error.held), error.remedy)
        leak.grown = error.grown
        raise leak from None
    made = new_values(effects, value)
    outlet.observe(made)
    versions = _versions(recorder, before)
    homes = {index: Input("", source, kind) for index, (source, kind) in world.homes(effects).items()}
    hoisted = hoist(recorder, made, homes)
    places = [outlet.place(v, index in homes) for index, v in enumerate(made)]
    differentiated = differentiate(recorder, outlet, made, recording) if differentiate else None
    if differentiated:
        _refuse_late_effects(world, effects)
        _refuse_shared_writes(recorder)  # of inputs that it met besides: bases of those that the step writes
    traced = _finish(recorder, outlet, value, effects, places, hoisted, versions, differentiated, homes)
    if torch.is_grad_enabled() != grad_mode:
        traced.grad_mode = not grad_mode
    return traced


def _refuse_late_effects(world: World, effects: list[Any]) -> None:
    """A backward that runs outside of the step writes tensors, and changes no other object."""
    before = {str(effect) for effect in effects}
    late = [e for e in world.outcome(is_made, None)[0] if str(e) not in before]
    if late:
        raise UnsupportedError(
            f"a hook that runs in the backward of a compiled function changes {late[0].source}: {late[0]}",
            remedy="compile the whole step, its backward() included, or the modules inside of the one with the hook",
        )


def _refuse_shared_writes(recorder: Recorder) -> None:
    by_memory: dict[int, list[Lifted]] = {}
    for item in recorder.lifted:
        tensor = item.value
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or item.members:
            continue
        if tensor.numel() and memory_of(tensor):
            by_memory.setdefault(memory_of(tensor), []).append(item)
    written = [m for m, items in by_memory.items() if len(items) > 1 and any(_is_written(i) for i in items)]
    for item in (item for memory in written for item in by_memory[memory] if id(item.value) in recorder.parts):
        raise UnsupportedError(
            f"the step writes to memory that {item.source}, of which each rank holds a part, shares with others",
            remedy="pass a copy: tensor.clone()",
        )
    if written:
        raise SharedMemory(recorder.shared | frozenset(written))


def _refuse_memories(recorder: Recorder, world: World) -> None:
    for memory in recorder.memories.values():
        if world.spread or id(memory.item.value) in world.parts:
            raise UnsupportedError(
                f"the step asks for the memory of {memory.item.source}, of which each rank holds a part",
                remedy="leave storages alone in a step that is spread over ranks",
            )


def _is_written(item: Lifted) -> bool:
    return item.ref is not None and item.ref.storage.generation > 0


def _versions(recorder: Recorder, before: dict[int, int]) -> dict[Any, int]:
    """How often eager execution would have counted a write to each tensor."""
    counts: dict[Any, int] = {}
    for item in recorder.lifted:
        inside: list[Any] = [*item.members] or [item.value]
        for tensor in inside:
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                times = tensor._version - before.get(id(tensor), tensor._version)
                if times:
                    counts[item if not item.members else recorder.by_id[id(tensor)]] = times
    return counts


def _finish(
    recorder: Recorder,
    outlet: Outlet,
    result: Any,
    effects: list[Any],
    made: list[Made],
    hoisted: Hoisted,
    versions: dict[Any, int],
    backward: Differentiated | None,
    homes: dict[int, Input],
) -> Traced:
    rewritten = {id(item) for item, _, _ in (*backward.rewritten, *backward.refused)} if backward else set()
    rewritten |= {id(m.item) for m in recorder.memories.values() if not m.now}  # nowhere is left to write to
    written = [i for i in recorder.lifted if _is_written(i) and i.ref.parent is None and id(i) not in rewritten]  # type: ignore[union-attr]
    copied = [outlet.add_output(node) for _, node, _ in backward.rewritten] if backward else []
    refused = [(item, outlet.add_output(node), why) for item, node, why in backward.refused] if backward else []
    results = len(outlet.outputs)
    late = backward.late if backward else []
    gradients = [*backward.gradients, *(node for _, node in late)] if backward else []
    output = recorder.graph.output((*outlet.outputs, *(i.ref.storage.value for i in written), *gradients))  # type: ignore[union-attr]
    gm = lazy_graph_module(recorder.constants, recorder.graph)
    if backward and backward.slots:
        _set_phases(gm.graph, backward.last)
    dead_code(StepGraph(gm, Signature()))
    ranks = first_uses(gm.graph)
    written.sort(key=lambda item: ranks.get(item.node, len(ranks)))
    outlet.outputs.extend(item.ref.storage.value for item in written)  # type: ignore[union-attr]
    mutated = dict(enumerate(written, start=results))
    output.args = ((*outlet.outputs, *gradients),)
    in_slots = [recorder.lifted[s.input].node for s in outlet.slots if s.input is not None]
    needed = [*(i.node for i in mutated.values()), *in_slots]
    needed += [*(i.node for i in backward.inputs), *(i.node for i, _ in late)] if backward else []
    used = order_inputs(gm.graph, needed, backward.tangents if backward else [])
    gm.recompile()
    primary: dict[fx.Node, Lifted] = {}
    for item in recorder.lifted:
        primary.setdefault(item.node, item)
    primals = used[: len(used) - len(backward.tangents)] if backward else used
    lifted = [primary[node] for node in primals]
    known = {id(item) for item in lifted}
    reshaped = [(recorder.by_id[key], ref.geometry) for key, ref in recorder.reshaped.items()]
    served = [*recorder.lifted, *versions, *(i for i, _ in reshaped), *(m.item for m in recorder.memories.values())]
    served += [*backward.inputs, *(i for i, _, _ in (*backward.rewritten, *backward.refused))] if backward else []
    lifted += [item for item in dict.fromkeys(served) if id(item) not in known]
    new_index = {id(item): index for index, item in enumerate(lifted)}
    moved = [new_index[id(item)] for item in recorder.lifted]
    by_name = {i.name: i for i in recorder.inputs}
    step = StepGraph(
        gm,
        Signature(
            [by_name[str(node.target)] for node in used],
            len(outlet.outputs) + len(gradients),
            {output: new_index[id(item)] for output, item in mutated.items()},
            recorder.gradients,
            {output: home for index, home in homes.items() if (output := _own_output(outlet, made[index])) is not None},
        ),
    )
    derivative = None
    if backward and backward.slots:
        derivative = Derivative(
            len(outlet.outputs),
            tuple(backward.slots),
            tuple((new_index[id(i)], out, k) for (i, _, k), out in zip(backward.rewritten, copied, strict=True)),
            tuple(new_index[id(item)] for item in backward.inputs),
            tuple(backward.reaches),
            tuple(new_index[id(item)] for item, _ in late),
            tuple(backward.made),
            len(backward.gradients) - len(backward.made),
        )
    return Traced(
        step,
        lifted,
        [s if s.input is None else replace(s, input=moved[s.input]) for s in outlet.slots],
        result,
        effects,
        made,
        [replace(p, inputs=tuple(moved[i] for i in p.inputs)) for p in recorder.predicates.values() if p.inputs],
        hoisted,
        {new_index[id(item)]: times for item, times in versions.items()},
        fingerprint(step, recorder.constants, derivative),
        derivative,
        [(new_index[id(m.item)], m.before, m.now) for m in recorder.memories.values()],
        refused=[(new_index[id(item)], output, why) for item, output, why in refused],
        reshaped=[(new_index[id(item)], tuple(place.shape), tuple(place.stride)) for item, place in reshaped],
    )


def _own_output(outlet: Outlet, place: Made) -> int | None:
    """The output that is all of what the step leaves at a place."""
    slot = None if place.slot is None else outlet.slots[place.slot]
    return slot.output if slot is not None and slot.geometry is None else None


def _set_phases(graph: fx.Graph, last: fx.Node) -> None:
    """Forward is what ran before the backward of the whole began, a backward inside of the step included."""
    phase: Phase = "forward"
    for node in graph.nodes:
        if "info" in node.meta and node.op != "placeholder":
            set_info(node, replace(info(node), phase=phase))
        if node is last:
            phase = "backward"
