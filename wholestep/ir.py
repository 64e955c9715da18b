"""The intermediate representation: `torch.fx.Graph` plus typed records.

A `StepGraph` is what every stage after capture takes and gives: a `GraphModule` and a `Signature`.
Inside the graph

- a *placeholder* is a tensor, or a Python float, that the step reads from outside;
- a *get_attr* is a constant tensor that the step built from Python numbers;
- a *call_function* is a pure ATen overload, a `wholestep::` operator, a `Functionalized` operator,
  `operator.getitem` for operators of several results, a Python function on host numbers
  (`operator.mul`, `math.sqrt`, `max`), a `Decided`, `Required` or `get_rng_state`, `set_rng_state`, `manual_seed`;
  an offset of `as_strided` and its kin counts from the operand's first element, not from the start of its memory;
- the *output* is one flat tuple: results, new values of mutated inputs, tensors the step created.

May import: errors, functional, nested, sizes, torch_compat.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from wholestep.errors import GraphError
from wholestep.functional import (
    Decided,
    Replayed,
    Required,
    Waited,
    argument_names,
    bound_arguments,
    get_rng_state,
    is_wait,
    manual_seed,
    operator_of,
    set_rng_state,
)
from wholestep.nested import tensors_of
from wholestep.sizes import SizeDecisions
from wholestep.torch_compat import OpOverload

Phase = Literal["forward", "backward", "optimizer"]
InputKind = Literal["parameter", "buffer", "grad", "state", "batch", "tensor", "number", "generator"]
# What ranks have alike, of which rank 0's is given to all; in the global view also what no module has registered, where
# they do not hold parts of it.
LASTING_KINDS = ("parameter", "buffer", "state")
WHOLE_KINDS = (*LASTING_KINDS, "tensor")


@dataclass(slots=True)
class NodeInfo:
    """What is known of one node.

    Attributes:
        value: the fake tensor, the tuple/list of them, or the Python number that the node gives.
        phase: the part of the step that ran it.
        seq: autograd sequence number; a backward node carries that of its forward node.
        where: the user's ``file:line`` that ran it.
        module: path of the module whose forward ran it, ``""`` outside of modules.
        placement: set by `spmd/`.
        part: number of the part of its graph that a backend compiles by itself; see `passes/bucket_parts.py`.
        recomputed: whether it is made a second time, to spare the memory in which it would wait for the backward.
    """

    value: Any
    phase: Phase = "forward"
    seq: int | None = None
    where: str = ""
    module: str = ""
    placement: Any = None
    part: int = 0
    recomputed: bool = False


@dataclass(frozen=True)
class Input:
    """One placeholder: where its value comes from and what it is for.

    Of kind "batch" are tensors in the arguments that no module, optimizer or object of the user's own keeps.

    Attributes:
        placements: of a value that goes from one graph of a step to the next, along the axes of the mesh that are still
            to come; of an output, along those that were; None for what plans place.
        bucket: of a parameter that is trained, the bytes of the first bucket and of each other one in which gradients
            are reduced; None for all else.
        shard: of a parameter that a wrapper in the step divides: the name of the group, the dimension, whether a
            backward gathers it again, and its name in the module in whose forward it is whole.
    """

    name: str
    source: str
    kind: InputKind
    placements: tuple[Any, ...] | None = None
    bucket: tuple[int, int] | None = None
    shard: tuple[str, int, bool, str] | None = None


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter when one `backward()` ended.

    `before` and `after` are names of the nodes that give the whole memory in which ``.grad`` lies, on entry (None
    when unset) and on exit: every later reader, views and outputs included, reads from `after`. A node that is no
    longer in the graph had no reader.

    Attributes:
        parameter: the parameter's source.
        place: (size, stride, offset in elements) of the gradient in the memory `after`, of whole tensors.
        dims: for each of its dimensions that of the memory, None where it is none; set by `spmd/`.
        group: name of the group over which the step itself wants the mean from here on; None where it says nothing.
    """

    parameter: str
    before: str | None
    after: str
    place: tuple[tuple[int, ...], tuple[int, ...], int]
    dims: tuple[int | None, ...] = ()
    group: str | None = None


