"""Replaces the arithmetic of a plain or foreach optimizer by the device's fused kernel. Changes rounding.

Each rule is a pattern of one parameter's update, from its new value back to what it is made from. Matches
with equal hyperparameters become one call of ``aten._fused_*``, which passes over memory once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import GETITEM, StepGraph, dead_code, info, set_info
from wholestep.passes.canonicalize import copy_step, expand_foreach, list_items
from wholestep.passes.common_subexpressions import same_host_numbers
from wholestep.passes.pattern_match import Bindings, Call, OneMinus, match

aten = torch.ops.aten

_ADD, _MUL, _DIV = (aten.add.Tensor,), (aten.mul.Tensor,), (aten.div.Tensor,)
_ADDCMUL, _ADDCDIV, _SQRT = (aten.addcmul.default,), (aten.addcdiv.default,), (aten.sqrt.default,)


def _host(function: Any, *args: Any) -> Call:
    return Call((function,), args)


def _minus(value: Any) -> tuple[Call, ...]:
    return (_host(operator.neg, value), _host(operator.mul, value, -1), _host(operator.mul, -1, value))


# The gradient with the L2 penalty added to it, or as it is.
_GRAD = (Call(_ADD, ("grad", "param"), {"alpha": "weight_decay"}), "grad")

_STEP = Call(_ADD, ("old_step", 1), as_="step")
_COUNT = (Call((aten._local_scalar_dense.default,), (_STEP,)), Call((aten._local_scalar_dense.default,), ("step",)))


def _correction(beta: str) -> Call:
    return _host(operator.sub, 1, _host(operator.pow, beta, _COUNT))


_SQUARE = Call(_ADDCMUL, (Call(_MUL, ("exp_avg_sq", "beta2")), "g", "g"), {"value": OneMinus("beta2")}, as_="new_sq")
_ROOT2 = (_host(operator.pow, _correction("beta2"), 0.5), _host(math.sqrt, _correction("beta2")))
_MAX = Call((aten.maximum.default,), ("max_sq", _SQUARE), as_="new_max")
_DENOMINATOR = Call(_ADD, (Call(_DIV, (Call(_SQRT, ((_MAX, _SQUARE),)), _ROOT2)), "eps"))
_AVERAGE = Call((aten.lerp.Scalar,), ("exp_avg", "g", OneMinus("beta1")), as_="new_avg")
_DECAYED = Call(_MUL, ("param", _host(operator.sub, 1, _host(operator.mul, "lr", "decoupled_decay"))))


def _adam(start: Any) -> Call:
    size = _minus(_host(operator.truediv, "lr", _correction("beta1")))
    return Call(_ADDCDIV, (start, _AVERAGE, _DENOMINATOR), {"value": size}, as_="new_param")


_BUFFER = Call(
    _ADD, (Call(_MUL, ("buffer", "momentum")), "g"), {"alpha": (OneMinus("dampening"), "one")}, as_="new_buffer"
)
_NESTEROV = Call(_ADD, ("g", _BUFFER), {"alpha": "momentum"}, as_="nesterov")
_SGD = Call(_ADD, ("param", (_NESTEROV, _BUFFER, "g")), {"alpha": _minus("lr")}, as_="new_param")

_SUM = Call(_ADDCMUL, ("state_sum", "g", "g"), {"value": 1}, as_="new_sum")
_RATE = _host(
    operator.truediv, "lr", _host(operator.add, 1, _host(operator.mul, _host(operator.sub, _COUNT, 1), "lr_decay"))
)
_ADAGRAD = Call(
    _ADDCDIV, ("param", "g", Call(_ADD, (Call(_SQRT, (_SUM,)), "eps"))), {"value": _minus(_RATE)}, as_="new_param"
)


@dataclass(frozen=True)
class Rule:
    """How one optimizer is found and written anew.

    Attributes:
        pattern: of the new parameter.
        fused: gives the fused overload for the bindings of a match.
        lists: list arguments in order; each names a binding, or is empty when that is not bound.
        results: (index among the results, binding of the node it replaces).
        settings: keyword arguments for the bindings of a match.
    """

    pattern: Call
    fused: Any
    lists: tuple[str, ...]
    results: tuple[tuple[int, str], ...]
    settings: Callable[[Bindings], dict[str, Any]]


def _adam_settings(b: Bindings) -> dict[str, Any]:
    return {
        "lr": b["lr"], "beta1": b["beta1"], "beta2": b["beta2"], "eps": b["eps"], "amsgrad": "max_sq" in b,
        "weight_decay": b.get("decoupled_decay", b.get("weight_decay", 0.0)), "maximize": False,
    }  # fmt: skip


def _sgd_settings(b: Bindings) -> dict[str, Any]:
    return {
        "weight_decay": b.get("weight_decay", 0.0), "momentum": b.get("momentum", 0.0), "lr": b["lr"],
        "dampening": b.get("dampening", 0.0), "nesterov": "nesterov" in b, "maximize": False, "is_first_step": False,
    }  # fmt: skip


def _adagrad_settings(b: Bindings) -> dict[str, Any]:
    return {
        "lr": b["lr"], "lr_decay": b["lr_decay"], "weight_decay": b.get("weight_decay", 0.0), "eps": b["eps"],
        "maximize": False,
    }  # fmt: skip


_ADAM_LISTS = ("param", "grad", "exp_avg", "exp_avg_sq", "max_sq", "step")
_ADAM_RESULTS = ((0, "new_param"), (2, "new_avg"), (3, "new_sq"), (4, "new_max"))
RULES: tuple[Rule, ...] = (
    Rule(_adam(_DECAYED), aten._fused_adamw.default, _ADAM_LISTS, _ADAM_RESULTS, _adam_settings),
    Rule(_adam("param"), aten._fused_adam.default, _ADAM_LISTS, _ADAM_RESULTS, _adam_settings),
    Rule(_ADAGRAD, aten._fused_adagrad.default, ("param", "grad", "state_sum", "step"),
         ((0, "new_param"), (2, "new_sum")), _adagrad_settings),
    Rule(_SGD, aten._fused_sgd.default, ("param", "grad", "buffer"),
         ((0, "new_param"), (2, "new_buffer")), _sgd_settings),
)  # fmt: skip


def fuse_optimizer(step: StepGraph) -> StepGraph:
    """Uses fused kernels for Adam, AdamW, SGD (momentum, Nesterov) and Adagrad written out in the graph.

    Results equal those of ``fused=True`` in eager, not those of the optimizer as the user chose it: opt-in.
    Updates that fit no rule, or whose tensors do not share one dense layout, stay as they are.
    """
    step = dead_code(same_host_numbers(expand_foreach(list_items(copy_step(step)), ("cpu", "cuda"))))
    place: dict[fx.Node, float] = {node: i for i, node in enumerate(step.graph.nodes)}
    moved: dict[fx.Node, fx.Node] = {}
    groups: dict[Any, list[tuple[Rule, Bindings]]] = {}
    for node in step.graph.nodes:
        found = _find(node)
        if found is not None:
            groups.setdefault(_key(*found), []).append(found)
    for matches in groups.values():
        for batch in _batches(matches, place):
            _replace(step, batch, place, moved)
    dead_code(step)
    step.gm.recompile()
    step.stage = "fuse_optimizer"
    return step


def _find(node: fx.Node) -> tuple[Rule, Bindings] | None:
    if node.op != "call_function" or info(node).phase != "optimizer":
        return None
    for rule in RULES:
        bound = match(node, rule.pattern, {})
        if bound is not None:  # the gradient is apart from the L2 penalty, where the update adds one
            split = match(bound["g"], "grad" if "decoupled_decay" in bound else _GRAD, {"param": bound["param"]})
            if split is not None and _suits(rule, bound | split) and _closed(rule, bound | split):
                return rule, bound | split
    return None


def _inner(rule: Rule, bound: Bindings) -> set[fx.Node]:
    """The nodes that a match computes the update with: from the new parameter back to the operands."""
    known, todo = set(_operands(rule, bound)), [bound["new_param"]]
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node not in found and node not in known and node.op == "call_function":
            found.add(node)
            todo += node.all_input_nodes
    return found


def _closed(rule: Rule, bound: Bindings) -> bool:
    """True when nothing else reads the tensors in between."""
    inner = _inner(rule, bound)
    between = [n for n in inner - set(_results(rule, bound)) if isinstance(info(n).value, torch.Tensor)]
    return all(user in inner for node in between for user in node.users)


def _suits(rule: Rule, bound: Bindings) -> bool:
    values = [info(bound[name]).value for name in rule.lists if name in bound and name != "step"]
    first = values[0]
    if not all(isinstance(v, torch.Tensor) and v.is_contiguous() for v in values) or not first.is_floating_point():
        return False
    return all((v.shape, v.dtype, v.device) == (first.shape, first.dtype, first.device) for v in values)


def _key(rule: Rule, bound: Bindings) -> Any:
    value = info(bound["param"]).value
    settings = tuple(v if isinstance(v, fx.Node) else repr(v) for v in rule.settings(bound).values())
    return (rule.fused, settings, "buffer" in bound, value.dtype, value.device)


def _batches(matches: list[tuple[Rule, Bindings]], place: dict[fx.Node, float]) -> list[list[tuple[Rule, Bindings]]]:
    """Splits matches so that a batch's operands all exist before any of its results is read."""
    batches: list[list[tuple[Rule, Bindings]]] = []
    limit = -1.0
    made: set[fx.Node] = set()
    for rule, bound in matches:
        needed = max(place[n] for n in _operands(rule, bound))
        inner = _inner(rule, bound)
        used = min([float(len(place)), *(place[u] for n in _results(rule, bound) for u in n.users if u not in inner)])
        if not batches or needed >= limit or made & set(_operands(rule, bound)):
            batches.append([])
            limit, made = len(place), set()
        batches[-1].append((rule, bound))
        made |= set(_results(rule, bound))
        limit = min(limit, used)
    return batches


