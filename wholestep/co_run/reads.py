"""Reads of memory that never reach the dispatcher: methods, functions and C extensions that flush the queue first.

What a step writes to memory that Python reads without torch, of NumPy arrays or buffers such as `bytearray`, is written
at once, since its readers ask nobody.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import EXTENSION_SUFFIXES
from types import FrameType, FunctionType
from typing import Any

import numpy
import torch
from torch.utils import dlpack

from wholestep.capture import Args, Kwargs, setters, unguarded_in_sight
from wholestep.capture.snapshot.user_code import origin
from wholestep.patches import Replacement, original, suspended
from wholestep.torch_compat import COMPILED_OPERATORS, CROSS_ENTROPY, dispatch_modes_off, storage_id
from wholestep.trace.operators.data_dependent_formulas import FORMULAS

# Methods of tensors that hand out memory or what is in it.
TENSOR = ("__repr__", "tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "const_data_ptr", "mutable_data_ptr",
          "storage", "untyped_storage", "_typed_storage", "__reduce_ex__", "__deepcopy__", "__setstate__",
          "__cuda_array_interface__", "share_memory_",
          # which constructors such as `torch.Tensor([x, y])` call where no mode is
          "__float__", "__int__", "__index__", "__complex__", "__bool__")  # fmt: skip

ARRAYS = ("numpy", "__array__")  # of these, what gives arrays

# Methods of random generators, whose state deferred operators have not moved yet.
GENERATOR = ("get_state", "set_state", "manual_seed", "seed", "get_offset", "set_offset", "clone_state",
             "graphsafe_get_state", "graphsafe_set_state")  # fmt: skip

# All these, and functions that hand objects to other threads, and memory to other libraries.
READS = (
    *((torch.Tensor, name) for name in TENSOR), *((torch.Generator, name) for name in GENERATOR),
    (threading.Condition, "notify"), (queue.SimpleQueue, "put"), (dlpack, "to_dlpack"), (torch, "set_default_dtype"),
)  # fmt: skip

# Functions whose C++ reads the memory of tensors that they are given, or calls the step's code in ways of its own.
WITHOUT_MODES = (
    *((torch, name) for name in ("sparse_coo_tensor", "ctc_loss", "tensor_split", "_shape_as_tensor",
                                 "_reshape_from_tensor", "_pad_packed_sequence")),
    (torch.Tensor, "tensor_split"), COMPILED_OPERATORS, (torch.jit, "trace"), (torch.jit, "trace_module"),
    # of singular values and eigenvalues alone: under a mode C++ has vectors made, too, and LAPACK rounds otherwise
    *((torch.linalg, name) for name in ("eigvalsh", "svdvals", "cond", "matrix_rank", "norm", "matrix_norm")),
    (torch, "nuclear_norm"), (torch, "norm"),
    CROSS_ENTROPY,  # which sums other weights under a mode
)  # fmt: skip
NORMS = ("norm", "matrix_norm")

# Functions with backward formulas that torch chooses by the data, and under a mode the one for any data.
BY_DATA = tuple((owner, name) for owner in (torch, torch.Tensor)
                for name in ("prod", "cumprod", "masked_fill", "masked_fill_") if hasattr(owner, name))  # fmt: skip


class _Current(threading.local):
    queue: Any = None


current = _Current()
"""The queue in which the calling thread defers operators, if any."""


_kept = functools.lru_cache(512)  # replacements of what was there lately


def flushing() -> Iterator[Replacement]:
    """Replacements for all of these, and for what sets how kernels compute, that ask `current` to `read` first.

    The same objects each time, as long as what they replace is the same. Before a thread begins, which may be handed
    tensors in ways that nobody sees, all runs at once.
    """
    for owner, name in (*READS, *setters(), *WITHOUT_MODES):
        if hasattr(owner, name):
            yield owner, name, _after(name, original(owner, name), (owner, name) in WITHOUT_MODES)
    for owner, name in BY_DATA:
        yield owner, name, _by_data(original(owner, name))
    yield torch.Tensor, "__new__", _new(original(torch.Tensor, "__new__"))
    yield threading.Thread, "start", _begin(original(threading.Thread, "start"))


@_kept
def _begin(start: Callable[..., None]) -> Callable[..., None]:
    def begin(thread: threading.Thread) -> None:
        current.queue.run_at_once()
        start(thread)

    return begin


@_kept
def _new(make: Callable[..., torch.Tensor]) -> Any:
    """Subclasses are made where no mode is: C++ makes them of a tensor that has no object of Python yet."""

    def new(kind: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kind is torch.Tensor:
            return make(kind, *args, **kwargs)
        current.queue.read((args, kwargs))
        with dispatch_modes_off():
            return make(kind, *args, **kwargs)

    return staticmethod(new)


@_kept
def _by_data(found: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = found(*args, **kwargs)
        if result.requires_grad and type(result.grad_fn).__name__ in FORMULAS:
            _differentiate_without_modes(result.grad_fn)
        return result

    return call


def _differentiate_without_modes(node: Any) -> None:
    """Has a node of autograd compute where no mode is, in a backward of the step."""
    entered: list[AbstractContextManager[Any]] = []

    def before(gradients: Any) -> None:
        if current.queue is not None and current.queue.plain:
            current.queue.flush()
            entered.append(dispatch_modes_off())
            entered[-1].__enter__()

    def after(*_: Any) -> None:
        while entered:
            entered.pop().__exit__(None, None, None)

    node.register_prehook(before)
    node.register_hook(after)


def _sums_weights(args: Sequence[Any]) -> bool:
    """Whether a cross entropy has weights, and smooths labels."""
    return args[2] is not None and args[5] > 0


def _is_spectral(norm: Any, args: Sequence[Any]) -> bool:
    """Whether a norm may be one of singular values; `torch.norm`, in Python, has but one by its name."""
    orders = ("nuc",) if isinstance(norm, FunctionType) else ("nuc", 2, -2)
    return any(type(a) in (int, float, str) and a in orders for a in args)


@_kept
def _after(name: str, found: Any, without_modes: bool) -> Any:
    if not callable(found):  # a property, of Python or of C

        def get(self: Any) -> Any:
            current.queue.read(self)
            return found.__get__(self)

        return property(get)

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        queue = current.queue
        if name in NORMS and not _is_spectral(found, (*args, *kwargs.values())):
            return found(*args, **kwargs)
        if name == CROSS_ENTROPY[1] and not _sums_weights(args):
            return found(*args, **kwargs)
        queue.read((args, kwargs))
        if without_modes:
            with suspended(), dispatch_modes_off():
                return found(*args, **kwargs)
        result = found(*args, **kwargs)
        if name in ARRAYS:
            queue.exposed.add(result, args[0])
        return result

    return call


# Packages whose functions in C take no tensors, but arrays at most, which are made after a flush.
WITHOUT_TENSORS = frozenset({"google", "numpy", "pandas", "PIL", "psutil", "yaml"})


class ExtensionWatch:
    """Flushes before this thread calls a function of a C extension other than Python's and torch's.

    A profile function sees such calls, and none where another profiler runs. Since it takes time, it watches where a
    step may go a new way: from its beginning and from each read to the next operator that is known, and beside those
    that are not.

    Attributes:
        active: whether it watches.
        found: the names of the functions that were called.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush, self.active, self.found = flush, False, list[str]()

    def begin(self) -> None:
        """Watches from now on."""
        if not self.active and sys.getprofile() is None:
            self.active = True
            sys.setprofile(self._seen)

    def end(self) -> None:
        """No longer watches."""
        if self.active:
            self.active = False
            sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        if _is_extension(module):
            self._flush()
            self.found.append(f"{module}.{function.__name__}")


