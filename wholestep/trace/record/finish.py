"""The end of a trace: its outputs, inputs and records in one `Traced`, without what nobody needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from wholestep.ir import Input, Phase, Signature, StepGraph, dead_code, info, set_info
from wholestep.torch_compat import lazy_graph_module
from wholestep.trace.outputs.canonical import fingerprint, first_uses, order_inputs
from wholestep.trace.outputs.hoisted_state import Hoisted
from wholestep.trace.outputs.results import Outlet
from wholestep.trace.outputs.state_outputs import Derivative, Differentiated, Made
from wholestep.trace.record.inputs import Lifted
from wholestep.trace.record.recorder import Recorder
from wholestep.trace.traced import Traced


def finish(
    recorder: Recorder,
    outlet: Outlet,
    result: Any,
    effects: list[Any],
    made: list[Made],
    hoisted: Hoisted,
    versions: dict[Any, int],
    backward: Differentiated | None,
    homes: dict[int, Input],
) -> Traced:
    """Closes the graph.

    Args:
        result, effects: as capture describes them.
        made: where the new values that they hold are.
        versions: input -> how many in-place writes eager execution counts.
        backward: what the trace of a backward has added.
        homes: index of a new value -> the gradient or state that it is.
    """
    rewritten = {id(item) for item, _, _ in (*backward.rewritten, *backward.refused)} if backward else set()
    rewritten |= {id(m.item) for m in recorder.memories.values() if not m.now}  # nowhere is left to write to
    written = [i for i in recorder.lifted if is_written(i) and i.ref.parent is None and id(i) not in rewritten]  # type: ignore[union-attr]
    copied = [outlet.add_output(node) for _, node, _ in backward.rewritten] if backward else []
    refused = [(item, outlet.add_output(node), why) for item, node, why in backward.refused] if backward else []
    results = len(outlet.outputs)
    late = backward.late if backward else []
    gradients = [*backward.gradients, *(node for _, node in late)] if backward else []
    output = recorder.graph.output((*outlet.outputs, *(i.ref.storage.value for i in written), *gradients))  # type: ignore[union-attr]
    gm = lazy_graph_module(recorder.constants, recorder.graph)
    if backward and backward.slots:
        _set_phases(gm.graph, backward.last)
    dead_code(StepGraph(gm, Signature()))
    ranks = first_uses(gm.graph)
    written.sort(key=lambda item: ranks.get(item.node, len(ranks)))
    outlet.outputs.extend(item.ref.storage.value for item in written)  # type: ignore[union-attr]
    mutated = dict(enumerate(written, start=results))
    output.args = ((*outlet.outputs, *gradients),)
    in_slots = [recorder.lifted[s.input].node for s in outlet.slots if s.input is not None]
    needed = [*(i.node for i in mutated.values()), *in_slots]
    needed += [*(i.node for i in backward.inputs), *(i.node for i, _ in late)] if backward else []
    used = order_inputs(gm.graph, needed, backward.tangents if backward else [])
    gm.recompile()
    primary: dict[fx.Node, Lifted] = {}
    for item in recorder.lifted:
        primary.setdefault(item.node, item)
    primals = used[: len(used) - len(backward.tangents)] if backward else used
    lifted = [primary[node] for node in primals]
    known = {id(item) for item in lifted}
    reshaped = [(recorder.by_id[key], ref.geometry) for key, ref in recorder.reshaped.items()]
    served = [*recorder.lifted, *versions, *(i for i, _ in reshaped), *(m.item for m in recorder.memories.values())]
    served += recorder.offsets.values()
    served += [*backward.inputs, *(i for i, _, _ in (*backward.rewritten, *backward.refused))] if backward else []
    lifted += [item for item in dict.fromkeys(served) if id(item) not in known]
    new_index = {id(item): index for index, item in enumerate(lifted)}
    moved = [new_index[id(item)] for item in recorder.lifted]
    by_name = {i.name: i for i in recorder.inputs}
    step = StepGraph(
        gm,
        Signature(
            [by_name[str(node.target)] for node in used],
            len(outlet.outputs) + len(gradients),
            {output: new_index[id(item)] for output, item in mutated.items()},
            recorder.gradients,
            {output: home for index, home in homes.items() if (output := _own_output(outlet, made[index])) is not None},
        ),
    )
    derivative = None
    if backward and backward.slots:
        derivative = Derivative(
            len(outlet.outputs),
            tuple(backward.slots),
            tuple((new_index[id(i)], out, k) for (i, _, k), out in zip(backward.rewritten, copied, strict=True)),
            tuple(new_index[id(item)] for item in backward.inputs),
            tuple(backward.reaches),
            tuple(new_index[id(item)] for item, _ in late),
            tuple(backward.made),
            len(backward.gradients) - len(backward.made),
            tuple(backward.names),
        )
    return Traced(
        step,
        lifted,
        [s if s.input is None else replace(s, input=moved[s.input]) for s in outlet.slots],
        result,
        effects,
        made,
        [replace(p, inputs=tuple(moved[i] for i in p.inputs)) for p in recorder.predicates.values() if p.inputs],
        hoisted,
        {new_index[id(item)]: times for item, times in versions.items()},
        fingerprint(step, recorder.constants, derivative),
        recorder.watch,
        derivative,
        [(new_index[id(m.item)], m.before, m.now) for m in recorder.memories.values()],
        refused=[(new_index[id(item)], output, why) for item, output, why in refused],
        offsets=[(new_index[id(item)], item.value.storage_offset()) for item in recorder.offsets.values()],  # type: ignore[union-attr,misc]
        reshaped=[(new_index[id(item)], tuple(place.shape), tuple(place.stride)) for item, place in reshaped],
    )


def _own_output(outlet: Outlet, place: Made) -> int | None:
    """The output that is all of what the step leaves at a place."""
    slot = None if place.slot is None else outlet.slots[place.slot]
    return slot.output if slot is not None and slot.geometry is None else None


def _set_phases(graph: fx.Graph, last: fx.Node) -> None:
    """Forward is what ran before the backward of the whole began, a backward inside of the step included."""
    phase: Phase = "forward"
    for node in graph.nodes:
        if "info" in node.meta and node.op != "placeholder":
            set_info(node, replace(info(node), phase=phase))
        if node is last:
            phase = "backward"


def is_written(item: Lifted) -> bool:
    """Whether the step writes to the memory of an input."""
    return item.ref is not None and item.ref.storage.generation > 0
