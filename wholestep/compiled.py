"""`Compiled`, the object that users call and ask: what it captured, why, and what a call would do.

May import: capture, capture_call, capturer, co_run, errors, pipeline, report, runtime, step_log, step_runner,
torch_compat.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from wholestep.capture import Args, Guard, Kwargs, Snapshot, no_collection
from wholestep.capture_call import TakeSnapshot, is_tracing
from wholestep.capturer import Capturer
from wholestep.co_run import is_deferring
from wholestep.errors import CaptureError
from wholestep.pipeline import Options
from wholestep.report import Explanation, Stage, explain, explain_segments
from wholestep.runtime import ProgramCache, Ready
from wholestep.step_log import Logged
from wholestep.step_runner import StepRunner
from wholestep.torch_compat import is_fx_symbolic_tracing, modes_active, skipped_by_dynamo, transforms_active


@skipped_by_dynamo
class Compiled:
    """A training step that is captured at its first call and replayed afterwards.

    Attributes:
        recompiles: why calls needed a new program, one reason each; empty while the first still serves.
        breaks: why the step cannot be replayed, so that its Python runs at each call (`co_run/`).
    """

    def __init__(
        self, fn: Callable[..., Any], options: Options, take: TakeSnapshot = Snapshot, dynamic: bool | None = False
    ) -> None:
        fn = fn._fn if isinstance(fn, Compiled) else fn
        functools.update_wrapper(self, fn, updated=())
        self._fn: Callable[..., Any] = fn
        self._options, self._executor = options, options.executor
        self._take, self._dynamic = take, dynamic
        self._lock = threading.RLock()
        self.reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by name where it stands under its function's name, else with its function; copies capture anew."""
        name, found = getattr(self, "__qualname__", ""), sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else super().__reduce_ex__(protocol)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._fn, self._options, self._take, self._dynamic

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __prepare_scriptable__(self) -> Any:
        """`torch.jit.script` makes of it what it makes of its function."""
        return self._fn

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """In a class, a compiled function is a method, as the function is."""
        return self if instance is None or not isinstance(self._fn, FunctionType) else MethodType(self, instance)

    def __repr__(self) -> str:
        """Its name, how often it was captured, and the arguments that the last program used serves, or how it runs."""
        served = f"\n  {', '.join(self._entries[0].binder.arguments) or 'no tensors'}" if self._entries else ""
        if self._runner.co_run is not None:
            served = f"\n  {self._runner.co_run}"
        return f"<Compiled {self._title}, captures: {self.captures}, recompiles: {len(self.recompiles)}>{served}"

    @property
    def _title(self) -> str:
        return f"{getattr(self, '__name__', type(self._fn).__name__)}{self._executor}"

    def reset(self) -> None:
        """Forgets all captures, and which modules are replaced."""
        self._entries = ProgramCache()
        self._capturer = Capturer(self._fn, self._options, self._take, self._dynamic, self._entries)
        self._runner = StepRunner(self._fn, self._options, self._entries, self._capturer)
        self.recompiles, self.breaks = self._capturer.recompiles, self._runner.breaks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # part of another step, or of a transform of `torch.func`, or of what TorchScript or FX traces
        if is_tracing() or transforms_active() or is_deferring() or torch.jit.is_tracing() or is_fx_symbolic_tracing():
            return self._fn(*args, **kwargs)
        if modes_active() and self._executor.plain and not self._options.module_override:  # they see eager's calls
            return self._fn(*args, **kwargs)
        return self.serve(args, kwargs)

    def serve(self, args: Args, kwargs: Kwargs, ready: Ready = None) -> Any:
        """One call of the step.

        Args:
            ready: called once it is clear which program serves, before it runs.
        """
        with self._lock:
            outcome = self._runner.run(args, kwargs, ready)
        return outcome.deliver() if type(outcome) is Logged else outcome

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
            executor, co_run = self._executor, self._runner.co_run
            if co_run is not None:
                return explain_segments(self._title, co_run.segments, co_run.eager, self.breaks)
            try:
                whole, step = self._capturer.of_one_rank(args, kwargs)
            except CaptureError as error:
                if not self._options.may_run_python:
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

    @property
    def specialized(self) -> list[str]:
        """The sizes that are constants although they vary, or ``dynamic=True`` asks for symbols, and why."""
        return list(self._capturer.known.templates.specialized) if self._capturer.known.templates is not None else []

    @property
    def backwards(self) -> list[str]:
        """Why a backward was compiled again: tangents of other strides, or that are None; one reason each."""
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
    def eager_calls(self) -> int:
        """How many calls ran in eager, since their sizes had not come before."""
        return self._runner.eager_calls

    @property
    def captures(self) -> int:
        """How many captures are kept to serve calls."""
        return len(self._entries)

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The captured graphs, after all passes; the latest used comes first.

        Of a step whose Python runs at each call, those of the last call's segments, in order.
        """
        co_run = self._runner.co_run
        programs = [e.program for e in self._entries] if co_run is None else [program for _, program in co_run.served]
        return list({id(program): program.step.gm for program in programs}.values())

    @property
    def code(self) -> str:
        """The generated program that served last, as readable Python: of each segment, where the step's Python runs.

        Raises:
            ValueError: there is none, as before the first call.
        """
        if self._runner.co_run is not None:
            return self._runner.co_run.code
        if not self._entries:
            raise ValueError("nothing is captured yet: call the step once first")
        return self._entries[0].program.code
