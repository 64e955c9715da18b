"""The boundary of a step's autograd graph: what autograd sees as its results, and what gradients flow to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from wholestep.errors import UnsupportedError
from wholestep.torch_compat import HOOK_TABLES, FakeTensor, behind
from wholestep.trace import ReentrantCheckpoint
from wholestep.trace.numbers.symbolic_sizes import is_made
from wholestep.trace.outputs.collect_outputs import OutputCollector
from wholestep.trace.outputs.output_records import is_leaf
from wholestep.trace.record.inputs import TracedInput
from wholestep.trace.record.recorder import Recorder


@dataclass(eq=False)
class Output:
    """One thing that autograd sees as a result: an output alias, or an input with a new history."""

    tensor: torch.Tensor
    alias: int | None = None
    input: TracedInput | None = None


@dataclass(eq=False)
class Root:
    """An input that gradients flow to, or a leaf that the step makes, and where in the autograd graph it stands."""

    item: TracedInput | None
    edge: torch.Tensor | GradientEdge
    node: Any
    alias: int | None = None


def has_history(value: Any) -> bool:
    """Whether a value of the step is the result of something that autograd can differentiate."""
    return isinstance(value, FakeTensor) and value.requires_grad and not is_leaf(value)


def roots_of(recorder: Recorder) -> list[Root]:
    """The inputs that gradients flow to."""
    roots = []
    for tensor in _own_tensors(recorder):
        found = recorder.inputs.world.find(tensor)
        if found is not None and found.beginning is not None:
            roots.append(Root(recorder.inputs.by_id[id(tensor)], GradientEdge(found.beginning, 0), found.beginning))
        elif tensor.is_leaf and tensor.requires_grad:
            roots.append(Root(recorder.inputs.by_id[id(tensor)], tensor, tensor))
    return roots


def leaves_made(collector: OutputCollector, values: list[Any]) -> list[Root]:
    """The leaves that the step makes and leaves behind, such as new parameters."""
    tensors = {id(v): v for v in values if isinstance(v, FakeTensor) and v.requires_grad and is_leaf(v)}
    return [Root(None, tensor, tensor, collector.alias(tensor)) for tensor in tensors.values()]


def _own_tensors(recorder: Recorder) -> list[torch.Tensor]:
    """The tensors that the step was given, those first that others are views of."""
    tensors: dict[int, torch.Tensor] = {}
    for item in list(recorder.inputs.by_id.values()):
        tensor = item.value
        assert isinstance(tensor, torch.Tensor)
        if tensor._base is not None and recorder.inputs.world.find(tensor._base) is not None:
            tensors.setdefault(id(tensor._base), tensor._base)
        tensors.setdefault(id(tensor), tensor)
    return [*{id(recorder.inputs.of(t)): t for t in tensors.values()}.values()]


def results_of(recorder: Recorder, collector: OutputCollector, values: list[Any]) -> list[Output]:
    """The tensors that the step made and leaves behind with a history; views are left to their bases."""
    found: dict[int, Output] = {}
    for value in values:
        if not isinstance(value, FakeTensor):
            continue
        base = value._base if value._is_view() and _is_plain_view(value, collector) else None
        if base is not None and not is_made(base):
            if recorder.inputs.world.find(base) is not None:
                collector.move(value, recorder.inputs.of(base))
            continue
        whole = value if base is None else base
        if not whole.requires_grad or is_leaf(whole):
            continue
        alias = collector.alias(whole)
        found.setdefault(alias, Output(whole, alias))
        if base is None:
            collector.cut(value)
    return list(found.values())


def _is_plain_view(view: torch.Tensor, collector: OutputCollector) -> bool:
    """Whether a view's history is that of its base and of view operators alone, and it is made of its base.

    A view that an `autograd.Function` gives back (as a module with backward hooks does) has a backward of its own, and
    so has one with a hook.
    """
    facts = [(t.dtype, t.is_conj(), t.is_neg()) for t in (view, view._base) if t is not None]
    if facts[0] != facts[1] and collector.aliases[collector.alias(view)].views is None:
        return False
    try:
        node, start = view.grad_fn, view._base.grad_fn  # type: ignore[union-attr]
    except RuntimeError:  # autograd forbids it: one of several views that one call made, written since
        return True
    while node is not None and node is not start and not hasattr(node, "variable"):
        if isinstance(node, BackwardCFunction) or len(node.next_functions) != 1 or node in collector.recorder.hooked:
            return False
        node = node.next_functions[0][0]
    return True


def rewritten_inputs(recorder: Recorder) -> list[Output]:
    """The inputs to which in-place writes gave a new history."""
    found = []
    for tensor in _own_tensors(recorder):
        source = recorder.inputs.world.find(tensor)
        before = source.beginning if source is not None else None
        if tensor._base is not None and recorder.inputs.world.find(tensor._base) is not None:
            continue  # its base has the new history, and gives it to all its views
        if tensor.grad_fn is None or tensor.grad_fn is before:
            continue
        if source is not None and source.entangled:
            raise UnsupportedError(
                f"{source.source} is changed in place by a value that requires grad, and is a view of a tensor that "
                "the step is not given, as another of its inputs is",
                remedy="pass the tensor that both are views of, and take the views inside",
            )
        found.append(Output(tensor, None, recorder.inputs.by_id[id(tensor)]))
    return found


def leaves_of(outputs: list[Output]) -> list[torch.Tensor]:
    """The leaves and detached aliases behind some results: inputs that only a backward reads are among them."""
    nodes = behind(output.tensor for output in outputs)
    found = (node.variable if hasattr(node, "variable") else getattr(node, "alias", None) for node in nodes)
    return [leaf if isinstance(leaf, torch.Tensor) else leaf() for leaf in found if leaf is not None]


def keeps(start: Any) -> bool:
    """Whether a node of an autograd graph saved a tensor, so that eager runs its backward once."""
    return any(_saves(node) for node in behind([start]))


def _saves(node: Any) -> bool:
    """By its class, since a saved tensor may be one that a hook of the user's gives."""
    if isinstance(node, BackwardCFunction):
        try:
            return bool(node._raw_saved_tensors)
        except RuntimeError:  # freed, and yet the backward has just been traced: it needs none
            return False
    return any(name.startswith("_raw_saved_") for name in dir(node))


