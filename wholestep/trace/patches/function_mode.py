"""What a step calls of torch's Python API, seen before C++ is: who may ask for a number, and what would escape."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import dlpack

from wholestep.errors import CaptureError, DataDependentError, UnsupportedError
from wholestep.functional import Count
from wholestep.patches import Replacement
from wholestep.torch_compat import (
    GET_VERSION,
    PAD_PACKED,
    FakeTensor,
    OpOverload,
    fake_refusal,
    function_modes_off,
    no_modes,
    set_versions,
)
from wholestep.trace.functionalize.storage_resize import OWNERS
from wholestep.trace.numbers.host_numbers import HostNode, make_host, plain
from wholestep.trace.numbers.symbolic_sizes import is_host, is_made, is_size
from wholestep.trace.operators.data_dependent_formulas import as_eager_sums
from wholestep.trace.operators.packed_sequences import RECURRENT, is_packed, padded, with_known_sizes
from wholestep.trace.operators.tables import ESCAPES, MEMORY_READS
from wholestep.trace.outputs.replaced_gradients import DELETE, GET, SET, ReplacedGradients
from wholestep.trace.record.provenance import user_line
from wholestep.trace.record.recorder import Recorder
from wholestep.trace.record.tape import leaves, map_leaves

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("wholestep.")


class CallWindow(TorchFunctionMode):
    """Sees every call of torch's Python API: knows when C++ may ask for a number, and stops escapes."""

    def __init__(self, recorder: Recorder, gradients: ReplacedGradients) -> None:
        super().__init__()
        self.recorder, self.gradients = recorder, gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._noting():
            return self._called(func, args, kwargs)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Remembers a refusal, which ends the capture even where the step catches it."""
        try:
            yield
        except CaptureError as error:
            self.recorder.refusal = self.recorder.refusal or error
            raise

    def exchanges(self) -> Iterator[Replacement]:
        """What stands in for methods that read memory, as which Python called by C++ sees them too."""
        for name in MEMORY_READS:
            if hasattr(torch.Tensor, name):
                yield torch.Tensor, name, self._exchanged(name, getattr(torch.Tensor, name), True)
        yield torch.UntypedStorage, "data_ptr", self._exchanged("data_ptr", torch.UntypedStorage.data_ptr, False)
        yield dlpack, "to_dlpack", self._exchanged("__dlpack__", dlpack.to_dlpack, True)

    def _exchanged(self, name: str, original: Callable[..., Any], of_tensor: bool) -> Callable[..., Any]:
        def call(holder: Any, *args: Any, **kwargs: Any) -> Any:
            if function_modes_off() or (of_tensor and not is_made(holder) and self.recorder.find(holder) is None):
                return original(holder, *args, **kwargs)
            if name == "__repr__" and sys._getframe(1).f_globals.get("__name__") == OpOverload.__module__:
                return object.__repr__(holder)  # C++ describes arguments that fit no overload
            with self._noting():
                return self._escape(name, original, (holder, *args))

        return call

    def _escape(self, name: str, func: Any, args: Any) -> Any:
        """A read of a value by Python: its result where it becomes a guard, else refused."""
        if name in READABLE and (self.recorder.guard_data or self.recorder.is_fixed(args[0])):
            return self._read(name, func, args)
        remedy = {**ESCAPES, **MEMORY_READS}[name] + (GUARD_DATA if name in READABLE else "")
        owner = "Tensor" if isinstance(args[0], torch.Tensor) else type(args[0]).__name__
        what = "Cannot access data pointer" if "data_ptr" in name else "Python needs the value"
        raise DataDependentError(f"{what} of a tensor: {owner}.{name}", user_line(), remedy)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name in ESCAPES and args and isinstance(args[0], torch.Tensor):
            return self._escape(name, func, args)
        if name == "storage_offset" and not _is_ours(sys._getframe(2)):
            self.recorder.read_offset(args[0])
        if name in OWNERS and not is_made(args[0]):
            self.recorder.memory(args[0])
        if name in DESCRIPTORS and func in GRADIENTS and not is_made(args[0]):
            self.gradients.accessed(func, args[0], sys._getframe(2))
        if func == GET_VERSION and not is_made(args[0]) and self.recorder.find(args[0]) is not None:
            return Count(func(*args)).of(args[0])
        if func in (torch.tensor, torch.as_tensor) and args and _is_of_numbers(args[0]):
            return self._tensor(*args, **(kwargs or {}))
        if func is torch.nn.functional.one_hot and not isinstance(args[0], FakeTensor) and not self.recorder.guard_data:
            return _one_hot(*args, **(kwargs or {}))
        if func in BY_VALUE:
            args, kwargs = self._by_value(func, args, kwargs or {})
            if func is torch.nn.functional.ctc_loss and len(args) < 6:
                kwargs = {"reduction": "mean"} | kwargs
            if func in CTC_LOSSES:
                return self._ctc_loss(*args, **kwargs)
        if func is PAD_PACKED:
            return padded(self.recorder, *args, **(kwargs or {}))
        if func in RECURRENT and is_packed(args):
            args = with_known_sizes(self.recorder, args)
        if func == SET_DATA:  # equal, never the same object
            return self._set_data(*args)
        if func is torch.Tensor.__deepcopy__:
            return self._deepcopy(*args)
        if func is torch.Tensor.__setitem__ and _is_scalar_mask(args[1]):
            return self._set_where(*args)
        if name in CROSS_ENTROPIES:
            return self._cross_entropy(func, args, kwargs or {})
        return self._window(func, args, kwargs or {})

    def _cross_entropy(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = len(self.recorder.graph.nodes)
        loss = self._window(func, args, kwargs)
        new = len(self.recorder.graph.nodes) - before
        as_eager_sums(list(itertools.islice(reversed(self.recorder.graph.nodes), new)))
        return loss

    def _window(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call; with its numbers' values if it takes none that are not known, as C++ says before it computes."""
        try:
            return self._call(func, args, kwargs)
        except (AttributeError, IndexError, TypeError, RuntimeError) as error:
            whole = "concrete integers" in str(error)
            if isinstance(error, RuntimeError) and not whole:
                raise
            if not any(is_host(leaf) or whole and _is_index(leaf) for leaf in (*leaves(args), *leaves(kwargs))):
                raise

        def value(leaf: Any) -> Any:
            number = self._call(torch.Tensor.item, (leaf,), {}) if whole and _is_index(leaf) else leaf
            return plain(number, f"{getattr(func, '__name__', func)} takes plain numbers")

        return self._call(func, map_leaves(value, args), map_leaves(value, kwargs))

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        before = len(recorder.tokens)
        recorder.in_call += 1
        if recorder.in_call == 1:
            recorder.callee = func
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            kind, name = fake_refusal(error), getattr(func, "__name__", str(func))
            if kind == "symbols" and recorder.sizes is not None:
                raise UnsupportedError(f"torch's own {name} asks for sizes as plain numbers", user_line()) from error
            if kind != "memory":
                raise
            what = f"{name} reads a tensor's memory in C++, which is only there when the step runs"
            raise UnsupportedError(what, user_line(), "use padded tensors and masks, or call it outside") from error
        finally:
            recorder.in_call -= 1
        if recorder.in_call == 0 and len(recorder.tokens) > before:
            lost = [t for t in list(recorder.tokens)[before:] if t not in recorder.spent]
            if lost:
                raise UnsupportedError(f"{func} computed with a number that may change", user_line())
        if type(out) in (torch.SymFloat, torch.SymInt) and isinstance(out.node, HostNode):
            return make_host(out.node)  # `.item()` came back through C++
        return out

    def _read(self, name: str, func: Any, args: Any) -> Any:
        """A tensor's value for Python, which becomes a guard."""
        if name == "__contains__":
            return self._window(func, args, {})
        if name == "tolist":
            return self.recorder.as_list(args[0])
        return READABLE[name](self._window(torch.Tensor.item, args, {}))

    def _tensor(self, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
        """A tensor of a number, or of a row of them, that the step computes."""
        is_row = isinstance(data, (list, tuple))
        row = [self.recorder.size(n) if is_size(n) else n for n in (data if is_row else [data])]
        default = torch.get_default_dtype() if any(isinstance(n, float) for n in row) else torch.int64
        scalars = [torch.scalar_tensor(n, dtype=dtype or default, device=device) for n in row]
        return (torch.stack(scalars) if is_row else scalars[0]).requires_grad_(requires_grad)

    def _by_value(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The arguments of a function that reads the memory of some, past the dispatcher, as numbers."""
        names = BY_VALUE[func]

        def number(key: Any, value: Any) -> Any:
            if key not in names or not isinstance(value, torch.Tensor):
                return value
            if self.recorder.guard_data:
                return self._read("tolist", torch.Tensor.tolist, (value,))
            what = f"{func.__name__} reads the values of a tensor"
            raise DataDependentError(what, user_line(), "give it a list of numbers, or compile with guard_data=True")

        return tuple(number(i, a) for i, a in enumerate(args)), {k: number(k, a) for k, a in kwargs.items()}

    def _ctc_loss(
        self,
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
        loss = self._window(torch.ctc_loss, (log_probs, targets, *lengths, blank, 0, zero_infinity), {})
        if reduction in ("none", 0):
            return loss  # type: ignore[no-any-return]
        if reduction in ("sum", 2):
            return loss.sum()  # type: ignore[no-any-return]
        divisors = torch.tensor(lengths[1], dtype=loss.dtype, device=loss.device)
        return (loss / divisors.clamp_min(1)).mean()  # type: ignore[no-any-return]

    def _set_where(self, tensor: torch.Tensor, mask: torch.Tensor, value: Any) -> None:
        """`t[mask] = value` with a single boolean, which C++ would read: a choice between two values."""
        new = value if isinstance(value, torch.Tensor) else torch.full_like(tensor, value)
        tensor.copy_(torch.where(mask, new, tensor))

    def _deepcopy(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """`copy.deepcopy(t)`, which copies memory without the dispatcher's knowing."""
        if id(tensor) in memo:
            return memo[id(tensor)]  # type: ignore[no-any-return]
        if not tensor.is_leaf:
            what = "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            raise RuntimeError(f"{what} at the moment")
        with no_modes():
            ref = self.recorder.ref(tensor)
        root = ref.storage.root
        if root is None or math.prod(ref.geometry.shape) != math.prod(root.geometry.shape):
            what = "a deep copy of a part of a tensor's memory, which copies the whole"
            raise UnsupportedError(what, user_line(), "copy it with tensor.clone()")
        with torch.no_grad():
            copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        with no_modes():
            set_versions((copied,), (1,))  # as eager counts the giving of memory
        memo[id(tensor)] = copied
        if tensor.grad is not None:
            copied.grad = copy.deepcopy(tensor.grad, memo)
        return copied

    def _set_data(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """`t.data = new`: the tensor leaves its memory for the new one's."""
        ref = self.recorder.ref(new)
        if is_made(tensor):
            with no_modes(), self.recorder.fake_mode:
                tensor.data = new if isinstance(new, FakeTensor) else self.recorder.by_id[id(new)].fake
            tensor.wholestep_ref = ref  # type: ignore[attr-defined]
            return
        if tensor.shape != new.shape or tensor.dtype != new.dtype or tensor.stride() != new.stride():
            raise UnsupportedError(
                f"assigning .data of shape {list(new.shape)} and strides {list(new.stride())} to a tensor of shape "
                f"{list(tensor.shape)} and strides {list(tensor.stride())} from outside of the step", user_line()
            )
        ours = self.recorder.ref(tensor)
        if ref.storage.input is not None or ours.parent is not None:
            raise UnsupportedError(
                "assigning .data, to a tensor from outside of the step, of a tensor that shares its memory with others",
                user_line(),
                "copy it in: tensor.data.copy_(new), or tensor.data = new.clone()",
            )
        version = tensor._version
        with torch.no_grad():
            torch.Tensor.copy_(tensor.detach(), new)
        with no_modes():
            set_versions((tensor,), (version,))
        ref.storage.moved = True
        if ref.parent is None:
            new.wholestep_ref = ours  # type: ignore[attr-defined]
        else:  # one of several that are given parts of one memory
            ref.storage.given.append((ours.storage, ours.storage.generation))


# The ways to a tensor's `.grad`.
GRADIENTS = (GET, SET, DELETE)
DESCRIPTORS = frozenset(way.__name__ for way in GRADIENTS)

# Functions that read the memory of arguments in C++, where no mode sees it: their positions and names.
CTC_LOSSES = (torch.ctc_loss, torch.nn.functional.ctc_loss)
BY_VALUE: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((torch.tensor_split, torch.Tensor.tensor_split), (1, "indices_or_sections")),
    **dict.fromkeys(CTC_LOSSES, (2, 3, "input_lengths", "target_lengths")),
}

# Functions that are, or call, the one of which `as_eager_sums` speaks.
CROSS_ENTROPIES = frozenset({"cross_entropy", "linear_cross_entropy"})

GUARD_DATA = ", or pass guard_data=True to ws.compile"

# Tensor methods that give a value to Python, and what makes it of a number.
READABLE: dict[str, Any] = {
    "__float__": float,
    "__int__": int,
    "__index__": operator.index,
    "__complex__": complex,
    "tolist": None,
    "__contains__": None,
}


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`one_hot` without the look at the classes that its kernel takes; `scatter` refuses those out of range."""
    if num_classes < 1:
        raise DataDependentError("one_hot counts the classes in its data", user_line(), "give it num_classes")
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def _is_index(leaf: Any) -> bool:
    """Whether something is a tensor that C++ takes as an integer."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and not leaf.is_floating_point()


def _is_scalar_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() == 0


def _is_of_numbers(data: Any) -> bool:
    """Whether something is a number that is not known, or a row of numbers with such a one."""
    row = data if isinstance(data, (list, tuple)) else [data]
    unknown = any(isinstance(n, (torch.SymFloat, torch.SymInt)) for n in row)
    return unknown and all(isinstance(n, (int, float, torch.SymFloat, torch.SymInt)) for n in row)
