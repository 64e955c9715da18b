"""The pipeline: a call of a Python step -> a captured, lowered program that serves such calls.

May import: aot_autograd, capture, capture_call, ir, lower, override, passes, runtime, spmd, tensor_parts, trace.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from wholestep.aot_autograd import Joint, MemoryBudget, Partition, default_partition, fit_memory
from wholestep.capture import (
    Args,
    Binder,
    InitialState,
    Kwargs,
    Snapshot,
    forget,
    read_by,
    refuse_shared_parts,
)
from wholestep.capture_call import TakeSnapshot, capture
from wholestep.ir import Input, Pass, StepGraph, check
from wholestep.lower import Backend, lower
from wholestep.lower.plan.peak_memory import fullest
from wholestep.override import Override
from wholestep.passes import transformed
from wholestep.runtime import Backward, Entry, Program, donated_inputs
from wholestep.spmd import PlanExecutor, shard_inputs
from wholestep.tensor_parts import say_parts, say_whole
from wholestep.trace import Traced
from wholestep.trace.numbers.dynamic_shapes import Templates

# Backends whose results are eager's, bit for bit.
EXACT = ("aten", "naive")


@dataclass(frozen=True)
class Options:
    """The settings of a compiled step.

    Attributes:
        executor: mesh and plans, whose passes come first.
        partition: cuts a joint graph of forward and backward in two.
        backward: the backend of the second; that of the first when None.
        donates: the step's first argument is a list of tensors that a call donates: memory that nobody else holds is
            free as soon as the program has read it.
        fullgraph: a step that cannot be replayed is refused, instead of its Python running at each call.
        memory_budget: what its tensors may take.
        module_override: other modules to trace in the place of some, and transformations of the graph.
    """

    executor: PlanExecutor
    passes: Sequence[Pass] = ()
    backend: Backend = "aten"
    partition: Partition = default_partition
    backward: Backend | None = None
    donates: bool = False
    fullgraph: bool = True
    memory_budget: MemoryBudget | None = None
    module_override: Sequence[Override] = ()

    @property
    def may_run_python(self) -> bool:
        """Whether the step's Python may run at each call, where it cannot be replayed."""
        return not self.fullgraph and not self.module_override

    @property
    def may_run_eagerly(self) -> bool:
        """Whether eager gives the same as a program, and the user has asked for no program of a kind."""
        asked = self.passes or self.memory_budget is not None
        return self.may_run_python and not asked and self.backend in EXACT

    @property
    def decides(self) -> bool:
        """Whether the step's Python may decide on bools that the program computes: another one may have to begin."""
        return not (self.executor.reduces or self.donates or self.fullgraph) and self.backend in EXACT

    @property
    def many_sizes(self) -> bool:
        """Whether one program may serve many sizes: numbers in its graph know more than passes and backends ask for."""
        alone = not self.passes and not self.module_override and self.memory_budget is None
        return self.backend == "aten" and alone and not self.donates and self.executor.plain


@dataclass
class Known:
    """What earlier calls of a step have left.

    Attributes:
        programs: those that entries hold, by key; a capture that computes the same shares one.
        steps: graphs that went through all passes before, by the same key, not run yet.
        templates: captures for many sizes, which a call's may come from.
        outcomes: of bools that the ranks decide on together, what is known of the call under way; None without.
        initial: optimizer state made for the capture under way, to be taken out until its first run has succeeded.
        traced: whether the capture under way, or the last one, has got past the step itself.
    """

    programs: MutableMapping[str, Program] = field(default_factory=WeakValueDictionary)
    steps: dict[str, StepGraph] = field(default_factory=dict)
    templates: Templates | None = None
    outcomes: tuple[str, ...] | None = None
    initial: InitialState = field(default_factory=functools.partial(InitialState, None))
    traced: bool = False


