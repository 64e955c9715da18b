"""The pipeline: a call of a Python step -> a captured, lowered program that serves such calls.

May import: aot_autograd, capture, errors, ir, lower, override, passes, runtime, spmd, trace.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from wholestep.aot_autograd import Joint, Partition, default_partition
from wholestep.aot_autograd.differentiate import differentiate
from wholestep.capture import (
    InitialState,
    PartsOf,
    Snapshot,
    births,
    compile_binder,
    forget,
    read_by,
    refuse_shared_parts,
    snapshot,
)
from wholestep.errors import LeakError
from wholestep.ir import Pass, StepGraph, check, info
from wholestep.lower import Backend, lower
from wholestep.override import Override
from wholestep.passes import transformed
from wholestep.runtime import Backward, Entry, Program, saved_places, spending
from wholestep.spmd import BufferSync, Launch
from wholestep.trace import ReentrantCheckpoint, ReshapedInput, SharedMemory, Traced, trace_step
from wholestep.trace.numbers.dynamic_shapes import Templates
from wholestep.trace.numbers.symbolic_sizes import Sizes
from wholestep.trace.outputs.leaks import Watch, empty_caches

Look = Callable[..., Snapshot]  # called as `snapshot` is

# Backends whose results are eager's, bit for bit.
EXACT = ("aten", "naive")

_tracing = threading.local()
_capturing = threading.RLock()  # a capture puts fake numbers and aliases where all threads see them


@dataclass(frozen=True)
class Halving:
    """How a joint graph is cut, and the backend of its backward (None: that of the forward)."""

    partition: Partition = default_partition
    backend: Backend | None = None


@dataclass(frozen=True)
class Options:
    """What is asked of a compiled step.

    Attributes:
        launch: mesh and plans, whose passes come first.
        guard_data: numbers and shapes that depend on data become guards, not errors.
        halving: how a joint graph of forward and backward becomes two programs.
        spends: the step's first argument is a list of tensors that a call gives up: memory that nobody else holds is
            free as soon as the program has read it.
    """

    launch: Launch
    passes: Sequence[Pass] = ()
    backend: Backend = "aten"
    guard_data: bool = False
    halving: Halving = Halving()
    spends: bool = False


@dataclass
class Known:
    """What earlier calls of a step have left.

    Attributes:
        programs: those lowered before, by key; a capture that computes the same shares one.
        steps: graphs that went through all passes before, by the same key, not run yet.
        templates: captures for many sizes, which a call's may come from.
        initial: optimizer state made for the capture under way, until its first run has succeeded.
    """

    programs: dict[str, Program] = field(default_factory=dict)
    steps: dict[str, StepGraph] = field(default_factory=dict)
    templates: Templates | None = None
    initial: InitialState | None = None


def build(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    known: Known,
    varying: frozenset[str] = frozenset(),
    look: Look = snapshot,
    overrides: Sequence[Override] = (),
) -> Entry:
    """From one call to a program: every stage of Wholestep, in order.

    Args:
        known: is added to.
        varying: paths of numbers that are inputs of the step rather than guards.
        look: takes the snapshot.
        overrides: transform the graph that the plans have made.
    """
    entry, watch = _entry(fn, args, kwargs, options, known, varying, look, overrides)
    with _capturing:  # no other thread's capture has set garbage aside
        watch.refuse()  # all that may hold what was made for the capture has let go
    return entry


def _entry(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    known: Known,
    varying: frozenset[str],
    look: Look,
    overrides: Sequence[Override],
) -> tuple[Entry, Watch]:
    """What `build` gives, with what tells whether somebody holds what was only there for the capture."""
    launch = options.launch
    take = known.templates or capture
    initial = known.initial = InitialState(look(fn, args, kwargs, varying=varying))
    world, traced = take(fn, args, kwargs, varying, options.guard_data, launch.plain, look, launch.parts, launch.sync)
    read = {id(world.substitutes.original(item.value)) for item in traced.lifted}
    dropped = initial.drop(unless=lambda tensor: id(tensor) in read)
    if overrides:  # which may look at it
        initial.fill()
    spent = spending(traced, len(args[0]), read_by(traced.effects, traced.result)) if options.spends else None
    traced.step.signature.dying = spent.dying if spent else frozenset()
    program = _program(traced, options, known, overrides)
    inputs = traced.step.signature.inputs[: traced.n_inputs]
    values = [world.substitutes.original(item.value) for item in traced.lifted[: len(inputs)]]
    written = [traced.lifted[i].source for i in traced.step.signature.mutations.values()]
    mutated = [source for source in written if source is not None]
    refuse_shared_parts(world, mutated)
    terms = launch.start(traced.step, program.packed.whole, inputs, values, world.substitutes.parts, initial)
    cut = launch.cut(program.placements, inputs, values, world.substitutes.parts)
    if cut.moved:
        initial.fill()
        return _entry(fn, args, kwargs, options, known, varying, look, overrides)
    initial.fill()
    if cut.any or dropped:
        unread = world.replaced_gradients
        world = look(fn, args, kwargs, names=world.names, varying=world.varying)
        world.replaced_gradients = unread
    bound = [item.source for item in traced.lifted if item.source is not None]
    binder = compile_binder(world, bound, mutated=mutated)
    binder.prepare(traced.effects, traced.result, args, kwargs)
    forget(traced.effects, traced.result)
    entry = Entry(traced, binder, program, releases=options.backend == "aten", terms=terms, spending=spent)
    del world, look
    return entry, traced.watch


def _program(traced: Traced, options: Options, known: Known, overrides: Sequence[Override]) -> Program:
    """The program of what was traced: one made before for the same, or passes and lowering."""
    key = options.launch.key(traced.step, traced.fingerprint)
    if options.spends:
        key = f"{key}\n{sorted(traced.step.signature.dying)}"
    if key not in known.programs:
        step = known.steps.pop(key, None) or of_one_rank(traced, options, overrides)
        if traced.derivative is None:
            known.programs[key] = Program(step, _lowered(step, options.backend), traced.fingerprint)
        else:
            known.programs[key] = in_halves(step, traced, options.backend, options.halving)
    return known.programs[key]


def of_one_rank(traced: Traced, options: Options, overrides: Sequence[Override]) -> StepGraph:
    """The graph that this rank runs: what was traced, after plans, overrides and passes."""
    # one at a time: the graphs between are as large as the last
    ((_, step),) = deque(stages_of_one_rank(traced, options, overrides), maxlen=1)
    return step


def stages_of_one_rank(
    traced: Traced, options: Options, overrides: Sequence[Override]
) -> Iterator[tuple[str, StepGraph]]:
    """The names of the passes, "trace" first, each with the graph that it gives."""
    step = check(traced.step, "trace")
    yield "trace", step
    for transform in (*options.launch.passes_of(step), *_last_words(overrides, traced), *options.passes):
        step = check(transform(step), _name(transform))
        yield _name(transform), step


def _last_words(overrides: Sequence[Override], traced: Traced) -> list[Pass]:
    """The overrides' transformations as passes."""
    if not overrides:
        return []
    beginnings = dict(zip(map(id, traced.hoisted.state), traced.hoisted.begin(), strict=True))
    flat = [beginnings.get(id(item), item.value) for item in traced.lifted[: traced.n_inputs]]

    def last_word(override: Override) -> Pass:
        name = f"{type(override).__qualname__}.transform"
        return functools.partial(transformed, transform=lambda gm: override.transform(gm, flat), name=name)

    return [last_word(override) for override in overrides]


