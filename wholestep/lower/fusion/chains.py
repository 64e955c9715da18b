"""Chains of elementwise operators over one shape, run by one compiled kernel, block by block in the cache.

An unfused AdamW is eight operators over five tensors. Called one by one, each passes over memory again and costs half a
microsecond of torch's dispatch for every parameter; in a chain, memory is passed over once.

Every operator of a chain rounds as torch's own kernel does. Whether that one fuses a product with a sum is up to the
compiler that built torch, so both are tried against it, once, on numbers of every kind; an operator whose bits neither
gives stays torch's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.lower.fusion import _chain as native
from wholestep.torch_compat import mkl_square_root, no_modes, openmp

aten = torch.ops.aten
_MKL_MODE = 0x2 | 0x100 | 0x140000  # high accuracy, no error state, subnormals kept: as torch calls it
_MEMORY, _SCRATCH, _GIVEN, _PART = range(4)
# Elements from which torch's kernels run on several threads where there are some. A chain runs on the same ones: with
# its own beside them, which spin for a while after each kernel, BERT-base's step took 2.2 of eager's time, not 0.75.
SHARED_FROM = 1 << 15


@dataclass(frozen=True)
class Step:
    """One operator of a chain.

    Attributes:
        kernel: the one that has torch's bits.
        operands: whole tensors.
        number: a number, or a node that gives one or a tensor with one; None where the operator takes none.
    """

    kernel: str
    operands: tuple[fx.Node, ...]
    number: Any = None


# Kernels that may have torch's bits, the likelier first; operands and number.
Candidate = tuple[tuple[str, ...], tuple[fx.Node, ...], Any]


# operator -> (kernels, how many whole tensors it takes, what it is called with beside them)
_KERNELS: dict[Any, tuple[tuple[str, ...], int]] = {
    aten.neg.default: (("neg",), 1),
    aten.abs.default: (("abs",), 1),
    aten.sqrt.default: (("sqrt", "sqrt_mkl"), 1),
    aten.maximum.default: (("maximum",), 2),
    aten.minimum.default: (("minimum",), 2),
    aten.relu.default: (("relu",), 1),
    aten.threshold_backward.default: (("threshold_backward",), 2),
    aten.lerp.Scalar: (("lerp_fused", "lerp"), 2),
    aten.addcmul.default: (("addcmul_fused", "addcmul"), 3),
    aten.addcdiv.default: (("addcdiv",), 3),
}
_ARITHMETIC = {aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.div.Tensor: "div"}


def is_elementwise(node: fx.Node) -> bool:
    """True for a call of an operator that chains know."""
    return node.target in _ARITHMETIC or node.target in _KERNELS


def chain_step(node: fx.Node) -> Step | None:
    """A call as an operator of a chain; None when it cannot be one."""
    value = info(node).value
    if not isinstance(value, torch.Tensor) or not _whole(value, value):
        return None
    if torch.get_num_threads() > 1 and not _has_threads() and value.numel() >= SHARED_FROM:
        return None
    if not value.dim() and getattr(node.args[0], "op", "") != "placeholder":  # not an optimizer's count of steps
        return None
    spelled = _spelled(node)
    if spelled is None or not all(isinstance(o, fx.Node) and _whole(info(o).value, value) for o in spelled[1]):
        return None
    _, operands, number = spelled
    found = info(number).value if isinstance(number, fx.Node) else number
    if isinstance(found, torch.Tensor):
        if found.dim() or found.dtype is not torch.float32 or found.device.type != "cpu":
            return None
    elif isinstance(found, bool) or not isinstance(found, (int, float, type(None))):
        return None
    elif found is number and number is not None and not math.isfinite(number):
        return None
    kernel = _kernel_of(node, spelled, isinstance(found, torch.Tensor))
    return Step(kernel, operands, number) if kernel else None


def _whole(value: Any, like: torch.Tensor) -> bool:
    """True for contiguous float32 memory of the CPU, of a given shape."""
    return (isinstance(value, torch.Tensor) and value.dtype is torch.float32 and value.device.type == "cpu"
            and value.shape == like.shape and value.is_contiguous() and value.numel() > 0)  # fmt: skip


def _spelled(node: fx.Node) -> Candidate | None:
    op, args, keywords = node.target, node.args, dict(node.kwargs)
    if op in _ARITHMETIC and len(args) == 2:
        alpha, second = keywords.pop("alpha", 1), args[1]
        scaled = isinstance(alpha, fx.Node) or alpha != 1
        if keywords or (scaled and op is not aten.add.Tensor):
            return None
        if isinstance(second, fx.Node) and isinstance(info(second).value, torch.Tensor) and info(second).value.dim():
            kernels: tuple[str, ...] = ("axpy_fused", "axpy") if scaled else (_ARITHMETIC[op],)
            return kernels, args, alpha if scaled else None  # type: ignore[return-value]
        return None if scaled else ((f"{_ARITHMETIC[op]}_number",), args[:1], second)  # type: ignore[return-value]
    if op not in _KERNELS:
        return None
    kernels, tensors = _KERNELS[op]
    number = args[tensors] if len(args) > tensors else None
    if op in (aten.addcmul.default, aten.addcdiv.default):
        number = keywords.pop("value", 1)
    return None if keywords or len(args) > tensors + 1 else (kernels, args[:tensors], number)  # type: ignore[return-value]


# Trials


_FOUND: dict[Any, str | None] = {}
_SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 3e38, -3e38, 1.0, 1e-20]
_NUMBERS = (0.37, 0.9, -0.01, 1e-3, 0.999, 1.0, 1e-8, 7.3)


def _kernel_of(node: fx.Node, spelled: Candidate, tensor: bool) -> str | None:
    """The compiled kernel with the bits of torch's, if there is one.

    Args:
        tensor: whether its number is given as one.
    """
    key = (node.target, spelled[0], tensor)
    if key not in _FOUND:
        with no_modes():
            _FOUND[key] = next((k for k in _available(spelled[0]) if _same_bits(node, spelled, k, tensor)), None)
    return _FOUND[key]


@functools.cache
def _has_threads() -> bool:
    """Whether chains run on torch's own threads."""
    addresses = openmp()
    if all(addresses):
        native.use_openmp(*addresses)
    return all(addresses)


