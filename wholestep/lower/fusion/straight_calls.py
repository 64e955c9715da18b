"""Straight calls: small kernels in a row that run with no Python, and nothing of torch's dispatch, between them.

A product of 32 x 64 x 64 takes the BLAS 1.7 µs, and 2.8 µs more to reach it by way of Python and ATen. What can run so
are products of small float32 matrices, sums over their rows, and what chains are made of, all in memory that stays
where it is. As with chains, each is tried against torch once, and stays torch's where it has not torch's bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.lower.fusion import chains
from wholestep.lower.fusion.chains import SHARED_FROM, Named, Step, aten, chain_step
from wholestep.torch_compat import full_precision, matrix_product, no_modes

LARGEST = 1 << 16  # elements of a tensor: what lies between kernels is nothing beside larger ones
MOST_PRODUCTS = 1 << 22  # of numbers in a product of matrices
TRIALS = 32  # another order has the same bits by chance in every third sum
SHIFT = 101  # how many numbers are others in the next trial, or at other places in sums
_PRODUCTS = {aten.mm.default: "mm", aten.addmm.default: "addmm"}
_PRODUCT, _ROWS, _SUM = 1, 2, 3  # as native/straight.c has them
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides


def straight_step(node: fx.Node) -> Step | None:
    """A call as a straight one; None when it cannot be one."""
    largest = LARGEST if torch.get_num_threads() == 1 else SHARED_FROM - 1
    if not isinstance(info(node).value, torch.Tensor) or info(node).value.numel() > largest:
        return None
    step = chain_step(node)
    if step is not None:
        return step
    if node.kwargs or not node.args:
        return None
    kernel, operands = _PRODUCTS.get(node.target), node.args  # type: ignore[call-overload]
    if node.target is aten.sum.dim_IntList and node.args[1] in ([0], (0,)) and info(node).value.dim() < 3:
        kernel, operands = "sum", node.args[:1]
    if kernel is None or not all(isinstance(o, fx.Node) for o in operands):
        return None
    values = [info(node).value, *(info(o).value for o in operands)]  # type: ignore[arg-type]
    if any(v.dtype is not torch.float32 or v.device.type != "cpu" or v.numel() > LARGEST for v in values):
        return None
    if kernel == "sum" and values[1].numel() > largest:
        return None
    layouts = tuple([(tuple(v.shape), v.stride()) for v in values])
    return Step(kernel, operands) if _same_bits(kernel, layouts, full_precision()) else None  # type: ignore[arg-type]


def _product(out: Layout, a: Layout, b: Layout) -> tuple[int, ...] | None:
    """Numbers with which the BLAS, which counts by columns, gives a product; called as torch calls it, else None.

    Returns:
        m, n, k, leading sizes of result and operands, whether each operand is flipped; and whether they are swapped.
    """
    (rows, columns), wide = out[0], a[0][1]
    if min(rows, columns, wide) < 2 or rows * columns * wide > MOST_PRODUCTS:
        return None
    by_rows = out[1][1] == 1 and out[1][0] >= columns
    if by_rows:  # the transposed product of the transposed ones
        out, a, b = ((size[::-1], strides[::-1]) for size, strides in (out, b, a))
    leading, flipped = [out[1][1]], []
    for size, strides in (out, a, b):
        if strides[0] == 1 and strides[1] >= size[0]:
            leading.append(strides[1])
            flipped.append(0)
        elif strides[1] == 1 and strides[0] >= size[1]:
            leading.append(strides[0])
            flipped.append(1)
        else:
            return None
    return None if flipped[0] else (*out[0], wide, *leading[1:], *flipped[1:], int(by_rows))


@functools.cache
def _same_bits(kernel: str, layouts: tuple[Layout, ...], full: bool) -> bool:
    """Tries a call in place of torch's on random numbers that lie so."""
    out, *operands = layouts
    if kernel == "sum":
        size, strides = operands[0]
        if len(size) != 2 or min(size) < 2 or strides != (size[1], 1):
            return False
    elif not full or not matrix_product() or _product(out, operands[-2], operands[-1]) is None:
        return False
    elif kernel == "addmm" and (operands[0] != ((out[0][1],), (1,)) or out[1] != (out[0][1], 1)):
        return False
    with no_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        made = [torch.empty_strided(*layout, dtype=torch.float32) for layout in layouts]
        for tensor in made:
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float32))
        names = [f"o{i}" for i in range(len(made))]
        run = straight([(kernel, "o0", tuple(names[1:]), None)], dict(zip(names, made, strict=True)))
        summed = made[1] if kernel == "sum" else made[-2]
        pool = torch.randn(summed.numel() + TRIALS * SHIFT, generator=generator, dtype=torch.float32)
        for trial in range(TRIALS):
            summed.copy_(pool[trial * SHIFT :][: summed.numel()].view(summed.shape))
            run()
            theirs = made[1].sum([0]).view(out[0]) if kernel == "sum" else getattr(torch, kernel)(*made[1:])
            if not torch.equal(theirs, made[0]):
                return False
        return True


# What the generated program calls


def straight(steps: Sequence[Named], names: Mapping[str, Any]) -> Callable[[], None]:
    """A function that runs calls one after another.

    Args:
        steps: (kernel, result, operands, number), by name.
        names: what the names stand for.
    """
    rows: list[Any] = []
    for step in steps:
        kernel, result, operands, _ = step
        out, *given = (names[name] for name in (result, *operands))
        places = [tensor.data_ptr() for tensor in (out, *given)]
        if kernel == "sum":
            rows.append((_SUM, *places, 0, *given[0].shape))
        elif kernel in _PRODUCTS.values():
            if kernel == "addmm":
                rows.append((_ROWS, *places[:2], 0, *out.shape))
            layouts = [(tuple(x.shape), x.stride()) for x in (out, *given[-2:])]
            found = _product(layouts[0], layouts[1], layouts[2])
            assert found is not None
            *numbers, swapped = found
            a, b = places[:-3:-1] if swapped else places[-2:]
            rows.append((_PRODUCT, places[0], a, b, *numbers, kernel == "addmm"))
        else:
            rows.append(chains.chain(out.numel(), [step], names).args[0])  # type: ignore[attr-defined]
    run = functools.partial(chains.native.run_straight, chains.native.straight(matrix_product(), rows))
    run.memory = [names[name] for _, result, operands, _ in steps for name in (result, *operands)]  # type: ignore[attr-defined]
    return run
