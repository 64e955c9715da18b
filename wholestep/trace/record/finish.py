"""The end of a trace: its outputs, inputs and records in one `Traced`, without dead code and unused inputs.

Two captures of a step (before and after its first call, say) often differ in what Python looked like and agree in what
is computed. So inputs come in the order of first use, and equal fingerprints mean that one lowered program serves both.
What cannot be finished asks to be traced again: `SharedMemory`, `ReentrantCheckpoint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from wholestep.ir import Gradient, Input, Phase, Signature, StepGraph, dead_code, info, set_info
from wholestep.torch_compat import lazy_graph_module
from wholestep.trace.numbers.decisions import Predicate
from wholestep.trace.numbers.many_sizes import ManySizes
from wholestep.trace.outputs.collect_outputs import OutputCollector
from wholestep.trace.outputs.leaks import Watch
from wholestep.trace.outputs.output_records import Derivative, Differentiated, NewValue, OutputAlias
from wholestep.trace.record.inputs import QUESTIONS, TracedInput
from wholestep.trace.record.recorder import Recorder

# Traces the backward of a step, given what its forward left behind; see `aot_autograd.differentiate`.
Differentiate = Callable[
    [Recorder, OutputCollector, list[Any], Callable[[], AbstractContextManager[Any]]], Differentiated | None
]


class SharedMemory(Exception):  # noqa: N818 - a request, not an error
    """Memory of inputs has to be an input itself: several share it of which one is written, or the step reads more of
    it than they hold. Trace again, knowing that."""

    def __init__(self, memories: frozenset[int]) -> None:
        super().__init__(f"{len(memories)} shared memories")
        self.memories = memories


class ReentrantCheckpoint(Exception):  # noqa: N818 - a request, not an error
    """A checkpoint's backward would run another one inside; trace again, with checkpoints of the other kind."""


@dataclass
class Traced:
    """One traced run of a step.

    Attributes:
        step: the graph; its placeholders are the first of `inputs`.
        inputs: those after the placeholders serve results and predicates alone.
        aliases: the tensors that outlive the step.
        result: what the step returned, as capture describes it.
        effects: changes of Python objects, as capture describes them.
        new_values: where to find the new values that result and effects hold, in the order in which they count them.
        predicates: decisions of Python's that are known before the step.
        versions: input index -> how many in-place writes eager execution counts.
        fingerprint: equal for programs that compute the same.
        watch: tells what of the trace is alive when it shall not be.
        derivative: what makes results differentiable; the graph is then a joint one, and its last placeholders, the
            tangents, are not in `inputs`.
        storage_sizes: (input index, bytes on entry, bytes afterwards) where the step asks for or changes an input's
            storage.
        answers: (input index, one of `QUESTIONS`, the answer) where the step asks for it; the offset also where several
            inputs are views of one memory.
        grad_mode: what the step leaves grad mode at, None when that is what it found.
        many: the sizes that it serves, where one program may serve many.
        moved: (input, alias) of each input that the step gives other memory, by an assignment to its `.data`.
    """

    step: StepGraph
    inputs: list[TracedInput]
    aliases: list[OutputAlias]
    result: Any
    effects: list[Any]
    new_values: list[NewValue]
    predicates: list[Predicate]
    versions: dict[int, int]
    fingerprint: str
    watch: Watch
    derivative: Derivative | None = None
    storage_sizes: list[tuple[int, int, int]] = field(default_factory=list)
    answers: list[tuple[int, str, Any]] = field(default_factory=list)
    grad_mode: bool | None = None
    many: ManySizes | None = None
    moved: list[tuple[int, int]] = field(default_factory=list)

    @property
    def n_inputs(self) -> int:
        """How many placeholders are inputs; those after them are tangents."""
        return len(self.step.signature.inputs) - (len(self.derivative.outputs) if self.derivative else 0)


