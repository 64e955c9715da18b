"""Operators of torch's own table: a captured backward, run on other values, gives eager's gradients bit for bit.

The quick form takes each 24th operator and its first sample; the long one (`make test-ops`) all of them.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from wholestep.autograd import CompiledBackward, compiled_backward

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))
KNOWN = [op for op in op_db if torch.float64 in op.supported_dtypes("cpu") and "jiterator" not in op.name]
OPERATORS = KNOWN[:: 1 if LONG else 24]
SAMPLES = 6 if LONG else 1


def gradients(op: Any, sample: Any, context: CompiledBackward | None) -> list[torch.Tensor] | None:
    """Gradients of a sample's tensors; None when there is nothing to differentiate."""
    torch.manual_seed(1)
    given = pytree.tree_map_only(torch.Tensor, _copy, (sample.input, sample.args, sample.kwargs))
    leaves = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad]
    out = sample.output_process_fn_grad(op.op(given[0], *given[1], **given[2]))
    outs = [o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
    if not outs or not leaves:
        return None
    grads = [torch.randn(o.shape, dtype=torch.float64).to(o.dtype) for o in outs]
    if context is None:
        torch.autograd.backward(outs, grads)
    else:
        with context:
            torch.autograd.backward(outs, grads)
    return [t.grad for t in leaves if t.grad is not None]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def samples(op: Any, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    return list(itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), SAMPLES))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: f"{op.name}-{op.variant_test_name}")
def test_gradients_are_eagers(op):
    context = compiled_backward("naive")
    for first, second in zip(samples(op, 1), samples(op, 2), strict=False):
        for sample in (first, second):  # the second runs what the first captured
            expected = _or_none(op, sample)
            if expected is None:
                continue
            found = gradients(op, sample, context)
            for left, right in zip(expected, found, strict=True):
                assert left.layout == right.layout and left.dtype == right.dtype
                strided = left.layout == torch.strided
                torch.testing.assert_close(right, left, rtol=0.0, atol=0.0, equal_nan=True, check_stride=strided)


def _or_none(op: Any, sample: Any) -> list[torch.Tensor] | None:
    try:
        return gradients(op, sample, None)
    except RuntimeError:  # an operator without a backward for this sample
        return None
