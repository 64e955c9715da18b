"""A compiled step: which of its programs serves a call, and when a new one is captured.

May import: capture, capturer, co_run, deferred_init, errors, override, pipeline, report, runtime, step_log,
torch_compat, trace.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from wholestep import pipeline
from wholestep.capture import NOT_AS_BEFORE, Guard, GuardFailure, no_collection, snapshot
from wholestep.capturer import Capturer
from wholestep.co_run import CoRun, is_deferring
from wholestep.deferred_init import fill
from wholestep.errors import BreakError, CaptureError, LazyError, WholestepError
from wholestep.override import Override
from wholestep.report import Explanation, Stage, explain, explain_segments
from wholestep.runtime import Entries, Entry, Program
from wholestep.step_log import Logged, collecting
from wholestep.torch_compat import modes_active, needs_memory, skipped_by_dynamo, transforms_active
from wholestep.trace.numbers.dynamic_shapes import shapes
from wholestep.trace.outputs.leaks import take_back

# Where a step's Python may run instead of a program, every how many calls the guards are asked one by one.
CALLS_A_WALK = 16


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
        self._capturer = Capturer(*self.__getstate__())
        self._entries = Entries()
        self.eager_calls = 0
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
        wanted = None
        failed: list[Exception] = []  # user code runs when they are handled: it asks for the one being handled, too
        if self._entries.sized:
            wanted = shapes((args, kwargs))
        self._entries.calls += 1
        try:
            outcome = self._known(wanted, args, kwargs, ready, run)
        except BreakError as error:  # another rank cannot replay this call
            failed.append(error)
        if failed:
            return self._break(failed.pop(), args, kwargs)
        if type(outcome) is not GuardFailure:
            return outcome
        failure = outcome
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
        while type(outcome) is GuardFailure:  # again where Python decides otherwise than in a capture for many sizes
            try:
                entry = self._capture(args, kwargs, outcome)
            except Exception as error:
                if not self._is_served(error):
                    take_back()
                    raise
                failed.append(error)
            if failed:
                return self._break(failed.pop(), args, kwargs)
            outcome = self._first(entry, args, kwargs, ready, run)
        return outcome

    def _known(self, wanted: Any, args: Any, kwargs: Any, ready: Any, run: Callable[..., Any]) -> Any:
        """Serves a call by a program that is there, or says why none does: one that was last in use before others.

        Whose objects are all as at its last call is told in microseconds, so all are asked for that first. Where the
        step's Python may run instead, the call is seldom walked.
        """
        candidates, failures = self._entries.candidates(wanted), dict[Entry, GuardFailure]()
        walks = self._co_run is None or self._entries.calls % CALLS_A_WALK == 0
        last = GuardFailure("")
        for walk in [False] * (len(candidates) > 1 or not walks) + [True] * walks:
            for entry in candidates:
                if entry in failures or not entry.may_follow(last.outcomes):
                    continue
                outcome = run(entry, args, kwargs, ready, walk)
                if type(outcome) is not GuardFailure:
                    if wanted is not None:
                        self._entries.note(entry, wanted)
                    if entry is not self._entries[0]:
                        self._prefer(entry)
                    return outcome
                if outcome is not NOT_AS_BEFORE:
                    failures[entry] = outcome
                    last = outcome if outcome.outcomes else last
        return last if last.outcomes else next((failures[e] for e in candidates if e in failures), last)

    def _first(self, entry: Entry, args: Any, kwargs: Any, ready: Any, run: Callable[..., Any]) -> Any:
        """Serves the call that an entry was captured for; where that fails, optimizers have no state, as before."""
        try:
            outcome = run(entry, args, kwargs, ready)
            if type(outcome) is GuardFailure:
                templates = self._capturer.known.templates
                if outcome.outcomes and templates is not None and templates.reason == "":
                    return outcome
                raise WholestepError(f"internal error: guards failed on the call they were made from: {outcome.reason}")
            if self._capturer.known.initial is not None:
                self._capturer.known.initial.keep()
            return outcome
        finally:
            self._capturer.undo()

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
        return given and self._capturer.known.traced and not isinstance(error, CaptureError)

    def _break(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves a call that cannot be captured, and all those to come that no program serves."""
        if isinstance(error, LazyError):  # the call that gives lazy modules their parameters
            return self._fn(*args, **kwargs)
        for tensor in self._capturer.deferred(args, kwargs):
            fill(tensor)
        _let_go(error)
        take_back()
        if self._entries.serve_seldom(len(self._entries)):  # and their guards take time
            self._entries.clear()
            self._capturer.known.programs.clear()
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

    @property
    def _replaceable(self) -> bool:
        """Whether eager gives the same as a program, and the user has asked for no program of a kind."""
        options = self._options
        asked = options.passes or options.memory_budget is not None
        exact = self._may_break and not asked and options.backend in pipeline.EXACT
        return exact and self._co_run is None

    def _prefer(self, entry: Entry) -> None:
        """Puts an entry first; programs of those that go are known no more."""
        known = self._capturer.known
        for gone in self._entries.prefer(entry, known.templates is not None and bool(known.templates.known)):
            known.programs = {k: p for k, p in known.programs.items() if p is not gone.program}

    def _run(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[], Any] | None,
        walks: bool = True,
    ) -> Any:  # fmt: skip
        """Runs a program whose ranks wait for each other: all begin together, and learn when one fails on its way."""
        running = False

        def begin() -> None:
            nonlocal running
            self._executor.check_call(entry.terms)
            if ready is not None:
                ready()
            running = True

        try:
            return entry(args, kwargs, begin, walks)
        except BaseException as error:
            if running:
                self._executor.abort_group(error)
            raise

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], failure: GuardFailure) -> Entry:
        entry = self._capturer.entry(args, kwargs, failure, self._entries)
        reason = self._capturer.reason(failure)
        if self._entries and reason:
            self.recompiles.append(reason)
        self._prefer(entry)
        return entry

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
                whole, step = self._capturer.of_one_rank(args, kwargs)
            except CaptureError as error:
                if not self._may_break:
                    raise
                return explain_segments(self._title, [], "", [str(error)])
            said = self.captures, self.recompiles, self.eager_calls
            return explain(self._title, step, whole if executor.view else None, executor.axes, *said)

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
            return self._capturer.stages(args, kwargs)

    def _latest(self) -> Program:
        if not self._entries:
            raise ValueError("nothing is captured yet: call the step once first")
        return self._entries[0].program

    @property
    def specialized(self) -> list[str]:
        """The sizes that are no symbols although they vary, or ``dynamic=True`` wants it, and the line that decided."""
        return list(self._capturer.known.templates.specialized) if self._capturer.known.templates is not None else []

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
