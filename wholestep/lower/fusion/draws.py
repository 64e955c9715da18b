"""Dropout's masks: large Bernoulli draws, with torch's bits in a fraction of its time.

torch's CPU kernel asks its generator for two words an element, one call each. Here the generator's state is taken out,
moved on by whole vectors, and put back; `F.dropout` on a GPT's activations is 8 % of a step otherwise.
"""

from __future__ import annotations

import functools

import torch

from wholestep.lower.fusion import _draws as native
from wholestep.torch_compat import no_modes

aten = torch.ops.aten
LEAST = 1 << 11  # elements: below, the state's way out and back costs more than is won


def bernoulli_(self: torch.Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> torch.Tensor:
    """`Tensor.bernoulli_` with one probability: 1 or 0 in each element, and the generator moved on as torch does."""
    plain = self.dtype is torch.float32 and self.device.type == "cpu" and self.is_contiguous()
    if plain and self.numel() >= LEAST and 0 <= p <= 1 and _has_torchs_bits():
        return _drawn(self, p, torch.default_generator if generator is None else generator)
    return aten.bernoulli_.float(self, p, generator=generator)  # type: ignore[no-any-return]


def _drawn(out: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    state = generator.get_state()
    native.bernoulli(out.data_ptr(), out.numel(), p, state.data_ptr())
    generator.set_state(state)
    return out


@functools.cache
def _has_torchs_bits() -> bool:
    """Tries it against torch, for several probabilities and from several places of the generator's state."""
    with no_modes():
        ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
        for count, p in ((1, 0.5), (623, 0.1), (4096, 0.9), (3, 0.0), (5001, 1.0), (2500, 0.37)):
            expected = torch.empty(count, dtype=torch.float32).bernoulli_(p, generator=theirs)
            same = torch.equal(_drawn(torch.empty_like(expected), p, ours), expected)
            if not same or not torch.equal(ours.get_state(), theirs.get_state()):
                return False
    return True