@functools.cache
def _available(kernels: tuple[str, ...]) -> tuple[str, ...]:
    if "sqrt_mkl" not in kernels:
        return kernels
    addresses = mkl_square_root()
    if all(addresses):
        native.use_mkl(*addresses, _MKL_MODE)
    return kernels if all(addresses) else tuple(k for k in kernels if k != "sqrt_mkl")


def _same_bits(node: fx.Node, spelled: Candidate, kernel: str, tensor: bool) -> bool:
    """Tries a kernel against torch on random numbers of many sizes, among them zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    for number in _NUMBERS if spelled[2] is not None else (None,):
        operands = [_trial(generator) for _ in spelled[1]]
        arg = torch.tensor(number, dtype=torch.float32) if tensor else number
        theirs = _as_called(node, operands, arg)
        ours = torch.empty_like(theirs)
        cell = torch.tensor(0.0 if number is None else number, dtype=torch.float32)
        names = [f"o{i}" for i in range(len(operands))]
        row = (kernel, "r", tuple(names), None if number is None else "n")
        chain(ours.numel(), [row], {**dict(zip(names, operands, strict=True)), "r": ours, "n": cell})()
        same = ours.view(torch.int32) == theirs.view(torch.int32)
        if not bool((same | (ours.isnan() & theirs.isnan())).all()):
            return False
    return True


def _trial(generator: torch.Generator) -> torch.Tensor:
    count = 4093
    values, scale = (torch.randn(count, generator=generator, dtype=torch.float32) for _ in range(2))
    values *= scale.mul(8).exp()
    where = torch.randperm(count, generator=generator)[: 20 * len(_SPECIAL)]
    values[where] = torch.tensor(_SPECIAL, dtype=torch.float32).repeat(20)
    return values


def _as_called(node: fx.Node, operands: list[torch.Tensor], number: Any) -> torch.Tensor:
    """What torch's operator gives for other operands in the places of its own, and another number."""
    if number is None:
        return node.target(*operands)  # type: ignore[operator, no-any-return]
    if len(node.args) > len(operands):
        return node.target(*operands, number)  # type: ignore[operator, no-any-return]
    keyword = "alpha" if node.target in _ARITHMETIC else "value"
    return node.target(*operands, **{keyword: number})  # type: ignore[operator, no-any-return]


# What the generated program calls

