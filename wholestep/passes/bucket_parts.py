"""Parts of a graph that each have the parameters of one bucket, for backends that compile one after the other.

Li et al., "PyTorch Distributed" (2020), fill buckets of gradients in the order in which a backward gives them; torch's
DDPOptimizer cuts a forward where these end. Here a forward, its backward and the update are cut alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from wholestep.ir import StepGraph, info, nbytes, set_info
from wholestep.passes.canonicalize import copy_step

Limits = Mapping[fx.Node, tuple[int, int]]


def bucket_parts(step: StepGraph) -> StepGraph:
    """Numbers the calls of a graph by parts (`NodeInfo.part`), each with parameters that fill a bucket.

    Buckets are filled from the forward's end. A backward has a part for each of its forward's, in opposite order; what
    follows it belongs to the last. A graph whose parameters fill no bucket has one part.
    """
    step = copy_step(step)
    limits = {n: i.bucket for n, i in zip(step.placeholders, step.signature.inputs, strict=True) if i.bucket}
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    part, last, of_seq = 0, 0, dict[int | None, int]()
    for phase, stretch in itertools.groupby(calls, lambda node: info(node).phase):
        nodes = list(stretch)
        numbers = [part] * len(nodes)
        if phase == "forward":
            numbers = [part + number for number in _filled(nodes, limits)]
            of_seq = {info(node).seq: number for node, number in zip(nodes, numbers, strict=True)}
            last = numbers[-1]
            turn = 2 * last + (last > part)  # a backward's part, and that of its forward
        elif phase == "backward" and of_seq:
            numbers = [turn - of_seq.get(info(node).seq, last) for node in nodes]
        for node, number in zip(nodes, numbers, strict=True):
            part = max(part, number)
            set_info(node, replace(info(node), part=part))
    return step


def _filled(nodes: Sequence[fx.Node], limits: Limits) -> list[int]:
    """The bucket of each node of a forward, the last one filled first, counted from the first node's."""
    seen, number, size, limit = set[fx.Node](), 0, 0, 1
    numbers: list[int] = []  # counted from the end
    made: set[fx.Node] = set()  # of parameters alone, as casts and transposes are: they go with who reads them
    for node in nodes:
        if node.all_input_nodes and all(operand in limits or operand in made for operand in node.all_input_nodes):
            made.add(node)
    first = next((n for n in nodes if any(o in limits for o in n.all_input_nodes)), None)
    for node in reversed(nodes):
        if size >= limit and node not in made and first is not None and node >= first:  # else without parameters
            number, size = number + 1, 0
        for parameter in node.all_input_nodes:
            if parameter in limits and parameter not in seen:  # a tied one counts where its gradient is complete last
                seen.add(parameter)
                size, limit = size + nbytes(info(parameter).value), limits[parameter][min(number, 1)]
        numbers.append(number)
    return [number - one for one in reversed(numbers)]
