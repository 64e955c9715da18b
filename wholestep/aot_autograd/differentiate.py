"""The backward of a step that is being traced: PyTorch's own engine runs it, on fake tensors, in the same trace.

`differentiate` finds what autograd sees as results of the step (tensors that outlive it with a history, and inputs to
which it gave a new one), makes a tangent for each, and lets the engine compute the gradients of all inputs that
require them. Its operators land in the graph after those of the forward: the joint graph.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

from wholestep.aot_autograd.backward_reads import refusing_reads
from wholestep.aot_autograd.boundary import (
    Output,
    Root,
    has_history,
    has_new_hooks,
    hooked_nodes,
    keeps,
    leaves_made,
    leaves_of,
    reach,
    refuse_beside,
    results_of,
    rewritten_inputs,
    roots_of,
)
from wholestep.capture.guards.compared_values import META
from wholestep.capture.snapshot.user_code import is_library
from wholestep.errors import CaptureError, LeakError, UnsupportedError
from wholestep.torch_compat import FakeTensor, behind, empty_fake, without_autocast
from wholestep.trace import ReentrantCheckpoint
from wholestep.trace.operators.data_dependent_formulas import by_data
from wholestep.trace.outputs.collect_outputs import OutputCollector
from wholestep.trace.outputs.leaks import made_at
from wholestep.trace.outputs.output_records import NO_GRADIENT, SECOND_TIME, Derivative, Differentiated, is_leaf
from wholestep.trace.patches.engine_hook import handled
from wholestep.trace.record.inputs import TracedInput
from wholestep.trace.record.recorder import Recorder
from wholestep.trace.record.user_line import line_of

IN_PLACE = (
    "was changed in place by a value that requires grad, and would stay in the autograd graph after the step, "
    "which ran its backward already"
)

# What a checkpoint says whose backward would run another one inside of `torch.autograd.grad`.
REENTRANT = "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad()"
BY_GRAD = "compatible with .grad()"  # and what others say, each in their words
NO_ADDRESS = "Cannot access data pointer"
# Each more use of an input keeps a gradient of its size until the backward ends.
MOST_USES = 4


def differentiate(
    recorder: Recorder,
    collector: OutputCollector,
    values: list[Any],
    recording: Callable[[], AbstractContextManager[Any]],
) -> Differentiated | None:
    """Traces the backward of a step whose forward has just been traced.

    Args:
        collector: has an alias for each of `values`; learns which of them are differentiable, and which refuse to be.
        values: what the step made and leaves behind.
        recording: the context in which the recorder sees what runs.

    Returns:
        None when nothing can be differentiated.

    Raises:
        LeakError: an input was given a history that cannot be differentiated any more.
        CaptureError: the backward cannot be traced.
    """
    if not torch.is_grad_enabled() and not any(has_history(v) for v in values):
        return None
    outputs = [*results_of(recorder, collector, values), *rewritten_inputs(recorder)]
    if not outputs:
        return None
    for tensor in leaves_of(outputs):
        if recorder.inputs.world.find(tensor) is not None:
            recorder.inputs.of(tensor)
    _refuse_retained(outputs)
    roots = [*roots_of(recorder), *leaves_made(collector, values)]
    new = {id(o): recorder.inputs.read(o.tensor) for o in outputs if o.input is not None}
    last = next(iter(reversed(recorder.builder.graph.nodes)))
    late: list[tuple[TracedInput, fx.Node]] = []
    tangents: list[fx.Node] = []
    gradients: list[list[torch.Tensor]] = []
    nodes, hooked, has_hooks = [r.node for r in roots], hooked_nodes(recorder), has_new_hooks(recorder)  # before ours
    with _without_hooks(roots), recording(), without_autocast(), _deferred_writes(recorder, late):
        refused = [(o, _alone(o)) for o in outputs if not reach(o.tensor.grad_fn, nodes)]
        outputs = [o for o in outputs if all(o is not other for other, _ in refused)]
        if outputs:
            with refusing_reads(recorder.inputs.world.reachable, behind(o.tensor for o in outputs), has_hooks):
                outputs, tangents, gradients = _gradients(recorder, outputs, roots, refused)
    alive = [*outputs, *(o for o, why in refused if not why.startswith(SECOND_TIME))]
    refuse_beside(hooked, alive, nodes)
    _refuse(collector, refused)
    if not outputs:
        return None
    pairs = [(r, recorder.inputs.read(g)) for r, found in zip(roots, gradients, strict=True) for g in found]
    histories = [o.tensor.grad_fn for o in outputs]
    silent = [  # reached, although the gradient is None
        r for r, found in zip(roots, gradients, strict=True) if not found and any(reach(h, [r.node]) for h in histories)
    ]
    given = [*(r for r, _ in pairs if r.item is not None), *(r for r in silent if r.item is not None)]
    made = [r for r, _ in pairs if r.alias is not None]
    _refuse_required(recorder, given)
    edges = [r.node for r in (*given, *made)]
    left = _left(outputs, values)
    reached = [reach(node, [*edges, *(v.grad_fn for v in left)]) for node in histories]
    rewritten = [(o.input, collector.add_output(new[id(o)]), k) for k, o in enumerate(outputs) if o.input is not None]
    derivative = Derivative(
        outputs=tuple(o.alias for o in outputs),
        reaches=tuple(frozenset(i for i in found if i < len(edges)) for found in reached),
        between=_between(collector, outputs, left, [{i - len(edges) for i in found} for found in reached]),
        names=tuple(f"output {o.tensor.output_nr} of {type(o.tensor.grad_fn).__name__}" for o in outputs),  # in errors
        made=tuple(r.alias for r in made if r.alias is not None),
        n_given=len(pairs) - len(made),
        runs_once=any(map(keeps, histories)),
    )
    return Differentiated(
        derivative,
        [r.item for r in given if r.item is not None],
        [node for _, node in pairs],
        tangents,
        last,
        rewritten,
        late,
    )


def _left(outputs: list[Output], values: list[Any]) -> list[torch.Tensor]:
    """The tensors with a history that the step leaves behind, each once."""
    found: list[torch.Tensor] = [
        v for v in values if isinstance(v, FakeTensor) and v.requires_grad and is_leaf(v) is False
    ]
    found += [o.tensor for o in outputs if o.input is not None]
    return list({id(tensor): tensor for tensor in found}.values())


def _between(
    collector: OutputCollector, outputs: list[Output], left: list[torch.Tensor], sources: list[set[int]]
) -> tuple[tuple[int | None, int, frozenset[int]], ...]:
    """What other results are made of, or has a hook, each with the results through which gradients reach it unseen."""
    places = {id(o.tensor): k for k, o in enumerate(outputs)}
    found = []
    for index, tensor in enumerate(left):
        place = places.get(id(tensor), -1)
        through = {
            k for k, o in enumerate(outputs) if index in sources[k]
            and (o.tensor.grad_fn is not tensor.grad_fn or (k == place and tensor._backward_hooks))
        }
        if through:
            is_input = place >= 0 and outputs[place].input is not None
            found.append((None if is_input else collector.alias(tensor), place, frozenset(through)))
    return tuple(found)


def _refuse_required(recorder: Recorder, given: list[Root]) -> None:
    """A replay sets an input's `requires_grad` last, when results have their history."""
    world = recorder.inputs.world
    for item in (root.item for root in given):
        assert item is not None and isinstance(item.value, torch.Tensor)
        before = world.reachable.metadata.get(id(world.substitutes.original(item.value)))
        if before is not None and not before[META.index("requires_grad")] and item.value.requires_grad:
            what = f"{item.source} is made to require grad, and results depend on it that the step gives back"
            raise UnsupportedError(what, remedy="set requires_grad before the call, or call backward() inside")


