"""The backward of a step that is being traced: PyTorch's own engine runs it, on fake tensors, in the same trace.

`differentiate` finds what autograd sees as results of the step (tensors that outlive it with a history, and inputs to
which it gave a new one), makes a tangent for each, and lets the engine compute the gradients of all inputs that
require them. Its operators land in the graph after those of the forward: the joint graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from wholestep.errors import CaptureError, LeakError, UnsupportedError
from wholestep.torch_compat import FakeTensor, empty_fake
from wholestep.trace import ReentrantCheckpoint
from wholestep.trace.inputs import Lifted
from wholestep.trace.recorder import Recorder
from wholestep.trace.results import Differentiated, Outlet, is_leaf
from wholestep.trace.sizes import is_made

IN_PLACE = (
    "was changed in place by a value that requires grad, and would stay in the autograd graph after the step, "
    "which ran its backward already"
)

# What a checkpoint says whose backward would run another one inside of `torch.autograd.grad`.
REENTRANT = "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad()"
NO_ADDRESS = "Cannot access data pointer"


@dataclass(eq=False)
class _Output:
    """One thing that autograd sees as a result: a tensor at a slot, or an input with a new history."""

    tensor: torch.Tensor
    slot: int | None = None
    input: Lifted | None = None


@dataclass(eq=False)
class _Root:
    """An input that gradients flow to, or a leaf that the step makes, and where in the autograd graph it stands."""

    item: Lifted | None
    edge: torch.Tensor | GradientEdge
    node: Any
    slot: int | None = None


def differentiate(
    recorder: Recorder, outlet: Outlet, values: list[Any], recording: Callable[[], AbstractContextManager[Any]]
) -> Differentiated | None:
    """Traces the backward of a step whose forward has just been traced.

    Args:
        outlet: has a slot for each of `values`; learns which of them are differentiable, and which refuse to be.
        values: what the step made and leaves behind.
        recording: the context in which the recorder sees what runs.

    Returns:
        None when nothing can be differentiated.

    Raises:
        LeakError: an input was given a history that cannot be differentiated any more.
        CaptureError: the backward cannot be traced.
    """
    if not torch.is_grad_enabled() and not any(_has_history(v) for v in values):
        return None
    outputs = [*_results(recorder, outlet, values), *_rewritten(recorder)]
    if not outputs:
        return None
    for tensor in _ends(outputs):
        if recorder.find(tensor) is not None:
            recorder.lift_once(tensor)
    _refuse_retained(recorder, outputs)
    roots = [*_roots(recorder), *_leaves(outlet, values)]
    new = {id(o): recorder.ref(o.tensor).read(recorder.emit) for o in outputs if o.input is not None}
    last = next(iter(reversed(recorder.graph.nodes)))
    late: list[tuple[Lifted, fx.Node]] = []
    refused: list[tuple[_Output, str]] = [(o, "") for o in outputs if not roots]
    tangents: list[fx.Node] = []
    gradients: list[Any] = []
    if roots:
        with _hooks_set_aside(roots), recording(), _writes_set_aside(recorder, late):
            outputs, tangents, gradients = _gradients(recorder, outputs, roots, refused)
    _refuse(recorder, outlet, refused)
    outputs = [o for o in outputs if all(o is not other for other, _ in refused)]
    if not outputs and all(o.input is None for o, _ in refused):
        return None
    gradients = gradients or [None] * len(roots)
    found = [(r, g) for r, g in zip(roots, gradients, strict=True) if g is not None]
    pairs = [(r, recorder.ref(g).read(recorder.emit)) for r, g in found]
    silent = [r for r, g in zip(roots, gradients, strict=True) if g is None and _reached(outputs, r)]
    given = [*(r for r, _ in pairs if r.item is not None), *(r for r in silent if r.item is not None)]
    made = [r for r, _ in pairs if r.slot is not None]
    edges = [r.node for r in (*given, *made)]
    return Differentiated(
        slots=[o.slot for o in outputs],
        rewritten=[(o.input, new[id(o)], k) for k, o in enumerate(outputs) if o.input is not None],
        inputs=[r.item for r in given if r.item is not None],
        gradients=[node for _, node in pairs],
        reaches=[_reach(o.tensor.grad_fn, edges) for o in outputs],
        tangents=tangents,
        last=last,
        late=late,
        made=[r.slot for r in made if r.slot is not None],
        refused=[(o.input, new[id(o)], why) for o, why in refused if o.input is not None],
    )


def _has_history(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.requires_grad and not is_leaf(value)


def _own_tensors(recorder: Recorder) -> list[torch.Tensor]:
    """The tensors that the step was given, those first that others are views of."""
    tensors: dict[int, torch.Tensor] = {}
    for item in list(recorder.by_id.values()):
        tensor = item.value
        assert isinstance(tensor, torch.Tensor)
        if tensor._base is not None and recorder.find(tensor._base) is not None:
            tensors.setdefault(id(tensor._base), tensor._base)
        tensors.setdefault(id(tensor), tensor)
    return [*{id(recorder.lift_once(t)): t for t in tensors.values()}.values()]


def _roots(recorder: Recorder) -> list[_Root]:
    roots = []
    for tensor in _own_tensors(recorder):
        found = recorder.find(tensor)
        if found is not None and found.beginning is not None:
            roots.append(_Root(recorder.by_id[id(tensor)], GradientEdge(found.beginning, 0), found.beginning))
        elif tensor.is_leaf and tensor.requires_grad:
            roots.append(_Root(recorder.by_id[id(tensor)], tensor, tensor))
    return roots


def _leaves(outlet: Outlet, values: list[Any]) -> list[_Root]:
    """The leaves that the step makes and leaves behind, such as new parameters."""
    tensors = {id(v): v for v in values if isinstance(v, FakeTensor) and v.requires_grad and is_leaf(v)}
    return [_Root(None, tensor, tensor, outlet.slot(tensor)) for tensor in tensors.values()]


def _results(recorder: Recorder, outlet: Outlet, values: list[Any]) -> list[_Output]:
    """The tensors that the step made and leaves behind with a history; views are left to their bases."""
    found: dict[int, _Output] = {}
    for value in values:
        if not isinstance(value, FakeTensor):
            continue
        base = value._base if value._is_view() and _is_plain_view(value) else None
        if base is not None and not is_made(base):
            if recorder.find(base) is not None:
                outlet.move(value, recorder.lift_once(base))
            continue
        whole = value if base is None else base
        if not whole.requires_grad or is_leaf(whole):
            continue
        slot = outlet.slot(whole)
        found.setdefault(slot, _Output(whole, slot))
        if base is None:
            outlet.set(value, base=None)
    return list(found.values())


def _is_plain_view(view: torch.Tensor) -> bool:
    """Whether a view's history is that of its base and of view operators alone, and it shows the base's elements.

    A view that an `autograd.Function` gives back (as a module with backward hooks does) has a backward of its own.
    """
    facts = [(t.dtype, t.is_conj(), t.is_neg()) for t in (view, view._base) if t is not None]
    if facts[0] != facts[1]:
        return False
    try:
        node, end = view.grad_fn, view._base.grad_fn  # type: ignore[union-attr]
    except RuntimeError:  # autograd forbids it: one of several views that one call made, written since
        return True
    while node is not None and node is not end and not hasattr(node, "variable"):
        if isinstance(node, BackwardCFunction) or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return True


def _rewritten(recorder: Recorder) -> list[_Output]:
    """The inputs to which in-place writes gave a new history."""
    found = []
    for tensor in _own_tensors(recorder):
        source = recorder.find(tensor)
        before = source.beginning if source is not None else None
        if tensor._base is not None and recorder.find(tensor._base) is not None:
            continue  # its base has the new history, and gives it to all its views
        if tensor.grad_fn is None or tensor.grad_fn is before:
            continue
        if source is not None and source.entangled:
            raise UnsupportedError(
                f"{source.source} is changed in place by a value that requires grad, and is a view of a tensor that "
                "the step is not given, as another of its inputs is",
                remedy="pass the tensor that both are views of, and take the views inside",
            )
        found.append(_Output(tensor, None, recorder.by_id[id(tensor)]))
    return found


def _refuse_retained(recorder: Recorder, outputs: list[_Output]) -> None:
    """A result keeps the gradient that reaches it outside; what another result adds to it inside, nobody sees."""
    for output in outputs:
        kept = output.tensor
        others = [o.tensor.grad_fn for o in outputs if o is not output]
        if kept.retains_grad and kept.grad is None and any(_reach(node, [kept.grad_fn]) for node in others):
            raise UnsupportedError(
                "retain_grad() on a result that other results of a compiled function are made of",
                recorder.made_at(kept),
                "call backward() inside of the function too, or make them outside of it",
            )


def _refuse(recorder: Recorder, outlet: Outlet, refused: list[tuple[_Output, str]]) -> None:
    """Keeps what autograd says of results that it cannot differentiate for when that is tried."""
    for output, why in refused:
        if output.slot is not None:
            outlet.refuse(output.slot, why)
        elif why.startswith("Trying to backward"):
            assert output.input is not None
            raise LeakError(f"{output.input.source} {IN_PLACE}", recorder.made_at(output.tensor),
                            "detach what you add, as in total += loss.detach()")


def _gradients(
    recorder: Recorder, outputs: list[_Output], roots: list[_Root], refused: list[tuple[_Output, str]]
) -> tuple[list[_Output], list[fx.Node], list[Any]]:
    """Lets the engine differentiate all outputs, or those of them that it can; the others are refused."""
    tangents = [_tangent(recorder, output.tensor) for output in outputs]
    try:
        return outputs, [node for _, node in tangents], _run(outputs, [t for t, _ in tangents], roots)
    except CaptureError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        if REENTRANT in str(error):
            raise ReentrantCheckpoint from None
        if NO_ADDRESS in str(error):
            raise UnsupportedError(str(error), remedy="address memory outside of compiled functions") from error
    kept = []
    for index, output in enumerate(outputs):
        try:
            _run([output], [tangents[index][0]], roots)
            kept.append(index)
        except CaptureError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            refused.append((output, str(error)))
    outputs, tangents = [outputs[i] for i in kept], [tangents[i] for i in kept]
    run = _run(outputs, [t for t, _ in tangents], roots) if kept else [None] * len(roots)
    return outputs, [node for _, node in tangents], run


def _run(outputs: list[_Output], tangents: list[torch.Tensor], roots: list[_Root]) -> list[Any]:
    tensors: list[Any] = [o.tensor for o in outputs]
    edges: list[Any] = [r.edge for r in roots]
    return list(torch.autograd.grad(tensors, edges, tangents, retain_graph=True, allow_unused=True))


def _tangent(recorder: Recorder, like: torch.Tensor) -> tuple[torch.Tensor, fx.Node]:
    """A placeholder for the gradient of one output."""
    fake = tangent_like(recorder, like)
    node = recorder.placeholder(f"tangent {len(recorder.inputs)}", "tensor", fake)
    recorder.root(fake, node)
    return fake, node


def tangent_like(recorder: Recorder, like: torch.Tensor) -> torch.Tensor:
    """As dense a layout as the output's own, contiguous where that leaves out or repeats elements."""
    with recorder.fake_mode, torch.no_grad():
        plain = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        return empty_fake(recorder.fake_mode, torch.empty_like(plain, memory_format=torch.preserve_format))


