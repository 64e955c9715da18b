"""Functions of torch whose C++ bypasses the dispatcher: while a step is traced, operators take their place."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional

from wholestep.errors import DataDependentError, UnsupportedError
from wholestep.torch_compat import FakeTensor, no_modes, set_versions
from wholestep.trace.numbers.decisions import OTHERWISE
from wholestep.trace.numbers.recorded_numbers import RecordedNumbers
from wholestep.trace.numbers.symbolic_sizes import is_made
from wholestep.trace.operators.data_dependent_formulas import as_eager_sums
from wholestep.trace.patches.tensor_sequences import CONSTRUCTORS, indexed, stacked
from wholestep.trace.record.inputs import Inputs
from wholestep.trace.record.recorder import Recorder

# Constructors that are given data alone, of which a stack is the result.
OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
# Functions that read the memory of arguments in C++, where no mode sees it: their positions and names.
CTC_LOSSES = (torch.ctc_loss, functional.ctc_loss)
BY_VALUE: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((torch.tensor_split, torch.Tensor.tensor_split), (1, "indices_or_sections")),
    **dict.fromkeys(CTC_LOSSES, (2, 3, "input_lengths", "target_lengths")),
}


class Calls(Protocol):
    """What sees the calls of a step, and makes them."""

    recorder: Recorder
    inputs: Inputs
    numbers: RecordedNumbers

    def call(self, func: Any, args: Any, kwargs: Any) -> Any: ...


def _cross_entropy(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    nodes = calls.recorder.builder.graph.nodes
    before = len(nodes)
    loss = calls.call(func, args, kwargs)
    as_eager_sums(list(itertools.islice(reversed(nodes), len(nodes) - before)))
    return loss


def _constructor(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
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


def _one_hot(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    """`one_hot` without the look at the classes that its kernel takes; `scatter` refuses those out of range."""
    if isinstance(args[0], FakeTensor):
        return calls.call(func, args, kwargs)
    return _scattered(*args, **kwargs)


def _by_value(calls: Calls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function that reads the memory of some arguments past the dispatcher, where they are tensors."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    if any(isinstance(given.get(key), torch.Tensor) for key in BY_VALUE[func]):
        what = f"{func.__name__} reads the values of a tensor"
        raise DataDependentError(what, f"give it a list of numbers, or {OTHERWISE}")
    if func not in CTC_LOSSES:
        return calls.call(func, args, kwargs)
    return _ctc_loss(calls, *args, **({"reduction": "mean"} if len(args) < 6 else {}) | kwargs)


def _ctc_loss(
    calls: Calls,
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


def _get_item(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    return calls.call(func, (args[0], indexed(calls.numbers, args[1])), kwargs)


def _set_item(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    """`t[mask] = value` with a single boolean, as Rprop has it, which C++ would read: a choice of two values."""
    tensor, mask, value = args[0], indexed(calls.numbers, args[1]), args[2]
    if not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == 0):
        return calls.call(func, (tensor, mask, value), kwargs)
    new = value if isinstance(value, torch.Tensor) else torch.full_like(tensor, value)
    tensor.copy_(torch.where(mask, new, tensor))
    return None


def _deepcopy(calls: Calls, func: Any, args: tuple[torch.Tensor, dict[int, Any]], kwargs: Any) -> torch.Tensor:
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


def _set_data(calls: Calls, func: Any, args: tuple[torch.Tensor, torch.Tensor], kwargs: Any) -> None:
    """`t.data = new`: the tensor leaves its memory for the new one's."""
    tensor, new = args
    ref = calls.inputs.ref(new)
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
    ours = calls.inputs.ref(tensor)
    if ref.storage is ours.storage and ref.geometry == ours.geometry:
        return  # its own memory, as `module.to(dtype)` gives it where nothing is to be converted
    made = [one for one in calls.recorder.builder.watch.alive() if hasattr(one, "wholestep_ref") and one is not new]
    shown = any(one.wholestep_ref.storage is ours.storage for one in made)
    if ref.storage.input is not None or ours.parent is not None or shown:
        raise UnsupportedError(
            "assigning .data, to a tensor from outside of the step, of a tensor that shares its memory with others",
            "copy it in: tensor.data.copy_(new), or tensor.data = new.clone()",
        )
    version = tensor._version
    with torch.no_grad():
        torch.Tensor.copy_(tensor.detach(), new)
    with no_modes():
        set_versions((tensor,), (version,))
    ref.storage.moved = ours.storage.left = True
    if ref.parent is None:
        new.wholestep_ref = ours  # type: ignore[attr-defined]
    else:  # one of several that are given parts of one memory
        ref.storage.given.append((ours.storage, ours.storage.generation))


def _scattered(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 1:
        raise DataDependentError("one_hot counts the classes in its data", "give it num_classes")
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


# Functions of torch's Python API -> what is done in their place.
BY_OPERATORS: dict[Any, Callable[[Calls, Any, Any, Any], Any]] = {
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