def _refuse_retained(outputs: list[Output]) -> None:
    """A result keeps the gradient that reaches it outside; what another result adds to it inside is not seen there."""
    for output in outputs:
        kept = output.tensor
        others = [o.tensor.grad_fn for o in outputs if o is not output]
        if kept.retains_grad and kept.grad is None and any(reach(node, [kept.grad_fn]) for node in others):
            raise UnsupportedError(
                "retain_grad() on a result that other results of a compiled function are made of",
                "call backward() inside of the function too, or make them outside of it",
                where=made_at(kept),
            )


def _refuse(collector: OutputCollector, refused: list[tuple[Output, str]]) -> None:
    """Keeps what autograd says of results that it cannot differentiate for when that is tried."""
    for output, why in refused:
        if output.alias is not None:
            collector.change(output.alias, refusal=why)
        elif output.input is not None:
            source, where = output.input.source, made_at(output.tensor)
            if why.startswith(SECOND_TIME):
                raise LeakError(f"{source} {IN_PLACE}", "detach it, as in total += loss.detach()", where=where)
            what = f"{source} is changed in place by a value that requires grad and gives no input a gradient: {why}"
            raise UnsupportedError(what, "detach it first", where=where)


def _gradients(
    recorder: Recorder, outputs: list[Output], roots: list[Root], refused: list[tuple[Output, str]]
) -> tuple[list[Output], list[fx.Node], list[list[torch.Tensor]]]:
    """Lets the engine differentiate all outputs, or those of them that it can; the others are refused."""
    tangents = [_tangent(recorder, output.tensor) for output in outputs]
    try:
        return outputs, [node for _, node in tangents], _run(outputs, [t for t, _ in tangents], roots)
    except CaptureError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        if REENTRANT in str(error):
            raise ReentrantCheckpoint from None
        if BY_GRAD in str(error):
            raise UnsupportedError(str(error), "call backward() inside of it", where=line_of(error)) from error
        if NO_ADDRESS in str(error):
            raise UnsupportedError(str(error), remedy="address memory outside of compiled functions") from error
        together = str(error)
    except Exception as error:  # one of a user's function is raised by eager's backward, others by its forward
        if all(is_library(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        what = f"its backward raises {type(error).__name__}: {error}"
        raise UnsupportedError(what, "call backward() inside of the function", where=line_of(error)) from error
    kept = []
    for index, output in enumerate(outputs):
        why = _refusal(output, tangents[index][0], roots)
        if not why:
            kept.append(index)
        else:  # spent by the first attempt, as what a checkpoint has kept
            refused.append((output, together if why.startswith(SECOND_TIME) else why))
    outputs, tangents = [outputs[i] for i in kept], [tangents[i] for i in kept]
    run = _run(outputs, [t for t, _ in tangents], roots) if kept else [[] for _ in roots]
    return outputs, [node for _, node in tangents], run


def _alone(output: Output) -> str:
    """What a later backward through a result of leaves that nobody else has is told: that it gives no gradient."""
    leaves = [Root(None, leaf, leaf) for leaf in leaves_of([output])]
    return _refusal(output, torch.zeros_like(output.tensor), leaves) or NO_GRADIENT


def _refusal(output: Output, tangent: torch.Tensor, roots: list[Root]) -> str:
    """What autograd says where it cannot differentiate one result; "" where it can."""
    try:
        _run([output], [tangent], roots)
    except CaptureError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return ""


def _run(outputs: list[Output], tangents: list[torch.Tensor], roots: list[Root]) -> list[list[torch.Tensor]]:
    """The gradients of each root: one for each use of an input, in the engine's order, or their sum if they are many.

    So the sum with what reaches the input outside, as by another call of a module, is rounded as in eager.
    """
    tensors: list[Any] = [o.tensor for o in outputs]
    edges: list[Any] = [r.edge for r in roots]
    with handled(by_data), _uses(outputs, roots) as uses:
        sums = torch.autograd.grad(tensors, edges, tangents, retain_graph=True, allow_unused=True)
    return [
        [] if total is None else found if 1 < len(found) <= MOST_USES else [total]
        for total, found in zip(sums, uses, strict=True)
    ]


@contextmanager
def _uses(outputs: list[Output], roots: list[Root]) -> Iterator[list[list[torch.Tensor]]]:
    """Learns what each node of the autograd graph gives to a root, but to one whose gradients a wrapper reduces."""
    uses: list[list[torch.Tensor]] = [[] for _ in roots]
    places = {
        id(r.node): found
        for r, found in zip(roots, uses, strict=True)
        if r.item is not None and not hasattr(r.item.value, "wholestep_shard")
    }

    def look(found: dict[int, list[torch.Tensor]]) -> Callable[..., None]:
        def given(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
            for index, use in found.items():
                if (gradient := gradients[index]) is not None:
                    use.append(gradient)

        return given

    hooks = []
    for node in behind(output.tensor for output in outputs):
        ends = ((i, id(getattr(to, "variable", to))) for i, (to, _) in enumerate(node.next_functions))
        if found := {i: places[end] for i, end in ends if end in places}:
            hooks.append(node.register_hook(look(found)))
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()


def _tangent(recorder: Recorder, like: torch.Tensor) -> tuple[torch.Tensor, fx.Node]:
    """A placeholder for the gradient of one output."""
    fake = tangent_like(recorder, like)
    node = recorder.builder.placeholder(f"tangent {len(recorder.builder.inputs)}", "tensor", fake)
    recorder.builder.root(fake, node)
    return fake, node


def tangent_like(recorder: Recorder, like: torch.Tensor) -> torch.Tensor:
    """As dense a layout as the output's own, contiguous where that leaves out or repeats elements."""
    with recorder.builder.fake_mode, torch.no_grad():
        plain = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        return empty_fake(recorder.builder.fake_mode, torch.empty_like(plain, memory_format=torch.preserve_format))


@contextmanager
def _without_hooks(roots: list[Root]) -> Iterator[None]:
    """Keeps the user's hooks on the step's inputs out of the graph: they run in the real backward."""
    tensors = [r.item.value if r.item is not None else r.edge for r in roots]
    tables = [t._backward_hooks for t in tensors if t._backward_hooks]  # type: ignore[union-attr]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


@contextmanager
def _deferred_writes(recorder: Recorder, late: list[tuple[TracedInput, fx.Node]]) -> Iterator[None]:
    """Keeps what hooks write to inputs, such as a counter, out of the forward: notes it and takes it back."""
    storages = {id(item): item.ref.storage for item in recorder.inputs.items if item.ref}
    before = {key: (storage.value, storage.generation) for key, storage in storages.items()}
    yield
    for item in recorder.inputs.items:
        if item.ref is None or item.ref.parent is not None:
            continue
        storage = item.ref.storage
        value, generation = before.get(id(item), (storage.first, 0))
        if storage.generation > generation:
            if item.members:
                raise UnsupportedError(f"a hook writes in the backward to {item.source}, which shares its memory")
            late.append((item, storage.value))
            storage.value, storage.generation = value, generation