def reach(start: Any, targets: list[Any]) -> frozenset[int]:
    """Which of some nodes, or leaves, an autograd graph leads to."""
    found = {id(getattr(node, "variable", node)) for node in behind([start])}
    return frozenset(i for i, target in enumerate(targets) if id(target) in found)


def hooked_nodes(recorder: Recorder) -> list[Any]:
    """The nodes of tensors of the step that were, or may have been, given hooks so far."""
    return [*recorder.hooked] if has_new_hooks(recorder) else []


def has_new_hooks(recorder: Recorder) -> bool:
    """Whether hooks were registered since the step began: ask before a context that has some of its own."""
    return RemovableHandle.next_id != recorder.hooks_before


def refuse_beside(hooked: list[Any], outputs: list[Output], roots: list[Any]) -> None:
    """Refuses functions and hooks that lead to no root: a backward that is asked for gradients of roots skips them.

    Eager's runs them: a checkpoint's function gives gradients beside its results, and hooks do what they like.
    """
    for node in behind(o.tensor for o in outputs):
        function: Any = getattr(node, "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
        leaf = None if function is not None else getattr(node, "variable", None)
        has_hook = any(node is other for other in hooked) or any(getattr(leaf, name, None) for name in HOOK_TABLES)
        own = function is not None and not function.__module__.startswith("wholestep.")
        if (own or has_hook) and not reach(node, roots):
            if function is CheckpointFunction:
                raise ReentrantCheckpoint
            what = f"{'a hook on' if has_hook else 'the backward of'} {type(node).__name__}, which leads to no input"
            raise UnsupportedError(what, "call backward() inside of the compiled function")
