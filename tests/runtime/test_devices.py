"""A step compiled for any device is the eager one, bit for bit; a GPU's tests are skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from tests.zoo.nets import GPT, MLP, ConvNet

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "convnet": ConvNet, "gpt": lambda: GPT(dropout=0.0)}
SHAPES = {"mlp": (5, 6), "convnet": (4, 3, 8, 8), "gpt": (2, 6)}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "fused adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}


def batch(name: str, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets: tokens and tokens for the GPT, else numbers and classes."""
    shape = SHAPES[name]
    if name == "gpt":
        return torch.randint(11, shape, device=device), torch.randint(11, shape, device=device)
    return torch.randn(shape, device=device), torch.randint(4, shape[:1], device=device)


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    out = model(x) if isinstance(model, ConvNet) else model(x, y)
    loss = F.cross_entropy(out, y) if isinstance(model, ConvNet) else out[1] if isinstance(model, GPT) else out
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def trained(name: str, optimizer: str, device: str, run: Callable[..., Tensor]) -> list[Tensor]:
    """Losses of 4 steps, then the parameters and the optimizer's state."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    opt = OPTIMIZERS[optimizer](model)
    losses = [run(model, opt, *batch(name, device)) for _ in range(4)]
    state = [v for s in opt.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*losses, *(p.detach() for p in model.parameters()), *state]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, optimizer: str, device: str) -> None:
    eager, compiled = (trained(name, optimizer, device, run) for run in (step, ws.compile(step, fullgraph=True)))
    assert len(eager) == len(compiled) > 4
    for one, two in zip(eager, compiled, strict=True):
        assert two.device.type == one.device.type
        assert torch.equal(one, two)
