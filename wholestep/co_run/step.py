"""A step served by running its Python at each call, with operators deferred and run as compiled segments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from wholestep.co_run.optimizer_updates import Update, deferred_updates
from wholestep.co_run.prefix_tree import Key, Node, Signatures
from wholestep.co_run.queue import Queue
from wholestep.co_run.rank_program import RankProgram
from wholestep.co_run.ranks import Ranks
from wholestep.co_run.reads import ExposedMemory, current, flushing
from wholestep.co_run.segment import Segment, SegmentProgram, same
from wholestep.errors import CaptureError, DistError, PlanError
from wholestep.patches import Patches, Replacement, suspended
from wholestep.pipeline import Options
from wholestep.runtime import Program
from wholestep.torch_compat import below_autograd, nested_compiles
from wholestep.trace.record.user_line import user_line

# Programs of one step; beyond, segments run operator by operator.
MAX_PROGRAMS = 64
# Calls timed in each way before the faster one is taken: those of known operators and programs, until there were
# that many calls without. Eager is taken where its fastest call takes less than this part of the fastest deferred one:
# so few calls do not tell smaller differences from noise.
TIMED, LEARNING, CLEARLY = 4, 8, 0.97
# From so many operators on, which take 0.3 s to compile, two calls are timed before they are, where deferring takes
# more than a part of what the kernels do: if both take less than deferring and that part together, no program can win.
MANY, TRIED, PART = 100, 2, 0.25


def is_deferring() -> bool:
    """True inside of a step of this thread whose operators are deferred."""
    return current.queue is not None


def outside_of_programs() -> AbstractContextManager[None]:
    """Runs what this thread has deferred, and defers nothing meanwhile."""
    return nullcontext() if current.queue is None else current.queue.paused()


class CoRun:
    """Runs a step's Python at each call, while its operators are deferred and run as compiled segments.

    Args:
        fn: the step.
        run: runs it.

    Attributes:
        refused: why segments run operator by operator, one reason each.
        segments: the segments that were compiled: the number of operators, bytes of results that outlive them, and the
            line that ends them.
        served: the programs that ran in the last call whose operators were deferred, each with its number among these.
        eager: why the step runs as it is; empty where its operators are deferred.
    """

    def __init__(self, fn: Callable[..., Any], run: Callable[..., Any], options: Options) -> None:
        budget = options.memory_budget  # which parts of a step need not meet
        options = replace(options, memory_budget=budget and replace(budget, required=False))
        self._step, self._fn, self._options = fn, run, options
        self._exposed: ExposedMemory | None = None
        self._ranks = None if options.executor.plain else Ranks(fn, options)
        self._signatures, self._patches = Signatures(), Patches()
        self._whole_updates = True  # of lists of parameters, as one call each; unless one decides on numbers
        self.refused: list[str] = []
        self.segments: list[tuple[int, int, str]] = []
        self.served: list[tuple[int, Program]] = []
        self.eager = ""
        self._calls = 0
        self._times: dict[bool, list[float]] = {False: [], True: []}  # of deferred calls, and of eager ones
        self._interpreted, self._kernels = 0, 0.0  # operators that the call ran one by one, and seconds in these
        self._least = 0.0  # seconds that a program's call would take at least, where the next ones show what eager does

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the step: all that it does has happened when it returns or raises."""
        if self.eager:
            return self._fn(*args, **kwargs)
        deferred, plain = self._times[False], self._times[True]
        if self._ranks is None and (len(deferred) >= TIMED > len(plain) or (self._least and len(plain) < TRIED)):
            begin = time.perf_counter()
            result = self._fn(*args, **kwargs)
            plain.append(time.perf_counter() - begin)
            hopeless = len(plain) == TRIED and max(plain) < self._least
            if hopeless or (len(plain) == TIMED and min(plain) < CLEARLY * min(deferred)):
                self.eager = "that was faster than deferring its operators"
            return result
        if self._exposed is None:
            self._exposed = ExposedMemory(self._step, args, kwargs)
        queue = Queue(self._signatures, self._serve, self._ranks, self._exposed)
        self.served.clear()
        self._interpreted, self._kernels = 0, 0.0
        programs, begin = len(self.segments), time.perf_counter()
        try:
            return self._deferred(queue, args, kwargs)
        finally:
            self._calls += 1
            known, took = queue.known and programs == len(self.segments), time.perf_counter() - begin
            if len(deferred) < TIMED and (known or self._calls > LEARNING):
                deferred.append(took)
            if known and not plain and self._interpreted >= MANY and took > (1 + PART) * self._kernels:
                self._least = took - (1 - PART) * self._kernels

    def __repr__(self) -> str:
        return f"its Python runs at each call, {'in eager' if self.eager else f'segments: {len(self.segments)}'}"

    @property
    def code(self) -> str:
        """The generated programs of the last call.

        Raises:
            ValueError: there is none.
        """
        if self.eager:
            raise ValueError(f"the step runs in eager, without a program: {self.eager}")
        if not self.served:
            raise ValueError("no segment is compiled yet: one is when its operators come again, so call the step again")
        texts: list[str] = []
        for number, program in self.served:
            operators, _, line = self.segments[number]
            texts.append(f"# {operators} operators, run at {line}\n{program.code}")
        return "\n\n".join(texts)

    def _deferred(self, queue: Queue, args: Any, kwargs: Any) -> Any:
        thread, ranks = threading.get_ident(), self._ranks

        def here() -> bool:
            return threading.get_ident() == thread

        current.queue = queue
        updates = deferred_updates() if ranks is None and self._whole_updates else ()
        begun: AbstractContextManager[list[Replacement]] = nullcontext([*updates])
        if ranks is not None:
            begun = ranks.call(args, kwargs, queue)
        try:
            with begun as replaced, self._patches.during([*flushing(), *nested_compiles(), *replaced], here):
                try:
                    with queue:
                        queue.watch.begin()
                        result = self._fn(*args, **kwargs)
                except BaseException:
                    with suppress(*() if ranks is None else (PlanError, DistError)):  # another rank's says less
                        queue.flush()
                    raise
                else:
                    queue.end()
                    return result
                finally:
                    queue.watch.end()
        finally:
            current.queue = None
            if queue.watch.found and ranks is None:
                self.eager = f"it calls {queue.watch.found[0]} of a C extension, which may read memory of tensors"

    def _serve(self, node: Node, segment: Segment, tensors: list[torch.Tensor], numbers: list[float]) -> None:
        """Runs a segment: by a program, which is one of all ranks with plans, or one operator after the other."""
        given = tensors[: len(segment.externals)]
        key = tuple(segment.alive), () if self._ranks is None else self._ranks.placements(given)
        found, varying = node.programs.get(key), frozenset[int]()
        program: Any = found
        if found is not None and not found.serves(numbers):
            program, varying = None, found.varying_with(numbers)
        if self._ranks is not None:
            self._ranks.begin(program, numbers)
        if program is None:
            program = self._compiled(node, key, segment, tensors, numbers, varying)
        if program is not None:
            self.served.append((program.number, program.program))
        if program is None:
            begin = time.perf_counter()
            with below_autograd():  # which counted the writes when they were deferred
                segment.run(tensors, numbers)
            self._kernels += time.perf_counter() - begin
            self._interpreted += len(segment.calls)
        elif self._ranks is None:
            with suspended():  # of memory that is written, nobody need be asked
                program(tensors, numbers)
        else:
            self._ranks.run(program, tensors, numbers)

    def _compiled(
        self, node: Node, key: Key, segment: Segment, tensors: list[torch.Tensor], numbers: list[float],
        varying: frozenset[int],
    ) -> SegmentProgram | RankProgram | None:  # fmt: skip
        """A new program for a segment; None for one that stays without."""
        full = len(self.segments) >= MAX_PROGRAMS
        program: SegmentProgram | RankProgram
        if self._ranks is not None:
            if full:
                raise CaptureError(
                    f"the step's segments needed {MAX_PROGRAMS} programs; operators differ from call to call again",
                    "keep the number of branches and sizes small, or compile a smaller part of the step",
                    where=user_line(),
                )
            program = self._ranks.compile(segment, tensors, numbers, varying)
        else:
            if key not in node.seen:  # compiled when it comes again, and it is known which numbers are others each time
                node.seen[key] = list(numbers)
                return None
            if key in node.refused or full:
                return None
            pairs = enumerate(zip(node.seen[key], numbers, strict=True))
            varying |= frozenset(index for index, (a, b) in pairs if not same(a, b))
            try:
                program = SegmentProgram(segment, tensors, numbers, varying, self._options)
            except Exception as error:  # nothing has run yet: a segment that cannot be compiled runs as it is
                if any(type(function) is Update for function, *_ in segment.calls):
                    self._whole_updates = False
                else:
                    self.refused.append(f"{type(error).__name__}: {error}")
                node.refused.add(key)
                return None
        node.programs[key], program.number = program, len(self.segments)
        kept = sum(t.nbytes for t in tensors[len(segment.externals) :])
        self.segments.append((len(segment.calls), kept, user_line()))
        return program
