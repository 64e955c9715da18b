"""Tracing: a step run once on fake tensors under the recorder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from wholestep.capture import Args, Effect, Kwargs, Snapshot, new_values, outcome, state_outputs
from wholestep.capture.effects.recipes import Value
from wholestep.capture.guards.compared_values import memory
from wholestep.capture.outside.stand_ins import refused_by
from wholestep.errors import CaptureError, DataDependentError, LeakError, UnsupportedError
from wholestep.ir import Input
from wholestep.nested import leaves
from wholestep.torch_compat import FakeTensor, makes_subclass, no_modes, without_saved_tensor_hooks
from wholestep.trace.numbers.decisions import OTHERWISE
from wholestep.trace.numbers.host_numbers import is_for_plain
from wholestep.trace.numbers.symbolic_sizes import Sizes, is_made
from wholestep.trace.outputs.collect_outputs import OutputCollector
from wholestep.trace.outputs.leaks import empty_caches, failed, made_at
from wholestep.trace.patches.function_mode import ReplacedGradients, TorchCalls
from wholestep.trace.patches.python_patches import patched_python
from wholestep.trace.record.finish import Differentiate, SharedMemory, Traced, finish
from wholestep.trace.record.inputs import TracedInput
from wholestep.trace.record.provenance import Provenance
from wholestep.trace.record.recorder import Recorder
from wholestep.trace.record.user_line import RunningCode, line_of

MAKES_SUBCLASS = "make it outside of the step, and pass it the plain tensor"


def trace_step(
    fn: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    world: Snapshot,
    shared: frozenset[int] = frozenset(),
    decides: bool = False,
    differentiate: Differentiate | None = None,
    sizes: Sizes | None = None,
    reentrant: bool = True,
    begin: Callable[[Recorder], None] | None = None,
    outcomes: Sequence[str] | None = None,
) -> Traced:
    """Runs a step once on fake tensors and records it.

    Args:
        fn: the step.
        world: capture's snapshot, taken just before; the caller restores it afterwards.
        shared: memories that an earlier attempt found to be shared.
        decides: Python may decide on bools that are not known before the step.
        differentiate: traces the backward of what the step leaves behind.
        sizes: takes the sizes of tensors among the arguments as symbols.
        reentrant: False to run checkpoints with ``use_reentrant=True`` as those without: gradients are the same.
        begin: called with the recorder before the step runs.
        outcomes: what is known of bools that the ranks decide on together; None where they do not.

    Raises:
        CaptureError: the step cannot be captured. Anything the step itself raises passes unchanged.
        SharedMemory, ReentrantCheckpoint, UnmetCode: restore the world and try again.
    """
    recorder = Recorder(world, Provenance(world.module_names()), shared, decides, sizes, outcomes)
    called = recorder.builder.provenance.called = RunningCode(world, _recorded.__code__)
    if sizes is not None:
        wanted = sizes.among(world.sizable())
        fakes = {id(found.tensor): recorder.inputs.with_symbolic_sizes(found) for found in wanted}
        world.substitutes.exchange(fakes)
    if begin is not None:
        begin(recorder)
    try:
        traced = _recorded(recorder, fn, args, kwargs, differentiate, reentrant)
        called.done()
        return traced
    except BaseException:
        empty_caches(frozen=True)
        failed.watch = recorder.builder.watch
        called.done()  # whatever else came of it
        raise
    finally:
        recorder.forget()


def _recorded(
    recorder: Recorder, fn: Callable[..., Any], args: Any, kwargs: Any, differentiate: Any, reentrant: bool
) -> Traced:
    world = recorder.inputs.world
    parameters = [f.tensor for f in world.tensors.values() if f.kind == "parameter"]  # some may come to require grad
    gradients = ReplacedGradients(parameters)
    before = world.versions()
    world.clear_autocast_cache()

    @contextmanager
    def recording() -> Iterator[None]:
        mode = TorchCalls(recorder, gradients)
        patches = patched_python(recorder, parameters, gradients, reentrant, mode.patches())
        with without_saved_tensor_hooks(), recorder.builder.provenance.following(), patches, mode, recorder:
            yield

    grad_mode = torch.is_grad_enabled()
    with recording():
        recorder.hooks_before = RemovableHandle.next_id  # without those of `recording`
        args, kwargs = world.substitutes.lift([recorder.numbers.input(n.source, n.value) for n in world.numbers])
        result = _run(recorder, fn, args, kwargs)
    if recorder.numbers.refusal is not None:  # the step went on past it, on a way that eager would not have taken
        raise recorder.numbers.refusal
    world.clear_autocast_cache()
    recorder.inputs.refuse_changed()
    _refuse_shared_writes(recorder)
    _refuse_storages(recorder)
    collector = OutputCollector(recorder, world.substitutes.spread)
    world.replaces_gradients(gradients.tensors)
    recorder.builder.watch.add(value for value in world.substitutes.standing() if not isinstance(value, FakeTensor))
    effects, value = _outcome(world, result, fn)
    new = new_values(effects, value)
    moved = dict(recorder.inputs.moved)
    collector.observe([*new, *(there.fake for _, there in moved.values())])
    versions = _versions(recorder, before)
    stays = {index: Input("", source, kind) for index, (source, kind) in state_outputs(effects).items()}
    places = [collector.new_value(v, index in stays) for index, v in enumerate(new)]
    collector.move_inputs()
    backward = differentiate(recorder, collector, new, recording) if differentiate else None
    if backward:
        _refuse_late_effects(world, effects)
        if moved != recorder.inputs.moved:
            raise UnsupportedError("a hook that runs in the backward of a compiled function assigns .data")
        _refuse_shared_writes(recorder)  # of inputs that only it reads: bases of those that the step writes
    traced = finish(recorder, collector, value, effects, places, versions, backward, stays)
    if torch.is_grad_enabled() != grad_mode:
        traced.grad_mode = not grad_mode
    return traced


def _run(recorder: Recorder, fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Runs the step; an error of its own, raised for what capture put there, is raised in our words."""
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        with no_modes():
            _refuse_shared_writes(recorder)  # had it been known, another error may have come first
        other = _in_our_words(error, recorder.numbers.refusal)
        for found in (error, other):  # from an object that capture put there, or about what it did
            if isinstance(found, CaptureError) and not found.where:
                found.locate(line_of(error))
        if other is not None:
            explains = isinstance(other, DataDependentError) or other is recorder.numbers.refusal
            raise other from (error if explains or makes_subclass(error) else None)
        raise


