"""One form for equal programs: inputs in the order of first use, and a fingerprint of what is computed.

Two captures of a step (before and after its first call, say) often differ in what Python looked like and
agree in what is computed. Equal fingerprints mean that one lowered program serves both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from wholestep.ir import StepGraph


def order_inputs(graph: fx.Graph, needed: list[fx.Node], last: Sequence[fx.Node] = ()) -> list[fx.Node]:
    """Placeholders in the order of their first use, then those of `needed` that nothing uses, then `last`.

    Moves them into that order in the graph and erases all others.
    """
    used = [n for node in graph.nodes for n in node.all_input_nodes if n.op == "placeholder"]
    ordered = [n for n in dict.fromkeys([*used, *needed]) if n not in last] + [*last]
    kept = set(ordered)
    body = next(n for n in graph.nodes if n.op != "placeholder")
    for node in ordered:
        body.prepend(node)
    for node in list(graph.nodes):
        if node.op == "placeholder" and node not in kept:
            graph.erase_node(node)
    return ordered


def fingerprint(step: StepGraph, constants: dict[str, torch.Tensor], derivative: object = None) -> str:
    """A hash of everything that a lowered program depends on."""
    numbers: dict[fx.Node, int] = {}
    digest = hashlib.sha256()
    for node in step.graph.nodes:
        numbers[node] = len(numbers)
        what = node.op if node.op in ("placeholder", "output") else str(node.target)
        if node.op == "get_attr":
            real = constants[str(node.target)]
            digest.update(real.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            what = f"constant {real.dtype} {list(real.shape)} {real.device}"
        text = f"{what} {words(node.args, numbers)} {words(node.kwargs, numbers)}"
        value = node.meta["info"].value if node.op == "placeholder" else None
        text += words(value, numbers) if isinstance(value, torch.Tensor) else ""
        digest.update(text.encode())
    signature = step.signature
    kinds = [i.kind for i in signature.inputs]
    digest.update(str(torch.get_default_dtype()).encode())  # that of calls that name none
    digest.update(f"{kinds} {sorted(signature.mutations.items())} {signature.n_outputs} {derivative}".encode())
    return digest.hexdigest()


def words(value: Any, numbers: Mapping[fx.Node, int] = MappingProxyType({})) -> str:
    """Arguments or results in words: nodes by their numbers, tensors by their layouts."""
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, torch.Tensor):
        return f"<{value.dtype} {list(value.shape)} {list(value.stride())} {value.device}>"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(words(v, numbers) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {words(v, numbers)}" for k, v in value.items()) + "}"
    return repr(value)
