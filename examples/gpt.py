"""A small byte-level GPT: pre-norm blocks, causal attention, dropout, the embedding shared with the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults make 3.3 million parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 256
    context: int = 128
    vocabulary: int = 256
    dropout: float = 0.1


class Block(nn.Module):
    """Attention over earlier positions, then two linear layers, each added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.merge = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention: [batch, time, width] to the same."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.merge(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    """Gives the mean cross-entropy of the next byte, in nats.

    Shapes: x and y int64 [batch, time] with time <= context; the loss is a scalar.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.dropout(self.token(x) + self.position(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())
