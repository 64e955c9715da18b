"""The attention kernels that the GPU has, on the CPU by plain formulas, so that their sharding rules run in numbers.

Results are shaped as the GPU's: of sums, rows to a multiple of 32 (efficient) or a last dimension of 1 (cuDNN); seeds,
lengths and what is empty besides. No dropout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")  # removed with this module


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    found = q @ _as_heads_of(q, k).mT / math.sqrt(q.shape[-1])
    found = found if bias is None else found + bias
    return found.masked_fill(torch.ones(found.shape[-2:]).tril().logical_not(), -math.inf) if causal else found


def _as_heads_of(q: Tensor, k: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, causal)
    return scores.softmax(-1) @ _as_heads_of(q, v), scores.logsumexp(-1)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, bias, causal) - sums.unsqueeze(-1)).exp()
    scores = weights * (grad @ _as_heads_of(q, v).mT - (grad * out).sum(-1, keepdim=True))
    scale = 1 / math.sqrt(q.shape[-1])
    few = (k.shape[0], k.shape[1], -1, *k.shape[2:])
    to_k, to_v = scores.mT @ q * scale, weights.mT @ grad
    return scores @ _as_heads_of(q, k) * scale, to_k.view(few).sum(2), to_v.view(few).sum(2), scores


def _seeds(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    return torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False) -> Any:
    seed, offset = _seeds(torch.uint64)
    ends = q.shape[2], k.shape[2], seed.expand(2).clone(), offset, q.new_empty(0)
    return *_forward(q, k, v, None, causal), None, None, *ends


def _to_flash(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, of_q: Any, of_k: Any, max_q: int,
    max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor,
) -> Any:  # fmt: skip
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    return _backward(grad, q, k, v, None, out, sums, causal)[:3]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0, causal: bool = False
) -> Any:
    out, found = _forward(q, k, v, bias, causal)
    return out, torch.nn.functional.pad(found, (0, -found.shape[2] % 32)), *_seeds()


def _to_efficient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False,
) -> Any:  # fmt: skip
    *found, scores = _backward(grad, q, k, v, bias, out, sums[..., : q.shape[2]], causal)
    return *found, scores.sum_to_size(bias.shape) if bias is not None and wanted[3] else None


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0, causal: bool = False,
    debug: bool = False,
) -> Any:  # fmt: skip
    out, found = _forward(q, k, v, bias, causal)
    return out, found.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *_seeds(), None


def _to_cudnn(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, of_q: Any, of_k: Any, max_q: int, max_k: int, dropout: float, causal: bool,
) -> Any:  # fmt: skip
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    return _backward(grad, q, k, v, bias, out, sums.squeeze(-1), causal)[:3]


for _kind, _kernel, _gradient in (("flash", _flash, _to_flash), ("efficient", _efficient, _to_efficient),
                                  ("cudnn", _cudnn, _to_cudnn)):  # fmt: skip
    _library.impl(f"_scaled_dot_product_{_kind}_attention", _kernel, "CPU")
    _library.impl(f"_scaled_dot_product_{_kind}_attention_backward", _gradient, "CPU")
