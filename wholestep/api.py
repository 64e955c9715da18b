"""The pipeline: a Python step -> a captured, lowered program that runs in its place."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from wholestep.autograd import Joint, Partition, default_partition
from wholestep.autograd.compiled_backward import CompiledBackward
from wholestep.autograd.differentiate import differentiate
from wholestep.capture import (
    PartOf,
    Snapshot,
    compile_binder,
    forget,
    hollow,
    new_values,
    no_collection,
    refuse_shared_parts,
    snapshot,
)
from wholestep.dynamic import Templates, shapes
from wholestep.errors import CaptureError, LazyError, WholestepError
from wholestep.ir import StepGraph, check, info
from wholestep.lower import Backend, lower
from wholestep.override import Override, Overrides
from wholestep.passes import transformed
from wholestep.report import Explanation, explain
from wholestep.runtime import Backward, Entry, Missed, Program, compiled_module, give_back, saved_places
from wholestep.spmd import DeviceMesh, Launch, Plan
from wholestep.trace import SharedMemory, Traced, trace_step
from wholestep.trace.sizes import Sizes

Pass = Callable[[StepGraph], StepGraph]
Look = Callable[..., Snapshot]  # called as `snapshot` is

_tracing = threading.local()
_capturing = threading.RLock()  # a capture exchanges functions of torch for all threads

# A step that keeps needing new captures is misused: better an error than minutes lost in silence.
MAX_ENTRIES = 32
# Of programs for many sizes: how many stay, and how many of them with their memory.
MAX_SIZES, AT_HAND = 64, 8


def build(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    launch: Launch,
    passes: Sequence[Pass],
    backend: Backend,
    programs: dict[str, Program],
    varying: frozenset[str] = frozenset(),
    guard_data: bool = False,
    halving: Halving | None = None,
    look: Look = snapshot,
    overrides: Sequence[Override] = (),
    templates: Templates | None = None,
    steps: dict[str, StepGraph] | None = None,
) -> Entry:
    """From one call to a program: every stage of Wholestep, in order.

    Args:
        launch: mesh and plans, whose passes come first.
        programs: those lowered before, by fingerprint; a capture that computes the same shares one.
        varying: paths of numbers that are inputs of the step rather than guards.
        guard_data: numbers and shapes that depend on data become guards, not errors.
        halving: how a joint graph of forward and backward becomes two programs.
        look: takes the snapshot.
        overrides: transform the graph that the plans have made.
        templates: captures for many sizes, which this one may come from.
        steps: graphs that went through all passes before, by the same key as programs.
    """
    take = capture if templates is None else templates
    world, traced = take(fn, args, kwargs, varying, guard_data, not launch.passes, look, launch.part)
    key = launch.key(traced.step, traced.fingerprint)
    program = programs.get(key)
    if program is None:
        step = (steps or {}).pop(key, None) or of_one_rank(traced, launch, overrides, passes)
        examples = [info(node).value for node in step.placeholders]
        if traced.derivative is None:
            program = Program(step, lower(step, examples, backend), traced.fingerprint)
        else:
            program = in_halves(step, traced, backend, halving or Halving())
        programs[key] = program
    inputs = traced.step.signature.inputs[: traced.n_inputs]
    values = [world.original(item.value) for item in traced.lifted[: len(inputs)]]
    written = [traced.lifted[i].source for i in traced.step.signature.mutations.values()]
    mutated = [source for source in written if source is not None]
    refuse_shared_parts(world, mutated)
    terms = launch.start(traced.step, program.packed.whole, inputs, values, world.parts)
    cut = launch.cut(program.placements, inputs, values, world.parts)
    if cut.moved:
        again = fn, args, kwargs, launch, passes, backend, programs, varying, guard_data, halving, look, overrides
        return build(*again, templates, steps)
    if cut.any:
        world = look(fn, args, kwargs, names=world.names, varying=varying)
    bound = [item.source for item in traced.lifted if item.source is not None]
    binder = compile_binder(world, bound, mutated=mutated)
    binder.prepare(traced.effects, traced.result, args, kwargs)
    forget(traced.effects, traced.result)
    return Entry(traced, binder, program, releases=backend == "aten", terms=terms)


def of_one_rank(traced: Traced, launch: Launch, overrides: Sequence[Override], passes: Sequence[Pass]) -> StepGraph:
    """The graph that this rank runs: what was traced, after plans, overrides and passes."""
    step = check(traced.step, "trace")
    for transform in (*launch.passes, *_last_words(overrides, traced), *passes):
        step = check(transform(step), _name(transform))
    return step


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


@dataclass(frozen=True)
class Halving:
    """How a joint graph is cut, and the backend of its backward (None: that of the forward)."""

    partition: Partition = default_partition
    backend: Backend | None = None


def in_halves(step: StepGraph, traced: Traced, backend: Backend, halving: Halving) -> Program:
    """Partitions a joint graph and lowers forward and backward."""
    joint = joint_of(step, traced)
    halves = halving.partition(joint)
    forward, backward = (
        lower(half, [info(node).value for node in half.placeholders], target)
        for half, target in ((halves.forward, backend), (halves.backward, halving.backend or backend))
    )
    return Program(step, forward, traced.fingerprint, Backward(halves, backward, saved_places(joint, halves)))


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


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varying: frozenset[str] = frozenset(),
    guard_data: bool = False,
    differentiable: bool = True,
    look: Look = snapshot,
    part: PartOf | None = None,
    sizes: list[Sizes] | None = None,
) -> tuple[Snapshot, Traced]:
    """Runs the step once on fake tensors; everything real is as before when it returns or raises.

    Args:
        guard_data: numbers and shapes that depend on data become guards, not errors.
        differentiable: whether results that require grad shall be differentiable outside of the step.
        part: in the global view, what a tensor without a mark is of a whole one.
        sizes: given, sizes of tensors among the arguments are symbols, which are its last entry then.
    """
    with _capturing:
        world = look(fn, args, kwargs, varying=varying)
        shared: frozenset[int] = frozenset()
        backward = differentiate if differentiable and world.differentiable else None
        while True:
            try:
                _tracing.active = True
                names = world.module_names()
                world.put_wholes(part)
                world.put_twins()
                step = world.twins.exchange(fn)
                symbols = None
                if sizes is not None:
                    symbols = Sizes()
                    sizes.append(symbols)
                how = shared, guard_data, backward, symbols
                return world, trace_step(step, args, kwargs, world, names, new_values, *how)
            except SharedMemory as request:
                shared = request.memories
            finally:
                _tracing.active = False
                world.restore()


class Compiled:
    """A training step that is captured at its first call and replayed afterwards.

    Attributes:
        recompiles: why calls needed a new program, one reason each; empty while the first still serves.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        launch: Launch,
        passes: Sequence[Pass],
        backend: Backend,
        guard_data: bool = False,
        look: Look = snapshot,
        halving: Halving | None = None,
        module_override: Sequence[Override] = (),
        dynamic: bool = False,
    ) -> None:
        self._dynamic = dynamic
        functools.update_wrapper(self, fn, updated=())
        self._look, self._module_override = look, module_override
        self._fn, self._launch, self._passes, self._backend = fn, launch, tuple(passes), backend
        self._guard_data, self._halving = guard_data, halving
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Forgets all captures, and which modules are replaced."""
        self._overrides = Overrides(self._module_override)
        self._entries: list[Entry] = []
        self._programs: dict[str, Program] = {}
        self._steps: dict[str, StepGraph] = {}  # explained, not run yet
        self._varying: frozenset[str] = frozenset()
        self._fixed: frozenset[str] = frozenset()
        self._templates = Templates(capture) if self._dynamic else None
        self.recompiles: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(_tracing, "active", False):  # inside of another step's capture: part of that step
            return self._fn(*args, **kwargs)
        return self.serve(args, kwargs)

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[], Any] | None = None) -> Any:
        """One call of the step.

        Args:
            ready: called once it is clear which program serves, before it runs.
        """
        with self._lock:
            missed = Missed("")
            for entry in self._candidates(args, kwargs):
                outcome = entry(args, kwargs, self._begin(entry, ready) if self._launch.view else ready)
                if type(outcome) is not Missed:
                    if entry is not self._entries[0]:
                        self._prefer(entry)
                    return outcome
                missed = missed if missed.reason else outcome
            self._launch.miss()
            try:
                entry = self._capture(args, kwargs, missed)
            except LazyError:  # the call that gives lazy modules their parameters
                if self._launch.view:
                    raise
                return self._fn(*args, **kwargs)
            outcome = entry(args, kwargs, ready)
            if type(outcome) is Missed:
                raise WholestepError(f"a fresh capture does not serve the call it was made from: {outcome.reason}")
            return outcome

    def _candidates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Entry]:
        """The entries that may serve a call: with one for each size, those of its sizes, else one for its reason."""
        if self._templates is None:
            return list(self._entries)
        wanted = shapes((args, kwargs))
        return [e for e in self._entries if e.shapes == wanted] or self._entries[:1]

    def _prefer(self, entry: Entry) -> None:
        """Puts an entry first; with one for each size, those not used lately give back their memory."""
        if entry in self._entries:
            self._entries.remove(entry)
        self._entries.insert(0, entry)
        if self._templates is not None:
            serving = [e.program for e in self._entries[:AT_HAND]]
            for unused in self._entries[AT_HAND:]:
                if unused.program not in serving:
                    unused.program.rest()
            for gone in self._entries[MAX_SIZES:]:
                self._entries.remove(gone)
                self._programs = {k: p for k, p in self._programs.items() if p is not gone.program}

    def _begin(self, entry: Entry, ready: Callable[[], Any] | None) -> Callable[[], Any]:
        def begin() -> None:
            self._launch.begin(entry.terms)
            if ready is not None:
                ready()

        return begin

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], missed: Missed) -> Entry:
        if (len(self._entries) if self._templates is None else self._templates.captures) >= MAX_ENTRIES:
            raise CaptureError(
                f"the step was captured {MAX_ENTRIES} times; the last call differs again: {missed.reason}",
                remedy="keep the number that changes in a tensor, or compile a smaller part of the step",
            )
        known = len(self._programs)
        for program in self._programs.values():
            program.rest()  # their arenas are empty between calls, and tracing needs memory too
        try:
            with no_collection():  # hundreds of thousands of small objects, few of them garbage
                entry = self._build(args, kwargs, missed.varying - self._fixed)
        except Exception as error:
            self._launch.withdraw(error)
            raise
        give_back()
        reason = missed.reason
        if self._templates is not None:
            reason = reason if self._templates.reason is None else self._templates.reason
            entry.shapes = shapes((args, kwargs))
        if known and len(self._programs) > known and reason:
            self.recompiles.append(reason)
        self._prefer(entry)
        return entry

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any], varying: frozenset[str]) -> Entry:
        """Captures with a number that was another before as an input, or as it is where that cannot be."""
        make = functools.partial(
            build,
            self._fn,
            args,
            kwargs,
            self._launch,
            self._passes,
            self._backend,
            self._programs,
            guard_data=self._guard_data,
            look=self._view,
            halving=self._halving,
            overrides=self._overrides.transforming,
            templates=self._templates,
            steps=self._steps,
        )
        if varying <= self._varying:
            return make(self._varying)
        try:
            entry = make(self._varying | varying)
        except Exception:  # a size, an index, a text: or the step's own error, which comes again
            inputs = self._varying
            for path in sorted(varying) if len(varying) > 1 else ():
                inputs |= self._can_vary(args, kwargs, inputs, path)
            self._fixed |= varying - inputs
            entry, varying = make(inputs), inputs
        self._varying |= varying
        return entry

    @property
    def _view(self) -> Look:
        """How this step takes snapshots."""
        return _view(self._look, self._module_override, self._overrides)

    def _can_vary(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], others: frozenset[str], path: str
    ) -> frozenset[str]:
        """The path, if the number there can be an input."""
        try:
            capture(self._fn, args, kwargs, others | {path}, self._guard_data, look=self._view)
        except Exception:
            return frozenset()
        return frozenset([path])

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What a call would do, before it does: collectives, bytes, memory, and where they come from.

        Nothing runs, changes or communicates, so that one process can look at a rank of any world:
        ``comm.init_process_group("null", rank=0, world_size=256)``. Models may be of fake tensors, when they and their
        optimizers are arguments of the step.

        Args:
            args, kwargs: as for a call.

        Returns:
            An `Explanation`, for `print` and with fields.

        Raises:
            CaptureError: the step cannot be captured.
        """
        with self._lock, no_collection():
            given = args
            fn, args, kwargs = hollow(self._fn, args, kwargs)
            look = self._view if args is given else _view(self._look, self._module_override)
            launch = self._launch
            traced = capture(fn, args, kwargs, self._varying, self._guard_data, not launch.passes, look, launch.part)[1]
            key = launch.key(traced.step, traced.fingerprint)
            program = self._programs.get(key)
            step = program.step if program is not None else self._steps.get(key)
            if step is None:
                step = of_one_rank(traced, launch, self._overrides.transforming, self._passes)
                if args is given:  # not copies that stand for fake tensors
                    self._steps[key] = step
            title = f"{getattr(self, '__name__', type(self._fn).__name__)}{launch}"
            whole = traced.step if launch.view else None
            return explain(title, step, whole, launch.axes, self.captures, self.recompiles)

    def _latest(self) -> Program:
        if not self._entries:
            raise ValueError("nothing is captured yet: call the step once first")
        return self._entries[0].program

    @property
    def specialized(self) -> list[str]:
        """With ``dynamic=True``: the sizes that only one value serves, and the line that decided so."""
        return list(self._templates.specialized) if self._templates is not None else []

    @property
    def captures(self) -> int:
        """How many captures serve calls now."""
        return len(self._entries)

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The captured graphs, after all passes; the latest used comes first."""
        return list({id(e.program): e.program.step.gm for e in self._entries}.values())

    @property
    def code(self) -> str:
        """The generated program that served last, as readable Python."""
        return self._latest().code


def _view(look: Look, overrides: Sequence[Override], known: Overrides | None = None) -> Look:
    """A way to take snapshots in which modules are replaced.

    Args:
        known: the overrides with what they have replaced so far.
    """
    return functools.partial(look, replace=(known or Overrides(overrides)).replace) if overrides else look


def compile(  # noqa: A001 - the ecosystem's name
    fn: Callable[..., Any] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    plan: Plan | Sequence[Plan] | None = None,
    backend: Backend = "aten",
    passes: Sequence[Pass] = (),
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    module_override: Sequence[Override] = (),
    guard_data: bool = False,
    dynamic: bool | None = None,
) -> Any:
    """Makes a training step run as one captured program.

    Args:
        fn: the step, or None to use this as a decorator with options.
        mesh: the ranks that run the step together; every rank compiles and calls it alike.
        plan: what they do along an axis of the mesh (`DataParallel`), or several plans, applied in order.
        backend: ``"aten"`` (bitwise equal to eager), ``"inductor"``, or a callable
            ``(gm, example_inputs) -> callable``.
        passes: functions ``StepGraph -> StepGraph``, applied in order; those that change rounding are here.
        gm_transformation: a function ``GraphModule -> GraphModule``, called once per program, last.
        module_override: instances of `Override`: other modules to trace in the place of some, and functions on the
            graph that the plans have made.
        guard_data: what Python or a shape needs of the data (``if loss > 0``, ``x[mask]``, ``int(t)``) becomes a guard
            instead of an error. Whatever it follows from is then computed once more before each call, and another
            value means another capture.
        dynamic: True for one capture that serves many sizes of the tensors among the arguments: each new size gets a
            program of its own from it, without the step's Python being run again. Sizes that Python or an operator
            decides on become guards; those that only one value serves are listed in ``specialized``. Sizes of 0 and 1
            are apart. None and False: a capture for each set of shapes.

    Returns:
        A `Compiled`, or a decorator when ``fn`` is None. For a module, a module that shares its parameters, buffers,
        children and attributes and has those of a `Compiled` besides. Results that require grad can be differentiated
        outside, as in eager.

    Raises:
        PlanError: mesh and plan do not fit each other.
        ValueError: ``dynamic=True`` with a mesh.
    """
    if dynamic and mesh is not None:
        raise ValueError("dynamic=True is for one process: with a mesh, each set of shapes is a capture")
    if fn is None:
        options: dict[str, Any] = {"mesh": mesh, "plan": plan, "backend": backend, "passes": passes}
        options |= {"module_override": module_override, "guard_data": guard_data, "dynamic": dynamic}
        return functools.partial(compile, **options, gm_transformation=gm_transformation)
    if not callable(fn):
        raise TypeError(f"ws.compile takes a function, a method or a module, not {type(fn).__name__}")
    chain = [*passes, _as_pass(gm_transformation)] if gm_transformation is not None else list(passes)

    def make(callee: Callable[..., Any]) -> Compiled:
        more: dict[str, Any] = {"module_override": module_override, "dynamic": bool(dynamic)}
        return Compiled(callee, Launch(mesh, plan), chain, backend, guard_data, **more)

    if not isinstance(fn, nn.Module):
        return make(fn)
    again: dict[str, Any] = {"mesh": mesh, "plan": plan, "backend": backend, "passes": chain}
    again |= {"module_override": module_override, "guard_data": guard_data, "dynamic": dynamic}
    return compiled_module(fn, make, functools.partial(compile, **again))


def _as_pass(transform: Callable[[fx.GraphModule], fx.GraphModule]) -> Pass:
    def gm_transformation(step: StepGraph) -> StepGraph:
        return transformed(step, transform, "gm_transformation")

    return gm_transformation


def trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.GraphModule:
    """The graph of one call of ``fn``, as captured; nothing is run and nothing changes."""
    return capture(fn, args, kwargs, differentiable=False)[1].step.gm


def _compile_backward(fn: Callable[..., Any], backend: Backend, look: Look) -> Compiled:
    """The pipeline for a backward: as for a step of one process, from a snapshot of its own."""
    return Compiled(fn, Launch(None, None), (), backend, look=look)


CompiledBackward.pipeline = staticmethod(_compile_backward)
