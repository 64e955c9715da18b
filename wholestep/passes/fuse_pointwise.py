"""Pointwise fusion: stretches of elementwise calls and reductions become one `Region` each, which Inductor compiles.

Opt-in, since results are equal to float tolerance and not bitwise: ``passes=[ws.passes.fuse_pointwise]``.
Products of matrices, convolutions, attention, random operators, collectives and the update stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.functional import Decided, Required, base_name, is_view
from wholestep.ir import (
    GETITEM,
    NodeInfo,
    StepGraph,
    add_call,
    copy_node,
    dead_code,
    info,
    is_effectful,
    nbytes,
    set_info,
)
from wholestep.passes.canonicalize import copy_step
from wholestep.passes.grouping import grouped
from wholestep.torch_compat import OpOverload, lazy_graph_module

aten = torch.ops.aten

# Besides all that torch tags as pointwise: what Inductor makes loops of.
LOOPS = {
    "native_layer_norm", "native_layer_norm_backward", "_softmax", "_safe_softmax", "_softmax_backward_data",
    "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "sum", "mean", "amax",
    "amin", "clone", "_to_copy", "gelu", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward",
    "threshold_backward",
}  # fmt: skip
# Those that also sum over rows. Inductor goes down each column for itself: slower than ATen beyond the cache.
ROW_SUMS = {"native_layer_norm_backward", "sum", "mean", "amax", "amin"}
CACHED = 1 << 18  # bytes
# Kernels from which one pass over memory is worth a call of its own; one fewer where one of them is of `LOOPS`: two of
# plain arithmetic write over their operands, which a region does not.
LEAST = 3


class Region:
    """Calls that run as one: called as the graph they stand for, until something better has been compiled.

    Attributes:
        graph: placeholders, ATen calls, and a flat output; names count up, so that equal regions have equal text.
        text: the graph's Python, and the layout of what goes in.
    """

    __module__ = "wholestep.passes"

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.__name__ = graph, "fused_region"
        given = [info(node).value for node in graph.nodes if node.op == "placeholder"]
        self.inputs = [(tuple(v.shape), v.stride(), str(v.dtype).removeprefix("torch.")) for v in given]
        self.text = f"{graph.python_code('self').src}# {self.inputs}"

    @property
    def operators(self) -> str:
        """The names of the operators it stands for."""
        calls = (node for node in self.graph.nodes if node.op == "call_function" and node.target is not GETITEM)
        return ", ".join(base_name(node.target) for node in calls if not is_view(node.target))

    def __repr__(self) -> str:
        return f"fused_region({self.operators})"

    def __call__(self, *inputs: Any) -> Any:
        return lazy_graph_module({}, self.graph)(*inputs)


def fuse_pointwise(step: StepGraph) -> StepGraph:
    """Replaces connected elementwise calls and reductions of forward and backward by calls of `Region`s.

    A bias that a product of matrices begins with is added by the region that reads the product.
    """
    step = dead_code(copy_step(step))
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    keys = _keys(calls)
    for node in calls:
        if node.target is aten.empty_like.default:  # which would wait for what it only looks at
            made = info(node).value
            node.target, node.args = aten.empty_strided.default, (tuple(made.shape), made.stride())
            node.kwargs = {"dtype": made.dtype, "device": made.device}
    for node in calls:
        if node.target is aten.addmm.default and (key := _only_reader(node, keys)) is not None:
            keys[_split_bias(node)] = key
    others = [node for node in step.graph.nodes if node.op == "call_function" and not _is_passed(node)]
    regions = list(filter(_is_worth_it, grouped(others, keys, _bases, _readers, _bases)))
    fused = StepGraph(lazy_graph_module(step.gm, _contracted(step.graph, regions)), step.signature, "fuse_pointwise")
    return dead_code(fused)


def _is_worth_it(members: list[fx.Node]) -> bool:
    names = [base_name(node.target) for node in members if node.target is not GETITEM]  # type: ignore[arg-type]
    return len(names) + any(name in LOOPS for name in names) >= LEAST and len(names) > 1


def _keys(calls: list[fx.Node]) -> dict[fx.Node, Any]:
    """The calls that may be in regions, and what those of one region share: its phase and its part of the graph."""
    keys: dict[fx.Node, Any] = {}
    for node in calls:
        owner = node.args[0] if node.target is GETITEM else node
        if owner in keys if node.target is GETITEM else _is_fusible(node):
            keys[node] = info(node).phase, info(node).part
    return keys


def _is_fusible(node: fx.Node) -> bool:
    op, record = node.target, info(node)
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op.is_view or is_effectful(node):
        return False
    if record.phase == "optimizer" or not (torch.Tag.pointwise in op.tags or base_name(op) in LOOPS):
        return False
    if op._schema.is_mutable or any(isinstance(user.target, Decided | Required) for user in node.users):
        return False
    made = record.value if isinstance(record.value, (tuple, list)) else [record.value]
    read = [info(operand).value for operand in node.all_input_nodes]
    if base_name(op) in ROW_SUMS and nbytes(read[0]) > CACHED and not _reduces_columns(node):
        return False
    return all(_is_plain(value) for value in (*made, *read))


def _reduces_columns(node: fx.Node) -> bool:
    """True for a reduction over a last dimension whose elements lie side by side."""
    value, dims = info(node.args[0]).value, node.args[1] if len(node.args) > 1 else None  # type: ignore[arg-type]
    if base_name(node.target) == "native_layer_norm_backward":  # type: ignore[arg-type]
        return False
    last = not isinstance(dims, (list, tuple)) or value.dim() - 1 in {dim % value.dim() for dim in dims}
    return last and value.is_contiguous()


def _is_plain(value: Any) -> bool:
    """True for a strided tensor of real numbers on the CPU, with elements."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    return value.numel() > 0 and not value.dtype.is_complex and not value.is_neg()


