"""Other code generators as backends: Inductor, or a user's own ``(gm, example_inputs) -> callable``.

A graph that is compiled part by part is run as one: what a part reads of another goes from one to the next. So is one
whose forward and backward go to Inductor, which takes tensors only, and everything that needs a host number (an
optimizer's schedule) or has an effect of its own to the generated ATen program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.errors import LoweringError
from wholestep.functional import OFFSETS, is_collective, is_view
from wholestep.ir import GETITEM, Input, Signature, StepGraph, copy_graph, info, is_effectful, is_host
from wholestep.lower.backends.aten import lower_aten
from wholestep.lower.backends.interpreter import write_back
from wholestep.lower.plan.operator_facts import offset_of
from wholestep.passes.canonicalize import copy_step
from wholestep.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    compile_with_inductor,
    fake_of,
    lazy_graph_module,
    without_autocast,
)

Run = Callable[..., Sequence[Any]]


def part_numbers(step: StepGraph, in_flight: bool) -> dict[fx.Node, int]:
    """The part of each call, counted up along the graph; those between which something else than a tensor or a number
    would have to go are one.

    Args:
        in_flight: whether a collective may go on from one part to the next.
    """
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    own = [info(n).part for n in calls if info(n).phase == "backward" or step.stage != "backward"]
    part = min(own, default=0)  # a forward's calls, made again by a backward, belong to what comes next
    numbers: dict[fx.Node, int] = {}
    for node in calls:
        part = max(part, info(node).part)
        numbers[node] = numbers.get(node.args[0], part) if node.target is GETITEM else part  # type: ignore[arg-type]
    joined: set[int] = set()
    for node, number in numbers.items():
        if not isinstance(info(node).value, torch.Tensor | int | float) or (
            is_collective(node.target) and not in_flight
        ):
            joined.update(*(range(number + 1, numbers[user] + 1) for user in node.users if user in numbers))
    order = {number: i for i, number in enumerate(sorted(set(numbers.values()) - joined))}
    kept = sorted(order)
    return {node: max(order[k] for k in kept if k <= number or k == kept[0]) for node, number in numbers.items()}


class Parts:
    """The callables that a backend made of a graph's parts, as one for the whole.

    Args:
        step: the graph.
        numbers: the part of each call.
        lower: makes a callable of a part.
    """

    def __init__(self, step: StepGraph, numbers: dict[fx.Node, int], lower: Callable[[StepGraph], Run]) -> None:
        inputs = dict(zip(step.placeholders, step.signature.inputs, strict=True))
        self._mutations, self._given = step.signature.mutations, [node.name for node in inputs]
        self._outputs = [node.name if isinstance(node, fx.Node) else None for node in step.outputs]
        graphs: list[tuple[StepGraph, list[str]]] = []
        last = dict.fromkeys(filter(None, self._outputs), -1)  # results of the step stay until its end
        results, olds = step.outputs, step.placeholders
        left = {node for node in results if isinstance(node, fx.Node)}
        for part in reversed(range(max(numbers.values()) + 1)):
            mine = _with_views([node for node, number in numbers.items() if number == part])
            reads = [n for n in dict.fromkeys(o for m in mine for o in m.all_input_nodes) if n not in mine]
            reads = [node for node in reads if node.op != "get_attr"]
            gives = [node for node in mine if node in left and numbers[node] == part]
            new: dict[fx.Node, fx.Node] = {}
            if not graphs:  # the last part writes inputs in place, but for those that are results as they were
                pairs = ((results[out], olds[into]) for out, into in self._mutations.items())
                new = {node: old for node, old in pairs if node in gives and old not in left}
                reads += [old for old in new.values() if old not in reads]
            left |= {node for node in reads if node in numbers}
            dead = [node.name for node in reads if last.setdefault(node.name, part) == part]
            graphs.append((_graph_of(step, mine, reads, gives, inputs), dead))
            graphs[-1][0].signature.mutations = {gives.index(node): reads.index(old) for node, old in new.items()}
        self._parts = [(lower(one), _names(one.placeholders), _names(one.outputs), dead) for one, dead in graphs[::-1]]

    @property
    def code(self) -> str:
        """The programs of all parts, as far as the backend has text of them."""
        return "\n\n".join(str(getattr(run, "code", "")) for run, *_ in self._parts).strip()

    def __call__(self, *inputs: Any) -> list[Any]:
        return self.consume(list(inputs))

    def consume(self, inputs: list[Any]) -> list[Any]:
        """Runs the parts; a value is let go of when no later one reads it."""
        values = dict(zip(self._given, inputs, strict=True))
        for run, reads, gives, dead in self._parts:
            values.update(zip(gives, run(*(values[name] for name in reads)), strict=True))
            for name in dead:
                del values[name]
        results = [None if name is None else values[name] for name in self._outputs]
        with torch.no_grad():
            return write_back(results, inputs, self._mutations)


def _names(nodes: list[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def _with_views(nodes: list[fx.Node]) -> dict[fx.Node, None]:
    """Some calls in order, with the views and constants made anew that they read of other parts: they cost nothing."""
    found = dict.fromkeys(nodes)
    more = {operand for node in nodes for operand in node.all_input_nodes} - found.keys()
    while more:
        node = more.pop()
        tensor_view = is_view(node.target) and isinstance(info(node).value, torch.Tensor)
        if node.op == "get_attr" or (node.op == "call_function" and tensor_view):
            found[node] = None
            more |= {*node.all_input_nodes} - found.keys()
    return dict.fromkeys(sorted(found))


def _graph_of(
    step: StepGraph, mine: dict[fx.Node, None], reads: list[fx.Node], gives: list[fx.Node], inputs: dict[fx.Node, Input]
) -> StepGraph:
    graph, copies = copy_graph(mine, [(node, node.name) for node in reads])
    graph.output(tuple(copies[node] for node in gives))
    made = [inputs.get(n) or Input("", f"value {n.name}", "number" if is_host(n) else "tensor") for n in reads]
    named = [replace(one, name=str(copies[node].target)) for one, node in zip(made, reads, strict=True)]
    return StepGraph(lazy_graph_module(step.gm, graph), Signature(named, len(gives)), step.stage)


UserBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def lower_callable(backend: UserBackend, step: StepGraph) -> Callable[..., list[Any]]:
    """Lowers a graph by a user's ``(gm, example_inputs) -> callable``.

    The callable gets the inputs in order (in one list, when it is marked by ``_boxed_call = True``) and returns the
    flat outputs, pure or not; new values of mutated inputs are then copied into them, and outputs that share memory
    are given their own. The example inputs are the fake tensors and numbers of the graph's records.
    """
    gm = _with_own_offsets(step).gm
    # an ordinary module: TorchScript reads the methods of one that writes its Python later
    compiled = backend(fx.GraphModule(gm, gm.graph), _examples(step))
    if not callable(compiled):
        raise LoweringError(f"backend {backend!r} returned {type(compiled).__name__}, required a callable")
    boxed = getattr(compiled, "_boxed_call", False)  # torch's mark of a callable that takes one list

    def run(*inputs: Any) -> list[Any]:
        with torch.no_grad(), without_autocast():  # its casts are in the graph
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


def lower_inductor(step: StepGraph) -> Run:
    """Compiles the tensor part of a step with Inductor; results are equal to float tolerance, not bitwise.

    Raises:
        LoweringError: Inductor could not compile the part; its own error is the cause.
    """
    inside = _tensor_part(step)
    if not inside:
        return lower_aten(step)
    numbers: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        if node.op == "call_function":
            numbers[node] = numbers[node.args[0]] if node.target is GETITEM else int(node not in inside)
    ways = iter((_compiled, lower_aten))
    return Parts(step, numbers, lambda part: next(ways)(part))


def _examples(step: StepGraph) -> list[Any]:
    """A value of its own for each placeholder: records share some, which compilers would take for one input."""
    values = [info(node).value for node in step.placeholders]
    return [fake_of(v.fake_mode, v) if isinstance(v, FakeTensor) else v for v in values]


def _compiled(part: StepGraph) -> Run:
    fakes = _examples(part)
    mode = next((v.fake_mode for v in fakes if isinstance(v, FakeTensor)), None) or FakeTensorMode()
    try:
        compiled = compile_with_inductor(part.gm, fakes, mode)
    except Exception as error:
        raise LoweringError(f"Inductor could not compile the step: {error}") from error

    def run(*inputs: Any) -> list[Any]:
        with torch.no_grad(), without_autocast():
            made = map(_laid_out, compiled(list(inputs)), part.outputs)
            return write_back([*made], inputs, part.signature.mutations)

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
