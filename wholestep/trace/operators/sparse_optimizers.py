"""Optimizers on sparse gradients, whose number of values is in the data: one operator for each parameter's update.

torch.optim coalesces such gradients in Python, so that the shapes of what follows depend on data. While a step is
traced its functions are patched with these operators, which run them as they are: same bits, and no memory but for the
rows that a gradient has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import adagrad

from wholestep.patches import Replacement
from wholestep.torch_compat import OPTIMIZERS_FUNCTIONS

_SCHEMAS = {
    "sparse_adam_": "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, SymInt step, *, "
    "float lr, Tensor? lr_tensor, float beta1, float beta2, float eps, bool maximize) -> ()",
    "sparse_adagrad_": "(Tensor(a!) param, Tensor grad, Tensor(b!) state_sum, *, "
    "float lr, float eps, bool maximize) -> ()",
}


@torch.no_grad()
def _adam(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, *,
    lr: float, lr_tensor: Tensor | None, **settings: Any,
) -> None:  # fmt: skip
    rate: Any = lr if lr_tensor is None else lr_tensor  # which computes in its own precision
    OPTIMIZERS_FUNCTIONS.sparse_adam([param], [grad], [exp_avg], [exp_avg_sq], [step], lr=rate, **settings)


@torch.no_grad()
def _adagrad(param: Tensor, grad: Tensor, state_sum: Tensor, **settings: Any) -> None:
    first = torch.zeros(())  # the decay of the learning rate is in it already
    alone: dict[str, Any] = {"has_sparse_grad": True, "foreach": False, "weight_decay": 0.0, "lr_decay": 0.0}
    adagrad.adagrad([param], [grad], [state_sum], [first], **alone, **settings)


_library = torch.library.Library("wholestep_optim", "FRAGMENT")
for _name, _run in (("sparse_adam_", _adam), ("sparse_adagrad_", _adagrad)):
    _library.define(_name + _SCHEMAS[_name])
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"wholestep_optim::{_name}", lambda *args, **kwargs: None, lib=_library)


def traced_sparse_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    state_steps: list[Any],
    *,
    lr: Any,
    **settings: Any,
) -> None:
    """`sparse_adam` of torch.optim while a step is traced."""
    settings |= {"lr": 0.0, "lr_tensor": lr} if isinstance(lr, Tensor) else {"lr": lr, "lr_tensor": None}
    for param, grad, *state, step in zip(params, grads, exp_avgs, exp_avg_sqs, state_steps, strict=True):
        torch.ops.wholestep_optim.sparse_adam_(param, grad, *state, step, **settings)
        increment_version([param, *state])


def traced_adagrad(original: Callable[..., None]) -> Callable[..., None]:
    """`adagrad` of torch.optim while a step is traced."""

    def call(
        params: list[Tensor],
        grads: list[Tensor],
        state_sums: list[Tensor],
        state_steps: list[Tensor],
        *args: Any,
        has_sparse_grad: bool = False,
        **settings: Any,
    ) -> None:
        if not has_sparse_grad:
            original(params, grads, state_sums, state_steps, *args, **settings)
            return
        for param, grad, state_sum, count in zip(params, grads, state_sums, state_steps, strict=True):
            if not grad.is_sparse:
                original([param], [grad], [state_sum], [count], *args, **settings | {"foreach": False})
                continue
            if settings["weight_decay"] != 0:
                raise RuntimeError("weight_decay option is not compatible with sparse gradients")
            count += 1
            rate = settings["lr"] / (1 + (count.item() - 1) * settings["lr_decay"])
            kept = {"lr": rate.item() if isinstance(rate, Tensor) else rate}
            kept |= {name: settings[name] for name in ("eps", "maximize")}
            torch.ops.wholestep_optim.sparse_adagrad_(param, grad, state_sum, **kept)
            increment_version([param, state_sum])

    return call


def patches() -> list[Replacement]:
    """What stands in the place of torch.optim's functions: (owner, name, function)."""
    return [
        (OPTIMIZERS_FUNCTIONS, "sparse_adam", traced_sparse_adam),
        (adagrad, "adagrad", traced_adagrad(adagrad.adagrad)),
    ]