def _outcome(world: Snapshot, result: Any, fn: Callable[..., Any]) -> tuple[list[Effect], Value]:
    """What the step has changed, and its result; a leak names the line that made what leaks."""
    try:
        return outcome(world, is_made, result)
    except LeakError as error:
        error.locate(error.where or made_at(error.held) or made_at(inspect.unwrap(fn)) or line_of(error))
        raise error.with_traceback(None) from None


def _in_our_words(error: Exception, refusal: CaptureError | None) -> CaptureError | None:
    """Why the step cannot be captured, where that made it fail; None where the error is its own."""
    if isinstance(error, (TypeError, ValueError)) and is_for_plain(error) and refusal is None:
        remedy = f"give it float(…) or int(…) of the number; if it comes from a tensor, {OTHERWISE}"
        return DataDependentError(f"Python needs a plain number: {error}", remedy)
    if isinstance(error, TypeError) and refusal is None and (of_schedule := refused_by(error)) is not None:
        return of_schedule
    if isinstance(error, TypeError) and "match pattern must be a" in str(error):
        what = "the step has a class pattern of type itself, for which another function stands while it is traced"
        return UnsupportedError(what, "write isinstance(value, type) in its place")
    if makes_subclass(error):
        return UnsupportedError(f"the step makes a tensor of a subclass: {error}", MAKES_SUBCLASS)
    if refusal is not None and not isinstance(error, CaptureError):  # which C code replaced by an error of its own
        return refusal
    if any(isinstance(leaf, FakeTensor) for leaf in leaves((error.args, vars(error)))):
        what = f"the step raises {type(error).__name__} with a tensor that it computed, which has no values yet"
        return UnsupportedError(what, "raise it outside of the step, or without the tensor")
    return None


def _refuse_late_effects(world: Snapshot, effects: list[Any]) -> None:
    """A backward that runs outside of the step writes tensors, and changes no other object."""
    found = outcome(world, is_made)[0]
    before, after = ({str(effect) for effect in some} for some in (effects, found))
    late = [effect for effect in (*found, *effects) if str(effect) not in before & after]  # made, or taken back
    if late:
        raise UnsupportedError(
            f"a hook that runs in the backward of a compiled function changes {late[0].source}: {late[0]}",
            remedy="compile the whole step, its backward() included, or the modules inside of the one with the hook",
        )


def _refuse_shared_writes(recorder: Recorder) -> None:
    inputs = recorder.inputs
    by_memory: dict[int, list[TracedInput]] = {}
    for item in inputs.items:
        tensor = item.value
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or item.members:
            continue
        if tensor.numel() and memory(tensor):
            by_memory.setdefault(memory(tensor), []).append(item)
    parts = inputs.world.substitutes.parts
    for item in (item for item in inputs.reached.values() if id(item.value) in parts):
        what = f"the step reads memory beyond the elements of {item.source}, of which each rank holds a part"
        raise UnsupportedError(what, remedy="pass all of that memory as an argument")
    written = {m: items for m, items in by_memory.items() if len(items) > 1 and any(i.is_written for i in items)}
    for item in (item for items in written.values() for item in items if id(item.value) in parts):
        raise UnsupportedError(
            f"the step writes to memory that {item.source}, of which each rank holds a part, shares with others",
            remedy="pass a copy: tensor.clone()",
        )
    if written or inputs.reached:
        raise SharedMemory(inputs.shared | written.keys() | inputs.reached.keys())


def _refuse_storages(recorder: Recorder) -> None:
    world = recorder.inputs.world
    for item in (size.item for size in recorder.storages.known):
        if world.substitutes.spread or id(item.value) in world.substitutes.parts:
            raise UnsupportedError(
                f"the step asks for the memory of {item.source}, of which each rank holds a part",
                remedy="leave storages alone in a step that is spread over ranks",
            )


def _versions(recorder: Recorder, before: dict[int, int]) -> dict[TracedInput, int]:
    """How often eager execution would have counted a write to each tensor."""
    counts: dict[TracedInput, int] = {}
    for item in recorder.inputs.items:
        inside: list[Any] = [*item.members] or [item.value]
        for tensor in inside:
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                times = tensor._version - before.get(id(tensor), tensor._version)
                if times:
                    counts[item if not item.members else recorder.inputs.by_id[id(tensor)]] = times
    return counts
