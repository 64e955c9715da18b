"""Functions of torch whose C++ bypasses the dispatcher: while a step is traced, operators take their place.

Nested lists are read by C++ value by value: of host numbers a stack stands in their place, as in
``torch.tensor([loss.item(), 2.0])``; of tensors they are refused.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn import functional

from wholestep.errors import DataDependentError, UnsupportedError
from wholestep.nested import map_leaves
from wholestep.torch_compat import FakeTensor, no_modes, set_versions
from wholestep.trace.numbers.decisions import OTHERWISE
from wholestep.trace.numbers.host_numbers import HostFloat64, plain
from wholestep.trace.numbers.recorded_numbers import RecordedNumbers
from wholestep.trace.numbers.symbolic_sizes import is_made
from wholestep.trace.operators.data_dependent_formulas import as_eager_sums

NUMBERS = (torch.SymFloat, torch.SymInt)
# What reads lists: the positions and names of the arguments that are data.
CONSTRUCTORS: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), (0, "data", "obj")),
    **dict.fromkeys((torch.Tensor.new_tensor, torch.Tensor.new), (1, "data")),
    torch.sparse_coo_tensor: (0, 1, "indices", "values"),
}
COMPRESSED = (torch.sparse_compressed_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor,
              torch.sparse_bsr_tensor, torch.sparse_bsc_tensor)  # fmt: skip


def stacked(numbers: RecordedNumbers, data: Any, options: dict[str, Any]) -> Any:
    """What C++ makes of data, where that has numbers in it that are not known; any other data as it is.

    Args:
        options: ``dtype`` and ``device`` of the tensor to make.

    Raises:
        DataDependentError: it has tensors in it.
    """
    data = map_leaves(lambda n: plain(n, "NumPy's numbers are read by C++") if type(n) is HostFloat64 else n, data)
    scalars = [data] if isinstance(data, NUMBERS) else _scalars(data)
    known = all(isinstance(n, (*NUMBERS, complex, float, int)) and not isinstance(n, numpy.generic) for n in scalars)
    if not known or not any(isinstance(n, NUMBERS) for n in scalars):
        return data
    wanted = options.get("dtype") or functools.reduce(torch.promote_types, map(_dtype, scalars))
    return _stack(numbers, data, wanted, options.get("device"))


def _is_sequence(value: Any) -> bool:
    """Whether C++ takes a value for a sequence, a list or any other."""
    others = (torch.Tensor, numpy.ndarray, numpy.generic, str, bytes, dict)
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__") and not isinstance(value, others)


def _scalars(data: Any) -> list[Any]:
    """What nested sequences hold, where C++ may read it."""
    found: list[Any] = []
    for one in data if _is_sequence(data) else ():
        found += _scalars(one) if _is_sequence(one) else [one]
    if any(isinstance(one, torch.Tensor) for one in found):
        what = "a list of tensors, whose values C++ reads, is made a tensor or an index"
        raise DataDependentError(what, f"use torch.stack, or {OTHERWISE}")
    return found


def _dtype(scalar: Any) -> torch.dtype:
    """What C++ takes a scalar for when it is told nothing."""
    if isinstance(scalar, bool):
        return torch.bool
    if isinstance(scalar, complex):
        return torch.promote_types(torch.get_default_dtype(), torch.complex32)
    return torch.get_default_dtype() if isinstance(scalar, float) else torch.int64


def _stack(numbers: RecordedNumbers, tree: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if _is_sequence(tree):
        return torch.stack([_stack(numbers, leaf, dtype, device) for leaf in tree])
    return torch.scalar_tensor(numbers.size(tree), dtype=dtype, device=device)


# Constructors that are given data alone, of which a stack is the result.
OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)

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


def _tensor_split(calls: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if any(isinstance(given, torch.Tensor) for given in (*args[1:], kwargs.get("indices_or_sections"))):
        what = "tensor_split reads the values of a tensor"
        raise DataDependentError(what, f"give it a list of numbers, or {OTHERWISE}")
    return calls.call(func, args, kwargs)


def _get_item(calls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    for one in args[1] if isinstance(args[1], tuple) else args[1:2]:
        _scalars(one)  # refuses lists of tensors
    return calls.call(func, args, kwargs)


def _set_item(calls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """`t[mask] = value` with a single boolean, as Rprop has it, which C++ would read: a choice of two values."""
    tensor, mask, value = args
    if not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == 0):
        return _get_item(calls, func, args, kwargs)
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
            remedy="assign it outside of the step, or compile without fullgraph=True",
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
    **dict.fromkeys((torch.tensor_split, torch.Tensor.tensor_split), _tensor_split),
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.__getitem__: _get_item,
    torch.Tensor.__setitem__: _set_item,
    **{getattr(functional, name): _cross_entropy  # of which `as_eager_sums` speaks
       for name in ("cross_entropy", "linear_cross_entropy") if hasattr(functional, name)},
}  # fmt: skip
