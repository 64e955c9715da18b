"""The training jobs that are measured: a model that gives its loss, and one rank's batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from examples.gpt import GPT, GPTConfig

Batch = dict[str, Tensor]


class Regression(nn.Module):
    """A stack of layers with the mean squared distance from a target."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class MaskedLanguage(nn.Module):
    """BERT as `transformers` builds it, giving its loss alone."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = BertForMaskedLM(config)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bert(input_ids=x, labels=y).loss


def _numbers(rows: int, wide_in: int, wide_out: int) -> Batch:
    return {"x": torch.randn(rows, wide_in), "y": torch.randn(rows, wide_out)}


def _tokens(rows: int, time: int, vocabulary: int) -> Batch:
    return {"x": torch.randint(vocabulary, (rows, time)), "y": torch.randint(vocabulary, (rows, time))}


def toy() -> tuple[nn.Module, Batch]:
    """Three wide layers and 50 million parameters on 20 rows: memory traffic is all of the cost."""
    sizes = [10, 5000, 5000, 5000, 5]
    layers: list[nn.Module] = []
    for wide_in, wide_out in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(wide_in, wide_out), nn.ReLU()]
    return Regression(*layers[:-1]), _numbers(20, 10, 5)


def mlp() -> tuple[nn.Module, Batch]:
    """Twenty narrow layers: overhead between kernels is all of the cost."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return Regression(*layers), _numbers(32, 64, 64)


def deep() -> tuple[nn.Module, Batch]:
    """Three hundred small layers, with 600 parameters: what is done for each of them is most of the cost."""
    layers = [layer for _ in range(300) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return Regression(*layers), _numbers(16, 32, 32)


def gpt() -> tuple[nn.Module, Batch]:
    """The demo's GPT on the demo's batch: arithmetic is most of the cost."""
    config = GPTConfig()
    return GPT(config), _tokens(8, config.context, config.vocabulary)


def bert_small() -> tuple[nn.Module, Batch]:
    """BERT with 4 layers of width 128."""
    config = BertConfig(num_hidden_layers=4, hidden_size=128, num_attention_heads=4, intermediate_size=512)
    return MaskedLanguage(config), _tokens(4, 64, config.vocab_size)


def bert_base() -> tuple[nn.Module, Batch]:
    """BERT-base: 12 layers, 110 million parameters."""
    return MaskedLanguage(BertConfig()), _tokens(2, 64, 30522)


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "toy": toy,
    "mlp": mlp,
    "deep": deep,
    "gpt": gpt,
    "bert-small": bert_small,
    "bert-base": bert_base,
}


def train_step(model: nn.Module, opt: torch.optim.Optimizer, batch: Batch) -> Any:
    """The step that every variant runs."""
    loss = model(batch["x"], batch["y"])
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()
