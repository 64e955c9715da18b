"""Models whose steps are expanded: small ones, without dropout, for which ranks that are threads have one generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import hf, nets

Batch = dict[str, Any]


class Loss(nn.Module):
    """A model and what its loss is."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model, x, y)


def _smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


def _of_tokens(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=3)


def tokens() -> Batch:
    return {"x": torch.randint(11, (2, 6)), "y": torch.randint(11, (2, 6))}


def images() -> Batch:
    return {"x": torch.randn(2, 3, 8, 8), "y": torch.randint(4, (2,))}


Maker = tuple[Callable[[], nn.Module], Callable[[], Batch]]
OURS: dict[str, Maker] = {
    "mlp": (nets.MLP, lambda: {"x": torch.randn(2, 6), "y": torch.randint(4, (2,))}),
    "gpt": (lambda: Loss(nets.GPT(dropout=0), lambda model, x, y: model(x, y)[1]), tokens),
    "convnet": (lambda: Loss(nets.ConvNet(momentum=None), _smoothed), images),
    "lstm": (lambda: Loss(nets.Recurrent(nn.LSTM), _of_tokens), tokens),
    "gru": (lambda: Loss(nets.Recurrent(nn.GRU), _of_tokens), tokens),
}
FIRST: dict[str, Maker] = {**OURS, **hf.FIRST}
HELD_OUT: dict[str, Maker] = hf.HELD_OUT


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """A whole step: forward, backward, clipping, optimizer."""
    out = model(**batch)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make(name: str, samples: int = 6) -> tuple[Any, ...]:
    """A model in float64 without dropout, its optimizer and a batch; labels that do not count lie unevenly in it."""
    torch.manual_seed(0)
    build, data = {**FIRST, **HELD_OUT}[name]
    model = _calm(build().double().train())
    if getattr(getattr(model, "config", None), "_experts_implementation", "") == "grouped_mm":  # has no float64
        model.set_experts_implementation("batched_mm")
    parts = [data() for _ in range(samples // 2)]
    batch = {key: torch.cat([p[key] for p in parts]) if isinstance(v, Tensor) else v for key, v in parts[0].items()}
    batch = {key: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for key, v in batch.items()}
    if "labels" in batch and batch["labels"].dim() > 1:
        batch["labels"][0, :3] = -100
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch


def _calm(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            for key, value in list(vars(owner).items()) if owner is not None else []:
                if "drop" in key and isinstance(value, float):
                    setattr(owner, key, 0.0)
    return model
