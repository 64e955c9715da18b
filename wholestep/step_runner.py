"""Calls of one step: each runs a program that serves it, a new capture's, or the step's Python.

May import: capture, capturer, co_run, deferred_init, errors, pipeline, runtime, step_log, torch_compat, trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from wholestep.capture import Args, GuardFailure, Kwargs
from wholestep.capturer import Capturer
from wholestep.co_run import CoRun
from wholestep.deferred_init import fill
from wholestep.errors import BreakError, CaptureError, LazyError, WholestepError
from wholestep.pipeline import Options
from wholestep.runtime import Entry, ProgramCache, Ready, Run
from wholestep.step_log import collecting
from wholestep.torch_compat import needs_memory, others_pack_saved_tensors
from wholestep.trace.numbers.dynamic_shapes import shapes
from wholestep.trace.outputs.leaks import take_back

# Where a step's Python may run instead of a program, every how many calls the guards are asked one by one; and where
# that took longer than the program.
CALLS_A_WALK, CALLS_A_LONG_WALK = 16, 256


_INTERNAL = "internal error: guards failed on the call they were made from: {}"


class StepRunner:
    """Runs the calls of one step.

    Args:
        entries: its programs.
        capturer: adds to them.

    Attributes:
        breaks, eager_calls: see `Compiled`.
        co_run: runs the calls that no program serves, since the step cannot be captured for them; None until then.
    """

    def __init__(self, fn: Callable[..., Any], options: Options, entries: ProgramCache, capturer: Capturer) -> None:
        self._fn, self._options, self._executor = fn, options, options.executor
        self._entries, self._capturer = entries, capturer
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        self.breaks: list[str] = []
        self.eager_calls = 0
        self.co_run: CoRun | None = None

    def run(self, args: Args, kwargs: Kwargs, ready: Ready) -> Any:
        """One call; see `Compiled.serve`."""
        if not self._executor.is_distributed:
            return self._serve(args, kwargs, ready)
        self._executor.preflight.begin_call(self._name)
        try:
            return self._serve(args, kwargs, ready)
        except BaseException as error:
            self._executor.preflight.abort_call(error)
            raise

    def _serve(self, args: Args, kwargs: Kwargs, ready: Ready) -> Any:
        """Serves a call by a program that is there, else as `_serve_new` does."""
        entries = self._entries
        if self.co_run is not None and not self._executor.plain:  # on all ranks
            return self.co_run(*args, **kwargs)
        if others_pack_saved_tensors() and self._options.may_run_python and self._executor.plain:
            return self._run_under_hooks(args, kwargs)
        of_shapes = shapes((args, kwargs)) if entries.sized else None
        entries.calls += 1
        calls_a_walk = CALLS_A_LONG_WALK if entries.walks_in_vain else CALLS_A_WALK
        walks = self.co_run is None or entries.calls % calls_a_walk == 0
        broken: BreakError | None = None
        try:
            outcome = entries.serve(args, kwargs, ready, self._run, of_shapes, walks)
        except BreakError as error:  # another rank cannot replay this call
            broken = error  # the step may ask for the error that is being handled: it runs when none is
        if broken is not None:
            return self._run_python(broken, args, kwargs)
        if type(outcome) is not GuardFailure:
            if entries.walks_in_vain and self.co_run is None and self._options.may_run_python and self._executor.plain:
                self._give_up_replays()
            return outcome
        if self.co_run is not None:
            return self.co_run(*args, **kwargs)
        return self._serve_new(outcome, of_shapes, args, kwargs, ready)

    def _serve_new(self, failure: GuardFailure, of_shapes: Hashable, args: Args, kwargs: Kwargs, ready: Ready) -> Any:
        """Serves a call that no program does: in eager, by the step's Python from now on, or by a new capture."""
        entries, options = self._entries, self._options
        if failure.outcomes and options.may_run_python and not entries.may_branch():
            entries.forget_branches()
            error = CaptureError(f"Python decides otherwise from call to call: {failure.reason}")
            if self._may_run_python(error):
                return self._run_python(error, args, kwargs)
        sized = of_shapes is not None and not failure.outcomes
        if sized and options.may_run_eagerly and entries.is_rare(of_shapes):
            self.eager_calls += 1
            return collecting(self._fn)(*args, **kwargs)
        outcome: Any = failure
        while type(outcome) is GuardFailure:  # again where Python decides otherwise than the capture
            self._executor.preflight.announce_capture()
            failure, entry = outcome, self._capture(args, kwargs, outcome)
            if isinstance(entry, Exception):
                return self._run_python(entry, args, kwargs)
            outcome = self._first_call(entry, args, kwargs, ready)
            if type(outcome) is GuardFailure and outcome.reason == failure.reason and not outcome.outcomes:
                raise WholestepError(_INTERNAL.format(outcome.reason))
        return outcome

    def _capture(self, args: Args, kwargs: Kwargs, failure: GuardFailure) -> Entry | Exception:
        """A new entry; or the error that ended its capture, where the step's Python may run instead."""
        try:
            return self._capturer.capture(args, kwargs, failure)
        except Exception as error:
            if self._may_run_python(error):
                return error
            take_back(error)
            raise

    def _first_call(self, entry: Entry, args: Args, kwargs: Kwargs, ready: Ready) -> Any:
        """Serves the call that an entry was captured for; where that fails, optimizers have no state, as before."""
        try:
            values = entry.binder(args, kwargs)
            outcome = self._run(entry, values, args, kwargs, ready) if type(values) is list else values
            if type(outcome) is not GuardFailure:
                self._capturer.keep()
                return outcome
            expected = self._executor.plain  # where another thread has changed a value
            if outcome.outcomes:
                expected = self._capturer.from_template or self._executor.decides_together
            if not expected:
                raise WholestepError(_INTERNAL.format(outcome.reason))
            return outcome
        finally:
            self._capturer.undo()

    def _run_under_hooks(self, args: Args, kwargs: Kwargs) -> Any:
        """Serves a call in eager: hooks around it expect what eager saves, where a program saves other things."""
        reason = "saved_tensors_hooks are active around the step, which see what eager saves; to do: enter them inside"
        self.eager_calls += 1
        self.breaks += [reason] if reason not in self.breaks else []
        return collecting(self._fn)(*args, **kwargs)

    def _give_up_replays(self) -> None:
        """From the next call on the step's Python runs, except where a program is known to serve at once."""
        walked = self._entries.walks
        self.co_run = CoRun(self._fn, collecting(self._fn), self._options)
        self.breaks.append(
            f"objects that the step reaches were others at each of the last {walked} calls, as containers made anew "
            "are: to compare what they hold took longer than the program; to do: change them in place, or pass what "
            "the step needs of them as arguments"
        )

    @property
    def _run(self) -> Run:
        """What runs an entry."""
        return self._run_on_ranks if self._executor.is_distributed else Entry.__call__

    def _run_on_ranks(self, entry: Entry, values: list[Any], args: Args, kwargs: Kwargs, ready: Ready) -> Any:
        """Runs a program whose ranks wait for each other: all begin together, and learn when one fails on its way."""
        running = False

        def begin() -> None:
            nonlocal running
            self._executor.preflight.check_call(entry.terms, values)
            if ready is not None:
                ready()
            running = True

        try:
            outcome = entry(values, args, kwargs, begin)
            if type(outcome) is GuardFailure and running:  # on all ranks, which meet again for another program
                self._executor.preflight.begin_call(self._name)
            return outcome
        except BaseException as error:
            if running:
                self._executor.preflight.abort_program(error)
            raise

    def _may_run_python(self, error: Exception) -> bool:
        """Whether the step's Python runs where it could not be captured."""
        if isinstance(error, LazyError):
            return self._executor.plain and not self._options.module_override
        options = self._options
        own = bool(options.passes) or callable(options.backend) or options.memory_budget is not None
        if own and self._capturer.known.traced and not isinstance(error, CaptureError):
            return False  # the user's passes or backend have failed, which running the step otherwise would hide
        return options.may_run_python and self._executor.preflight.announce_break(error)

    def _run_python(self, error: Exception, args: Args, kwargs: Kwargs) -> Any:
        """Serves a call that cannot be captured by the step's Python, and all those to come that no program serves."""
        _let_go(error)
        with suppress(LazyError):
            for tensor in self._capturer.deferred(args, kwargs):
                fill(tensor)
        take_back()
        if isinstance(error, LazyError):  # the call that gives lazy modules their parameters
            return collecting(self._fn)(*args, **kwargs)
        if self._entries.serve_seldom(len(self._entries)):  # and their guards take time
            self._entries.clear()
        co_run = CoRun(self._fn, collecting(self._fn), self._options)
        if any(map(needs_memory, (error, error.__cause__))):
            co_run.eager = "C++ reads memory of tensors in it past the dispatcher"
        reason = str(error)
        if isinstance(error, CaptureError):
            self.co_run = co_run
            self.breaks.append(reason)
            return co_run(*args, **kwargs)
        result = co_run(*args, **kwargs)  # the step's own error comes again, after what it did before
        self.co_run = co_run
        self.breaks.append(f"{type(error).__name__} while it was captured: {reason}")
        return result


def _let_go(error: BaseException | None) -> None:
    """Has an error, and those behind it, hold no frames, with which results of calls would live on."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