def finish(
    recorder: Recorder,
    collector: OutputCollector,
    result: Any,
    effects: list[Any],
    new_values: list[NewValue],
    versions: dict[TracedInput, int],
    backward: Differentiated | None,
    state_outputs: Mapping[int, Input],
) -> Traced:
    """Closes the graph, and gathers what a replay needs besides it.

    Args:
        result, effects: as capture describes them.
        new_values: where the new values that they hold are.
        versions: input -> how many in-place writes eager execution counts.
        backward: what the trace of a backward has added.
        state_outputs: index of a new value -> the gradient or state that it is.
    """
    builder, outputs, items, sizes = recorder.builder, collector.outputs, recorder.inputs.items, recorder.storages.known
    gm, used, mutated = _close(recorder, collector, backward)
    by_node: dict[fx.Node, TracedInput] = {}
    for item in items:
        by_node.setdefault(item.node, item)
    primals = [by_node[node] for node in used[: len(used) - len(backward.tangents if backward else ())]]
    asked, original = recorder.inputs.asked, recorder.inputs.world.substitutes.original
    resized = [size.item for size in sizes]
    named = backward.items if backward else []
    inputs = list(dict.fromkeys([*primals, *items, *versions, *resized, *asked.values(), *named, *collector.moved]))
    for index, item in enumerate(inputs):
        item.index = index
    by_name = {i.name: i for i in builder.inputs}
    state_places = {index: _output(collector, place) for index, place in enumerate(new_values)}
    signature = Signature(
        [by_name[str(node.target)] for node in used],
        len(gm.graph.output_node().args[0]),  # type: ignore[arg-type]
        {output: item.index for output, item in mutated.items()},
        builder.gradients,
        {output: state_outputs[i] for i, output in state_places.items() if output is not None and i in state_outputs},
    )
    if backward is not None:
        _name_gradients(signature, backward, by_name, len(outputs))
    step, derivative = StepGraph(gm, signature), _derivative(backward, len(outputs))
    return Traced(
        step,
        inputs,
        [a if a.input is None else replace(a, input=items[a.input].index) for a in collector.aliases],
        result,
        effects,
        new_values,
        [replace(p, inputs=tuple(items[i].index for i in p.inputs))
         for p in recorder.numbers.predicates.values() if p.inputs],
        {item.index: times for item, times in versions.items()},
        fingerprint(step, builder.constants, derivative),
        builder.watch,
        derivative,
        [(size.item.index, size.before, size.now) for size in sizes],
        answers=[(item.index, name, QUESTIONS[name](original(item.value))) for (_, name), item in asked.items()],
        moved=[(item.index, alias) for item, alias in collector.moved.items()],
    )  # fmt: skip


def _close(
    recorder: Recorder, collector: OutputCollector, backward: Differentiated | None
) -> tuple[fx.GraphModule, list[fx.Node], dict[int, TracedInput]]:
    """Gives the graph its outputs, and takes out what they do not need.

    Returns:
        The graph, its placeholders in order, and the inputs that it gives new contents, by output.
    """
    builder, outputs = recorder.builder, collector.outputs
    elsewhere = {size.item for size in recorder.storages.known if not size.now}  # nowhere is left to write to
    gradients: list[fx.Node] = []
    graded: list[TracedInput] = []
    if backward is not None:
        elsewhere |= {item for item, *_ in backward.rewritten}
        gradients = [*backward.gradients, *(node for _, node in backward.late)]
        graded = [*backward.inputs, *(item for item, _ in backward.late)]
    items = recorder.inputs.items
    written = [i for i in items if i.is_written and i.ref.parent is None and i not in elsewhere]  # type: ignore[union-attr]
    output = builder.graph.output((*outputs, *map(_new_value, written), *gradients))
    gm = lazy_graph_module(builder.constants, builder.graph)
    if backward is not None:
        _set_phases(gm.graph, backward.last)
    dead_code(StepGraph(gm, Signature()))
    in_aliases = [items[alias.input] for alias in collector.aliases if alias.input is not None]
    needed = [item.node for item in (*written, *in_aliases, *graded)]
    used = order_inputs(gm.graph, needed, backward.tangents if backward else ())
    order = {node: index for index, node in enumerate(used)}
    written.sort(key=lambda item: order[item.node])
    mutated = dict(enumerate(written, start=len(outputs)))
    outputs.extend(map(_new_value, written))
    output.args = ((*outputs, *gradients),)
    gm.recompile()
    return gm, used, mutated


