"""The function mode: what a step calls of torch's Python API, seen before C++ is.

It knows when C++ may ask for a number, and stops values that would escape to Python; what C++ does past the dispatcher
is done by operators (`by_operators.py`).

It also follows gradients from before a step that the step replaces unread, as a `zero_grad()` before the backward does.
Whether such a gradient is there is no matter: a step captured at its first call, where `.grad` is None, serves later
ones too. What decides is the first thing that happens to a `.grad` in the step: that it is set, or is read by
`zero_grad`, which sets it to None whatever it finds.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import dlpack

from wholestep.capture.outside.stand_ins import Count
from wholestep.errors import CaptureError, DataDependentError, UnsupportedError
from wholestep.functional import Required
from wholestep.nested import leaves, map_leaves
from wholestep.patches import Replacement
from wholestep.torch_compat import (
    DESCRIBING_MODULES,
    GET_BASE,
    GET_VERSION,
    IS_ALL_TRUE,
    IS_VIEW,
    PACKED_SEQUENCES,
    dispatching,
    fake_refusal,
    function_modes_off,
    is_linearized,
)
from wholestep.trace.functionalize.storage_resize import OWNERS
from wholestep.trace.numbers.decisions import OTHERWISE
from wholestep.trace.numbers.host_numbers import HostInt, HostNode, make_host, plain
from wholestep.trace.numbers.recorded_numbers import PythonCall
from wholestep.trace.numbers.symbolic_sizes import is_host, is_made
from wholestep.trace.operators.tables import ESCAPES, MEMORY_READS
from wholestep.trace.patches.by_operators import BY_OPERATORS, COMPRESSED
from wholestep.trace.record.caught_errors import is_caught
from wholestep.trace.record.recorder import Recorder
from wholestep.trace.record.user_line import user_line

GET, SET, DELETE = (getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__"))  # type: ignore[attr-defined]
_OWN = f"{__name__.partition('.')[0]}."
_ZERO_GRAD = {inspect.unwrap(kind.zero_grad).__code__ for kind in (torch.optim.Optimizer, torch.nn.Module)}


class ReplacedGradients:
    """Follows the `.grad` of tensors from outside through one run of a step.

    Args:
        parameters: those of which each backward says whether it has changed their gradients.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._read: set[int] = set()
        self._replaced: dict[int, torch.Tensor] = {}
        self._ran_backward = False

    def accessed(self, func: Any, tensor: torch.Tensor, caller: FrameType) -> None:
        """Notes that `.grad` was read, set or deleted."""
        key = id(tensor)
        if key in self._read or key in self._replaced or caller.f_globals.get("__name__", "").startswith(_OWN):
            return
        unknown = self._ran_backward and key not in self._parameters
        if unknown or (func == GET and not _sets_to_none(caller)):
            self._read.add(key)
        else:
            self._replaced[key] = tensor

    def accumulated(self, parameters: Iterable[torch.Tensor]) -> None:
        """Notes that a backward has run, and which parameters' gradients it has changed."""
        self._ran_backward = True
        self._read.update(id(p) for p in parameters if id(p) not in self._replaced)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors whose gradients from before are replaced unread."""
        return list(self._replaced.values())


def _sets_to_none(caller: FrameType) -> bool:
    return caller.f_code in _ZERO_GRAD and caller.f_locals.get("set_to_none") is True


class TorchCalls(TorchFunctionMode):
    """Sees every call of torch's Python API while a step is traced."""

    def __init__(self, recorder: Recorder, gradients: ReplacedGradients) -> None:
        super().__init__()
        self.recorder, self.inputs, self.numbers = recorder, recorder.inputs, recorder.numbers
        self.gradients = gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._handled(func, args, kwargs or {})
        except CaptureError as error:
            self.numbers.refused(error)
            raise

    def _handled(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name in ESCAPES and args and isinstance(args[0], torch.Tensor):
            return self._escape(name, func, args)
        if name == "storage_offset" and not _is_ours(sys._getframe(2)):
            self.inputs.read_offset(args[0])
        if name in OWNERS and not is_made(args[0]):
            self.recorder.storages.of(args[0])
        handler = HANDLERS.get(func)
        return self.call(func, args, kwargs) if handler is None else handler(self, func, args, kwargs)

    def patches(self) -> Iterator[Replacement]:
        """Methods that read memory, as which Python called by C++ sees them too."""
        for name in MEMORY_READS:
            if hasattr(torch.Tensor, name):
                yield torch.Tensor, name, self._patched(name, getattr(torch.Tensor, name), True)
        yield torch.UntypedStorage, "data_ptr", self._patched("data_ptr", torch.UntypedStorage.data_ptr, False)
        yield dlpack, "to_dlpack", self._patched("__dlpack__", dlpack.to_dlpack, True)

    def _patched(self, name: str, original: Callable[..., Any], of_tensor: bool) -> Callable[..., Any]:
        def method(holder: Any, *args: Any, **kwargs: Any) -> Any:
            if function_modes_off() or (of_tensor and not is_made(holder) and self.inputs.world.find(holder) is None):
                return original(holder, *args, **kwargs)
            if name == "__repr__" and sys._getframe(1).f_globals.get("__name__") in DESCRIBING_MODULES:
                return object.__repr__(holder)
            return self._escape(name, original, (holder, *args))

        return method

    def _escape(self, name: str, func: Any, args: Any) -> Any:
        """A read of a value by Python: its result where it becomes a guard, else refused."""
        decides = name == "__contains__" and self.numbers.may_decide
        with dispatching():
            if name in READABLE and (decides or self.numbers.is_fixed(args[0])):
                return READABLE[name](self, func, args)
        remedy = {**ESCAPES, **MEMORY_READS}[name] + (f", or {OTHERWISE}" if name in READABLE else "")
        owner = "Tensor" if isinstance(args[0], torch.Tensor) else type(args[0]).__name__
        what = "Cannot access data pointer" if "data_ptr" in name else "Python needs the value"
        raise self.numbers.refused(DataDependentError(f"{what} of a tensor: {owner}.{name}", remedy))

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
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
        try:
            with PythonCall(self.numbers, func, args, kwargs):
                out = func(*args, **kwargs)
        except RuntimeError as error:
            kind, name = fake_refusal(error), getattr(func, "__name__", str(func))
            if kind == "symbols" and self.recorder.builder.sizes is not None:
                raise UnsupportedError(f"torch's own {name} asks for sizes as plain numbers") from error
            if kind != "memory":
                raise
            what = f"{name} reads a tensor's memory in C++, which is only there when the step runs"
            remedy = "use padded tensors and masks, or call it outside"
            if is_linearized():
                what, remedy = "torch.func.linearize computes with values while it traces", "use torch.func.jvp"
            raise UnsupportedError(what, remedy) from error
        if type(out) in (torch.SymFloat, torch.SymInt) and isinstance(out.node, HostNode):
            return make_host(out.node)  # `.item()` came back through C++
        return out

    # -- functions that are handled apart ----------------------------------------------------------------------

    def _gradient(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_made(args[0]):
            self.gradients.accessed(func, args[0], sys._getframe(3))
        return self.call(func, args, kwargs)

    def _hook(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Gives a hook to a tensor, or its autograd node to who may give it one."""
        if is_made(args[0]) and args[0].grad_fn is not None:
            self.recorder.hooked.append(args[0].grad_fn)
        return self.call(func, args, kwargs)

    def _version(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_made(args[0]) and self.inputs.world.find(args[0]) is not None:
            return Count(func(*args)).of(args[0])
        return self.call(func, args, kwargs)

    def _origin(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if not is_made(tensor) and self.inputs.world.find(tensor) is not None and not _is_ours(sys._getframe(3)):
            answer, original = self.inputs.ask(tensor, ORIGIN[func]), self.inputs.world.substitutes.original(tensor)
            if func != GET_BASE:
                return answer
            if original._base is not None and self.inputs.world.find(original._base) is not None:
                what = "the step asks whether a tensor from outside is a view of another: no guard compares that"
                raise UnsupportedError(what, "ask outside, and pass the answer")
            return original._base
        return self.call(func, args, kwargs)

    def _all_true(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Whether all is true, where `torch.distributions` checks what it is given: when the step runs."""
        if func is IS_ALL_TRUE and args[0].dtype is torch.bool:
            func = torch.Tensor.all  # the same, with a rule for sizes that are symbols
        out, frame = self.call(func, args, kwargs), sys._getframe(3)
        checks = frame.f_globals.get("__name__", "").startswith("torch.distributions.") and len(args) == 1
        if not checks or kwargs or is_caught(ValueError):
            return out
        of = frame.f_locals.get("self")
        name = frame.f_locals.get("param", "value")
        what = f"Expected {name} of {type(of).__name__} to be within its constraint, but found invalid values"
        self.recorder.builder.emit(Required(f"{what} (at {user_line()})"), (self.inputs.read(out),), value=())
        return True

    def _power(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A power; autograd compares its numbers with 0, which symbols for integers cannot be, but those for floats."""
        given = map_leaves(lambda leaf: leaf * 1.0 if type(leaf) is HostInt else leaf, args)
        dtypes = {leaf.dtype for leaf in leaves(args) if isinstance(leaf, torch.Tensor)}
        whole = any(not (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes)
        return self.call(func, args if whole else given, kwargs)

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in RECURRENT and not isinstance(args[3], (list, tuple)):
            return self.call(func, args, kwargs)
        what, remedy = REFUSED[func]
        raise DataDependentError(f"{func.__name__} {what}", f"{remedy}, or compile without fullgraph=True")


# Functions that read the sizes of a packed sequence's batches, where they are given one.
RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
# Functions that are refused: why, and what to do.
REFUSED: dict[Any, tuple[str, str]] = {
    **dict.fromkeys(
        (*PACKED_SEQUENCES, *RECURRENT),
        ("takes or makes a packed sequence, whose shapes depend on its lengths", "use padded tensors and masks"),
    ),
    **dict.fromkeys((torch.ctc_loss, functional.ctc_loss), ("reads its lengths in C++", "take it outside of the step")),
    torch.Tensor.is_set_to: ("tells whether tensors are the same memory", "compare them outside of the step"),
    **dict.fromkeys(COMPRESSED, ("makes a tensor that no fake one can stand for", "use dense tensors")),
}

POWERS = (
    torch.pow, torch._foreach_pow, torch._foreach_pow_,
    *(getattr(torch.Tensor, name) for name in "pow pow_ __pow__ __rpow__ __ipow__".split()),
)  # fmt: skip

GET_HISTORY: Any = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
# What says whether an input is a view, of what, and in which mode it was made.
ORIGIN = {GET_BASE: "base", IS_VIEW: "being a view", torch.is_inference: "inference mode",
          torch.Tensor.is_inference: "inference mode"}  # fmt: skip
# Functions of torch's Python API -> what is done in their place.
HANDLERS: dict[Any, Callable[[TorchCalls, Any, Any, Any], Any]] = {
    **dict.fromkeys((GET, SET, DELETE), TorchCalls._gradient),
    GET_VERSION: TorchCalls._version,
    **dict.fromkeys((torch.Tensor.register_hook, GET_HISTORY), TorchCalls._hook),
    **dict.fromkeys(ORIGIN, TorchCalls._origin),
    **dict.fromkeys((IS_ALL_TRUE, torch.Tensor.all), TorchCalls._all_true),
    **dict.fromkeys(POWERS, TorchCalls._power),
    **dict.fromkeys(REFUSED, TorchCalls._refuse),
    **BY_OPERATORS,
}  # fmt: skip



def _converted(convert: Callable[[Any], Any]) -> Callable[[TorchCalls, Any, Any], Any]:
    def read(calls: TorchCalls, func: Any, args: Any) -> Any:
        if convert is operator.index and args[0].numel() != 1:
            return func(*args)  # an error of another type than item()'s
        return convert(calls.call(torch.Tensor.item, args, {}))

    return read


# Tensor methods that give a value to Python, and how.
READABLE: dict[str, Callable[[TorchCalls, Any, Any], Any]] = {
    **{f"__{kind.__name__}__": _converted(kind) for kind in (float, int, operator.index, complex)},
    "tolist": lambda calls, func, args: calls.numbers.as_list(args[0]),
    "__contains__": lambda calls, func, args: calls.call(func, args, {}),
}


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("wholestep.")


def _is_index(leaf: Any) -> bool:
    """Whether something is a tensor that C++ takes as an integer."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and not leaf.is_floating_point()
