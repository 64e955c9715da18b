"""Lowering to generated Python over ATen kernels and compiled chains: a straight line over a planned arena.

canonical form (`passes.canonicalize`) -> `arrange`: which calls run together, and in which order -> `make_plan`: which
values share memory, and where it lies -> `emit`: the text -> `Program`
"""

from __future__ import annotations

import linecache
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch

from wholestep.errors import LoweringError
from wholestep.ir import Signature, StepGraph, dead_code
from wholestep.lower.backends.interpreter import interpret
from wholestep.lower.codegen import emit
from wholestep.lower.codegen.bind_memory import Loan, arena_memory
from wholestep.lower.fusion.blocked_matmuls import split_fused_updates
from wholestep.lower.fusion.blocking_collectives import late_starts
from wholestep.lower.fusion.compiled_regions import Awaited, with_kernels
from wholestep.lower.fusion.execution_order import arrange
from wholestep.lower.plan.arena import SHARED, grow
from wholestep.lower.plan.memory_plan import Plan, make_plan
from wholestep.packed_graph import Packed
from wholestep.passes.canonicalize import copy_step, expand_foreach, list_items, plain_views, same_host_numbers
from wholestep.torch_compat import below_autograd, full_precision, set_grad_mode

_pointer = torch.Tensor.data_ptr
OFTEN = 4  # calls at which memory was elsewhere, after which it is no longer bound
# Sizes for which a program keeps its views of the arena; to make them anew takes some milliseconds.
MOST_SIZES = 64


def lower_aten(step: StepGraph) -> Program:
    """Turns a graph into a fast callable.

    Args:
        step: the program; left as it is.

    Returns:
        ``fn(*inputs) -> outputs``: bitwise what `naive.interpret` gives. Mutated inputs are written in
        place; all other outputs are fresh memory of the caller's own.

    Raises:
        LoweringError: the generated program does not compile: a mistake of ours.
    """
    return Program(step)


def plan_of(step: StepGraph, held: frozenset[str] = frozenset(), fused: bool = False) -> Plan:
    """The order of execution and the place of each value; the graph is left as it is.

    Args:
        held: see `make_plan`.
        fused: whether regions that are compiled run so.
    """
    graph = same_host_numbers(expand_foreach(list_items(copy_step(with_kernels(step, fused)))))
    graph = split_fused_updates(dead_code(plain_views(dead_code(graph))))
    return make_plan(graph, late_starts(arrange(graph), step.signature.same_order), held)