def in_halves(step: StepGraph, traced: Traced, backend: Backend, halving: Halving) -> Program:
    """Partitions a joint graph and lowers forward and backward."""
    joint = joint_of(step, traced)
    halves = halving.partition(joint)
    behind = halving.backend or backend
    forward = _lowered(halves.forward, backend)
    made = functools.partial(_lowered, backend=behind)
    backward = Backward(halves, saved_places(joint, halves), made, behind in EXACT)
    return Program(step, forward, traced.fingerprint, backward)


def _lowered(step: StepGraph, backend: Backend) -> Callable[..., Sequence[Any]]:
    return lower(step, [info(node).value for node in step.placeholders], backend)


def joint_of(step: StepGraph, traced: Traced) -> Joint:
    """A traced step with a backward as a joint graph; ``step`` is its graph, after passes."""
    assert traced.derivative is not None
    count = traced.n_inputs
    derivative = traced.derivative
    rewritten = tuple(i for i, *_ in (*derivative.rewritten, *traced.refused) if i < count)
    return Joint(step, count, derivative.n_forward, rewritten, derivative.inputs[: derivative.n_given])


def _name(transform: Pass) -> str:
    function = transform.func if isinstance(transform, functools.partial) else transform
    return getattr(function, "__name__", str(function))


def is_tracing() -> bool:
    """True inside of a step that this thread is capturing."""
    return getattr(_tracing, "active", False)


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varying: frozenset[str] = frozenset(),
    guard_data: bool = False,
    differentiable: bool = True,
    look: Look = snapshot,
    parts: PartsOf | None = None,
    sync: BufferSync | None = None,
    sizes: list[Sizes] | None = None,
) -> tuple[Snapshot, Traced]:
    """Runs the step once on fake tensors; everything real is as before when it returns or raises.

    Args:
        guard_data: numbers and shapes that depend on data become guards, not errors.
        differentiable: whether results that require grad shall be differentiable outside of the step.
        parts: in the global view, what tensors without a mark are of whole ones.
        sync: in the local view, what broadcasts buffers.
        sizes: given, sizes of tensors among the arguments are symbols, which are its last entry then.
    """
    with _capturing, births() as young:
        world = look(fn, args, kwargs, varying=varying)
        asked, optional = varying, frozenset[str]()
        shared: frozenset[int] = frozenset()
        reshaped: frozenset[int] = frozenset()
        reentrant = True
        first: LeakError | None = None
        backward = differentiate if differentiable and world.differentiable else None
        while True:
            try:
                _tracing.active = True
                world.new_ids = young
                world.substitutes.put(parts, world.differentiable, reshaped)
                step = world.substitutes.aliases.exchange(fn)
                symbols = None
                if sizes is not None:
                    symbols = Sizes()
                    sizes.append(symbols)
                how = shared, guard_data, backward, symbols, reentrant, sync.begin if sync else None
                traced = _traced(step, args, kwargs, world, *how)
                if sync is None or not sync.again():
                    return world, traced
            except SharedMemory as request:
                shared = request.memories
            except ReshapedInput as request:
                reshaped |= {id(request.tensor)}
            except ReentrantCheckpoint:
                reentrant = False
            except LeakError as leak:  # once more, not looking into lists that the step appends to
                if leak.read and optional & varying:
                    varying, first = varying - optional, None
                elif leak.grown <= varying:  # none, or none that can stay unseen
                    raise (first or leak) if leak.read else leak  # noqa: B904
                else:
                    first, varying = leak, varying | leak.grown
                    optional = leak.grown if leak.optional else optional
            finally:
                _tracing.active = False
                world.restore()
            if varying != asked:
                world, asked = look(fn, args, kwargs, varying=varying), varying
                world.read_lists = optional - varying


def _traced(*given: Any) -> Traced:
    """What `trace_step` gives; when it raises, no cache holds what the attempt made."""
    try:
        return trace_step(*given)
    except BaseException:
        empty_caches()
        raise