def _operands(rule: Rule, bound: Bindings) -> list[fx.Node]:
    numbers = [v for v in rule.settings(bound).values() if isinstance(v, fx.Node)]
    return [bound[name] for name in rule.lists if name in bound] + numbers


def _results(rule: Rule, bound: Bindings) -> list[fx.Node]:
    return [bound[name] for _, name in rule.results if name in bound]


def _replace(
    step: StepGraph, batch: list[tuple[Rule, Bindings]], place: dict[fx.Node, float], moved: dict[fx.Node, fx.Node]
) -> None:
    """Writes one fused call for a batch; ``moved`` leads from replaced nodes to those that stand for them."""
    batch = [(rule, {k: moved.get(v, v) if isinstance(v, fx.Node) else v for k, v in b.items()}) for rule, b in batch]
    rule, first = batch[0]
    last = max((n for r, b in batch for n in _operands(r, b)), key=place.__getitem__)
    lists = [[b[name] for _, b in batch] if name in first else [] for name in rule.lists]
    record = info(first["new_param"])

    values = [[info(n).value for n in column] for column in lists]
    results = tuple(values[: len(rule.fused._schema.returns)])
    with step.graph.inserting_before((last if last.op != "placeholder" else step.placeholders[-1]).next):
        call = step.graph.call_function(rule.fused, tuple(lists), rule.settings(first))
        set_info(call, replace(record, value=results))
        for index, name in rule.results:
            if name not in first:
                continue
            column = step.graph.call_function(GETITEM, (call, index))
            set_info(column, replace(record, value=results[index]))
            for position, (_, bound) in enumerate(batch):
                item = step.graph.call_function(GETITEM, (column, position))
                set_info(item, replace(record, value=results[index][position]))
                place[item] = place[last] + 1e-6 * (len(moved) + 1)  # between this node and the next
                moved[bound[name]] = item
                bound[name].replace_all_uses_with(item)