@dataclass
class Signature:
    """Names what goes in and out of a graph.

    Attributes:
        inputs: one per placeholder, in order.
        n_outputs: length of the flat output.
        mutations: output index -> input index: that output is the new content of that input, which a
            lowered program writes into the input's own memory. All other outputs are fresh memory that
            the caller owns.
        gradients: one per parameter and `backward()`, for data parallelism.
        state_outputs: output index -> the gradient or optimizer state that the step leaves there, named as an input is.
        donated: indices of inputs that nobody else reads once the program has: given in a list, which it empties, their
            memory is free after their last use.
        saved: how many of the last outputs are held until a backward: their memory is not reused by the next call.
        of_part: whether it is of a part of a step, which need not hold all that plans name. In the local view,
            gradients that only later parts read stay as they are.
        unreduced: the parameters of these.
        same_order: whether a plan made it, so that all ranks issue their collectives, of all groups, in one order.
        sizes: where numbers in the graph know what they are at other sizes, what was decided on them.
    """

    inputs: list[Input] = field(default_factory=list)
    n_outputs: int = 0
    mutations: dict[int, int] = field(default_factory=dict)
    gradients: list[Gradient] = field(default_factory=list)
    state_outputs: dict[int, Input] = field(default_factory=dict)
    donated: frozenset[int] = frozenset()
    saved: int = 0
    of_part: bool = False
    unreduced: tuple[str, ...] = ()
    same_order: bool = False
    sizes: SizeDecisions | None = None


@dataclass
class StepGraph:
    """A graph, its signature and the name of the stage that made it."""

    gm: fx.GraphModule
    signature: Signature
    stage: str = "trace"

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]


Pass = Callable[[StepGraph], StepGraph]


def info(node: fx.Node) -> NodeInfo:
    """The record of a node.

    Raises:
        GraphError: the node has none.
    """
    try:
        return node.meta["info"]  # type: ignore[no-any-return]
    except KeyError:
        raise GraphError(f"node {node.name} ({node.op} {node.target}) carries no NodeInfo") from None


def set_info(node: fx.Node, record: NodeInfo) -> fx.Node:
    """Attaches a record, and its value under fx's customary key ``val``."""
    node.meta["info"] = record
    node.meta["val"] = record.value
    return node


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a call of an operator gives, by the names in the schema."""
    return bound_arguments(node.target, node.args, node.kwargs)


def is_effectful(node: fx.Node) -> bool:
    """True for nodes that must stay, in order, even when nothing reads them.

    Those are random and RNG-state calls, collectives, which every rank must issue in one order, and checks and
    decisions, which give no result but an error.
    """
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(node.target, (Waited, Decided, Required)):
        return True
    if isinstance(node.target, Replayed):
        return False
    target = operator_of(node.target)
    if not isinstance(target, OpOverload):
        return target in (get_rng_state, set_rng_state, manual_seed)
    if target.namespace == "wholestep":
        return not is_wait(target) or _meets_others(node.args[0])
    return _has_effect(target) and not draws_nothing(node)


@functools.cache
def _has_effect(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags or not op._schema.returns


def is_communication(node: fx.Node) -> bool:
    """True for a call of one of our collectives, or of the wait for one."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "wholestep"


def draws_nothing(node: fx.Node) -> bool:
    """True for attention without dropout, whose operators are tagged as random for the dropout that they can do."""
    if not isinstance(node.target, OpOverload):
        return False
    if "dropout_p" not in argument_names(node.target):
        return False
    found = arguments(node).get("dropout_p", 0.0)
    return isinstance(found, (int, float)) and found == 0.0


def _meets_others(started: Any) -> bool:
    """True for a send or a barrier, which is waited for even where nothing reads what it gives."""
    target = started.target if isinstance(started, fx.Node) else None
    return isinstance(target, OpOverload) and target._schema.name in ("wholestep::send", "wholestep::barrier")


def is_host(node: fx.Node) -> bool:
    """True when the node gives a Python number."""
    return isinstance(info(node).value, (int, float, bool)) if "info" in node.meta else False


