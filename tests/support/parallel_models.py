"""Models that wrappers are compared on, each with a function that gives a rank's batch of an iteration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Batch = Callable[[int, int], torch.Tensor]  # of a rank and an iteration


def rows(rank: int, iteration: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * iteration + rank))


class Net(nn.Module):
    """Layers whose gradients fill several buckets, and buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False)
        self.last = nn.Linear(16, 4)
        nn.init.uniform_(self.norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.norm(self.first(x)).relu()).tanh())


class Tied(nn.Module):
    """One weight in two places, of other strides than its shape's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner.weight = self.outer.weight = nn.Parameter(torch.randn(8, 8).t() / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).tanh())


class Sparse(nn.Module):
    """Rows of tables, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(10, 8, sparse=True), nn.EmbeddingBag(10, 8, mode="sum", sparse=True)
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows_read = (x * 3).long().abs() % 8
        found = self.table(rows_read).sum(1) + self.bag(rows_read)
        return self.last(found)


class RowsRead(nn.Module):
    """A layer that is no Embedding, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.rows, sparse=True)


class SharedGradients(nn.Module):
    """Gradients that have one memory: with each other, and with one that the backward reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.one, self.other = (
            nn.Linear(8, 8),
            nn.Parameter(torch.ones(1, 6, 8)),
            nn.Parameter(torch.ones(48)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.early(x)
        early.register_hook(lambda grad: time.sleep(0.01))  # time to reduce what must not be
        return early + self.one.squeeze(0) + self.other.view(6, 8)


class MixedDtypes(nn.Module):
    """Layers of float32, float64 and bfloat16, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(8, 8, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        )
        self.layers[3].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


@dataclass
class Record:
    main: torch.Tensor | None
    others: dict[str, torch.Tensor]


class Halves(nn.Module):
    """Two outputs, each of parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.first(x), self.second(x)]


class Branches(nn.Module):
    """By iteration and by rank, another layer has no part in the outputs; one layer never has.

    With ``record``, the outputs are in a dataclass, else in a dictionary.
    """

    def __init__(self, record: bool = False) -> None:
        super().__init__()
        self.layers, self.never = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 8)
        self.record = record

    def forward(self, x: torch.Tensor, choice: int = 0) -> Any:
        left_out = choice % 4
        main = None if left_out == 0 else self.layers[0](x)
        kept = [layer for place, layer in enumerate(self.layers) if place != left_out]
        output = Record(main, {"a": kept[1](kept[0](x)), "b": kept[2](x)})
        return output if self.record else {"main": main, "others": output.others}


class Checkpointed(nn.Module):
    """One layer under a checkpoint, ``times`` times; with ``shared``, its weight is the first layer's, too."""

    def __init__(self, reentrant: bool = False, times: int = 1, shared: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.reentrant, self.times = nn.Linear(8, 8), nn.Linear(8, 8), reentrant, times
        if shared:
            self.first.weight = self.second.weight
        if unused:
            self.never = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return x


def loss_of(output: Any) -> torch.Tensor:
    """Of one output, or of some tensors of a record."""
    if isinstance(output, (Record, dict)):
        fields = output if isinstance(output, dict) else vars(output)
        main = 0 if fields["main"] is None else fields["main"].square().mean()
        return main + fields["others"]["b"].square().mean()  # "a" is an output that the loss does not use
    if isinstance(output, list):
        return torch.stack([loss_of(one) for one in output]).sum()
    return output.float().square().mean()