# A product or quotient by a number, and the operator that alone reads it -> the kernel that does both: in the first
# cache too, passes over a block are what most operators cost.
_PAIRS = {("mul_number", kernel): f"mul_{kernel}" for kernel in
          ("add", "axpy", "axpy_fused", "addcmul", "addcmul_fused", "addcdiv")}  # fmt: skip
_PAIRS["div_number", "add_number"] = "div_add_number"

Named = tuple[str, str, tuple[str, ...], str | None]  # kernel, result, operands, number


def paired(
    steps: Sequence[Named], lasting: Collection[str], shared: Collection[str]
) -> list[tuple[*Named, str | None]]:
    """Steps with the number of a second one that each may have taken in.

    Args:
        lasting: names of memory that somebody reads after the chain.
        shared: names of memory that may have another name, too.
    """
    left: list[tuple[*Named, str | None]] = [(*step, None) for step in steps]
    for index in range(len(steps) - 1, 0, -1):
        kernel, result, (first, *others), number, _ = left[index]
        before = next((i for i in reversed(range(index)) if left[i][1] == first), index)
        pair = _PAIRS.get((left[before][0], kernel))
        if pair is None or first in others:
            continue
        _, _, sources, other, _ = left[before]
        between, after = left[before + 1 : index], left[index + 1 :]
        if any(first in step[2] or step[1] in (first, *sources) or step[1] in shared for step in between):
            continue
        if result == first or not (first in lasting or any(first in step[2] for step in after)):  # nobody else reads it
            left[index] = (pair, result, (*sources, *others), number, other)
            del left[before]
    return left


def _overlapping(memory: dict[str, torch.Tensor], count: int) -> list[str]:
    """Names of tensors of a chain's size that share bytes with another one."""
    begins = sorted((tensor.data_ptr(), name) for name, tensor in memory.items() if tensor.numel() == count)
    near = [(a, b) for (p, a), (q, b) in itertools.pairwise(begins) if q - p < 4 * count]
    return [name for pair in near for name in pair]


def chain(
    count: int,
    steps: Sequence[Named],
    names: Mapping[str, Any],
    given: Sequence[str] = (),
    part: str | None = None,
) -> Callable[..., None]:
    """A function that runs a chain.

    Args:
        count: elements of each tensor.
        steps: (kernel, result, operands, number), by name.
        names: what the names of tensors that stay where they are stand for; others among them are not looked at.
        given: names of those whose addresses each call gives, in this order.
        part: name of one of which each call gives some elements, before the addresses: the function then takes the
            place of the first of them and a tensor that is them, and runs the chain on their places.

    Names that are neither are values between steps, and need no memory.
    """
    used = dict.fromkeys(name for _, result, operands, number in steps for name in (result, *operands, number))
    memory = {name: names[name] for name in used if name is not None and name in names and name not in given}
    places: dict[str, tuple[int, int]] = {name: (_GIVEN, i) for i, name in enumerate(given)}
    places |= {name: (_MEMORY, tensor.data_ptr()) for name, tensor in memory.items()}
    if part is not None:
        places[part] = (_PART, 0)
    scratch = 0
    pairs = paired(steps, places, {*given, *_overlapping(memory, count)})
    for _, result, *_ in pairs:
        if result not in places:
            places[result] = (_SCRATCH, scratch)
            scratch += 1
    index = {name: i for i, name in enumerate(places)}
    rows = []
    touched: set[str] = set()
    for kernel, result, operands, *numbers in pairs:
        mine = [result, *operands]
        new = [places[n][0] in (_MEMORY, _GIVEN) and n not in (*touched, *mine[:i]) for i, n in enumerate(mine)]
        touched.update(mine)
        result_, a, b, c = (*(index[n] for n in mine), -1, -1)[:4]
        touches = sum(1 << i for i, first in enumerate(new) if first)
        number, other = (-1 if name is None else index[name] for name in numbers)
        rows.append((native.KERNELS[kernel], result_, a, b, c, number, other, touches))
    made = native.chain(count, list(places.values()), rows)
    run = functools.partial(native.run if part is None else _run_part, made)
    run.memory = memory  # type: ignore[attr-defined]  # which it knows by address alone
    return run


def _run_part(made: Any, first: int, part: torch.Tensor, *addresses: int) -> None:
    native.run_part(made, first, part.numel(), part.data_ptr(), *addresses)
