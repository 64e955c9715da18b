"""A partition that keeps as few bytes for the backward as a minimum cut allows.

Tables by operator say what may be made again, and at what price; the cut, and the choice under a budget, are
`min_cut.py`'s; `partition.py` makes two graphs. Dropout draws its masks as floats of 0 and 1; as booleans they are a
quarter of the saved bytes.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from wholestep.aot_autograd.min_cut import Value, cheapest, within_budget
from wholestep.aot_autograd.partition import Joint, Partitioned, backward_roots, is_effect, split, view_base
from wholestep.functional import Functionalized, base_name, is_view, operator_of
from wholestep.ir import (
    GETITEM,
    StepGraph,
    ancestors,
    copy_graph,
    draws_nothing,
    info,
    is_effectful,
    is_host,
    nbytes,
    set_info,
)
from wholestep.nested import tensors_of
from wholestep.torch_compat import OpOverload, lazy_graph_module
from wholestep.trace.functionalize.aliases import Geometry

KERNEL = 1 << 14  # bytes: what one more call of a kernel is worth, a few microseconds of memory traffic

# Bytes that must be spared for one byte made again, by kind of operator. A pass over memory costs about as much as
# keeping the value does; a kernel that computes more per element costs more.
POINTWISE, HEAVY = 0.2, 0.4

FILLS = {
    "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
    "scalar_tensor", "arange", "eye",
}  # fmt: skip
COSTLY = {
    "gelu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "tanh", "sigmoid",
    "silu", "softplus", "elu", "selu", "mish", "sin", "cos", "tan", "lgamma", "digamma", "logit", "log_sigmoid_forward",
    "sum", "mean", "amax", "amin", "var", "var_mean", "std", "std_mean", "logsumexp", "native_layer_norm",
    "_softmax", "_log_softmax", "native_group_norm", "linalg_vector_norm", "any", "all",
}  # fmt: skip
MOVES = {
    "clone", "_to_copy", "copy", "cat", "stack", "repeat", "constant_pad_nd", "embedding", "index_select", "gather",
    "slice_scatter", "select_scatter", "diagonal_scatter", "flip", "roll", "tril", "triu", "where", "contiguous",
}  # fmt: skip


@functools.cache
def rate(target: Any) -> float | None:
    """Bytes that must be spared for one byte made again; None for what is never made again."""
    if target is GETITEM:
        return 0.0
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = base_name(target)
    if is_view(target):
        return 0.0
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return None
    if name in FILLS:
        return 0.0
    if name in COSTLY:
        return HEAVY
    return POINTWISE if name in MOVES or torch.Tag.pointwise in target.tags else None


def remake_price(node: fx.Node) -> int | None:
    """Price in bytes of computing a value again; None when it must be kept or follow from kept ones."""
    if is_host(node) or node.op == "get_attr":
        return 0
    per_byte = rate(node.target) if node.op == "call_function" and not is_effectful(node) else None
    if per_byte is None or is_free(node):
        return None if per_byte is None else 0
    return KERNEL + int(per_byte * nbytes(info(node).value))


def is_pure(node: fx.Node) -> bool:
    """True for calls that give the same bits whenever they run; uninitialised memory does not."""
    if node.op == "placeholder" or is_effectful(node):
        return False
    target = operator_of(node.target)
    if not isinstance(target, OpOverload):
        return True
    name = target._schema.name
    return target.namespace == "aten" and not name.startswith(("aten::empty", "aten::new_empty"))


def draws(node: fx.Node) -> bool:
    """True for calls that draw random numbers, all of them from a generator of the CPU."""
    op = operator_of(node.target)
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags or draws_nothing(node):
        return False
    return all(tensor.device.type == "cpu" for tensor in tensors_of(info(node).value))


def is_free(node: fx.Node) -> bool:
    """True for calls that run no kernel: views, parts of results."""
    return node.target is GETITEM or is_view(node.target)


def seconds(node: fx.Node) -> float:
    """A rough time of one call on one core: 70 GFLOP/s, 8 GB/s, 2 µs a kernel, 9 ns a draw. Only ratios matter."""
    if is_free(node) or is_host(node) or node.op != "call_function":
        return 0.0
    value = info(node).value
    moved = nbytes(value) + sum(nbytes(info(o).value) for o in node.all_input_nodes)
    drawn = sum(tensor.numel() for tensor in tensors_of(value)) if draws(node) else 0
    return 2e-6 + moved / 8e9 + flops(node) / 7e10 + drawn * 9e-9


def flops(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention; 0 for everything else."""
    if node.target is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:  # not in torch's table
        return int(sdpa_flop_count(*(info(operand).value.shape for operand in node.args[:3])))  # type: ignore[arg-type]
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: info(n).value)
    return int(count(*args, **kwargs, out_val=info(node).value))


NUMBER = 8  # bytes of a host number


def min_cut_partition(joint: Joint, memory_budget: float = 1.0) -> Partitioned:
    """Keeps the cheapest set of values from which the backward can be computed.

    Views, fills, elementwise operators, copies and reductions may be computed again in the backward, where they run
    just before their first reader; random operators, collectives and whatever writes never are. The price of keeping a
    value is its bytes; making one again has a price too, so that a pass over memory is repeated only where that spares
    several.

    Args:
        joint: forward and backward in one graph.
        memory_budget: 1 for the above. Below it, matrix products, convolutions and attention may be computed again as
            well: the values kept take at most this part of the way from the fewest bytes possible (0) to those of 1,
            chosen so that the least time is spent again.

    Raises:
        ValueError: the budget is not between 0 and 1.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; the cut as in "Min-cut optimal
    (re)computation (i.e. activation checkpointing) with AOTAutograd", PyTorch developers' forum, 2022.
    """
    if not 0 <= memory_budget <= 1:
        raise ValueError(f"memory_budget is {memory_budget}; it must be between 0 (fewest bytes) and 1 (least time)")
    joint = replace(joint, step=with_bool_masks(joint.step))
    wanted = wanted_values(joint)
    needed = ancestors(wanted)
    nodes = {node: index for index, node in enumerate(n for n in joint.step.graph.nodes if n in needed)}
    at_hand = lasting(joint)
    kept = cheapest([value_of(node, nodes, wanted, at_hand, remake_price(node)) for node in nodes])
    if memory_budget < 1:
        again = [0 if is_pure(node) else None for node in nodes]
        values = [value_of(node, nodes, wanted, at_hand, a) for node, a in zip(nodes, again, strict=True)]
        kept = within_budget(values, [seconds(node) for node in nodes], kept, memory_budget)
    ordered = list(nodes)
    return split(joint, [ordered[index] for index in kept])


