"""Captures of one step: an entry for a call that no other serves, and what each capture leaves for the next.

May import: capture, capture_call, deferred_init, errors, ir, override, pipeline, report, runtime, trace.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch

from wholestep import pipeline
from wholestep.capture import (
    Args,
    CalledCode,
    GuardFailure,
    InitialState,
    Kwargs,
    Snapshot,
    materialize_fakes,
    no_collection,
)
from wholestep.capture_call import TakeSnapshot, capture, refuse_leaks
from wholestep.deferred_init import allocated, any_deferred, record_of
from wholestep.errors import PACKAGE, CaptureError, UnsupportedError
from wholestep.ir import StepGraph
from wholestep.override import Overrides
from wholestep.report import Stage
from wholestep.runtime import Entry, ProgramCache, give_back
from wholestep.trace import Traced
from wholestep.trace.numbers.dynamic_shapes import Templates, shapes
from wholestep.trace.record.user_line import line_of

# A step that keeps needing new captures is misused: better an error than minutes lost in silence.
MAX_ENTRIES = 32


class Capturer:
    """Captures a step, once for each kind of call that needs a program of its own.

    Args:
        entries: those that there are; each capture adds one.

    Attributes:
        recompiles: why captures after the first were needed, one reason each.
        known: programs, graphs and optimizer state that earlier captures have left.
    """

    def __init__(
        self, fn: Callable[..., Any], options: pipeline.Options, take: TakeSnapshot, dynamic: bool | None,
        entries: ProgramCache,
    ) -> None:  # fmt: skip
        self._fn, self._options, self._take, self._dynamic = fn, options, take, dynamic
        self._entries = entries
        self.recompiles: list[str] = []
        self._overrides, self._called = Overrides(options.module_override), CalledCode()
        templates = dynamic is not False and options.executor.plain
        how = capture, bool(dynamic), options.many_sizes
        self.known = pipeline.Known(templates=Templates(*how) if templates else None)
        self._varying: frozenset[str] = frozenset()
        self._fixed: frozenset[str] = frozenset()

    def capture(self, args: Args, kwargs: Kwargs, failure: GuardFailure) -> Entry:
        """Captures a call: adds an entry that serves it, and says why it was needed.

        Args:
            failure: why none of the other entries serves the call.
        """
        self._refuse_endless(failure)
        templates, reason, evicts = self.known.templates, failure.reason, False
        if templates is not None:
            templates.decided = failure.outcomes
        self.known.outcomes = failure.outcomes if self._options.executor.decides_together else None
        for program in self.known.programs.values():
            program.release_memory()  # their arenas are empty between calls, and tracing needs memory too
        try:
            with no_collection():  # hundreds of thousands of small objects, few of them garbage
                entry = self._build(args, kwargs, failure.varying - self._fixed)
        except BaseException as error:
            self.undo()
            if isinstance(error, RecursionError) and _is_ours(error):
                what = "arguments, state or results of the step are nested too deeply for Python's recursion limit"
                remedy = "nest them less deeply, or raise sys.setrecursionlimit()"
                raise UnsupportedError(what, remedy, where=line_of(error)) from None
            if isinstance(error, CaptureError) and not error.where:  # of what the step can see, or found at its end
                error.locate(line_of(error))
            raise
        give_back()
        if templates is not None:
            entry.shapes, evicts = {shapes((args, kwargs))}, bool(templates.known)
            reason = "; ".join([reason if templates.reason is None else templates.reason, *templates.notes])
        if self._entries and reason:
            self.recompiles.append(reason)
        self._entries.add(entry, evicts)
        return entry

    def _refuse_endless(self, failure: GuardFailure) -> None:
        """Raises a `CaptureError` where captures would go on for ever."""
        templates, entries = self.known.templates, self._entries
        count = len(entries) if templates is None else templates.captures
        may_run = failure.by_value and self._options.executor.plain and not self._options.fullgraph
        if count >= MAX_ENTRIES or (may_run and entries.serve_seldom(count)):
            way = "pass what changes in a tensor, leave out what the step does not use"
            if " shape: " in failure.reason:
                way = "pad to a few sizes" if self._dynamic is None else "compile with dynamic=None, pad to a few sizes"
            raise CaptureError(
                f"the step was captured {count} times in {entries.calls} calls; the last differs again: "
                f"{failure.reason}",
                remedy=f"{way}, or compile a smaller part of the step",
            )

    @property
    def from_template(self) -> bool:
        """Whether the last entry was made of an earlier capture for many sizes: the step's Python did not run."""
        return self.known.templates is not None and self.known.templates.reason == ""

    def keep(self) -> None:
        """The first run of the last capture has succeeded: the optimizer state made for it stays."""
        self.known.initial.keep()

    def undo(self) -> None:
        """Takes out the optimizer state made for a capture that failed, or whose first run did."""
        self.known.initial.drop()

    def _build(self, args: Args, kwargs: Kwargs, varying: frozenset[str]) -> Entry:
        """Captures with numbers that have changed as inputs; with those that cannot be inputs as guarded constants."""
        def make(inputs: frozenset[str]) -> Entry:
            how = self._options, self.known, inputs, self._taking(), self._overrides.transforming
            with allocated(self.deferred(args, kwargs)):
                entry = pipeline.build(self._fn, args, kwargs, *how)
            refuse_leaks(entry.traced.watch)
            return entry

        entry, inputs = None, self._varying | varying
        if not varying <= self._varying:
            try:
                entry = make(inputs)
            except Exception as error:  # a size, an index, a text: or the step's own error, which comes again
                if self._options.executor.preflight.all_know(error):
                    raise
            if entry is None:
                self.undo()
                inputs = self._varying
                for path in sorted(varying) if len(varying) > 1 else ():
                    inputs |= self._can_vary(args, kwargs, inputs, path)
                self._fixed |= varying - inputs
        if entry is None:
            entry = make(inputs)
        self._varying = inputs
        return entry

    def deferred(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """Tensors that the step can see and that have no values yet."""
        seen = Snapshot(self._fn, args, kwargs).tensors.values() if any_deferred() else ()
        return [found.tensor for found in seen if record_of(found.tensor) is not None]

    def _taking(self, overrides: Overrides | None = None) -> TakeSnapshot:
        """How this step takes snapshots: with overridden modules replaced, by default as in earlier captures."""
        replacing = overrides or self._overrides
        how = {"replace": replacing.replace} if replacing.overrides else {}
        return functools.partial(self._take, called=self._called, **how)

    def _can_vary(self, args: Args, kwargs: Kwargs, others: frozenset[str], path: str) -> frozenset[str]:
        """The path, if the number there can be an input."""
        try:
            capture(self._fn, args, kwargs, others | {path}, self._options.decides, take=self._taking())
        except Exception:
            return frozenset()
        return frozenset([path])

    def _dry_capture(self, args: Args, kwargs: Kwargs) -> tuple[Traced, bool]:
        """A capture that no call is served from, and whether it is of real tensors."""
        given, executor = args, self._options.executor
        fn, args, kwargs = materialize_fakes(self._fn, args, kwargs)
        take = self._taking() if args is given else self._taking(Overrides(self._options.module_override))
        outcomes = () if executor.decides_together else None
        ways = self._options.decides, executor.plain, take, executor.parts, executor.buffer_broadcast, outcomes
        with allocated(self.deferred(args, kwargs), fills=False):
            initial = InitialState(take(fn, args, kwargs))
            try:
                if args is given and self._options.decides and executor.plain:
                    initial.fill()
                return capture(fn, args, kwargs, self._varying, *ways)[1], args is given
            finally:
                initial.drop()

    def of_one_rank(self, args: Args, kwargs: Kwargs) -> tuple[StepGraph, StepGraph]:
        """What a call's capture records, and the graph that this rank would run of it. Nothing runs."""
        traced, real = self._dry_capture(args, kwargs)
        key = self._options.executor.key(traced.step, traced.fingerprint)
        program = self.known.programs.get(key)
        step = program.step if program is not None else self.known.steps.get(key)
        if step is None:
            step = pipeline.of_one_rank(traced, self._options, self._overrides.transforming)
            if real:  # not copies that stand for fake tensors
                self.known.steps[key] = step
        return traced.step, step

    def stages(self, args: Args, kwargs: Kwargs) -> list[Stage]:
        """What each pass makes of the graph of a call."""
        traced, _ = self._dry_capture(args, kwargs)
        found: list[Stage] = []
        for name, step in pipeline.stages_of_one_rank(traced, self._options, self._overrides.transforming):
            found.append(Stage.of(name, step, found[-1] if found else None))
        return found


def _is_ours(error: Exception) -> bool:
    """Whether it is this package that has gone too deep, and none of the user's functions."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return sum(file.startswith(PACKAGE) for file in files) > len(files) // 3
