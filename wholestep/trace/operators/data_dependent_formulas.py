"""Formulas that torch chooses by data: one operator each, which chooses when it runs.

torch takes a formula for any data where a tensor has none, which rounds otherwise than the short one. While a
backward is traced, the nodes of such operators get a hook that puts what eager computes in the place of what they
recorded, which is then dead code. `cross_entropy` does it in its forward; see `as_eager_sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import UnsupportedError
from wholestep.patches import suspended
from wholestep.torch_compat import CUMPROD_BY_DATA, behind, saved_as_it_is, saved_numbers, with_autograd
from wholestep.trace.patches.engine_hook import running

Engine = Callable[..., Any]

_library = torch.library.Library("wholestep_formulas", "FRAGMENT")


def _gradient(node: str, grad: Tensor, x: Tensor, dim: int | None) -> Tensor:
    """The gradient of a product of `x`, by autograd's own formula; laid out as where no element is zero.

    Args:
        node: the name of the product's node.
        dim: the dimension along which it is taken, which grad has too; None for that of all elements.
    """
    with suspended(), running(), with_autograd(), torch.enable_grad():  # whoever else captures backwards
        leaf = x.detach().requires_grad_()
        made = torch.autograd.grad(PRODUCTS[node](leaf, dim), leaf, grad)[0]
    planned = _fake_gradient(node, grad, x, dim)
    return made if made.stride() == planned.stride() else planned.copy_(made)


def _fake_gradient(node: str, grad: Tensor, x: Tensor, dim: int | None) -> Tensor:
    return grad * (PRODUCTS[node](x, dim) / x).conj()


# What autograd differentiates by the data, by the name of its node; `cumprod` in torch 2.11 alone.
PRODUCTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "ProdBackward0": lambda x, dim: x.prod(),
    "ProdBackward1": lambda x, dim: x.prod(dim, keepdim=True),
    "CumprodBackward0": lambda x, dim: x.cumprod(dim),
}
if not CUMPROD_BY_DATA:
    del PRODUCTS["CumprodBackward0"]


def _masked_sum(x: Tensor, mask: Tensor, wanted: bool) -> Tensor:
    """The sum of the elements at which a mask is as wanted; with zeros between them, others would be added first."""
    return x.masked_select(mask if wanted else ~mask).sum()


def _fake_masked_sum(x: Tensor, mask: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(())


_SCHEMAS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "masked_sum(Tensor x, Tensor mask, bool wanted) -> Tensor": (_masked_sum, _fake_masked_sum),
    "product_gradient(str node, Tensor grad, Tensor x, int? dim) -> Tensor": (_gradient, _fake_gradient),
}
for _schema, (_kernel, _fake) in _SCHEMAS.items():
    _name = _library.define(_schema)
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    _library.impl(_name, _fake, "Meta")


def _of_product(node: Any, grad: Tensor, made: Tensor) -> Any:
    x = saved_as_it_is(node, "self")
    if x is None:
        what = "the gradient of a product of what a hook of saved tensors has packed, as in a checkpoint"
        raise UnsupportedError(what, "compute the product outside of it")
    if x.dim() == 0 or x.numel() == 0:
        return None
    dim: Any = saved_numbers(node, "dim")[0]
    if dim is not None:
        dim %= x.dim()
        grad = grad.unsqueeze(dim) if saved_numbers(node, "keepdim")[0] is False else grad
    return torch.ops.wholestep_formulas.product_gradient(type(node).__name__, grad, x.to(grad.dtype), dim)


def _of_filling(node: Any, grad: Tensor, made: Tensor) -> None:
    """The gradient of the value that `masked_fill` puts in, recorded as `where(mask, grad, 0).sum()`."""
    total = made.wholestep_ref.storage.value  # type: ignore[attr-defined]
    chosen = total.args[0]
    if total.target is torch.ops.aten.sum.default and chosen.target is torch.ops.aten.where.self:
        mask, taken, _ = chosen.args
        total.target, total.args = torch.ops.wholestep_formulas.masked_sum.default, (taken, mask, True)


def _of_extreme(node: Any, grad: Tensor, made: Tensor) -> Tensor | None:
    """The gradient of the largest, smallest or middle of all elements: shared out among its equals."""
    x, result = saved_as_it_is(node, "self"), saved_as_it_is(node, "result")
    if x is None or result is None:
        return None
    equals = (x == result) | (x.isnan() & result.isnan())
    return grad.new_zeros(x.shape).masked_fill(equals, grad / equals.sum())


# Name of an autograd node -> which of its gradients it is, and that, given the node, what reaches it and what it made;
# None to leave it as it is.
Formula = Callable[[Any, Tensor, Tensor], Tensor | None]
FORMULAS: dict[str, tuple[int, Formula]] = {
    **dict.fromkeys(PRODUCTS, (0, _of_product)),
    **dict.fromkeys(("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), (0, _of_extreme)),
    "MaskedFillBackward1": (1, _of_filling),
}


def as_eager_sums(nodes: Iterable[fx.Node]) -> None:
    """Lets what `cross_entropy` recorded sum the weights of the targets that count, without zeros for the others.

    With weights and label smoothing, the mean divides by that sum.
    """
    for node in nodes:
        filled = node.args[0] if node.target is torch.ops.aten.sum.default else None
        if isinstance(filled, fx.Node) and filled.target is torch.ops.aten.masked_fill.Scalar and filled.args[2] == 0:
            weights, ignored = filled.args[:2]
            if isinstance(weights, fx.Node) and weights.target is torch.ops.aten.gather.default:
                node.target = torch.ops.wholestep_formulas.masked_sum.default
                node.args = weights, ignored, False


def by_data(run: Engine, roots: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the autograd engine while a recorder looks on: choices by data are left to when the step runs."""
    roots = tuple(roots)
    with _with_formulas(roots):
        return run(roots, *args, **kwargs)


@contextmanager
def _with_formulas(roots: tuple[Any, ...]) -> Iterator[None]:
    named = [node for node in behind(roots) if type(node).__name__ in FORMULAS]  # a context's own `name` hides a node's
    handles = [node.register_hook(partial(_replace, node)) for node in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replace(node: Any, made: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a node's hook does: another gradient, unless autograd is to differentiate it once more."""
    index, formula = FORMULAS[type(node).__name__]
    if torch.is_grad_enabled() or made[index] is None or given[0] is None:
        return None
    new = formula(node, given[0], made[index])
    return None if new is None else (*made[:index], new.to(made[index].dtype), *made[index + 1 :])