def wanted_values(joint: Joint) -> set[fx.Node]:
    """Values that the backward reads, or gives as gradients, and that follow from no tangent or effect of its own."""
    late: set[fx.Node] = set(joint.tangents)
    for node in joint.step.graph.nodes:
        if node.op == "call_function":
            if is_effect(node, "backward") or any(operand in late for operand in node.all_input_nodes):
                late.add(node)
    return ancestors(backward_roots(joint), until=lambda node: node not in late) - late


def lasting(joint: Joint) -> set[fx.Node]:
    """What is held anyway: parameters and buffers that the forward does not write, and the forward's outputs."""
    kinds = zip(joint.primals, joint.step.signature.inputs, strict=False)
    stay = {primal for primal, given in kinds if given.kind in ("parameter", "buffer")} - joint.overwritten
    return stay | {out for out in joint.forward_outputs if isinstance(out, fx.Node) and out.op == "call_function"}


def value_of(
    node: fx.Node, index: dict[fx.Node, int], wanted: set[fx.Node], at_hand: set[fx.Node], remake: int | None
) -> Value:
    """A node as a value of the cut's problem.

    Args:
        index: of all values.
        wanted: those that the backward needs.
        at_hand: those that are held anyway.
        remake: the price of making it again, None where that must not be.
    """
    operands = tuple(index[operand] for operand in dict.fromkeys(node.all_input_nodes))
    once = remake is not None and info(node).phase == "backward"  # computed once, in whichever of the two graphs
    return Value(operands, keep_price(node, at_hand), 0 if once else remake, node in wanted)


def keep_price(node: fx.Node, at_hand: set[fx.Node]) -> int | None:
    """Bytes held for a value; None for what is not kept itself: constants, tuples, views of the whole of a value.

    A view of a part is copied when it is kept, which decides between equal choices; one with gaps is made again, for a
    copy would have other strides.
    """
    if node.op == "get_attr":
        return None
    if is_host(node):
        return NUMBER
    value = info(node).value
    if not isinstance(value, torch.Tensor):
        return None
    if node in at_hand:
        return 0
    base = view_base(node)
    if base is None:
        return nbytes(value)
    while (above := view_base(base)) is not None:
        base = above
    part = value.numel() < info(base).value.numel() and Geometry.of(value).is_dense
    return nbytes(value) + 1 if part else None


aten = torch.ops.aten

FROM = 1 << 15  # elements: below, two conversions cost more than the bytes are worth


def with_bool_masks(step: StepGraph) -> StepGraph:
    """A graph whose backward reads each Bernoulli draw, and what follows from it alone, by way of booleans.

    The forward is as it was; the same bits reach the backward, since 0 and 1 survive the way there and back. The graph
    given is left alone.
    """
    graph, _ = copy_graph(step.graph.nodes)
    for draw in [node for node in graph.nodes if _is_draw(node)]:
        following = _following(draw)
        read = [node for node in following if any(_is_backward(user) for user in node.users)]
        copies = _from_booleans(graph, draw, following) if read else {}
        for node in read:
            for user in [user for user in node.users if _is_backward(user)]:
                user.replace_input_with(node, copies[node])
    return StepGraph(lazy_graph_module(step.gm, graph), step.signature, step.stage)


def _is_draw(node: fx.Node) -> bool:
    """True for a large float tensor that a Bernoulli operator of the forward has drawn."""
    call = node.args[0] if node.target is GETITEM else node
    target = call.target.op if isinstance(call, fx.Node) and isinstance(call.target, Functionalized) else node.target
    if not isinstance(target, OpOverload) or target._schema.name not in ("aten::bernoulli", "aten::bernoulli_"):
        return False
    value = info(node).value
    large = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() >= FROM
    return large and not _is_backward(node)


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).phase == "backward"


def _following(draw: fx.Node) -> list[fx.Node]:
    """The draw and what the forward computes from it and constants alone, in the graph's order."""
    following = {draw: None}
    node = draw.next
    while node.op != "root":
        known = node.op == "call_function" and not _is_backward(node) and rate(node.target) is not None
        if known and node.all_input_nodes and following.keys() >= set(node.all_input_nodes):
            following[node] = None
        node = node.next
    return list(following)


def _from_booleans(graph: fx.Graph, draw: fx.Node, following: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The draw and what follows from it, computed from booleans."""
    record = info(draw)
    with graph.inserting_after(draw):
        mask = graph.call_function(aten._to_copy.default, (draw,), {"dtype": torch.bool})
    set_info(mask, replace(record, value=torch.empty_like(record.value, dtype=torch.bool)))
    with graph.inserting_after(mask):
        last = graph.call_function(aten._to_copy.default, (mask,), {"dtype": record.value.dtype})
    copies = {draw: set_info(last, replace(record))}
    for node in following[1:]:
        with graph.inserting_after(last):
            last = copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies
