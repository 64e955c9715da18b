"""Blocked matrix products: a gradient that only the optimizer reads is computed by blocks of rows, never as a whole.

The gradient of a weight on few rows of a batch is a product with little arithmetic and a large result. Computed and
used by some of its rows at a time, it stays in the cache: of the ten times that such a step passes over memory as
large as the weight, two are gone, and so is that memory. The bits are those of the whole product, which is tried.

A ``_fused_*`` operator updates a list of parameters, each of whose gradients it wants whole. Here a parameter whose
gradient is a blocked product gets a call of its own, which then runs on some rows at a time, right after these rows of
the gradient. The kernel's vector loop begins at the first element that it is given: blocks of whole vectors have the
bits of one call, which is tried, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.functional import argument_names, base_name
from wholestep.ir import GETITEM, StepGraph, arguments, info, set_info
from wholestep.lower.plan.operator_facts import aten
from wholestep.nested import map_leaves
from wholestep.torch_compat import OpOverload, no_modes

PIECE = 1 << 18  # elements that are computed at once: 1 MB, as much as fits the second cache
LEAST = 1 << 21  # elements of a product from which this pays
WHOLE = 1 << 22  # and of one that stays in memory
# The dimension that is summed over, at most: beyond, arithmetic takes longer than memory, and the factors live longer.
INNER = 128
ROWS = 16  # computed at once are so many, or some times so many: whole vectors of whatever reads them by rows

_SAME_BITS: dict[Any, bool] = {}


def product_of(nodes: Iterable[fx.Node], readers: Callable[[fx.Node], bool]) -> fx.Node | None:
    """A product that calls of one group read by pieces, and nobody else.

    Args:
        nodes: of the group.
        readers: whether a node is in the group.
    """
    operands = (operand for node in nodes for operand in node.all_input_nodes)
    return next((operand for operand in operands if is_blocked(operand, readers)), None)


def is_blocked(node: fx.Node, readers: Callable[[fx.Node], bool]) -> bool:
    """True for a product that is better computed by rows, where all that read it can take it so."""
    return is_product(node) and all(map(readers, node.users)) and _pays(node) and _same_bits(node)


def is_product(node: fx.Node) -> bool:
    """True for a product of two matrices."""
    return node.op == "call_function" and node.target is aten.mm.default


def rows_at_once(value: torch.Tensor) -> int:
    """How many rows of a product are computed at once."""
    return max(ROWS, PIECE // value.shape[1] // ROWS * ROWS)


def by_rows(left: torch.Tensor, piece: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The pieces of a product: where each begins (element), the rows of the first factor, and memory for it."""
    rows, columns = piece.shape
    for first in range(0, left.shape[0], rows):
        some = left[first : first + rows]
        yield first * columns, some, piece[: some.shape[0]]


def in_parts(node: fx.Node) -> bool:
    """Whether a product that is whole in memory is computed by rows: each part is written while the cache holds it.

    On one thread 5000 x 5000 elements take 0.65 of the time with 20 rows of a batch, 0.77 with 64 and 0.97 with 128;
    several threads share out the whole product better than its parts (0.98 to 1.16).
    """
    here = is_product(node) and info(node).value.device.type == "cpu"
    return here and info(node).value.numel() >= WHOLE and _pays(node) and _same_bits(node)


def parts(left: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of the first factor and of the product, as many at once as the cache holds."""
    rows = rows_at_once(out)
    return zip(left.split(rows), out.split(rows), strict=True)


def _pays(node: fx.Node) -> bool:
    left, right = node.args
    value = info(node).value
    if torch.get_num_threads() > 1 or left is right or value.numel() < LEAST or value.shape[0] <= rows_at_once(value):
        return False
    factors = sum(info(one).value.numel() for one in (left, right))  # type: ignore[arg-type]
    return info(left).value.shape[1] <= INNER and 4 * factors <= value.numel()  # type: ignore[arg-type, no-any-return]


def _same_bits(node: fx.Node) -> bool:
    """Tries a product on random numbers: whole, and by rows."""
    like = [info(one).value for one in node.args]  # type: ignore[arg-type]
    key = (*((*map(int, v.shape), *map(int, v.stride()), v.dtype) for v in like), torch.get_num_threads())
    if key not in _SAME_BITS:
        with no_modes():
            generator = torch.Generator().manual_seed(0)
            left, right = (_random(v, generator) for v in like)
            whole = torch.mm(left, right)
            piece = whole.new_empty(rows_at_once(whole), whole.shape[1])
            _SAME_BITS[key] = all(
                torch.equal(torch.mm(some, right, out=into), whole.view(-1)[first : first + into.numel()].view_as(into))
                for first, some, into in by_rows(left, piece)
            )
    return _SAME_BITS[key]


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in another tensor's layout; drawn by strides, they take four times as long."""
    extent = 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(like.shape, like.stride(), strict=True))
    return torch.empty(extent, dtype=like.dtype).normal_(generator=generator).as_strided(like.shape, like.stride())


WHOLE_LISTS = ("grads", "state_steps")  # of a fused optimizer: what is not cut as its parameters are


def is_fused_update(target: Any) -> bool:
    """True for the functional form of a fused optimizer."""
    fused = isinstance(target, OpOverload) and base_name(target).startswith("_fused_")
    return fused and "grads" in argument_names(target)


