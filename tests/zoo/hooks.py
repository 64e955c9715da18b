"""Worlds with hooks, custom autograd functions and custom operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.equal import Make, World
from tests.zoo import register
from tests.zoo.models import labelled, train
from tests.zoo.nets import MLP

HOOKS: dict[str, Make] = {}


def _world(model: nn.Module, watch: dict[str, Any] | None = None, **settings: Any) -> World:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [(model, opt, *batch) for batch in labelled()]
    return World(train, batches, {"model": model, "opt": opt} | (watch or {}), **settings)


@register(HOOKS)
def parameter_hooks(seed: int) -> World:
    model = MLP()
    model.fc1.weight.register_hook(lambda grad: grad * 2)
    model.fc1.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    model.fc2.bias.register_hook(lambda grad: None)
    return _world(model)


@register(HOOKS)
def hooks_on_activations(seed: int) -> World:
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.logits(x)
        logits.register_hook(lambda grad: grad * 3)
        logits.retain_grad()
        loss = F.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach(), logits.grad

    return World(step, labelled(), {"model": model, "opt": opt})


@register(HOOKS)
def hooks_keep_statistics(seed: int) -> World:
    """A hook writes into a buffer: a side effect on tensors, replayed at every call."""
    model = MLP()
    model.register_buffer("norms", torch.zeros(2))

    def remember(grad: Tensor) -> None:
        model.norms[0] += grad.norm()

    def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        model.norms[1].copy_(output.detach().abs().max())

    model.fc1.weight.register_hook(remember)
    model.fc2.register_forward_hook(watch)
    return _world(model)


@register(HOOKS)
def post_accumulate_hooks(seed: int) -> World:
    """The optimizer inside backward: each parameter steps as soon as its gradient is there."""
    model = MLP()
    opts = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step_one(p: Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_one)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        return loss

    return World(step, labelled(), {"model": model, "opts": list(opts.values())})


@register(HOOKS)
def module_hooks(seed: int) -> World:
    model = MLP()
    model.fc1.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.fc1.register_forward_hook(lambda module, args, output: output * 0.5)
    model.fc2.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    model.fc1.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] + 0.1,))
    return _world(model)


@register(HOOKS)
def optimizer_hooks(seed: int) -> World:
    model = MLP()
    world = _world(model)
    opt = world.watch["opt"]

    def decay(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.add_(p.detach(), alpha=0.01)

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            model.fc1.weight.clamp_(-0.2, 0.2)

    opt.register_step_pre_hook(decay)
    opt.register_step_post_hook(clip)
    return world


class Scaled(torch.autograd.Function):
    """y = 2x, with a gradient that is three times x's sign times the true one; saves tensors and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = factor  # which hides the node's own `name()`
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x.sign() * ctx.name, None


class Split(torch.autograd.Function):
    """Two outputs, the second without gradient; written in the setup_context style."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


class AddOne(torch.autograd.Function):
    """In-place forward (mark_dirty)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 0.5


@register(HOOKS)
def custom_functions(seed: int) -> World:
    model = MLP()
    opt = torch.optim.Adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = Scaled.apply(model.fc1(x), 0.5)
        grown, positive = Split.apply(AddOne.apply(hidden * 1))
        loss = F.cross_entropy(model.fc2(torch.where(positive, grown, hidden)), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, positive

    return World(step, labelled(), {"model": model, "opt": opt})


@torch.library.custom_op("zoo::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """x ** 3 on detached memory, opaque to any tracer."""
    return torch.from_numpy(x.numpy() ** 3)


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _cube_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 3 * ctx.saved_tensors[0] ** 2


cube.register_autograd(_cube_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("zoo::tally", mutates_args={"table"})
def tally(table: Tensor, x: Tensor) -> Tensor:
    """table += the column sums of x; returns the sum of x. Opaque to any tracer."""
    table.add_(torch.from_numpy(x.detach().numpy().sum(0)))
    return x.detach().sum()


@tally.register_fake
def _(table: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(())


@register(HOOKS)
def custom_operators(seed: int) -> World:
    model = MLP()
    model.register_buffer("table", torch.zeros(2, 6))
    opt = torch.optim.Adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = tally(model.table[1], x)
        loss = F.cross_entropy(model.fc2(cube(model.fc1(x))), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, total

    return World(step, labelled(), {"model": model, "opt": opt}, versions=False)


@register(HOOKS)
def saved_tensor_hooks(seed: int) -> World:
    """Activations kept in half precision by saved-tensor hooks."""
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def pack(t: Tensor) -> Any:
        return t.bfloat16() if t.is_floating_point() else t

    def unpack(t: Tensor) -> Tensor:
        return t.float() if t.dtype is torch.bfloat16 else t

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, labelled(), {"model": model, "opt": opt})


@register(HOOKS)
def hook_removed_outside(seed: int) -> World:
    """A hook removed between calls: a recompile, and the right gradients afterwards."""
    model = MLP()
    handle = model.fc1.weight.register_hook(lambda grad: grad * 10)

    def after(i: int, result: Any) -> None:
        if i == 1:
            handle.remove()

    return _world(model, after=after)
