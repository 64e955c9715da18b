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

from wholestep.torch_compat import CUMPROD_BY_DATA, empty_fake, saved_as_it_is, saved_numbers
from wholestep.trace.functionalize.aliases import new_root

Engine = Callable[..., Any]

_library = torch.library.Library("wholestep_formulas", "FRAGMENT")


def _prod_backward(grad: Tensor, x: Tensor, result: Tensor | None, dim: int | None) -> Tensor:
    """The gradient of a product of `x` along a dimension, which grad and result have too, or of all elements."""
    if result is None:
        result = x.prod() if dim is None else x.prod(dim, keepdim=True)
    made = grad * (result / x).conj()
    zeros = x == 0
    if not zeros.any():
        return made
    if dim is not None:
        return made.copy_(grad * _others(x, dim))
    if int(zeros.sum()) > 1:
        return made.zero_()
    return made.copy_((grad * _others(x.reshape(-1), 0)).view(x.shape))


def _others(x: Tensor, dim: int) -> Tensor:
    """For each element the conjugate of the product of all others along a dimension."""
    size = x.shape[dim]
    if size == 1:
        return torch.ones_like(x)
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat((one, x.narrow(dim, 0, size - 1)), dim).cumprod(dim)
    after = torch.cat((one, x.narrow(dim, 1, size - 1).flip(dim)), dim).cumprod(dim).flip(dim)
    return (before * after).conj()


def _fake_prod_backward(grad: Tensor, x: Tensor, result: Tensor | None, dim: int | None) -> Tensor:
    return grad * (x if result is None else result / x).conj()


def _cumprod_backward(grad: Tensor, x: Tensor, result: Tensor, dim: int) -> Tensor:
    """The gradient of a cumulative product: the quotient before the first zero, sums of products at it, else zero."""
    weighted, x = result.conj() * grad, x.conj()
    zeros = x == 0
    if not zeros.any():
        return _sums_to_the_end(weighted, dim) / x
    count = zeros.cumsum(dim)
    made = (_sums_to_the_end(weighted.masked_fill(count != 0, 0), dim) / x).masked_fill(count != 0, 0)
    since = count == 1
    first = zeros & since
    place = since.max(dim, keepdim=True).indices
    ahead = result.conj().gather(dim, (place - 1).relu()).masked_fill(place == 0, 1)
    after = x.masked_fill(~(since & ~first), 1).cumprod(dim) * grad.masked_fill(~since, 0)
    return made.copy_(torch.where(first, after.sum(dim, keepdim=True) * ahead, made))


def _sums_to_the_end(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


def _fake_cumprod_backward(grad: Tensor, x: Tensor, result: Tensor, dim: int) -> Tensor:
    return _sums_to_the_end(result.conj() * grad, dim) / x.conj()


def _masked_sum(x: Tensor, mask: Tensor, wanted: bool) -> Tensor:
    """The sum of the elements at which a mask is as wanted; with zeros between them, others would be added first."""
    return x.masked_select(mask if wanted else ~mask).sum()


def _fake_masked_sum(x: Tensor, mask: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(())


_SCHEMAS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "masked_sum(Tensor x, Tensor mask, bool wanted) -> Tensor": (_masked_sum, _fake_masked_sum),
    "cumprod_backward(Tensor grad, Tensor x, Tensor result, int dim) -> Tensor":
        (_cumprod_backward, _fake_cumprod_backward),
    "prod_backward(Tensor grad, Tensor x, Tensor? result, int? dim) -> Tensor": (_prod_backward, _fake_prod_backward),
}  # fmt: skip
for _schema, (_kernel, _fake) in _SCHEMAS.items():
    _name = _library.define(_schema)
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"wholestep_formulas::{_name}", _fake, lib=_library)


