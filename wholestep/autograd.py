"""Ahead-of-time autograd: joint graphs, partitions, the user's own compilers, and compiled `backward()`.

The public names of the room `aot_autograd/`. They stand above the pipeline, which imports that room.
May import: aot_autograd, capture_call, compiled, ir, lower, passes, pipeline, runtime, spmd, torch_compat.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from wholestep.aot_autograd import (
    CompiledBackward,
    Joint,
    Partition,
    Partitioned,
    default_partition,
    min_cut_partition,
    split,
)
from wholestep.capture_call import TakeSnapshot, capture
from wholestep.compiled import Compiled
from wholestep.ir import Pass, check
from wholestep.lower import Backend
from wholestep.passes.user_functions import decompose
from wholestep.pipeline import Options, joint_of
from wholestep.runtime import compiled_module
from wholestep.spmd import PlanExecutor
from wholestep.torch_compat import floats_as_tensors

__all__ = [
    "CompiledBackward", "Joint", "Partition", "Partitioned", "aot_function", "aot_module", "compiled_backward",
    "default_partition", "dynamo_backend", "export_joint", "min_cut_partition", "split",
]

Table = Mapping[Any, Callable[..., Any]]


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Backend,
    bw_compiler: Backend | None = None,
    partition_fn: Partition = default_partition,
    decompositions: Table | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """A function whose forward and backward are captured as graphs, and compiled by functions of yours.

    Args:
        fn: a function of tensors and other values; what it returns may be any structure of them.
        fw_compiler: ``(gm, example_inputs) -> callable`` for the forward graph, or a backend's name. The callable
            takes the inputs in order and returns the flat outputs.
        bw_compiler: the same for the backward graph; ``fw_compiler`` when None.
        partition_fn: decides which values the forward saves for the backward.
        decompositions: operator -> function in terms of other operators, applied to both.
        dynamic: one capture for many sizes; as for `wholestep.compile`.

    Returns:
        A function with the results, gradients, aliases and errors of ``fn``. It is captured at its first call, and
        again when something about a call differs (`recompiles`).
    """
    if not callable(fn):
        raise TypeError(f"aot_function takes a function, a method or a module, not {type(fn).__name__}")
    options = _options(fw_compiler, bw_compiler, partition_fn, None, decompositions)
    return Compiled(fn, options, dynamic=dynamic)


def aot_module(
    module: nn.Module,
    fw_compiler: Backend,
    bw_compiler: Backend | None = None,
    partition_fn: Partition = default_partition,
    decompositions: Table | None = None,
    dynamic: bool | None = None,
) -> nn.Module:
    """`aot_function` of a module; the result shares its parameters, buffers, children and attributes."""
    settings: dict[str, Any] = {name: value for name, value in locals().items() if name != "module"}
    if not isinstance(module, nn.Module):
        raise TypeError(f"aot_module takes a torch.nn.Module, not {type(module).__name__}")
    make, again = functools.partial(aot_function, **settings), functools.partial(aot_module, **settings)
    return compiled_module(module, make, again)


def export_joint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Joint:
    """Forward and backward of one call as one flat graph; nothing is run and nothing changes.

    Returns:
        A `Joint`: ``joint.step.gm`` is the graph, ``joint.step.signature.inputs`` names its inputs by where they are
        found (``L['self'].linear.weight``), ``joint.gradient_of`` says which of them its last outputs are for.

    Raises:
        ValueError: no result requires grad.
    """
    with torch.enable_grad():
        traced = capture(fn, args, kwargs)[1]
    if traced.derivative is None:
        raise ValueError("export_joint: no result of the function requires grad, so there is no backward to export")
    check(traced.step, "trace")
    return joint_of(traced.step, traced)


def compiled_backward(backend: Backend = "aten") -> CompiledBackward:
    """Inside of this context, each `backward()` is captured as one graph and run as one program.

    Hooks on tensors, modules and gradients, `autograd.Function`s and compiled pieces are part of it; what they read is
    found again at each run, and what they change is changed at each run. Programs are kept by the structure of the
    autograd graph for all contexts of one backend. What cannot be captured is left to the engine, with eager's
    result; `eager` says why. `torch.autograd.grad` is captured alike.

    torch's own compiled autograd can run before it in a process, not after: the engine gives the functions that it
    binds to the first who asks.

    Args:
        backend: as in `wholestep.compile`.

    Returns:
        A context manager, which also decorates functions.

    Raises:
        UnsupportedError: inside of it, a backward with ``create_graph=True``.
    """
    return CompiledBackward(backend, _compile_backward)


def _compile_backward(fn: Callable[..., Any], backend: Backend, take: TakeSnapshot) -> Compiled:
    """The pipeline for a backward: as for a step of one process, from a snapshot of its own."""
    return Compiled(fn, Options(PlanExecutor(None, None), backend=backend, donates=True), take)


def dynamo_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    backend: Backend = "aten",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="wholestep")`: Dynamo's front end, then our joint graph, partition and lowering.

    Registered by entry point; without an installed package, pass this function itself as the backend. A graph that
    cannot be replayed runs as it is written, with its operators deferred, as in `wholestep.compile`.

    Args:
        gm: a graph of Dynamo's.
        example_inputs: not read: the graph is captured when it is first called.
        backend: as in `wholestep.compile`; bind another with `functools.partial`, or name it among the options.
        mode: refused: its names stand for settings of Inductor.
        options: ``torch.compile(…, options={…})``: ``backend`` and ``passes`` as for `wholestep.compile`;
            ``bw_compiler``, ``partition_fn`` and ``decompositions`` as for `aot_function`;
            ``memory_budget`` for `min_cut_partition`.

    Raises:
        ValueError: a mode, or an option of another name.
    """
    if mode is not None:
        raise ValueError(f'mode={mode!r} is a setting of Inductor: options={{"backend": "inductor"}} compiles with it')
    chosen = replace(_options(**{"backend": backend, **_known(options or {})}), fullgraph=False)

    numbers = floats_as_tensors(gm.graph)

    def graph(*inputs: Any) -> Any:
        return gm(*(_Number(given) if k in numbers else given for k, given in enumerate(inputs)))

    compiled = Compiled(graph, chosen)

    def run(*inputs: Any) -> Any:
        return compiled(*(given.item() if k in numbers else given for k, given in enumerate(inputs)))

    return run


class _Number:
    """A float where a graph of Dynamo's expects a tensor, to ask for its value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    known = list(inspect.signature(_options).parameters)
    for name in options:
        if name not in known:
            raise ValueError(f'backend="wholestep" has no option {name!r}; it has {", ".join(known)}')
    if "memory_budget" in options and "partition_fn" in options:
        raise ValueError("memory_budget is a setting of min_cut_partition: give no partition_fn, or one with its own")
    return options


def _options(
    backend: Backend,
    bw_compiler: Backend | None = None,
    partition_fn: Partition = default_partition,
    memory_budget: float | None = None,
    decompositions: Table | None = None,
    passes: Sequence[Pass] = (),
) -> Options:
    partition = partition_fn
    if memory_budget is not None:
        partition = functools.partial(min_cut_partition, memory_budget=memory_budget)
    own: list[Pass] = [functools.partial(decompose, table=decompositions)] if decompositions else []
    return Options(PlanExecutor(None, None), [*own, *passes], backend, partition, bw_compiler)
