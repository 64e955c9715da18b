"""The naive backend: runs a `StepGraph` node by node, as written, and writes mutations back at the end.

Slow and obviously right; every other lowering is compared with it bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.functional import OFFSETS, clone_as_it_lies
from wholestep.ir import StepGraph, info
from wholestep.lower.plan.operator_facts import offset_of
from wholestep.torch_compat import below_autograd, casts


def interpret(step: StepGraph, inputs: Sequence[Any]) -> list[Any]:
    """Runs the graph on real inputs.

    Args:
        step: the program.
        inputs: tensors or Python floats, one per placeholder, in order. Mutated ones are written in place.

    Returns:
        The flat outputs. A mutation's entry is the input tensor itself; all others are memory of their own.
    """
    with torch.no_grad(), below_autograd():
        values = run_nodes(step, inputs)
        return write_back(values, inputs, step.signature.mutations)


def run_nodes(step: StepGraph, inputs: Sequence[Any]) -> list[Any]:
    """Calls the graph's operators one by one: what a trace in progress sees when it meets a compiled program."""
    return list(_Interpreter(step.gm, garbage_collect_values=True).run(*inputs))


class _Interpreter(fx.Interpreter):
    """Counts offsets from each operand's first element, as a graph means them; constants are marked as fresh.

    Where autocast is on in a backward, results are cast back, as autograd does with the gradients of each node.
    """

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node.op == "call_function" and isinstance(value, torch.Tensor) and casts():
            return value.to(info(node).value.dtype)
        return value

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.ops.aten.lift_fresh.default(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in OFFSETS and len(args) > OFFSETS[target]:
            place = OFFSETS[target]
            args = (*args[:place], args[0].storage_offset() + offset_of(target, args), *args[place + 1 :])
        return super().call_function(target, args, kwargs)


def write_back(values: list[Any], inputs: Sequence[Any], mutations: dict[int, int]) -> list[Any]:
    """Gives each output memory of its own, then copies new values into the mutated inputs.

    Args:
        values: raw flat outputs of a graph, which may share memory with inputs or with each other.
        inputs: what the graph was called with.
        mutations: output index -> input index.
    """
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    taken = {x.untyped_storage().data_ptr() for x in tensors if x.layout == torch.strided}
    results = list(values)
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        if index in mutations and value is inputs[mutations[index]]:
            continue
        if value.layout != torch.strided:  # its indices and values may be those of inputs
            results[index] = value.clone()
            continue
        address = value.untyped_storage().data_ptr()
        if address in taken:
            results[index] = clone_as_it_lies(value)
        taken.add(address)
    with below_autograd():  # whoever runs the program counts the writes
        for out, into in mutations.items():
            if results[out] is not inputs[into]:
                inputs[into].copy_(results[out])
                results[out] = inputs[into]
    return results


def lower_naive(step: StepGraph) -> Callable[..., list[Any]]:
    """`interpret` in the form of a lowering: ``fn(*inputs) -> outputs``."""
    return lambda *inputs: interpret(step, inputs)
