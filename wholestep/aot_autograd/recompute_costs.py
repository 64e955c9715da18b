"""What it costs to keep a value for the backward, and what to make it again there: tables by operator."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from wholestep.functional import base_name, is_view, operator_of
from wholestep.ir import GETITEM, draws_nothing, info, is_effectful, is_host, nbytes
from wholestep.nested import tensors_of
from wholestep.torch_compat import OpOverload

KERNEL = 1 << 14  # bytes: what one more call of a kernel is worth, a few microseconds of memory traffic

# Bytes that must be spared for one byte made again, by kind of operator. A pass over memory costs about as much as
# keeping the value does; a kernel that computes more per element costs more.
POINTWISE, HEAVY, REDUCTION = 0.2, 0.4, 0.4

FILLS = {
    "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
    "scalar_tensor", "arange", "eye",
}  # fmt: skip
HEAVY_POINTWISE = {
    "gelu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "tanh", "sigmoid",
    "silu", "softplus", "elu", "selu", "mish", "sin", "cos", "tan", "lgamma", "digamma", "logit", "log_sigmoid_forward",
}  # fmt: skip
REDUCTIONS = {
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
    if name in HEAVY_POINTWISE:
        return HEAVY
    if name in REDUCTIONS:
        return REDUCTION
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