def _of_prod(node: Any, grad: Tensor, made: Tensor) -> Tensor | None:
    x, result = saved_as_it_is(node, "self"), saved_as_it_is(node, "result")
    if x is None or result is None:
        x, result = _operand(made, node.name() == "ProdBackward0"), None
    if x is None or x.dim() == 0 or x.numel() == 0:
        return None
    dim: int | None = None
    if node.name() == "ProdBackward1":
        dim = _dim(node, x)
        if not saved_numbers(node, "keepdim")[0]:
            grad, result = grad.unsqueeze(dim), None if result is None else result.unsqueeze(dim)
    return torch.ops.wholestep_formulas.prod_backward(grad, x.to(grad.dtype), result, dim)  # type: ignore[no-any-return]


def _operand(made: Tensor, flat: bool) -> Tensor | None:
    """What a product was taken of, where a hook packed it, as in a checkpoint: from the formula that unpacked it.

    That is `grad * (cumprod(cat(ones, x[:-1])) * …)`; the hook itself may be called once only.

    Args:
        flat: whether that `x` is what the product was taken of as one dimension.
    """
    level = made.wholestep_ref.storage.value.all_input_nodes[1:]  # type: ignore[attr-defined]
    for _ in range(6):
        for node in level:
            if node.target is torch.ops.aten.slice.Tensor:
                x: Any = node.args[0]
                return _holding(_unflattened(x, made.shape) if flat else x, made)
        level = [operand for node in level for operand in node.all_input_nodes]
    return None


def _unflattened(node: fx.Node, shape: torch.Size) -> fx.Node:
    """What `x.contiguous().view(-1)` was made of."""
    if node.target is torch.ops.aten.view.default:
        above: Any = node.args[0]
        copied = above.target is torch.ops.aten.clone.default and above.meta["info"].value.shape == shape
        node = above.args[0] if copied else above
    return node


def _holding(node: fx.Node, like: Any) -> Tensor:
    """A tensor with a node's value."""
    value = node.meta["info"].value
    fake = empty_fake(value.fake_mode, value)
    new_root(fake, node, like.wholestep_ref.storage.emit)
    return fake


def _of_cumprod(node: Any, grad: Tensor, made: Tensor) -> Tensor | None:
    x, result = saved_as_it_is(node, "self"), saved_as_it_is(node, "result")
    if x is None or result is None or x.dim() == 0 or x.numel() <= 1 or x.shape[_dim(node, x)] == 1:
        return None
    x = x.to(grad.dtype)
    return torch.ops.wholestep_formulas.cumprod_backward(grad, x, result, _dim(node, x))  # type: ignore[no-any-return]


def _dim(node: Any, x: Tensor) -> int:
    """The dimension that a node works along; autograd shows it without its sign."""
    dim = int(saved_numbers(node, "dim")[0])
    return (dim - (1 << 64) if dim >= 1 << 63 else dim) % x.dim()


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
    **dict.fromkeys(("ProdBackward0", "ProdBackward1"), (0, _of_prod)),
    **dict.fromkeys(("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), (0, _of_extreme)),
    "MaskedFillBackward1": (1, _of_filling),
}
if CUMPROD_BY_DATA:
    FORMULAS["CumprodBackward0"] = 0, _of_cumprod


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
    handles = [node.register_hook(partial(_replace, node)) for node in behind(roots) if node.name() in FORMULAS]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replace(node: Any, made: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a node's hook does: another gradient, unless autograd is to differentiate it once more."""
    index, formula = FORMULAS[node.name()]
    if torch.is_grad_enabled() or made[index] is None or given[0] is None:
        return None
    new = formula(node, given[0], made[index])
    return None if new is None else (*made[:index], new.to(made[index].dtype), *made[index + 1 :])


def behind(roots: Iterable[Any]) -> Iterator[Any]:
    """All nodes of the graph behind tensors, gradient edges or nodes."""
    waiting = [getattr(root, "node", None) or getattr(root, "grad_fn", root) for root in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
            yield node
