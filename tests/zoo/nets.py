"""Small networks for the worlds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Two linear layers with dropout: x [N, 6] and integer y [N] -> mean cross-entropy."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 10)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(10, 4)

    def logits(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(F.gelu(self.fc1(x))))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), y)


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, pooling and a residual: x [N, 3, 8, 8] -> logits [N, 4]."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.bn2 = nn.BatchNorm2d(6, momentum=momentum)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = x + F.relu_(self.bn2(self.conv2(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(nn.Module):
    """LSTM or GRU with dropout between its layers: tokens [N, T] -> logits [N, T, 11]."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.rnn = kind(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class Block(nn.Module):
    """Pre-norm transformer block with causal attention and dropout: [N, T, C] -> [N, T, C]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (
            part.view(n, t, self.heads, c // self.heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(c, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(n, t, c)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A small GPT with tied embeddings: tokens [N, T], targets [N, T] -> (logits, mean loss)."""

    def __init__(self, vocab: int = 19, width: int = 16, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, width), nn.Embedding(16, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
