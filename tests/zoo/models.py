"""Worlds that differ in the model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.equal import Make, World
from tests.zoo import register
from tests.zoo.nets import GPT, MLP, ConvNet, Recurrent

MODELS: dict[str, Make] = {}


def labelled(batches: int = 3, n: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Batches of (x [n, 6], y [n] < 4)."""
    return [(torch.randn(n, 6), torch.randint(4, (n,))) for _ in range(batches)]


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The plain step for models that return their loss."""
    loss = model(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def training(forward: Callable[[MLP, Tensor, Tensor], Tensor]) -> Make:
    """A world whose step trains an MLP with dropout and Adam: one update, then one on ``forward(model, x, y)``.

    By the time ``forward`` goes wrong, the step has changed all that it can change.
    """

    def make(seed: int) -> World:
        model = MLP(dropout=0.2)
        opt = torch.optim.Adam(model.parameters())
        model.fc1.weight.register_hook(lambda grad: grad * 2)
        x, y = labelled(1)[0]
        (model(x, y) * 2).backward()
        opt.step()

        def step(x: Tensor, y: Tensor) -> Tensor:
            opt.zero_grad()
            (model(x, y) * 0.5).backward()
            model.fc2.bias.grad.mul_(2)
            opt.step()
            opt.zero_grad()
            loss = forward(model, x, y)
            loss.backward()
            opt.step()
            return loss

        return World(step, [(x, y)], {"model": model, "opt": opt})

    return make


@register(MODELS)
def mlp(seed: int) -> World:
    model = MLP(dropout=0.3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return World(train, [(model, opt, *batch) for batch in labelled()], {"model": model, "opt": opt})


@register(MODELS)
def mlp_adamw(seed: int) -> World:
    model = MLP()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    return World(train, [(model, opt, *batch) for batch in labelled()], {"model": model, "opt": opt})


@register(MODELS)
def convnet(seed: int) -> World:
    model = ConvNet()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach(), logits

    batches = [(torch.randn(4, 3, 8, 8), torch.randint(4, (4,))) for _ in range(3)]
    return World(step, batches, {"model": model, "opt": opt})


@register(MODELS)
def convnet_channels_last(seed: int) -> World:
    model = ConvNet().to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        return loss, logits

    batches = [(torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last), torch.randint(4, (4,)))]
    return World(step, batches, {"model": model, "opt": opt})


@register(MODELS)
def batchnorm_mixed_modes(seed: int) -> World:
    """One BatchNorm in eval mode inside a training model, as in fine-tuning."""
    model = ConvNet()
    model.bn1.eval()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randn(4, 3, 8, 8), torch.randint(4, (4,)))], {"model": model, "opt": opt})


@register(MODELS)
def batchnorm_cumulative_average(seed: int) -> World:
    """momentum=None: the averaging factor is 1 / float(counter), a host number read from a buffer."""
    model = ConvNet(momentum=None)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randn(4, 3, 8, 8), torch.randint(4, (4,)))], {"model": model, "opt": opt})


def _recurrent(kind: type[nn.RNNBase]) -> World:
    model = Recurrent(kind)
    opt = torch.optim.RMSprop(model.parameters(), lr=0.01)

    def step(tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randint(11, (3, 6)),) for _ in range(3)], {"model": model, "opt": opt})


@register(MODELS)
def lstm(seed: int) -> World:
    return _recurrent(nn.LSTM)


@register(MODELS)
def gru(seed: int) -> World:
    return _recurrent(nn.GRU)


@register(MODELS)
def gpt(seed: int) -> World:
    model = GPT()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(batch: dict[str, Tensor]) -> Tensor:
        _, loss = model(batch["x"], batch["y"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss

    text = [torch.randint(19, (2, 9)) for _ in range(3)]
    return World(step, [({"x": t[:, :-1], "y": t[:, 1:]},) for t in text], {"model": model, "opt": opt})


@register(MODELS)
def tied_weights(seed: int) -> World:
    model = nn.Sequential(nn.Embedding(7, 5), nn.Tanh(), nn.Linear(5, 7))
    model[2].weight = model[0].weight
    opt = torch.optim.Adam(model.parameters())

    def step(tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        opt.step()
        return loss

    return World(step, [(torch.randint(7, (6,)),)], {"model": model, "opt": opt})


@register(MODELS)
def frozen_parameters(seed: int) -> World:
    model = MLP()
    for p in model.fc1.parameters():
        p.requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters())
    return World(train, [(model, opt, *batch) for batch in labelled()], {"model": model, "opt": opt})


@register(MODELS)
def unused_parameter(seed: int) -> World:
    model = MLP()
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    opt = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    return World(train, [(model, opt, *batch) for batch in labelled()], {"model": model, "opt": opt})


@register(MODELS)
def ema_copy(seed: int) -> World:
    model = MLP()
    ema = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, opt, x, y)
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return loss

    return World(step, labelled(), {"model": model, "ema": ema, "opt": opt})


@register(MODELS)
def averaged_model(seed: int) -> World:
    """torch.optim.swa_utils: its counter is a tensor that decides in Python, so it steps outside."""
    model = MLP()
    swa = torch.optim.swa_utils.AveragedModel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def after(i: int, result: Tensor) -> None:
        swa.update_parameters(model)

    return World(train, [(model, opt, *b) for b in labelled()], {"model": model, "swa": swa, "opt": opt}, after)


@register(MODELS)
def averaged_model_ema_inside(seed: int) -> World:
    model = MLP()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    ema.n_averaged += 1
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, opt, x, y)
        with torch.no_grad():
            pairs = [list(m.parameters()) for m in (ema.module, model)]
            torch._foreach_lerp_(pairs[0], pairs[1], 0.1)
            ema.n_averaged.add_(1)
        return loss

    return World(step, labelled(), {"model": model, "ema": ema, "opt": opt})


@register(MODELS)
def gan(seed: int) -> World:
    generator = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.BatchNorm1d(8), nn.Linear(8, 4))
    judge = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(8, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.99))

    def step(real: Tensor) -> dict[str, Tensor]:
        fake = generator(torch.randn(real.shape[0], 3))
        opt_d.zero_grad()
        real_score, fake_score = judge(real), judge(fake.detach())
        loss_d = F.binary_cross_entropy_with_logits(real_score, torch.ones_like(real_score))
        loss_d = loss_d + F.binary_cross_entropy_with_logits(fake_score, torch.zeros_like(fake_score))
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        score = judge(fake)
        loss_g = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
        loss_g.backward()
        opt_g.step()
        return {"g": loss_g, "d": loss_d.detach(), "sample": fake}

    watch = {"g": generator, "d": judge, "opt_g": opt_g, "opt_d": opt_d}
    return World(step, [(torch.randn(5, 4),) for _ in range(2)], watch)


@register(MODELS)
def embedding_bag_and_norms(seed: int) -> World:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 8, mode="mean")
            self.group, self.rms = nn.GroupNorm(2, 8), nn.RMSNorm(8)
            self.spectral = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.spectral(self.rms(self.group(self.bag(tokens))))

    model = Mixed()
    opt = torch.optim.NAdam(model.parameters(), lr=0.01)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randint(9, (4, 3)),) for _ in range(2)], {"model": model, "opt": opt})


@register(MODELS)
def encoder_layer(seed: int) -> World:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), 2)
    opt = torch.optim.AdamW(model.parameters())
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True

    def step(x: Tensor) -> Tensor:
        loss = (model(x, src_key_padding_mask=mask) - x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randn(3, 5, 8),)], {"model": model, "opt": opt, "mask": mask})


@register(MODELS)
def double_precision(seed: int) -> World:
    model = MLP().double()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.01)
    return World(train, [(model, opt, x.double(), y) for x, y in labelled()], {"model": model, "opt": opt})


@register(MODELS)
def transformer(seed: int) -> World:
    """`nn.Transformer` compares its mask with a causal one, in Python: the mask is made in the step."""
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
    opt = torch.optim.Adam(model.parameters(), foreach=True)

    def step(source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        loss = (model(source, target, tgt_mask=mask) - target).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    batches = [(torch.randn(2, 5, 8), torch.randn(2, 4, 8)) for _ in range(3)]
    return World(step, batches, {"model": model, "opt": opt})


@register(MODELS)
def transformer_encoder_with_masks(seed: int) -> World:
    """The mask is an argument: what Python decides on it is a guard, and another kind of mask another program."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, mask: Tensor) -> Tensor:
        loss = model(x, mask=mask).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    causal = nn.Transformer.generate_square_subsequent_mask(4)
    masks = (causal, torch.zeros(4, 4), causal.clone(), torch.zeros(4, 4))
    return World(step, [(torch.randn(2, 4, 8), mask) for mask in masks], {"model": model, "opt": opt})


@register(MODELS)
def empty_parameters(seed: int) -> World:
    """Layers of no width, as heads that a configuration switches off: their parameters have no elements."""
    model = nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, labelled(), {"model": model, "opt": opt})