def _is_passed(node: fx.Node) -> bool:
    """True for a view, which costs nothing wherever it is made."""
    return node.op == "call_function" and is_view(node.target) and isinstance(info(node).value, torch.Tensor)


def _base(node: fx.Node) -> fx.Node:
    while _is_passed(node):
        node = node.all_input_nodes[0]
    return node


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    """What a call reads, or reads a view of."""
    return map(_base, node.all_input_nodes)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a value or a view of it."""
    for user in node.users:
        if _is_passed(user):
            yield from _readers(user)
        else:
            yield user


def _only_reader(node: fx.Node, keys: dict[fx.Node, Any]) -> Any:
    """What the readers of a product with a bias share, where all of them may be in one region."""
    found = {keys.get(reader) for reader in _readers(node)}
    plain = len(node.args) == 3 and not node.kwargs and _is_plain(info(node).value)
    same = (info(node).phase, info(node).part)
    return same if plain and found == {same} else None


def _split_bias(node: fx.Node) -> fx.Node:
    """Takes the bias out of a product; gives the addition."""
    bias, *factors = node.args
    with node.graph.inserting_before(node):
        product = set_info(add_call(node.graph, aten.mm.default, tuple(factors)), info(node))
    node.target, node.args = aten.add.Tensor, (product, bias)
    return node


def _contracted(graph: fx.Graph, regions: list[list[fx.Node]]) -> fx.Graph:
    """The graph with each region as one call, where its first reader is."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    region_of = {node: members for members in regions for node in members}
    effects = [node for node in graph.nodes if node.op == "call_function" and is_effectful(node)]
    before = dict(zip(effects[1:], effects, strict=False))  # effects keep their order

    def add(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node in region_of:
                _add_region(made, region_of[node], add, copies)
            else:
                for operand in (*node.all_input_nodes, *filter(None, [before.get(node)])):
                    add(operand)
                copies[node] = copy_node(made, node, copies.__getitem__)
        return copies[node]

    for node in graph.nodes:
        if node not in region_of and not _is_passed(node):
            add(node)
    return made


def _add_region(made: fx.Graph, members: list[fx.Node], add: Any, copies: dict[fx.Node, fx.Node]) -> None:
    """Adds the call of a region, and the results that are read outside of it."""
    inside, body = dict.fromkeys(members), fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    reads: list[fx.Node] = []

    def within(node: fx.Node) -> fx.Node:
        if node not in inner:
            assert _is_passed(node) and _base(node) in inside
            inner[node] = _counted(body, node, within)
        return inner[node]

    for node in members:
        for operand in node.all_input_nodes:
            if operand not in inner and _base(operand) not in inside:
                reads.append(operand)
                inner[operand] = set_info(body.placeholder(f"x{len(inner)}"), info(operand))
    for node in members:
        inner[node] = _counted(body, node, within)
    gives = [node for node in members if isinstance(info(node).value, torch.Tensor)]
    gives = [node for node in gives if any(reader not in inside for reader in _readers(node))]
    body.output(tuple(inner[node] for node in gives))
    region = Region(body)
    first = info(members[-1])
    call = add_call(made, region, tuple([add(operand) for operand in reads]))
    set_info(call, replace(first, value=tuple(info(node).value for node in gives)))
    for index, node in enumerate(gives):
        copies[node] = set_info(add_call(made, GETITEM, (call, index)), info(node))


def _counted(body: fx.Graph, node: fx.Node, exchange: Any) -> fx.Node:
    """A copy of a call under a name that depends on its place alone."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), exchange)
    record: NodeInfo = info(node)
    return set_info(body.create_node("call_function", node.target, args, kwargs, f"v{len(body.nodes)}"), record)
