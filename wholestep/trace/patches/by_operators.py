"""Functions of torch whose C++ bypasses the dispatcher: while a step is traced, operators take their place.

Nested lists of tensors and host numbers are read by C++ value by value: a stack stands in their place, as in
``torch.tensor([loss, 2.0])``, or ``x[rows, columns]`` with tuples of tensors.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.nn import functional

from wholestep.errors import DataDependentError, UnsupportedError
from wholestep.torch_compat import FakeTensor, no_modes, set_versions
from wholestep.trace.numbers.decisions import OTHERWISE
from wholestep.trace.numbers.recorded_numbers import RecordedNumbers
from wholestep.trace.numbers.symbolic_sizes import is_made
from wholestep.trace.operators.data_dependent_formulas import as_eager_sums

UNKNOWN = (torch.Tensor, torch.SymFloat, torch.SymInt)
# What reads lists: the positions and names of the arguments that are data.
CONSTRUCTORS: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), (0, "data", "obj")),
    **dict.fromkeys((torch.Tensor.new_tensor, torch.Tensor.new), (1, "data")),
    torch.sparse_coo_tensor: (0, 1, "indices", "values"),
}
COMPRESSED = (torch.sparse_compressed_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor,
              torch.sparse_bsr_tensor, torch.sparse_bsc_tensor)  # fmt: skip
_INDEX_DTYPES = (torch.bool, torch.uint8)


def stacked(numbers: RecordedNumbers, data: Any, options: dict[str, Any]) -> Any:
    """What C++ makes of data, where that has unknown values in it; any other data as it is.

    Where C++ would refuse them, or convert otherwise than operators do, it is given tensors whose memory it cannot read
    unnoticed.

    Args:
        options: ``dtype`` and ``device`` of the tensor to make.
    """
    scalars = [*_scalars(data)] if _is_sequence(data) or isinstance(data, UNKNOWN[1:]) else []
    if not any(isinstance(n, UNKNOWN) for n in scalars):
        return data
    wanted = options.get("dtype") or functools.reduce(torch.promote_types, map(_dtype, scalars))
    if all(_converts(n, wanted) for n in scalars):
        return _stack(numbers, data, wanted, options.get("device"))
    return _made(data)


def indexed(numbers: RecordedNumbers, index: Any) -> Any:
    """An index, with tensors for the sequences of tensors in it."""
    if not isinstance(index, (list, tuple)):
        return index
    found = [_of_sequence(numbers, n) if _is_sequence(n) else n for n in index]
    return tuple(found) if isinstance(index, tuple) else found


def _of_sequence(numbers: RecordedNumbers, sequence: Any) -> Any:
    dtypes = {_dtype(n) for n in _scalars(sequence)}
    bools = len(dtypes) == 1 and not dtypes.isdisjoint(_INDEX_DTYPES)
    return stacked(numbers, sequence, {"dtype": None if bools else torch.int64})


def _is_sequence(value: Any) -> bool:
    """Whether C++ takes a value for a sequence, a list or any other."""
    others = (torch.Tensor, numpy.ndarray, numpy.generic, str, bytes, dict)
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__") and not isinstance(value, others)


def _scalars(tree: Any) -> Iterator[Any]:
    if _is_sequence(tree):
        for leaf in tree:
            yield from _scalars(leaf)
    else:
        yield tree


def _made(tree: Any) -> Any:
    """Nested lists with traced copies of tensors."""
    if _is_sequence(tree):
        return [_made(leaf) for leaf in tree]
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def _dtype(scalar: Any) -> torch.dtype:
    """What C++ takes a scalar for when it is told nothing."""
    if isinstance(scalar, torch.Tensor):
        return scalar.dtype
    if isinstance(scalar, bool):
        return torch.bool
    if isinstance(scalar, complex):
        return torch.promote_types(torch.get_default_dtype(), torch.complex32)
    return torch.get_default_dtype() if isinstance(scalar, float) else torch.int64


def _converts(scalar: Any, wanted: torch.dtype) -> bool:
    """Whether operators make of a scalar what C++ makes of it."""
    if not isinstance(scalar, torch.Tensor):
        return isinstance(scalar, (*UNKNOWN, complex, float, int)) and not isinstance(scalar, numpy.generic)
    if wanted.is_floating_point or wanted.is_complex:
        return scalar.numel() == 1 and (wanted.is_complex or not scalar.is_complex())
    counted = not (scalar.is_floating_point() or scalar.is_complex())
    return scalar.numel() == 1 and counted and wanted in (torch.bool, torch.int64, scalar.dtype)


def _stack(numbers: RecordedNumbers, tree: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if _is_sequence(tree):
        return torch.stack([_stack(numbers, leaf, dtype, device) for leaf in tree])
    if not isinstance(tree, torch.Tensor):
        return torch.scalar_tensor(numbers.size(tree), dtype=dtype, device=device)
    value = tree.detach().reshape(())
    if not (value.is_floating_point() or value.is_complex()) and (dtype.is_floating_point or dtype.is_complex):
        value = value.to(torch.float64)  # C++ has it as a Python number on its way
    return value.to(device=device or torch.get_default_device(), dtype=dtype)


# Constructors that are given data alone, of which a stack is the result.
OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
# Functions that read the memory of arguments in C++, where no mode sees it: their positions and names.
CTC_LOSSES = (torch.ctc_loss, functional.ctc_loss)
BY_VALUE: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((torch.tensor_split, torch.Tensor.tensor_split), (1, "indices_or_sections")),
    **dict.fromkeys(CTC_LOSSES, (2, 3, "input_lengths", "target_lengths")),
}


def _cross_entropy(calls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    before = len(calls.recorder.builder.graph.nodes)
    loss = calls.call(func, args, kwargs)
    as_eager_sums(calls.recorder.builder.since(before))
    return loss


def _constructor(calls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor made of lists, of which a stack stands in the place of those with unknown values."""
    places, options = CONSTRUCTORS[func], dict[str, Any]()
    if 0 not in places:
        options = {"dtype": args[0].dtype, "device": args[0].device}
    if func in OF_DATA:
        options |= {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
    given = [stacked(calls.numbers, a, options) if i in places else a for i, a in enumerate(args)]
    named = {k: stacked(calls.numbers, a, options) if k in places else a for k, a in kwargs.items()}
    data = (given[-1:] or [named.get("data", named.get("obj"))])[0]
    if func in OF_DATA and isinstance(data, torch.Tensor) and not any(data is a for a in (*args, *kwargs.values())):
        return data.requires_grad_(kwargs.get("requires_grad", False))
    return calls.call(func, given, named)


def _one_hot(calls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """`one_hot` without the look at the classes that its kernel takes; `scatter` refuses those out of range."""
    if isinstance(args[0], FakeTensor):
        return calls.call(func, args, kwargs)
    return _scattered(*args, **kwargs)


def _by_value(calls: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function that reads the memory of some arguments past the dispatcher, where they are tensors."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    if any(isinstance(given.get(key), torch.Tensor) for key in BY_VALUE[func]):
        what = f"{func.__name__} reads the values of a tensor"
        raise DataDependentError(what, f"give it a list of numbers, or {OTHERWISE}")
    if func not in CTC_LOSSES:
        return calls.call(func, args, kwargs)
    return _ctc_loss(calls, *args, **({"reduction": "mean"} if len(args) < 6 else {}) | kwargs)


def _ctc_loss(
    calls: Any,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: list[int],
    target_lengths: list[int],
    blank: int = 0,
    reduction: int | str = 0,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`ctc_loss` reduced here: its C++ would fill a tensor of lengths by hand."""
    lengths = list(input_lengths), list(target_lengths)
    loss = calls.call(torch.ctc_loss, (log_probs, targets, *lengths, blank, 0, zero_infinity), {})
    if reduction in ("none", 0):
        return loss  # type: ignore[no-any-return]
    if reduction in ("sum", 2):
        return loss.sum()  # type: ignore[no-any-return]
    divisors = torch.tensor(lengths[1], dtype=loss.dtype, device=loss.device)
    return (loss / divisors.clamp_min(1)).mean()  # type: ignore[no-any-return]


def _get_item(calls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return calls.call(func, (args[0], indexed(calls.numbers, args[1])), kwargs)


def _set_item(calls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """`t[mask] = value` with a single boolean, as Rprop has it, which C++ would read: a choice of two values."""
    tensor, mask, value = args[0], indexed(calls.numbers, args[1]), args[2]
    if not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == 0):
        return calls.call(func, (tensor, mask, value), kwargs)
    new = value if isinstance(value, torch.Tensor) else torch.full_like(tensor, value)
    tensor.copy_(torch.where(mask, new, tensor))
    return None


def _deepcopy(calls: Any, func: Any, args: tuple[torch.Tensor, dict[int, Any]], kwargs: Any) -> torch.Tensor:
    """`copy.deepcopy(t)`, which copies memory without the dispatcher's knowing."""
    tensor, memo = args
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    if not tensor.is_leaf:
        what = "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
        raise RuntimeError(f"{what} at the moment")
    with no_modes():
        ref = calls.inputs.ref(tensor)
    if math.prod(ref.geometry.shape) != math.prod(ref.whole.geometry.shape):
        what = "a deep copy of a part of a tensor's memory, which copies the whole"
        raise UnsupportedError(what, "copy it with tensor.clone()")
    with torch.no_grad():
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with no_modes():
        set_versions((copied,), (1,))  # as eager counts the giving of memory
    memo[id(tensor)] = copied
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    return copied


def _set_data(calls: Any, func: Any, args: tuple[torch.Tensor, torch.Tensor], kwargs: Any) -> None:
    """`t.data = new`: the tensor leaves its memory for the new one's."""
    tensor, new = args
    with no_modes():
        ref, ours = calls.inputs.ref(new), calls.inputs.ref(tensor)
    if is_made(tensor):
        with no_modes(), calls.recorder.builder.fake_mode:
            tensor.data = calls.inputs.fake(new)
        tensor.wholestep_ref = ref  # type: ignore[attr-defined]
        return
    if tensor.shape != new.shape or tensor.dtype != new.dtype or tensor.stride() != new.stride():
        raise UnsupportedError(
            f"assigning .data of shape {list(new.shape)} and strides {list(new.stride())} to a tensor of shape "
            f"{list(tensor.shape)} and strides {list(tensor.stride())} from outside of the step",
        )
    if ref.storage is ours.storage and ref.geometry == ours.geometry:
        return  # its own memory, as `module.to(dtype)` gives it where nothing is to be converted
    with no_modes(), calls.recorder.builder.fake_mode:
        there = calls.inputs.fake(new).detach()
    there.wholestep_ref = ref
    calls.inputs.move(tensor, there)


def _scattered(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 1:
        raise DataDependentError("one_hot counts the classes in its data", "give it num_classes")
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


# Functions of torch's Python API -> what is done in their place, given the `TorchCalls` that see and make calls.
BY_OPERATORS: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    **dict.fromkeys(CONSTRUCTORS, _constructor),
    functional.one_hot: _one_hot,
    **dict.fromkeys(BY_VALUE, _by_value),
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.__getitem__: _get_item,
    torch.Tensor.__setitem__: _set_item,
    **{getattr(functional, name): _cross_entropy  # of which `as_eager_sums` speaks
       for name in ("cross_entropy", "linear_cross_entropy") if hasattr(functional, name)},
}  # fmt: skip
