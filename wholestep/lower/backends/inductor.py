"""Other code generators as backends: Inductor, or a user's own ``(gm, example_inputs) -> callable``.

Inductor takes tensors only, so the graph is cut in two: forward and backward go to Inductor, everything that
needs a host number (an optimizer's schedule) or has an effect of its own to the generated ATen program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.errors import LoweringError
from wholestep.functional import OFFSETS
from wholestep.ir import GETITEM, Input, Signature, StepGraph, copy_graph, info, is_effectful
from wholestep.lower.backends.aten import lower_aten
from wholestep.lower.backends.interpreter import write_back
from wholestep.lower.plan.operator_facts import offset_of
from wholestep.passes.canonicalize import copy_step
from wholestep.torch_compat import FakeTensor, FakeTensorMode, OpOverload, compile_with_inductor, lazy_graph_module

UserBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def lower_callable(backend: UserBackend, step: StepGraph) -> Callable[..., list[Any]]:
    """Lowers a graph by a user's ``(gm, example_inputs) -> callable``.

    The callable gets the inputs in order (in one list, when it is marked by ``_boxed_call = True``) and returns the
    flat outputs, pure or not; new values of mutated inputs are then copied into them, and outputs that share memory
    are given their own. The example inputs are the fake tensors and numbers of the graph's records.
    """
    gm = _with_own_offsets(step).gm
    # an ordinary module: TorchScript reads the methods of one that writes its Python later
    compiled = backend(fx.GraphModule(gm, gm.graph), [info(node).value for node in step.placeholders])
    if not callable(compiled):
        raise LoweringError(f"backend {backend!r} returned {type(compiled).__name__}, required a callable")
    boxed = getattr(compiled, "_boxed_call", False)  # torch's mark of a callable that takes one list

    def run(*inputs: Any) -> list[Any]:
        with torch.no_grad():
            values = compiled(list(inputs)) if boxed else compiled(*inputs)
            if len(values) != step.signature.n_outputs:
                raise LoweringError(
                    f"backend {backend!r}: its callable returned {len(values)} outputs, "
                    f"the graph has {step.signature.n_outputs}; return them flat, in the graph's order"
                )
            return write_back(list(values), inputs, step.signature.mutations)

    return run


def _with_own_offsets(step: StepGraph) -> StepGraph:
    """The graph with offsets counted from the start of each operand's memory, as the operators themselves do."""
    if not any(node.target in OFFSETS for node in step.graph.nodes):
        return step
    copied = copy_step(step)
    for node in copied.graph.nodes:
        place = OFFSETS.get(node.target, len(node.args))
        if place < len(node.args):
            offset = offset_of(node.target, node.args)
            begin = info(node.args[0]).value.storage_offset()
            node.args = (*node.args[:place], begin + offset) if offset else node.args[:place]
    copied.gm.recompile()
    return copied


def lower_inductor(step: StepGraph) -> Callable[..., list[Any]]:
    """Compiles the tensor part of a step with Inductor; results are equal to float tolerance, not bitwise.

    Raises:
        LoweringError: Inductor could not compile the part; its own error is the cause.
    """
    inside = _tensor_part(step)
    if not inside:
        return lower_aten(step)
    used = [i for i, node in enumerate(step.placeholders) if any(user in inside for user in node.users)]
    kept = [n for n in step.graph.nodes if n in inside and isinstance(info(n).value, torch.Tensor)]
    kept = [node for node in kept if any(user not in inside for user in node.users)]
    left = [i for i, node in enumerate(step.outputs) if i in step.signature.mutations or node not in kept]
    fakes = [info(step.placeholders[i]).value for i in used]
    mode = next((v.fake_mode for v in fakes if isinstance(v, FakeTensor)), None) or FakeTensorMode()
    try:
        tensor_part = compile_with_inductor(_inner(step, inside, kept), fakes, mode)
    except Exception as error:
        raise LoweringError(f"Inductor could not compile the step: {error}") from error
    rest = lower_aten(_outer(step, inside, kept, left))

    def run(*inputs: Any) -> list[Any]:
        with torch.no_grad():
            made = [_laid_out(v, node) for v, node in zip(tensor_part([inputs[i] for i in used]), kept, strict=True)]
            values = dict(zip(kept, write_back(made, inputs, {}), strict=True))
            results = dict(zip(left, rest(*inputs, *values.values()), strict=True))
            return [results[i] if i in results else values[node] for i, node in enumerate(step.outputs)]

    return run


def _laid_out(value: Any, node: fx.Node) -> Any:
    """A value with the strides that the graph says it has; Inductor lays its results out as it likes."""
    wanted = info(node).value
    if not isinstance(value, torch.Tensor) or value.stride() == wanted.stride():
        return value
    return torch.empty_strided(wanted.shape, wanted.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _tensor_part(step: StepGraph) -> set[fx.Node]:
    """ATen calls of forward and backward that need no host number and follow no effect left outside."""
    inside: set[fx.Node] = set()
    blocked = False
    for node in step.graph.nodes:
        if node.op == "get_attr":
            inside.add(node)
        if node.op != "call_function":
            continue
        # Inductor would count an offset from the start of its operand's memory
        plain = isinstance(node.target, OpOverload) and node.target.namespace == "aten" and node.target not in OFFSETS
        fits = (plain or node.target is GETITEM) and info(node).phase != "optimizer"
        tensors = all(
            o in inside or (o.op == "placeholder" and isinstance(info(o).value, torch.Tensor))
            for o in node.all_input_nodes
        )
        effect = is_effectful(node)
        if fits and tensors and not isinstance(info(node).value, (int, float)) and not (effect and blocked):
            inside.add(node)
        elif effect:
            blocked = True
    return inside if any(n.op == "call_function" for n in inside) else set()


def _inner(step: StepGraph, inside: set[fx.Node], kept: list[fx.Node]) -> fx.GraphModule:
    """The tensor part as a graph of its own."""
    used = inside | {node for node in step.placeholders if not inside.isdisjoint(node.users)}
    graph, copies = copy_graph(node for node in step.graph.nodes if node in used)
    graph.output(tuple(copies[node] for node in kept))
    return lazy_graph_module(step.gm, graph)


def _outer(step: StepGraph, inside: set[fx.Node], kept: list[fx.Node], left: list[int]) -> StepGraph:
    """Everything else, with the tensor part's results as further inputs."""
    outputs, old = step.outputs, step.signature
    others = [n for n in step.graph.nodes if n not in inside and n.op not in ("placeholder", "output")]
    graph, copies = copy_graph(others, [*((n, str(n.target)) for n in step.placeholders), *((n, n.name) for n in kept)])
    graph.output(tuple(fx.map_arg(outputs[i], copies.__getitem__) for i in left))
    results = [Input(str(copies[n].target), f"result {n.name} of the compiled part", "tensor") for n in kept]
    mutations = {left.index(out): into for out, into in old.mutations.items()}
    return StepGraph(
        lazy_graph_module(step.gm, graph), Signature(old.inputs + results, len(left), mutations), step.stage
    )