def _reached(outputs: list[_Output], root: _Root) -> bool:
    """Whether some output's graph leads to an input, be its gradient None."""
    return any(_reach(o.tensor.grad_fn, [root.node]) for o in outputs)


def _ends(outputs: list[_Output]) -> list[torch.Tensor]:
    """The leaves and twins that an autograd graph leads to: inputs that only a backward reads are among them."""
    seen: set[Any] = set()
    found: list[torch.Tensor] = []
    queue: list[Any] = [o.tensor.grad_fn for o in outputs]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        elif hasattr(node, "twin"):
            found.append(node.twin())
        else:
            queue += [above for above, _ in node.next_functions]
    return found


def _reach(start: Any, ends: list[Any]) -> frozenset[int]:
    """Which of the ends (nodes, or leaves) an autograd graph leads to."""
    places = {id(end): i for i, end in enumerate(ends)}
    seen: dict[int, Any] = {}
    found: set[int] = set()
    queue = [start]
    while queue:
        node = queue.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        end = getattr(node, "variable", node)
        if id(end) in places:
            found.add(places[id(end)])
        else:
            queue += [above for above, _ in node.next_functions]
    return frozenset(found)


@contextmanager
def _hooks_set_aside(roots: list[_Root]) -> Iterator[None]:
    """Keeps the user's hooks on the step's inputs out of the graph: they run when gradients really arrive."""
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
def _writes_set_aside(recorder: Recorder, late: list[tuple[Lifted, fx.Node]]) -> Iterator[None]:
    """Keeps what hooks write to inputs, such as a counter, out of the forward: notes it and takes it back."""
    before = {id(item): (item.ref.storage.value, item.ref.storage.generation) for item in recorder.lifted if item.ref}
    yield
    for item in recorder.lifted:
        if item.ref is None or item.ref.parent is not None:
            continue
        storage = item.ref.storage
        value, generation = before.get(id(item), (storage.first, 0))
        if storage.generation > generation:
            if item.members:
                raise UnsupportedError(f"a hook writes in the backward to {item.source}, which shares its memory")
            late.append((item, storage.value))
            storage.value, storage.generation = value, generation