@functools.cache
def _is_extension(name: str) -> bool:
    while name not in sys.modules and "." in name:
        name = name.rpartition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    in_c = file.endswith(tuple(EXTENSION_SUFFIXES)) and origin(file) in ("installed", "user")
    return in_c and name.partition(".")[0] not in WITHOUT_TENSORS


_STORAGE = torch.Tensor.untyped_storage  # as the queue asks: not one of the step's reads, by which it is replaced


class ExposedMemory:
    """Knows such memory: of the arrays that a step can see at its first call, and of those that it makes.

    Args:
        fn: the step, with the arguments of its first call.
    """

    def __init__(self, fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
        self._seen = [at for value in unguarded_in_sight(fn, args, kwargs) if (at := _addresses(value))]
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}  # id of an array -> itself, and the storage

    def add(self, array: Any, tensor: Any) -> None:
        """Notes an array that was made of a tensor, for as long as it is there."""
        if isinstance(array, numpy.ndarray) and isinstance(tensor, torch.Tensor):
            key, made = id(array), self._made
            made[key] = weakref.ref(array, lambda _: made.pop(key, None)), storage_id(tensor.untyped_storage())

    def __bool__(self) -> bool:
        return bool(self._seen or self._made)

    def holds(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether some of the tensors are there."""
        storages = [_STORAGE(t) for t in tensors if t.layout is torch.strided]
        if not {storage for _, storage in self._made.values()}.isdisjoint(map(storage_id, storages)):
            return True
        return any(seen.start < s.data_ptr() + s.nbytes() and s.data_ptr() < seen.stop
                   for s in storages for seen in self._seen)  # fmt: skip


def _addresses(value: Any) -> range:
    """Where in memory an array or a buffer is; nowhere for all else."""
    try:
        array = value if isinstance(value, numpy.ndarray) else numpy.asarray(memoryview(value))
    except TypeError:
        return range(0)
    ends = [stride * (size - 1) for size, stride in zip(array.shape, array.strides, strict=True)]
    first, last = (array.ctypes.data + sum(pick(end, 0) for end in ends) for pick in (min, max))
    return range(first, last + array.itemsize if array.size else first)
