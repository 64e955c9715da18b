"""Attention kernels: by batch, by heads and by queries, each of which attends on its own."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import Dims, Names, Rule, Strategy, linear, nonempty, trailing


def _names(call: Call) -> dict[str, Names]:
    """Names for the dimensions of each argument: batch b, heads h, queries t; keys and sizes are not split."""
    values = call.by_name(call.values)
    query = values["query"]
    batch, heads, length = query.shape[:3]
    t = None if call.argument("is_causal") else "t"  # which keys a query sees is a matter of its place
    ours, theirs = ["b", "h", t, None], ["b", "h", None, None]
    found: dict[str, Names] = {"query": ours, "out": ours, "grad_out": ours, "key": theirs, "value": theirs,
                               "logsumexp": ["b", "h", t]}  # fmt: skip
    if "attn_mask" in values:
        mask, keys = values["attn_mask"], values["key"].shape[2]
        found["attn_mask"] = trailing(mask, ours, [batch, heads, length, keys])
    return found


def _attention(call: Call) -> Iterator[Strategy]:
    """Forward and backward. Heads of keys may be fewer: each serves some heads of queries, and goes with them."""
    names, values = _names(call), call.by_name(call.values)
    results = ["query", "key", "value"] if "grad_out" in values else ["query", "logsumexp"]
    dims = Dims([names[name] for name in values], [names[name] for name in results], {"t": "sum"})
    yield from dims.strategies(call)
    few, by_heads = values["key"].shape[1], dims.strategy("h")
    if few != values["query"].shape[1] and few % call.group.size == 0 and by_heads is not None:
        yield by_heads


_KERNELS = ["_scaled_dot_product_flash_attention_for_cpu"]

RULES: dict[str, Rule] = {
    **{f"aten.{kernel}": nonempty(_attention) for kernel in _KERNELS},
    **{f"aten.{kernel}_backward": linear(nonempty(_attention)) for kernel in _KERNELS},
}
