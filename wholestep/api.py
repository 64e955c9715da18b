"""The public functions: `compile` and `trace`.

May import: aot_autograd, capture_call, compiled, ir, lower, override, passes, pipeline, runtime, spmd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import fx, nn

from wholestep.aot_autograd import MemoryBudget, Partition, default_partition, min_cut_partition
from wholestep.capture_call import capture
from wholestep.compiled import Compiled
from wholestep.ir import Pass
from wholestep.lower import Backend
from wholestep.override import Override
from wholestep.passes import bucket_parts, transformed
from wholestep.pipeline import Options
from wholestep.runtime import compiled_module
from wholestep.spmd import Plan, PlanExecutor


def compile(  # noqa: A001 - the ecosystem's name
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Any = None,
    plan: Plan | Sequence[Plan] | None = None,
    backend: Backend = "aten",
    passes: Sequence[Pass] = (),
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    module_override: Sequence[Override] = (),
    dynamic: bool | None = None,
    fullgraph: bool = False,
    split: Literal["buckets"] | None = None,
    memory_budget: str | float | None = None,
) -> Any:
    """Makes a training step run as one captured program.

    Args:
        fn: the step, or None to use this as a decorator with options.
        mesh: the ranks that run the step together, a `DeviceMesh` of ours or torch's; every rank compiles and calls it
            alike.
        plan: what they do along an axis of the mesh (`DataParallel`), or several plans, applied in order.
        backend: ``"aten"`` (bitwise equal to eager), ``"inductor"``, or a callable
            ``(gm, example_inputs) -> callable``.
        passes: functions ``StepGraph -> StepGraph``, applied in order.
        gm_transformation: a function ``GraphModule -> GraphModule``, called once per program, last.
        module_override: instances of `Override`: other modules to trace in the place of some, and functions on the
            graph that the plans have made.
        dynamic: whether sizes of tensors among the arguments are symbols, so that one capture serves many. None: those
            that differ at a later call are, from then on; where that cannot be, each is a capture. True: all are, from
            the first call on. False: none is. One program serves all sizes for which it is planned alike; where each
            needs its own (modules inside of ordinary autograd, passes or a backend of your own), that is made, without
            the step's Python being run again, at the second call that has the size: the first one runs in eager
            (``eager_calls``), except with ``fullgraph=True``, passes or a backend. Sizes that Python or an operator
            decides on become guards; those that cannot be symbols, or that only one value serves, are listed in
            ``specialized``. Sizes 0 and 1 are always specialised.
        fullgraph: True to refuse, with line and remedy, a step that cannot be captured whole: one that reads values of
            tensors, prints them or decides on them. By default the Python of such a step runs at each call, while its
            operators are deferred until a value is read and run as compiled segments; ``breaks`` says why. Without a
            plan, a step that is slower so than in eager runs in eager. ``module_override`` refuses such steps as well.
        split: "buckets": ``backend`` gets a graph for each bucket of gradients, in the place of one for all: of the
            forward, and of its backward in opposite order, the update with the last. Parameters fill buckets from the
            forward's end, of the `DistributedDataParallel`'s ``bucket_cap_mb`` where there is one, at most 1 MiB the
            first one, else of 25 MiB; those that it ignores and frozen ones do not count.
        memory_budget: how much memory the step may take at once: ``"1.5GiB"`` of parameters, states, batch and all that
            it computes, on this rank; or the part that what it computes may take of what that takes otherwise (0.6).
            What does not fit is computed again in the backward, with the same bits, at the least cost that was found;
            ``explain`` says what, and what it costs. Of a module, a part alone: see `min_cut_partition`. Where the
            step's Python runs at each call, its segments take as little as they can.

    Returns:
        A `Compiled`, or a decorator when ``fn`` is None. For a module, a module that shares its parameters, buffers,
        children and attributes and has those of a `Compiled` besides. Results that require grad can be differentiated
        outside, as in eager.

    Raises:
        PlanError: mesh and plan do not fit each other.
        ValueError: ``dynamic=True`` with a mesh; another ``split``; a bad memory budget.
        MemoryBudgetError: at the first call, of a budget that is too small; says what would do.
    """
    settings = {name: value for name, value in locals().items() if name != "fn"}
    if split not in (None, "buckets"):
        raise ValueError(f'ws.compile: split is "buckets" or None, found {split!r}')
    if dynamic and mesh is not None:
        raise ValueError("dynamic=True is for one process: with a mesh, each set of shapes is a capture")
    again = functools.partial(compile, **settings)
    if fn is None:
        return again
    if not callable(fn):
        raise TypeError(f"ws.compile takes a function, a method or a module, not {type(fn).__name__}")
    budget = None if memory_budget is None else MemoryBudget.of(memory_budget)
    partition: Partition = default_partition
    if budget is not None and isinstance(fn, nn.Module):
        if isinstance(budget.amount, int):
            raise ValueError(f"memory_budget={memory_budget!r} is for whole steps: give a module a part, as 0.6")
        partition = functools.partial(min_cut_partition, memory_budget=budget.amount)
    chain = list(passes)
    if gm_transformation is not None:
        chain.append(functools.partial(transformed, transform=gm_transformation, name="gm_transformation"))
    chain += [bucket_parts] if split else []

    def make(callee: Callable[..., Any]) -> Compiled:
        options = Options(PlanExecutor(mesh, plan), chain, backend, partition, fullgraph=fullgraph,
                          memory_budget=budget, module_override=module_override)  # fmt: skip
        return Compiled(callee, options, dynamic=dynamic)

    return compiled_module(fn, make, again) if isinstance(fn, nn.Module) else make(fn)


def trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.GraphModule:
    """The graph of one call of ``fn``, as captured; nothing is run and nothing changes."""
    return capture(fn, args, kwargs, differentiable=False)[1].step.gm
