"""A compiled forward and backward as one node of PyTorch's autograd graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, ClassVar

import torch

from wholestep.cached_property import cached_property
from wholestep.ir import info
from wholestep.lower.backends.interpreter import run_nodes
from wholestep.runtime.asked_results import refuse_hooks
from wholestep.runtime.backward_programs import Backward, Layout, Served
from wholestep.runtime.program import Program
from wholestep.runtime.second_derivatives import SecondDerivative, Sources
from wholestep.runtime.unreached_leaves import quiet
from wholestep.torch_compat import casts, dispatch_modes_active, is_batched, skipped_by_dynamo, transforms_active
from wholestep.trace import Traced
from wholestep.trace.outputs.output_records import Derivative


@dataclass(slots=True)
class Ran:
    """A forward that has run.

    Attributes:
        outputs: what autograd is to see as results.
        saved: the values to save, in the order in which the backward takes them.
        late: the inputs that the backward writes.
        part: what of the plan's results and inputs the node is for, by position; None: all.
    """

    outputs: tuple[torch.Tensor, ...]
    saved: Sequence[Any]
    late: Sequence[torch.Tensor]
    part: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """What all calls of one differentiable program have in common.

    Attributes:
        reads_all: whether the backward reads the gradients of all results.
        parts: results that have no input in common, and the inputs of each: nodes of their own, as a backward of some
            leads to nothing behind the others. Empty where one node is for all.
        apart: positions among the saved values of host numbers, and of inputs that the backward writes.
        guard_identity: a captured backward serves nodes of this very plan.
    """

    guard_identity: ClassVar[bool] = True
    derivative: Derivative
    backward: Backward
    apart: frozenset[int]
    reads_all: bool
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    @cached_property
    def sources(self) -> Sources:
        """What gradients follow from."""
        return Sources(self.backward.halves, self.derivative.inputs)


def plan_of(traced: Traced, program: Program) -> Plan | None:
    """The plan of a program with a backward; None for one without."""
    if traced.derivative is None or program.backward is None:
        return None
    late = {("input", i) for i in traced.derivative.late}
    written = {("output", o): i for o, i in traced.step.signature.mutations.items() if i in traced.derivative.late}
    read = {written.get(place, place[1]) for place in program.backward.saved if place in written or place in late}
    if read == set(traced.derivative.late):  # the backward writes what follows from what is there when it runs
        late |= written.keys()
    nodes = program.backward.halves.backward.placeholders[: len(program.backward.saved)]
    host = [not isinstance(info(node).value, torch.Tensor) for node in nodes]
    apart = frozenset(i for i, place in enumerate(program.backward.saved) if place in late or host[i])
    reads_all = program.backward.halves.tangents == list(range(len(traced.derivative.outputs)))
    return Plan(traced.derivative, program.backward, apart, reads_all, _parts(traced.derivative))


def _parts(derivative: Derivative) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    if derivative.rewritten or derivative.late or derivative.between:
        return ()
    parts: list[tuple[frozenset[int], frozenset[int]]] = []
    for place, reached in enumerate(derivative.reaches):
        joined = [part for part in parts if not part[1].isdisjoint(reached)]
        parts = [part for part in parts if part not in joined]
        results, inputs = zip((frozenset([place]), reached), *joined, strict=True)
        parts.append((frozenset().union(*results), frozenset().union(*inputs)))
    return tuple((tuple(sorted(results)), tuple(sorted(ins))) for results, ins in parts) if len(parts) > 1 else ()


@skipped_by_dynamo  # whose frames C++ calls in a backward() inside of what torch.compile gave
class CompiledFunction(torch.autograd.Function):
    """Takes what a program's forward gave, saves exactly what its partition says, and runs its backward.

    Each node has, as attributes of its ``ctx``: ``plan`` (whose ``backward.halves`` are the graphs), ``numbers`` (the
    host numbers among the saved values, by position), ``saved_tensors`` (the others, in order) and ``late`` (the
    inputs that hooks write in the backward; hooks read what is there when it runs, so ``numbers`` holds them too);
    ``part``, where there is a node for each of several parts; ``wholestep_between``, where there is something, for
    `refuse_hooks`.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, ran: Ran, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved, apart = ran.saved, plan.apart
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.late, ctx.part = plan, ran.late, ran.part
        ctx.numbers = {i: saved[i] for i in apart} if apart else {}
        ctx.save_for_backward(*[v for i, v in enumerate(saved) if i not in apart] if apart else saved)
        return ran.outputs

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        backward, derivative = plan.backward, plan.derivative
        if ctx.part is not None:
            given = dict(zip(ctx.part[0], tangents, strict=True))
            tangents = tuple(map(given.get, range(len(derivative.outputs))))
        if derivative.between:
            refuse_hooks(ctx.wholestep_between, tangents)
        read: Sequence[Any] = tangents if plan.reads_all else [tangents[i] for i in backward.halves.tangents]
        strides = tuple(map(_strides, read))
        served, alone = backward.served.get(strides), transforms_active()
        if served is None or alone or backward.by_memory:
            served, read, alone = _unusual(backward, read, alone)
        if served.layouts is not None:
            read = list(map(_laid_out, read, served.layouts))
        there = [t for t in read if t is not None] if None in strides else read
        values = all_saved(ctx)
        second = SecondDerivative(ctx, plan.sources, [*values, *read]) if torch.is_grad_enabled() else None
        values += there
        if alone or dispatch_modes_active() or casts():  # a trace sees each operator, and autocast each of a backward
            outputs: Sequence[Any] = run_nodes(served.graph, values)
        else:
            ctx.maybe_clear_saved_tensors()  # where the graph is not kept for another backward
            outputs = served.consume(values)
        count, made = derivative.n_given, len(derivative.made)
        gradients = outputs
        if not served.plain:
            gradients = served.gradients(outputs, there, count + made + len(derivative.late))
        if second is not None:
            gradients = second.refuse(gradients)
        if ctx.late:
            with torch.no_grad():
                for tensor, value in zip(ctx.late, gradients[count + made :], strict=True):
                    if value is not None:
                        tensor.copy_(value)
            gradients = gradients[: count + made]
        silent = len(derivative.inputs) - count
        if silent:
            gradients = [*gradients[:count], *[None] * silent, *gradients[count:]]
        if plan.reads_all and None not in strides or not any(map(_is_none, tangents)):
            return (None, None, *gradients)
        present = [i for i, t in enumerate(tangents) if t is not None]
        reached = frozenset().union(*(derivative.reaches[i] for i in present))
        order = range(len(gradients)) if ctx.part is None else ctx.part[1]
        if unreached := [place for place, i in enumerate(order) if i not in reached]:
            quiet(ctx, unreached)
        return (None, None, *(gradients[i] if i in reached else None for i in order))

    @classmethod
    def of(cls, plan: Plan, ran: Ran, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What autograd sees as results, with the history that the inputs give them."""
        found: dict[int, torch.Tensor] = {}
        for part in plan.parts:
            others = {id(t) for k, t in enumerate(ran.outputs) if k not in part[0]}  # no node keeps another alive
            saved = [value.detach() if id(value) in others else value for value in ran.saved]
            node = Ran(tuple([ran.outputs[k] for k in part[0]]), saved, (), part)
            found |= zip(part[0], cls.apply(plan, node, *[inputs[i] for i in part[1]]), strict=True)
        return [found[k] for k in range(len(found))] if found else cls.apply(plan, ran, *inputs)  # type: ignore[no-any-return]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's, without its Python (2 µs) where nothing asks for it."""
        return super().apply(*args) if transforms_active() else _apply(*args)  # type: ignore[no-untyped-call]


_apply = super(torch.autograd.Function, CompiledFunction).apply
_is_none = partial(is_, None)
_OWN_NAME = re.compile("output ([0-9]+) of CompiledFunction(Backward)?")


def _as_eager(name: str, suffix: str | None) -> str:
    """A node's name as errors give it: whole before torch 2.13, then as that of the function alone."""
    return name if suffix else name.split("Backward")[0]


def all_saved(ctx: Any) -> list[Any]:
    """The saved values of one node, tensors and host numbers, in the order in which its backward takes them.

    Raises:
        RuntimeError: they are freed, or were written since: autograd's own errors.
    """
    numbers = ctx.numbers
    count = len(ctx.plan.backward.saved)
    if len(numbers) == count and not ctx.plan.derivative.runs_once:  # nothing is freed, in eager neither
        return [numbers[i] for i in range(count)]
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        names = ctx.plan.derivative.names
        names = names if ctx.part is None else [names[k] for k in ctx.part[0]]
        raise RuntimeError(_OWN_NAME.sub(lambda found: _as_eager(names[int(found[1])], found[2]), str(error))) from None
    if not numbers:
        return list(saved)
    tensors = iter(saved)
    return [numbers[i] if i in numbers else next(tensors) for i in range(count)]


def _strides(tangent: torch.Tensor | None) -> Any:
    """What a backward program is looked up by; for tangents that none reads as they are, `_UNUSUAL`, which none is."""
    if tangent is None:
        return None
    if tangent.is_conj() or tangent.is_neg() or _is_odd(tangent):
        return _UNUSUAL
    return tangent.stride()


_UNUSUAL = object()


def _is_odd(tangent: torch.Tensor) -> bool:
    """Whether it is sparse, or many gradients at once: operators know what to do with them, a program does not."""
    return tangent.layout is not torch.strided or is_batched(tangent)


def _unusual(backward: Backward, read: Sequence[Any], alone: bool) -> tuple[Served, list[Any], bool]:
    """For tangents not found by strides: the program, the tangents, and whether to run it operator by operator."""
    shown = [t.resolve_conj().resolve_neg() if t is not None and (t.is_conj() or t.is_neg()) else t for t in read]
    alone = alone or any(t is not None and _is_odd(t) for t in shown)
    if alone:
        return backward.serve(backward.traced(shown)), shown, alone
    offsets = tuple([0 if t is None else t.storage_offset() for t in shown]) if backward.by_memory else ()
    return backward.serve(tuple(map(_strides, shown)), offsets), shown, alone


def _laid_out(tangent: torch.Tensor | None, layout: Layout | None) -> torch.Tensor | None:
    if layout is None:
        return None
    size, stride, dtype, device = layout
    if tangent is None:
        return torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()
    if tangent.stride() == stride:
        return tangent
    return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(tangent)