def build(
    fn: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    options: Options,
    known: Known,
    varying: frozenset[str] = frozenset(),
    take: TakeSnapshot = Snapshot,
    overrides: Sequence[Override] = (),
) -> Entry:
    """From one call to a program: every stage of Wholestep, in order.

    Args:
        known: is added to.
        varying: paths of numbers that are inputs of the step rather than guards.
        take: takes the snapshot.
        overrides: transform the graph that the plans have made.
    """
    executor, capture_for = options.executor, known.templates or capture
    while True:
        # capture and trace, with the state that optimizers make in their first step
        known.traced = False
        seen = take(fn, args, kwargs, varying=varying)
        initial = known.initial = InitialState(seen)
        look = take if initial else _once(seen, take, varying)  # what it has made is in sight from now on
        if options.decides and executor.plain:  # which may be taken after an update
            initial.fill()
        how = options.decides, executor.plain, look, executor.parts, executor.buffer_broadcast, known.outcomes
        world, traced = capture_for(fn, args, kwargs, varying, *how)
        known.traced, logged = True, world.reachable.outside
        original, parts, signature = world.substitutes.original, world.substitutes.parts, traced.step.signature
        read = {id(original(item.value)) for item in traced.inputs}
        dropped = initial.drop(kept=read)
        if overrides:  # which may look at it
            initial.fill()

        # passes and lowering
        donated = None
        if options.donates:
            donated = donated_inputs(traced, len(args[0]), read_by(traced.effects, traced.result))
            signature.donated = donated.freed
        program = _program(traced, options, known, overrides)
        if traced.many is not None:
            traced.many.decisions = program.sizes
            traced.many = None if program.sizes.specialized else traced.many

        # the ranks agree, and whole tensors become the parts that the program keeps
        mutated = [traced.inputs[i].source for i in signature.mutations.values()]
        refuse_shared_parts(world, mutated)
        terms, cut = _start(executor, world, traced, program, initial)
        initial.fill()
        if not cut.moved:
            break  # else the program is for another layout than tensors have as parts

    # guards, and a fast path around what is there now
    owners = [container.owner for container in world.containers] if parts or cut.any else []
    said = say_parts(owners) | (executor.view is not None and say_whole(owners))
    if cut.any or dropped or said:
        unread = world.replaced_gradients
        world = take(fn, args, kwargs, names=world.names, varying=world.varying)
        world.replaced_gradients = unread
    bound = [item.source for item in traced.inputs]
    sizeless = traced.many.paths if traced.many is not None else frozenset[str]()
    binder = Binder(world, bound, mutated, traced.effects, traced.result, sizeless)
    forget(traced.effects, traced.result)
    logged.log()
    return Entry(traced, binder, program, releases=options.backend == "aten", terms=terms, donated=donated)


def _once(seen: Snapshot, take: TakeSnapshot, varying: frozenset[str]) -> TakeSnapshot:
    """Takes snapshots as ``take`` does, the first one of a call excepted, which is there."""
    there = [seen]

    def look(*call: Any, **how: Any) -> Snapshot:
        return there.pop() if there and how == {"varying": varying} else take(*call, **how)

    return look


def _start(
    executor: PlanExecutor, world: Snapshot, traced: Traced, program: Program, initial: InitialState
) -> tuple[Any, Any]:
    """Has the ranks agree on a program, then cuts what each of them holds whole and the program has in parts."""
    parts, signature = world.substitutes.parts, traced.step.signature
    inputs = signature.inputs[: traced.n_inputs]
    values = [world.substitutes.original(item.value) for item in traced.inputs[: len(inputs)]]
    unused = world.trained_besides({item.source for item in inputs})  # rank 0's all the same
    spread = [*inputs, *(Input("", f.source.text, f.kind) for f in unused)], [*values, *(f.tensor for f in unused)]
    terms = executor.start(traced.step, program.packed.unpack, *spread, parts, initial)
    return terms, shard_inputs(program.placements, inputs, values, parts)


def _program(traced: Traced, options: Options, known: Known, overrides: Sequence[Override]) -> Program:
    """The program of what was traced: one made before for the same, or passes and lowering."""
    key = options.executor.key(traced.step, traced.fingerprint)
    if options.donates:
        key = f"{key}\n{sorted(traced.step.signature.donated)}"
    program = known.programs.get(key)
    if program is None:
        step = known.steps.pop(key, None) or of_one_rank(traced, options, overrides)
        if traced.derivative is None:
            program = Program(step, lower(step, options.backend))
        else:
            program = _partitioned(step, traced, options)
        known.programs[key] = program
    return program


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
    for transform in (*options.executor.passes_of(step), *_overriding(overrides, traced), *options.passes):
        step = check(transform(step), _name(transform))
        yield _name(transform), step
    if options.memory_budget is not None and traced.derivative is None:
        yield "recomputation", fit_memory(step, options.memory_budget, fullest)


def _overriding(overrides: Sequence[Override], traced: Traced) -> list[Pass]:
    """The overrides' transformations as passes."""
    if not overrides:
        return []
    flat = [item.value for item in traced.inputs[: traced.n_inputs]]

    def overriding(override: Override) -> Pass:
        name = f"{type(override).__qualname__}.transform"
        return functools.partial(transformed, transform=lambda gm: override.transform(gm, flat), name=name)

    return [overriding(override) for override in overrides]


def _partitioned(step: StepGraph, traced: Traced, options: Options) -> Program:
    """Partitions a joint graph and lowers forward and backward."""
    joint = joint_of(step, traced)
    halves = options.partition(joint)
    behind = options.backward or options.backend
    forward = lower(halves.forward, options.backend)
    made = functools.partial(lower, backend=behind)
    backward = Backward(halves, made, behind in EXACT)
    return Program(step, forward, backward)


def joint_of(step: StepGraph, traced: Traced) -> Joint:
    """A traced step with a backward as a joint graph; ``step`` is its graph, after passes."""
    assert traced.derivative is not None
    count = traced.n_inputs
    derivative = traced.derivative
    rewritten = tuple(i for i, *_ in derivative.rewritten if i < count)
    return Joint(step, count, derivative.n_forward, rewritten, derivative.inputs[: derivative.n_given])


def _name(transform: Pass) -> str:
    named = getattr(transform, "__name__", None) or getattr(transform, "keywords", {}).get("name")
    bound = getattr(transform, "func", transform)  # of a partial
    return str(named or getattr(bound, "__name__", bound))
