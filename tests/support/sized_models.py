"""Models, batches of given sizes, and training with them: for steps whose sizes vary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import wholestep as ws
from examples.gpt import GPT, GPTConfig


def mlp(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 8))


def convnet() -> nn.Module:
    pooled = [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *pooled, nn.Linear(8, 8))


def gpt() -> nn.Module:
    return GPT(GPTConfig(layers=1, heads=2, width=16, context=32, dropout=0.1))


def rows(batch: int, _: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 8), torch.randn(batch, 8)


def pictures(batch: int, _: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 8, 8), torch.randn(batch, 8)


def tokens(batch: int, time: int) -> tuple[Tensor, Tensor]:
    return torch.randint(256, (batch, time)), torch.randint(256, (batch, time))


def own_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y)  # type: ignore[no-any-return]


def train(model: nn.Module, batches: Sequence[Any], loss_of: Callable[..., Tensor], how: dict[str, Any] | None) -> Any:
    """Trains, as eager does or compiled; gives the step, and what it has left."""
    torch.manual_seed(0)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    step: Any = train_step if how is None else ws.compile(train_step, fullgraph=True, **how)
    losses = [step(*batch).detach() for batch in batches]
    return step, [*losses, *model.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