def split_fused_updates(step: StepGraph) -> StepGraph:
    """Gives each parameter whose gradient can be computed by rows a fused call of its own; one keeps all others."""
    for node in list(step.graph.nodes):
        if node.op == "call_function" and is_fused_update(node.target):
            lists = _lists(node)
            alone = [i for i in range(len(lists["self"])) if _by_rows(node, lists, i)]
            rest = [i for i in range(len(lists["self"])) if i not in alone]
            if alone and (rest or len(alone) > 1):
                _split(step.graph, node, [[i] for i in alone] + [rest] * bool(rest))
    return step


def product_of_update(node: fx.Node) -> fx.Node | None:
    """The product that is the gradient of a call's one parameter, where it can be computed by rows."""
    if not is_fused_update(node.target):
        return None
    lists = _lists(node)
    return lists["grads"][0] if len(lists["self"]) == 1 and _by_rows(node, lists, 0) else None


def cut_lists(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """What an update of one parameter works on some rows of at a time, by argument, beside the gradient."""
    return [(name, items[0]) for name, items in _lists(node).items() if name not in WHOLE_LISTS and items]


def _lists(node: fx.Node) -> dict[str, list[Any]]:
    return {name: list(v) for name, v in arguments(node).items() if isinstance(v, (list, tuple))}


def _by_rows(node: fx.Node, lists: dict[str, list[Any]], index: int) -> bool:
    """True when the update of one parameter of a call can run on some rows of it at a time, on one thread.

    The kernel writes gradients where it unscales them; results that are gradients are read by whoever wants them whole.
    """
    if arguments(node).get("grad_scale") is not None:
        return False
    gradient, first = lists["grads"][index], info(lists["self"][index]).value
    cut = [items[index] for name, items in lists.items() if name != "state_steps" and items]
    same = all(info(o).value.shape == first.shape and info(o).value.is_contiguous() for o in cut)
    once = all(len({*items}) == len(items) for items in lists.values())
    if not same or not once or not is_blocked(gradient, lambda user: user is node):
        return False
    return not _picks(node, argument_names(node.target).index("grads"), index) and _same_bits_by_rows(node, first.dtype)  # type: ignore[arg-type]


def _picks(node: fx.Node, result: int, index: int) -> list[fx.Node]:
    """Those that read one item of one of a call's lists of results."""
    lists = [u for u in node.users if u.target is GETITEM and u.args[1] == result]
    return [u for one in lists for u in one.users if u.target is not GETITEM or u.args[1] == index]


def _pick(value: Any, group: list[int]) -> Any:
    return [value[i] for i in group] if isinstance(value, (list, tuple)) and value else value


def _split(graph: fx.Graph, node: fx.Node, groups: list[list[int]]) -> None:
    """One call for each group of a call's parameters."""
    for group in groups:
        with graph.inserting_before(node):
            args = tuple(_pick(value, group) for value in node.args)
            one = graph.call_function(node.target, args, {k: _pick(v, group) for k, v in node.kwargs.items()})  # type: ignore[arg-type]
        record = info(node)
        set_info(one, replace(record, value=tuple(_pick(value, group) for value in record.value)))
        for items in [u for u in node.users if u.target is GETITEM]:
            with graph.inserting_before(node):
                mine = graph.call_function(GETITEM, (one, items.args[1]))
            set_info(mine, replace(info(items), value=_pick(info(items).value, group)))
            for item in [u for u in items.users if u.args[1] in group]:
                item.args = (mine, group.index(item.args[1]))  # type: ignore[arg-type]
    for items in list(node.users):
        graph.erase_node(items)
    graph.erase_node(node)


def _same_bits_by_rows(node: fx.Node, dtype: torch.dtype) -> bool:
    """Tries a kernel on random numbers: whole, and by blocks."""
    bound = arguments(node)
    settings = {name: v for name, v in bound.items() if not isinstance(v, (list, tuple, fx.Node))}
    key = (node.target, dtype, *((name, v if name in settings else bool(v)) for name, v in bound.items()))
    if key not in _SAME_BITS:
        with no_modes():
            _SAME_BITS[key] = _tried(node, bound, dtype)
    return _SAME_BITS[key]


def _tried(node: fx.Node, bound: dict[str, Any], dtype: torch.dtype) -> bool:
    generator, count, block = torch.Generator().manual_seed(0), 8 * ROWS * ROWS + 5, 3 * ROWS
    trial: dict[str, Any] = {}
    for name, value in bound.items():
        if isinstance(value, (list, tuple)):
            counted = torch.tensor(3.0, dtype=torch.float32) if name == "state_steps" else None
            tensor = torch.rand(count, dtype=dtype, generator=generator) if counted is None else counted
            trial[name] = [tensor] * bool(value)
        elif isinstance(value, fx.Node):
            number = torch.tensor(0.37, dtype=torch.float32)
            trial[name] = number if isinstance(info(value).value, torch.Tensor) else 0.37
        else:
            trial[name] = value
    whole = node.target(**trial)  # type: ignore[operator]
    for begin in range(0, count, block):
        rows = slice(begin, begin + block)
        cut = map_leaves(lambda t, rows=rows: t[rows] if isinstance(t, torch.Tensor) and t.dim() else t, trial)  # type: ignore[misc]
        some = zip(node.target(**cut), whole, strict=True)  # type: ignore[operator]
        if not all(torch.equal(part[0], all_[0][rows]) for part, all_ in some if part and part[0].dim()):
            return False
    return True
