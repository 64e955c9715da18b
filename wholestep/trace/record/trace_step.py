"""Tracing: a step run once on fake tensors under the recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wholestep.capture import Snapshot, new_values, outcome, state_outputs
from wholestep.errors import CaptureError, DataDependentError, LeakError, UnsupportedError
from wholestep.ir import Input
from wholestep.torch_compat import FakeTensor, no_modes
from wholestep.trace.numbers.host_numbers import is_for_plain
from wholestep.trace.numbers.symbolic_sizes import Sizes, is_made
from wholestep.trace.outputs.hoisted_state import hoist
from wholestep.trace.outputs.leaks import made_at
from wholestep.trace.outputs.replaced_gradients import ReplacedGradients
from wholestep.trace.outputs.results import Outlet
from wholestep.trace.patches.function_mode import CallWindow
from wholestep.trace.patches.python_patches import exchanged
from wholestep.trace.record.finish import finish, is_written
from wholestep.trace.record.inputs import Lifted, memory_of
from wholestep.trace.record.options import Setting
from wholestep.trace.record.provenance import Whereabouts, line_of
from wholestep.trace.record.recorder import Recorder
from wholestep.trace.traced import Differentiate, SharedMemory, Traced


def trace_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world: Snapshot,
    shared: frozenset[int] = frozenset(),
    guard_data: bool = False,
    differentiate: Differentiate | None = None,
    sizes: Sizes | None = None,
    reentrant: bool = True,
    begin: Callable[[Recorder], None] | None = None,
) -> Traced:
    """Runs a step once on fake tensors and records it.

    Args:
        fn: the step.
        world: capture's snapshot, taken just before; the caller restores it afterwards.
        shared: memories that an earlier attempt found to be shared.
        guard_data: numbers and shapes that depend on data are read from the real inputs and become guards.
        differentiate: traces the backward of what the step leaves behind.
        sizes: takes the sizes of tensors among the arguments as symbols.
        reentrant: False to run checkpoints with ``use_reentrant=True`` as those without: gradients are the same.
        begin: called with the recorder before the step runs.

    Raises:
        CaptureError: the step cannot be captured. Anything the step itself raises passes unchanged.
        SharedMemory, ReshapedInput, ReentrantCheckpoint: restore the world and try again.
    """
    how = shared, guard_data, world.substitutes.parts, sizes, world.substitutes.ids, world.generators, world.ask
    recorder = Recorder(Setting(world.find, Whereabouts(world.module_names()), *how))
    parameters = [f.tensor for f in world.tensors.values() if f.kind == "parameter" and f.tensor.requires_grad]
    if sizes is not None:
        world.substitutes.exchange({id(found.tensor): recorder.stand_in(found) for found in world.sizable()})
    if begin is not None:
        begin(recorder)
    gradients = ReplacedGradients(parameters)
    before = world.versions()
    torch.clear_autocast_cache()

    @contextmanager
    def recording() -> Iterator[None]:
        window = CallWindow(recorder, gradients)
        exchange = exchanged(recorder, parameters, gradients, reentrant, window.exchanges())
        with recorder.whereabouts.following(), exchange, window, recorder:
            yield

    grad_mode = torch.is_grad_enabled()
    with recording():
        args, kwargs = world.substitutes.lift([recorder.lift_number(n.source, n.value) for n in world.numbers])
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            with no_modes():
                _refuse_shared_writes(recorder)  # had it been known, another error may have come first
            if isinstance(error, CaptureError) and not error.where:  # from an object that capture put there
                error.locate(line_of(error))
            if isinstance(error, TypeError) and is_for_plain(error) and recorder.refusal is None:
                remedy = "give it float(…) or int(…) of the number, with guard_data=True if it comes from a tensor"
                raise DataDependentError(f"Python needs a plain number: {error}", line_of(error), remedy) from error
            if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
                name = str(error).partition("HigherOrderOperator ")[2].partition(" ")[0]
                what = f"the step calls the higher-order operator {name}, which tracing cannot follow"
                remedy = "write it as a Python loop or branch, or with torch.where"
                raise UnsupportedError(what, line_of(error), remedy) from None
            if recorder.refusal is not None and not isinstance(error, CaptureError):
                raise recorder.refusal from error  # which C code met with an error of its own
            raise
    if recorder.refusal is not None:  # the step went on past it, on a way that eager would not have taken
        raise recorder.refusal
    torch.clear_autocast_cache()
    recorder.refuse_changed()
    _refuse_shared_writes(recorder)
    _refuse_memories(recorder, world)
    outlet = Outlet(recorder, world.substitutes.spread)
    world.replaces_gradients(gradients.tensors)
    recorder.watch.add(value for value in world.substitutes.standing() if not isinstance(value, FakeTensor))
    try:
        effects, value = outcome(world, is_made, result)
    except LeakError as error:
        leak = LeakError(error.what, error.where or made_at(error.held) or made_at(fn) or line_of(error), error.remedy)
        leak.grown, leak.optional = error.grown, error.optional
        raise leak from None
    made = new_values(effects, value)
    outlet.observe(made)
    versions = _versions(recorder, before)
    homes = {index: Input("", source, kind) for index, (source, kind) in state_outputs(effects).items()}
    hoisted = hoist(recorder, made, homes)
    places = [outlet.place(v, index in homes) for index, v in enumerate(made)]
    differentiated = differentiate(recorder, outlet, made, recording) if differentiate else None
    if differentiated:
        _refuse_late_effects(world, effects)
        _refuse_shared_writes(recorder)  # of inputs that it met besides: bases of those that the step writes
    traced = finish(recorder, outlet, value, effects, places, hoisted, versions, differentiated, homes)
    recorder.tokens.clear()  # numbers of which each holds the recorder
    if torch.is_grad_enabled() != grad_mode:
        traced.grad_mode = not grad_mode
    return traced


def _refuse_late_effects(world: Snapshot, effects: list[Any]) -> None:
    """A backward that runs outside of the step writes tensors, and changes no other object."""
    before = {str(effect) for effect in effects}
    late = [e for e in outcome(world, is_made)[0] if str(e) not in before]
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
    written = [m for m, items in by_memory.items() if len(items) > 1 and any(is_written(i) for i in items)]
    for item in (item for item in recorder.reached.values() if id(item.value) in recorder.parts):
        what = f"the step reads memory beyond the elements of {item.source}, of which each rank holds a part"
        raise UnsupportedError(what, remedy="pass all of that memory as an argument")
    for item in (item for memory in written for item in by_memory[memory] if id(item.value) in recorder.parts):
        raise UnsupportedError(
            f"the step writes to memory that {item.source}, of which each rank holds a part, shares with others",
            remedy="pass a copy: tensor.clone()",
        )
    written += recorder.reached.keys()
    if written:
        raise SharedMemory(recorder.shared | frozenset(written))


def _refuse_memories(recorder: Recorder, world: Snapshot) -> None:
    for memory in recorder.memories.values():
        if world.substitutes.spread or id(memory.item.value) in world.substitutes.parts:
            raise UnsupportedError(
                f"the step asks for the memory of {memory.item.source}, of which each rank holds a part",
                remedy="leave storages alone in a step that is spread over ranks",
            )


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
