"""Joint graphs for the tests of partitions, made by hand, and a partition's two halves run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.api import capture
from wholestep.autograd import Joint, Partitioned
from wholestep.ir import Signature, StepGraph, check
from wholestep.lower import lower

Function = Callable[..., Sequence[Tensor]]


def joint_of(fn: Function, inputs: Sequence[Tensor]) -> tuple[Joint, list[int]]:
    """The joint graph of a function whose differentiable inputs all get gradients, and which input each primal is."""
    state = torch.get_rng_state()
    shapes = [out.shape for out in fn(*(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs))]
    torch.set_rng_state(state)

    def whole(inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
        outs = fn(*inputs)
        results = [out.detach().clone() for out in outs]
        grads = torch.autograd.grad(outs, [t for t in inputs if t.requires_grad], tangents)
        return results, [grad.clone() for grad in grads]

    _, traced = capture(whole, (inputs, [torch.ones(shape) for shape in shapes]), {})
    return _arranged(traced.step, inputs, len(shapes))


def _arranged(step: StepGraph, inputs: Sequence[Tensor], count: int) -> tuple[Joint, list[int]]:
    """Primals before tangents, new values of inputs before gradients."""
    found = [(i.source.startswith("L['tangents']"), int(i.source.split("[")[-1][:-1])) for i in step.signature.inputs]
    order = sorted(range(len(found)), key=found.__getitem__)
    placeholders, outputs = step.placeholders, step.outputs
    body = next(n for n in step.graph.nodes if n.op != "placeholder")
    for index in order:
        body.prepend(placeholders[index])
    primals = [found[i][1] for i in order if not found[i][0]]
    wanted = [i for i, t in enumerate(inputs) if t.requires_grad]
    grads = dict(zip(wanted, outputs[count : count + len(wanted)], strict=True))
    mutated = outputs[count + len(wanted) :]
    (end,) = (n for n in step.graph.nodes if n.op == "output")
    end.args = ((*outputs[:count], *mutated, *(grads.get(i) for i in primals)),)
    moved = {old: new for new, old in enumerate(order)}
    mutations = {out - len(wanted): moved[into] for out, into in step.signature.mutations.items()}
    signature = Signature([step.signature.inputs[i] for i in order], len(end.args[0]), mutations)
    step.gm.recompile()
    joint = Joint(StepGraph(step.gm, signature, "joint"), len(primals), count + len(mutated))
    check(joint.step, "joint")
    return joint, primals


def run_halves(joint: Joint, parts: Partitioned, inputs: Sequence[Tensor], backend: Any) -> tuple[Any, Any]:
    """Forward, then backward on what it saved: results with new values of inputs, and gradients."""
    forward, backward = lower(parts.forward, (), backend), lower(parts.backward, (), backend)
    outs = forward(*inputs)
    known = {node.name: value for node, value in zip(joint.primals, inputs, strict=True)}
    known |= {n.name: v for n, v in zip(joint.forward_outputs, outs, strict=False) if n.op == "call_function"}
    own = iter(outs[joint.n_forward :])
    saved = [known[name] if name in known else next(own) for name in parts.saved]
    return outs[: joint.n_forward], backward(*saved, *(torch.ones_like(outs[i]) for i in parts.tangents))
