"""A compiled step: which of its programs serves a call, and when a new one is captured.

May import: capture, co_run, deferred_init, errors, override, pipeline, report, runtime, step_log, torch_compat, trace.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from wholestep import pipeline
from wholestep.capture import Guard, GuardFailure, InitialState, materialize_fakes, no_collection, snapshot
from wholestep.co_run import CoRun, is_deferring
from wholestep.deferred_init import allocated, any_deferred, fill, record_of
from wholestep.errors import PACKAGE, BreakError, CaptureError, LazyError, UnsupportedError, WholestepError
from wholestep.override import Override, Overrides
from wholestep.report import Explanation, Stage, explain, explain_segments
from wholestep.runtime import Entries, Entry, Program, give_back
from wholestep.step_log import Logged, collecting
from wholestep.torch_compat import modes_active, needs_memory, skipped_by_dynamo, transforms_active
from wholestep.trace import Traced
from wholestep.trace.numbers.dynamic_shapes import Templates, shapes
from wholestep.trace.record.provenance import line_of

# A step that keeps needing new captures is misused: better an error than minutes lost in silence.
MAX_ENTRIES = 32


@skipped_by_dynamo
class Compiled:
    """A training step that is captured at its first call and replayed afterwards.

    Attributes:
        recompiles: why calls needed a new program, one reason each; empty while the first still serves.
        breaks: why the step cannot be replayed, so that its Python runs at each call (`co_run/`).
        eager_calls: how many calls ran in eager, since their sizes had not come before.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        options: pipeline.Options,
        take: pipeline.TakeSnapshot = snapshot,
        module_override: Sequence[Override] = (),
        dynamic: bool | None = False,
    ) -> None:
        fn = fn._fn if isinstance(fn, Compiled) else fn
        functools.update_wrapper(self, fn, updated=())
        self._fn: Callable[..., Any] = fn
        self._options, self._executor = options, options.executor
        self._take, self._module_override, self._dynamic = take, module_override, dynamic
        self._lock = threading.RLock()
        self.reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by name where it stands under its function's name, else with its function; copies capture anew."""
        name, found = getattr(self, "__qualname__", ""), sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else super().__reduce_ex__(protocol)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._fn, self._options, self._take, self._module_override, self._dynamic

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """In a class, a compiled function is a method, as the function is."""
        return self if instance is None or not isinstance(self._fn, FunctionType) else MethodType(self, instance)

    def __repr__(self) -> str:
        """Its name, how often it was captured, and the arguments that the last program used serves."""
        served = f"\n  {', '.join(self._entries[0].binder.arguments) or 'no tensors'}" if self._entries else ""
        return f"<Compiled {self._title}, captures: {self.captures}, recompiles: {len(self.recompiles)}>{served}"

    @property
    def _title(self) -> str:
        return f"{getattr(self, '__name__', type(self._fn).__name__)}{self._executor}"

    def reset(self) -> None:
        """Forgets all captures, and which modules are replaced."""
        self._overrides = Overrides(self._module_override)
        self._entries = Entries()
        templates = self._dynamic is not False and self._executor.plain
        many = self._options.many_sizes and not self._module_override
        how = pipeline.capture, bool(self._dynamic), many
        self._known = pipeline.Known(templates=Templates(*how) if templates else None)
        self.eager_calls = 0
        self._varying: frozenset[str] = frozenset()
        self._fixed: frozenset[str] = frozenset()
        self.recompiles: list[str] = []
        self.breaks: list[str] = []
        self._co_run: CoRun | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # part of another step, or of a transform of `torch.func`, or of what TorchScript traces
        if pipeline.is_tracing() or transforms_active() or is_deferring() or torch.jit.is_tracing():
            return self._fn(*args, **kwargs)
        if modes_active() and self._executor.plain and not self._module_override:  # they see eager's calls
            return self._fn(*args, **kwargs)
        return self.serve(args, kwargs)

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[], Any] | None = None) -> Any:
        """One call of the step.

        Args:
            ready: called once it is clear which program serves, before it runs.
        """
        outcome = self._serve_locked(args, kwargs, ready)
        return outcome.deliver() if type(outcome) is Logged else outcome

    def _serve_locked(self, args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[], Any] | None) -> Any:
        with self._lock:
            if not self._executor.is_distributed:
                return self._serve(args, kwargs, ready, Entry.__call__)
            self._executor.enter_call(getattr(self, "__qualname__", type(self._fn).__name__))
            try:
                return self._serve(args, kwargs, ready, self._run)
            except BaseException as error:
                self._executor.abort_call(error)
                raise

    def _serve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[], Any] | None, run: Callable[..., Any]
    ) -> Any:
        if self._co_run is not None and not self._executor.plain:  # on all ranks
            return self._co_run(*args, **kwargs)
        failure, wanted = GuardFailure(""), None
        failed: list[Exception] = []  # user code runs when they are handled: it asks for the one being handled, too
        if self._entries.sized:
            wanted = shapes((args, kwargs))
        self._entries.calls += 1
        for entry in self._entries.candidates(wanted):
            if not entry.may_follow(failure.outcomes):
                continue
            try:
                outcome = run(entry, args, kwargs, ready)
            except BreakError as error:  # another rank cannot replay this call
                failed.append(error)
                break
            if type(outcome) is not GuardFailure:
                if wanted is not None:
                    self._entries.note(entry, wanted)
                if entry is not self._entries[0]:
                    self._prefer(entry)
                return outcome
            failure = outcome if outcome.outcomes or not failure.reason else failure
        if failed:
            return self._break(failed.pop(), args, kwargs)
        if self._co_run is None and failure.outcomes and self._may_break and not self._entries.may_branch():
            self._entries.forget_branches()
            what = f"Python decides otherwise from call to call: {failure.reason}"
            return self._break(CaptureError(what), args, kwargs)
        if wanted is not None and not failure.outcomes and self._replaceable and self._entries.is_new(wanted):
            self.eager_calls += 1
            return collecting(self._fn)(*args, **kwargs)
        if self._co_run is not None:
            return self._co_run(*args, **kwargs)
        self._executor.announce_capture()
        outcome = failure
        while type(outcome) is GuardFailure:  # again where Python decides otherwise than in a capture for many sizes
            try:
                entry = self._capture(args, kwargs, outcome)
            except Exception as error:
                if not self._is_served(error):
                    raise
                failed.append(error)
            if failed:
                return self._break(failed.pop(), args, kwargs)
            outcome = self._first(entry, args, kwargs, ready, run)
        return outcome

    def _first(self, entry: Entry, args: Any, kwargs: Any, ready: Any, run: Callable[..., Any]) -> Any:
        """Serves the call that an entry was captured for; where that fails, optimizers have no state, as before."""
        try:
            outcome = run(entry, args, kwargs, ready)
            if type(outcome) is GuardFailure:
                if outcome.outcomes and self._known.templates is not None and self._known.templates.reason == "":
                    return outcome
                raise WholestepError(f"internal error: guards failed on the call they were made from: {outcome.reason}")
            if self._known.initial is not None:
                self._known.initial.keep()
            return outcome
        finally:
            self._undo()

    @property
    def _may_break(self) -> bool:
        """Whether the step's Python may run at each call."""
        return not self._options.fullgraph and not self._module_override

    def _is_served(self, error: Exception) -> bool:
        """Whether the step's Python runs where it could not be captured."""
        if isinstance(error, LazyError):
            return not self._executor.view
        return self._may_break and not self._is_passes_own(error) and self._executor.announce_break(error)

    def _is_passes_own(self, error: Exception) -> bool:
        """Whether passes or a backend of the user's own have failed, which running the step otherwise would hide."""
        options = self._options
        given = bool(options.passes) or callable(options.backend) or options.memory_budget is not None
        return given and self._known.traced and not isinstance(error, CaptureError)

    def _break(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves a call that cannot be captured, and all those to come that no program serves."""
        if isinstance(error, LazyError):  # the call that gives lazy modules their parameters
            return self._fn(*args, **kwargs)
        for tensor in self._deferred(args, kwargs):
            fill(tensor)
        _let_go(error)
        co_run = CoRun(self._fn, collecting(self._fn), self._options)
        if any(map(needs_memory, (error, error.__cause__))):
            co_run.eager = "C++ reads memory of tensors in it past the dispatcher"
        reason = str(error)
        if not isinstance(error, CaptureError):  # the step's own comes again, after what it did before
            result = co_run(*args, **kwargs)
            self._co_run = co_run
            self.breaks.append(f"{type(error).__name__} while it was captured: {reason}")
            return result
        self._co_run = co_run
        self.breaks.append(reason)
        return co_run(*args, **kwargs)

    def _undo(self) -> None:
        """Takes out the optimizer state made for a capture that failed, or whose first run did."""
        if self._known.initial is not None:
            self._known.initial.drop()
            self._known.initial = None

    @property
    def _replaceable(self) -> bool:
        """Whether eager gives the same as a program, and the user has asked for no program of a kind."""
        options = self._options
        asked = options.passes or options.memory_budget is not None
        exact = self._may_break and not asked and options.backend in pipeline.EXACT
        return exact and self._co_run is None

    def _prefer(self, entry: Entry) -> None:
        """Puts an entry first; programs of those that go are known no more."""
        templates = self._known.templates
        for gone in self._entries.prefer(entry, templates is not None and bool(templates.known)):
            self._known.programs = {k: p for k, p in self._known.programs.items() if p is not gone.program}

    def _run(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[], Any] | None
    ) -> Any:
        """Runs a program whose ranks wait for each other: all begin together, and learn when one fails on its way."""
        running = False

        def begin() -> None:
            nonlocal running
            self._executor.check_call(entry.terms)
            if ready is not None:
                ready()
            running = True

        try:
            return entry(args, kwargs, begin)
        except BaseException as error:
            if running:
                self._executor.abort_group(error)
            raise

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], failure: GuardFailure) -> Entry:
        if (len(self._entries) if self._known.templates is None else self._known.templates.captures) >= MAX_ENTRIES:
            way = "keep the number that changes in a tensor"
            if " shape: " in failure.reason:
                way = "pad to a few sizes" if self._dynamic is None else "compile with dynamic=None, pad to a few sizes"
            raise CaptureError(
                f"the step was captured {MAX_ENTRIES} times; the last call differs again: {failure.reason}",
                remedy=f"{way}, or compile a smaller part of the step",
            )
        if self._known.templates is not None:
            self._known.templates.decided = failure.outcomes
        for program in self._known.programs.values():
            program.release_memory()  # their arenas are empty between calls, and tracing needs memory too
        try:
            with no_collection():  # hundreds of thousands of small objects, few of them garbage
                entry = self._build(args, kwargs, failure.varying - self._fixed)
        except BaseException as error:
            self._undo()
            if isinstance(error, RecursionError) and _is_ours(error):
                what = "arguments, state or results of the step are nested too deeply for Python's recursion limit"
                remedy = "nest them less deeply, or raise sys.setrecursionlimit()"
                raise UnsupportedError(what, line_of(error), remedy) from None
            if isinstance(error, CaptureError) and not error.where:  # of what the step can see, or found at its end
                error.locate(line_of(error))
            raise
        give_back()
        reason = failure.reason
        templates = self._known.templates
        if templates is not None:
            reason = "; ".join([reason if templates.reason is None else templates.reason, *templates.notes])
            entry.shapes = {shapes((args, kwargs))}
        if self._entries and reason:
            self.recompiles.append(reason)
        self._prefer(entry)
        return entry

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any], varying: frozenset[str]) -> Entry:
        """Captures with a number that was another before as an input, or as it is where that cannot be."""
        def make(inputs: frozenset[str]) -> Entry:
            how = self._options, self._known, inputs, self._taking(), self._overrides.transforming
            with allocated(self._deferred(args, kwargs)):
                entry = pipeline.build(self._fn, args, kwargs, *how)
            pipeline.refuse_leaks(entry)
            return entry

        entry, inputs = None, self._varying | varying
        if not varying <= self._varying:
            with suppress(Exception):  # a size, an index, a text: or the step's own error, which comes again
                entry = make(inputs)
            if entry is None:
                inputs = self._varying
                for path in sorted(varying) if len(varying) > 1 else ():
                    inputs |= self._can_vary(args, kwargs, inputs, path)
                self._fixed |= varying - inputs
        if entry is None:
            entry = make(inputs)
        self._varying = inputs
        return entry

    def _deferred(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Tensors that the step can see and that have no values yet."""
        seen = snapshot(self._fn, args, kwargs).tensors.values() if any_deferred() else ()
        return [found.tensor for found in seen if record_of(found.tensor) is not None]

    def _taking(self, overrides: Overrides | None = None) -> pipeline.TakeSnapshot:
        """How this step takes snapshots, in which modules are replaced; by default as they were so far."""
        replacing = overrides or self._overrides
        return functools.partial(self._take, replace=replacing.replace) if replacing.overrides else self._take

    def _can_vary(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], others: frozenset[str], path: str
    ) -> frozenset[str]:
        """The path, if the number there can be an input."""
        try:
            pipeline.capture(self._fn, args, kwargs, others | {path}, self._options.decisions, take=self._taking())
        except Exception:
            return frozenset()
        return frozenset([path])

    def _dry_capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Traced, bool]:
        """A capture that no call is served from, and whether it is of real tensors."""
        given, executor = args, self._executor
        fn, args, kwargs = materialize_fakes(self._fn, args, kwargs)
        take = self._taking() if args is given else self._taking(Overrides(self._module_override))
        how = self._varying, self._options.decisions, executor.plain, take, executor.parts, executor.buffer_broadcast
        initial = InitialState(take(fn, args, kwargs))
        try:
            if args is given and self._options.decisions != "none":
                initial.fill()
            return pipeline.capture(fn, args, kwargs, *how)[1], args is given
        finally:
            initial.drop()

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What a call would do, before it does: collectives, bytes, memory, and where they come from.

        Of a step whose Python runs at each call, why it does and which segments were compiled so far, each with its
        operators, the bytes of results that outlive it, and the line that ends it.

        Nothing runs, changes or communicates, so that one process can look at a rank of any world:
        ``comm.init_process_group("null", rank=0, world_size=256)``. Models may be of fake tensors, when they and their
        optimizers are arguments of the step.

        Args:
            args, kwargs: as for a call.

        Returns:
            An `Explanation`, for `print` and with fields.

        Raises:
            CaptureError: the step cannot be captured, and its Python may not run at each call.
        """
        with self._lock, no_collection():
            executor = self._executor
            if self._co_run is not None:
                return explain_segments(self._title, self._co_run.segments, self._co_run.eager, self.breaks)
            try:
                traced, real = self._dry_capture(args, kwargs)
            except CaptureError as error:
                if not self._may_break:
                    raise
                return explain_segments(self._title, [], "", [str(error)])
            key = executor.key(traced.step, traced.fingerprint)
            program = self._known.programs.get(key)
            step = program.step if program is not None else self._known.steps.get(key)
            if step is None:
                step = pipeline.of_one_rank(traced, self._options, self._overrides.transforming)
                if real:  # not copies that stand for fake tensors
                    self._known.steps[key] = step
            whole = traced.step if executor.view else None
            said = self.captures, self.recompiles, self.eager_calls
            return explain(self._title, step, whole, executor.axes, *said)

    def stages(self, *args: Any, **kwargs: Any) -> list[Stage]:
        """What each pass makes of the graph of a call: print one to see the difference. Nothing runs, as in `explain`.

        Args:
            args, kwargs: as for a call.

        Returns:
            The stages in order, the traced graph first.

        Raises:
            CaptureError: the step cannot be captured.
        """
        with self._lock, no_collection():
            traced, _ = self._dry_capture(args, kwargs)
            found: list[Stage] = []
            for name, step in pipeline.stages_of_one_rank(traced, self._options, self._overrides.transforming):
                found.append(Stage.of(name, step, found[-1] if found else None))
            return found

    def _latest(self) -> Program:
        if not self._entries:
            raise ValueError("nothing is captured yet: call the step once first")
        return self._entries[0].program

    @property
    def specialized(self) -> list[str]:
        """The sizes that are no symbols although they vary, or ``dynamic=True`` wants it, and the line that decided."""
        return list(self._known.templates.specialized) if self._known.templates is not None else []

    @property
    def backwards(self) -> list[str]:
        """Why a backward was made anew for gradients that lie otherwise, or do not arrive: one reason each."""
        programs = {id(e.program): e.program for e in self._entries}.values()
        return [reason for p in programs if p.backward is not None for reason in p.backward.reasons]

    @property
    def guards(self) -> list[Guard]:
        """What must hold for the program that served last: a later call that differs in one of these needs another.

        Each has a ``source`` (``L['x']``, ``L['self'].fc.weight``), a ``kind`` and what is ``expected`` there; sizes
        are among them also where one capture serves many. Empty for a step whose Python runs at each call.
        """
        return list(self._entries[0].guards) if self._entries else []

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


def _let_go(error: BaseException | None) -> None:
    """Has an error, and those behind it, hold no frames, with which results of calls would live on."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _is_ours(error: Exception) -> bool:
    """Whether it is this package that has gone too deep, and none of the user's functions."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return sum(file.startswith(PACKAGE) for file in files) > len(files) // 3