def _name_gradients(signature: Signature, backward: Differentiated, by_name: Mapping[str, Input], first: int) -> None:
    """Those that a backward outside of the step gets, of parameters that a wrapper divides."""
    for index, (item, node) in enumerate(zip(backward.inputs, backward.gradients, strict=False), start=first):
        found = by_name[str(item.node.target)]
        if found.shard is not None:
            signature.state_outputs[index] = Input("", f"{found.source}.grad", "grad")
            value = info(node).value
            place = tuple(value.shape), tuple(value.stride()), 0
            signature.gradients.append(Gradient(found.source, None, node.name, place, group=found.shard[0]))


def _new_value(item: TracedInput) -> fx.Node:
    assert item.ref is not None
    return item.ref.storage.value


def _derivative(backward: Differentiated | None, n_forward: int) -> Derivative | None:
    if backward is None or not backward.derivative.outputs:
        return None
    return replace(
        backward.derivative,
        n_forward=n_forward,
        inputs=tuple(item.index for item in backward.inputs),
        rewritten=tuple((item.index, output, place) for item, output, place in backward.rewritten),
        late=tuple(item.index for item, _ in backward.late),
    )


def _output(collector: OutputCollector, place: NewValue) -> int | None:
    """The output that is all of what the step leaves at a place."""
    alias = None if place.alias is None else collector.aliases[place.alias]
    return alias.output if alias is not None and alias.views is None else None


def _set_phases(graph: fx.Graph, last: fx.Node) -> None:
    """Forward is what ran before the backward of the whole began, a backward inside of the step included."""
    phase: Phase = "forward"
    for node in graph.nodes:
        if "info" in node.meta and node.op != "placeholder":
            set_info(node, replace(info(node), phase=phase))
        if node is last:
            phase = "backward"


def order_inputs(graph: fx.Graph, needed: list[fx.Node], last: Sequence[fx.Node] = ()) -> list[fx.Node]:
    """Placeholders in the order of their first use, then those of `needed` that nothing uses, then `last`.

    Moves them into that order in the graph and erases all others.
    """
    used = [n for node in graph.nodes for n in node.all_input_nodes if n.op == "placeholder"]
    ordered = [n for n in dict.fromkeys([*used, *needed]) if n not in last] + [*last]
    kept = set(ordered)
    body = next(n for n in graph.nodes if n.op != "placeholder")
    for node in ordered:
        body.prepend(node)
    for node in list(graph.nodes):
        if node.op == "placeholder" and node not in kept:
            graph.erase_node(node)
    return ordered


def fingerprint(step: StepGraph, constants: dict[str, torch.Tensor], derivative: object = None) -> str:
    """A hash of everything that a lowered program depends on."""
    numbers: dict[fx.Node, int] = {}
    digest = hashlib.sha256()
    for node in step.graph.nodes:
        numbers[node] = len(numbers)
        what = node.op if node.op in ("placeholder", "output") else str(node.target)
        if node.op == "get_attr":
            real = constants[str(node.target)]
            digest.update(real.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            what = f"constant {real.dtype} {list(real.shape)} {real.device}"
        text = f"{what} {words(node.args, numbers)} {words(node.kwargs, numbers)}"
        value = node.meta["info"].value if node.op == "placeholder" else None
        text += words(value, numbers) if isinstance(value, torch.Tensor) else ""
        digest.update(text.encode())
    signature = step.signature
    kinds = [(i.kind, i.bucket, i.shard) for i in signature.inputs]
    places = {node.name: number for node, number in numbers.items()} if signature.gradients else {}
    reduced = [(places.get(g.before or ""), places.get(g.after), g.place, g.group) for g in signature.gradients]
    digest.update(str(torch.get_default_dtype()).encode())  # that of calls that name none
    written = sorted(signature.mutations.items())
    digest.update(f"{kinds} {written} {signature.n_outputs} {reduced} {derivative}".encode())
    return digest.hexdigest()


def words(value: Any, numbers: Mapping[fx.Node, int] = MappingProxyType({})) -> str:
    """Arguments or results in words: nodes by their numbers, tensors by their layouts."""
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, torch.Tensor):
        return f"<{value.dtype} {list(value.shape)} {list(value.stride())} {value.device}>"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(words(v, numbers) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {words(v, numbers)}" for k, v in value.items()) + "}"
    return repr(value)
