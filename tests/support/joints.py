"""The joint graph of a function, and the two halves of a partition run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.autograd import Joint, Partitioned
from wholestep.capture_call import capture
from wholestep.ir import info
from wholestep.lower import lower

Function = Callable[..., Sequence[Tensor]]


def joint_of(fn: Function, inputs: Sequence[Tensor]) -> tuple[Joint, list[int]]:
    """The joint graph of a function, and which of its inputs each primal is."""
    _, traced = capture(fn, tuple(inputs), {})
    derivative = traced.derivative
    assert derivative is not None
    names = [f"L['{name}']" for name in fn.__code__.co_varnames]
    primals = [names.index(given.source) for given in traced.step.signature.inputs[: traced.n_inputs]]
    rewritten = tuple(i for i, _, _ in derivative.rewritten)
    return Joint(traced.step, traced.n_inputs, derivative.n_forward, rewritten), primals


def run_halves(joint: Joint, parts: Partitioned, inputs: Sequence[Tensor], backend: Any) -> tuple[Any, Any]:
    """Forward, then backward on what it saved: results with new values of inputs, and gradients."""
    forward, backward = lower(parts.forward, backend), lower(parts.backward, backend)
    found = {"input": inputs, "output": forward(*inputs)}
    saved = [found[place][index] for place, index in parts.places]
    tangents = [torch.ones(info(joint.tangents[i]).value.shape) for i in parts.tangents]
    return found["output"][: joint.n_forward], backward(*saved, *tangents)
