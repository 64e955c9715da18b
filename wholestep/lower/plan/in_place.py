"""In-place execution: how a call can write into memory that it is given, and which memory it may write over."""

from __future__ import annotations

import torch
from torch import fx

from wholestep.functional import base_name, is_view
from wholestep.ir import info
from wholestep.lower.plan.liveness import Liveness
from wholestep.lower.plan.operator_facts import SELF_ONLY_INPLACE, aten, inplace_variant, is_pointwise
from wholestep.lower.plan.value_facts import How, dense, layout, tensor_operands, writer
from wholestep.torch_compat import OpOverload

# CPU kernels whose result may lie over the first operand: they read all of a row before they write it, or add to it.
ROW_BY_ROW = {
    aten._softmax.default, aten._log_softmax.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
}  # fmt: skip
ACCUMULATE = {aten.addmm.default, aten.addbmm.default, aten.baddbmm.default, aten.addmv.default}


def way(node: fx.Node) -> How | None:
    """How a call can put its result into memory that it is given; None when it cannot."""
    found, value = writer(node), info(node).value
    if found is None and isinstance(value, torch.Tensor) and isinstance(node.target, OpOverload):
        named = is_pointwise(node.target) or base_name(node.target) in SELF_ONLY_INPLACE
        if named and dense(value) and inplace_variant(node.target) is not None and not is_view(node.target):
            return "inplace"
    return found


def may_write_over(live: Liveness, node: fx.Node, root: fx.Node, how: How) -> bool:
    """True when ``node`` may write where ``root`` lies although it reads it (or does not)."""
    if not live.dead_before(root, node):
        return False
    mine = [o for o in tensor_operands(node) if live.root[o] is root]
    if not mine:
        return True
    if any(layout(info(o).value) != layout(info(node).value) for o in mine):
        return False
    over_first = node.target in ROW_BY_ROW | ACCUMULATE and info(node).value.device.type == "cpu"
    if over_first or how in ("scatter", "collective") or (how == "inplace" and not is_pointwise(node.target)):
        return len(mine) == 1 and mine[0] is node.args[0]
    item = live.items[live.item_of[node]]
    if item.by_pieces and live.read_time(node, root) != live.position[node]:
        return False
    if info(node).value.is_complex():  # compiled twice, with and without overlap, which round products otherwise
        return how == "copy"
    return how == "copy" or is_pointwise(node.target)