class Program:
    """A lowered step: call it with the inputs in the signature's order.

    Where numbers in the graph know what they are at other sizes, it serves all for which lowering decides as it did.

    Attributes:
        code: its Python source.
        rebinds: how often memory was bound: 1 while parameters and state stay where they are.
    """

    def __init__(self, step: StepGraph) -> None:
        self._signature = step.signature
        self._unpack: Callable[[], StepGraph] = lambda: step
        self._held: frozenset[str] = frozenset()  # results whose memory somebody still holds when the next call comes
        self._moves: Counter[int] = Counter()  # how often an input whose memory is bound was elsewhere
        self.rebinds = 0
        self._lock = threading.Lock()  # a backward may run in any thread, and there is one arena
        self._full_precision = full_precision()  # products are of the BLAS's, as long as ATen's are
        self._regions = Awaited(step)
        self._fused = not self._regions.groups and self._regions.ready()  # as those on disk are
        self._make(step)

    def _make(self, step: StepGraph) -> None:
        with torch.no_grad():
            plan = plan_of(step, self._held, self._fused)
            self._source = source = emit.emit(plan, {i for i, times in self._moves.items() if times >= OFTEN})
        self.code = source.text + (f"\n{source.of_sizes}" if source.of_sizes else "")
        self._sizes, self._slots, self._needed = plan.arena, plan.slots, plan.needed
        self._loans: dict[str, Loan] = source.namespace.get("loans", {})  # by results
        self._viewed = operator.itemgetter(*source.viewed, 0, 0) if source.viewed else None
        self._ids: list[int] = []
        self._pointers: list[int] = []
        self._arena: dict[str, torch.Tensor] = {}
        self._unbind()
        filename = f"wholestep program {id(self)}"  # in brackets, it would have to be split into lines at once
        below = "\n" * (source.text.count("\n") + 1)
        try:
            self._compiled = compile(source.text, filename, "exec")
            self._compiled_of_sizes = compile(below + source.of_sizes, filename, "exec")
        except SyntaxError as error:
            raise LoweringError(f"the generated program does not compile: {error}") from error
        linecache.cache[filename] = (partial(str, self.code),)  # type: ignore[assignment]
        weakref.finalize(self, linecache.cache.pop, filename, None)

    def _unbind(self) -> None:
        """Lets go of all views of memory that lasts."""
        self._runs: dict[tuple[int, ...], Callable[[Sequence[Any]], list[Any]]] = {}  # by sizes
        self._bound: dict[str, Any] = {}  # globals of the program, but for the sizes
        self._tensors: list[weakref.ref[Any]] = []

    def __call__(self, *inputs: Any) -> list[Any]:
        """Runs one step."""
        return self.consume(list(inputs))

    def consume(self, inputs: list[Any]) -> list[Any]:
        """Runs one step on inputs that it may let go of; then the list is empty.

        Memory of the signature's `donated` inputs is free after their last reader, if nobody else holds them.
        """
        graded = torch.is_grad_enabled()
        if graded:
            set_grad_mode(False)
        try:
            with self._lock, below_autograd():
                out = [name for name, loan in self._loans.items() if loan.is_out]
                made_for = self._held.union(out), full_precision(), self._regions.ready() or self._fused
                if made_for != (self._held, self._full_precision, self._fused):
                    self._held, self._full_precision, self._fused = made_for
                    self._make(self._unpack())
                sizes = self._signature.sizes.sizes(inputs) if self._signature.sizes else ()
                if not self._as_bound(inputs):
                    self._let_pass(inputs)
                    self._unbind()
                return (self._runs.get(sizes) or self._bind(inputs, sizes))(inputs)
        finally:
            if graded:
                set_grad_mode(True)

    def release_memory(self) -> None:
        """Gives back arena and memory kept for results; the next call takes them anew."""
        with self._lock:
            self._unbind()
            self._arena = {device: memory for device, memory in self._arena.items() if device == SHARED}
            self._loans.clear()
            if "fresh" in self._source.namespace:
                self._source.namespace["fresh"].forget()

    def keep(self, packed: Packed) -> None:
        """Takes its graph, pickled, in place of the graph itself."""
        self._unpack = partial(packed.unpack, sized=True)

    def _as_bound(self, inputs: Sequence[Any]) -> bool:
        if self._viewed is None:
            return True
        lasting = self._viewed(inputs)[:-2]
        return [*map(id, lasting)] == self._ids and [*map(_pointer, lasting)] == self._pointers

    def _bind(self, inputs: Sequence[Any], sizes: tuple[int, ...]) -> Callable[[Sequence[Any]], list[Any]]:
        """The step at given sizes, with what lasts between its calls."""
        if self._needed is not None and (grown := grow(self._slots, self._needed(*sizes))) is not None:
            self._unbind()
            self._sizes, self._arena = grown, {}
        if not self._bound:
            self._rebind(inputs)
        planned = self._signature.sizes
        if _written_overlap(self._signature, inputs):
            if planned is not None and sizes != tuple(planned.hints.values()):
                raise LoweringError("an input that the step writes shares memory with another one, at other sizes")
            self._runs[sizes] = partial(interpret, self._unpack())
        else:
            if len(self._runs) >= MOST_SIZES:
                del self._runs[next(iter(self._runs))]
            names = self._bound if planned is None else self._bound | dict(zip(planned.names, sizes, strict=True))
            exec(self._compiled_of_sizes, names)
            self._runs[sizes] = FunctionType(self._code, names)
        return self._runs[sizes]

    def _let_pass(self, inputs: Sequence[Any]) -> None:
        """Writes the program anew where inputs are elsewhere at each call: these are given to it, not bound."""
        bound = zip(self._source.viewed, self._ids, self._pointers, strict=False)
        moved = [i for i, known, at in bound if id(inputs[i]) != known or _pointer(inputs[i]) != at]
        self._moves.update(moved)
        if any(self._moves[i] == OFTEN for i in moved):
            self._make(self._unpack())

    def _rebind(self, inputs: Sequence[Any]) -> None:
        """Makes all views of lasting memory anew: at the first call and when a parameter has moved."""
        self.rebinds += 1
        for device, size in self._sizes.items():
            if device not in self._arena:
                self._arena[device] = arena_memory(max(size, 1), device)
        lasting = self._viewed(inputs)[:-2] if self._viewed else ()
        self._tensors, self._ids = self._watched(lasting), [*map(id, lasting)]
        self._pointers = [*map(_pointer, lasting)]
        offsets = [slot.offset for slot in self._slots]
        names = self._source.namespace | {"inputs": inputs, "arena": self._arena, "offsets": offsets}
        exec(self._compiled, names)
        del names["inputs"]
        # the function refers to them, and they not to it: their memory is free at once
        self._bound, self._code = names, names.pop("run").__code__

    def _watched(self, tensors: Sequence[Any]) -> list[weakref.ref[Any]]:
        """References that keep nothing alive: with one of the tensors go the views of its memory."""
        program = weakref.ref(self)

        def unbind(_: Any) -> None:
            bound = program()
            if bound is not None:
                bound._unbind()

        return [weakref.ref(tensor, unbind) for tensor in tensors]


def _written_overlap(signature: Signature, inputs: Sequence[Any]) -> bool:
    """True when an input that the step writes shares bytes with another one, which the plan excludes."""
    written = set(signature.mutations.values())
    ranges = []
    for index, tensor in enumerate(inputs):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + span * tensor.itemsize, index in written))
    ranges.sort()
    reach, reach_written = -1, False
    for start, stop, is_written in ranges:
        if start < reach and (is_written or reach_written):
            return True
        if stop > reach:
            reach, reach_written = stop, is_written
    return False