def nbytes(value: Any) -> int:
    """Bytes that the tensors in a node's value take."""
    return sum(t.numel() * t.itemsize for t in tensors_of(value))


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True when the elements fill one block of memory, each place once."""
    expected = 1
    for step, length in sorted((st, sz) for st, sz in zip(stride, size, strict=True) if sz > 1):
        if step != expected:
            return False
        expected *= length
    return True


def check(step: StepGraph, stage: str) -> StepGraph:
    """Checks the invariants that hold between stages and returns the graph unchanged.

    1. The graph lints; every node but the output carries a `NodeInfo`.
    2. Placeholders and `signature.inputs` agree in number and name; so do outputs and `n_outputs`.
    3. Each call is pure: no overload whose schema writes to an argument.
    4. `mutations` lead from outputs to inputs of equal shape and dtype.

    Raises:
        GraphError: naming the stage, the node and the ten lines around it.
    """
    step.graph.lint()
    nodes = list(step.graph.nodes)
    for position, node in enumerate(nodes):
        if node.op == "output":
            continue
        info(node)
        why = f"{node.op} is not part of the IR" if node.op in ("call_module", "call_method") else ""
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            why = f"{node.target} writes to an argument"
        if why:
            near = nodes[max(0, position - 5) : position + 5]
            lines = [f"{'>>' if one is node else '  '} {one.format_node()}" for one in near]
            raise GraphError("\n".join([f"after {stage}: {why}", *lines]))
    placeholders = step.placeholders
    names = [str(node.target) for node in placeholders]
    if names != [i.name for i in step.signature.inputs]:
        raise GraphError(f"after {stage}: placeholders {names[:5]}… do not match the signature's inputs")
    outputs = step.outputs
    if len(outputs) != step.signature.n_outputs:
        raise GraphError(f"after {stage}: {len(outputs)} outputs, signature says {step.signature.n_outputs}")
    for out_index, in_index in step.signature.mutations.items():
        new, old = info(outputs[out_index]).value, info(placeholders[in_index]).value
        if new.shape != old.shape or new.dtype != old.dtype:
            raise GraphError(f"after {stage}: {step.signature.inputs[in_index].source} changes from {old} to {new}")
    return step


def ancestors(
    nodes: Iterable[fx.Node], most: int | None = None, until: Callable[[fx.Node], bool] | None = None
) -> set[fx.Node]:
    """Some nodes and all that they follow from.

    Args:
        most: stops when there are more.
        until: nodes beyond which it does not look.
    """
    found: set[fx.Node] = set()
    queue = list(nodes)
    while queue and (most is None or len(found) <= most):
        node = queue.pop()
        if node not in found:
            found.add(node)
            if until is None or not until(node):
                queue += node.all_input_nodes
    return found


def dead_code(step: StepGraph) -> StepGraph:
    """Removes nodes that nothing reads, except effectful ones, placeholders and waits for collectives.

    Until its wait a collective reads and writes memory, whether or not anybody wants its result.
    """
    for node in reversed(list(step.graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr") and not is_effectful(node):
            if not is_wait(node.target):
                step.graph.erase_node(node)
    return step


GETITEM: Callable[..., Any] = operator.getitem


# Past `Node.__setattr__`, which takes a node out of its graph's tables and puts it back: a sixth of an expansion.
_set_args: Any = fx.Node.args.fset  # type: ignore[attr-defined]
_set_kwargs: Any = fx.Node.kwargs.fset  # type: ignore[attr-defined]


def add_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """`Graph.call_function`, in half the time: that one looks through all arguments for sizes to warn of."""
    node = graph.create_node("call_function", target, (), {})
    _set_args(node, args)
    if kwargs:
        _set_kwargs(node, kwargs)
    return node


def copy_node(graph: fx.Graph, node: fx.Node, exchange: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """`Graph.node_copy`, in half the time."""
    if node.op != "call_function":
        return graph.node_copy(node, exchange)
    made = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    _set_args(made, fx.map_arg(node.args, exchange))
    if node.kwargs:
        _set_kwargs(made, fx.map_arg(node.kwargs, exchange))
    made.meta.update(node.meta)
    return made


def copy_graph(
    nodes: Iterable[fx.Node], given: Iterable[tuple[fx.Node, str]] = ()
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph of copies of some nodes in their order, and the copy of each; records are shared.

    Args:
        nodes: all of a graph, or those of its calls that are a graph of their own.
        given: what these read of others, with a name: its placeholders, before all copies.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node, name in given:
        copies[node] = set_info(graph.placeholder(name), info(node))
    for node in nodes:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    return graph, copies
