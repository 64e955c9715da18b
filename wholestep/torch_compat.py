"""The only file that names private modules, functions and classes of torch. Seen in torch 2.11 to 2.13.

Private attributes of torch's objects are also read where they are needed: ``_base``, ``_version``, ``_is_view()`` and
``_backward_hooks`` of tensors, ``_schema`` of operators, ``_saved_…`` of autograd nodes, ``_forward_cls`` of contexts.
Each name says what it is for; `tests/project/test_torch_compat.py` fails when one of them moves.
May import: cached_property.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial, wraps
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import sympy
import torch
from torch import fx
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._decomp import decomposition_table
from torch._guards import Source
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx._symbolic_trace import is_fx_symbolic_tracing as is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _foreach_utils
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import SUPPORTED_NODES as PYTREE_NODES  # noqa: F401
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._sympy.printers import PythonPrinter

from wholestep.cached_property import cached_by_class

without_autocast: Callable[[], AbstractContextManager[object]] = torch._C._DisableAutocast
"""Context manager: no device casts."""

casts: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether operators are cast, on any device; not within a kernel of autocast itself."""

decomposition_of: Callable[[Any], Callable[..., Any]] = decomposition_table.__getitem__
"""The function by which torch says an operator in terms of others."""

set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
"""Sets version counters, as in-place calls would have left them."""

current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node  # type: ignore[attr-defined]
"""The autograd node that the engine is running on this thread, if any."""

lazy_graph_module: Callable[[torch.nn.Module | dict[str, Any], fx.Graph], fx.GraphModule] = _LazyGraphModule
"""A graph module that writes and compiles its Python when that is first read or run.

An ordinary one does so when it is made, and torch keeps the text of each for good.
"""


def with_autograd() -> AbstractContextManager[object]:
    """Context manager: the layers that `below_autograd` skips take part again inside of it, too."""
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD_LAYERS
    )


_outside = torch._C._dispatch_tls_local_exclude_set()
with torch._C._AutoDispatchBelowADInplaceOrView():
    _AUTOGRAD_LAYERS = torch._C._dispatch_tls_local_exclude_set() - _outside
    with without_autocast():
        _ABOVE = torch._C._dispatch_tls_local_exclude_set()

below_autograd: Callable[[], AbstractContextManager[object]] = partial(torch._C._ExcludeDispatchKeyGuard, _ABOVE)
"""Context manager: operators skip the layers of the dispatcher for autocast, autograd and version counters."""


def has_native_kernel(op: OpOverload, key: str) -> bool:
    """True when an overload has a kernel of its own for dispatch key ``key`` ("CPU", "CUDA").

    The dispatcher does not know what tensors of a subclass are asked for their sizes by, and fails when asked about it.
    """
    name = op.name()
    return bool(torch._C._dispatch_has_kernel(name)) and bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


@cache
def is_one_operator(function: Any) -> bool:
    """Whether a function of torch is one operator, dispatched with the arguments as they were given."""
    if isinstance(function, OpOverload):
        overloads = [function]
    elif isinstance(function, FunctionType):
        return False
    else:
        named = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
        packet = function if isinstance(function, OpOverloadPacket) else named
        overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    key = "CompositeImplicitAutograd"
    made = (torch._C._dispatch_has_kernel(op.name()) and not has_native_kernel(op, key) for op in overloads)
    return bool(overloads) and all(made)


def is_one_of_several(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as one of several views that one call made, which nobody may write."""
    several = torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE
    return tensor._is_view() and torch._C._autograd._get_creation_meta(tensor) == several


def refusing_backward(words: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives a tensor of the same memory, with a version counter of its own, whose backward raises a
    RuntimeError of these words: in C++, in a quarter of the time that an `autograd.Function` takes."""
    fail = torch._C._functions.DelayedError(words.encode(), 1)
    return lambda tensor: fail(tensor.detach().requires_grad_())


def make_one_of_several(view: torch.Tensor, outdated: bool) -> None:
    """Has autograd treat a view as one of several that one call made.

    Args:
        outdated: whether its base was written since: then nobody may use it.
    """
    version = view._version
    if outdated:
        set_versions((view,), (1 << 30,))  # one that no count comes to
    _ = view.grad_fn  # made now, for this version
    torch._C._autograd._set_creation_meta(view, torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE)
    set_versions((view,), (version,))


def node_sequence_number(node: Any) -> int:
    """The sequence number of an autograd node; a backward node has that of its forward operator."""
    return int(node._sequence_nr())


def sequence_number() -> int:
    """The number that autograd gives to the next node it makes."""
    return int(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]


def saved_as_it_is(node: Any, name: str) -> torch.Tensor | None:
    """What a node of torch's own saved under a name; None where a hook packed it, or it was freed."""
    raw = getattr(node, f"_raw_saved_{name}")
    return None if raw.unpack_hook is not None else getattr(node, f"_saved_{name}")


def is_packed(node: Any) -> bool:
    """Whether a node of torch's own saved a tensor that a hook packed, other than torch's own."""
    try:
        saved = [getattr(node, name) for name in _saved_names(node.__class__)]
    except RuntimeError:  # a list of them, freed
        return False
    hooks = [raw.unpack_hook for one in saved for raw in (one if isinstance(one, tuple) else (one,))]
    return any(hook is not None and not str(hook.__module__).startswith("torch.") for hook in hooks)


@cached_by_class
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple([name for name in dir(kind) if name.startswith("_raw_saved_")])


def saved_numbers(node: Any, name: str) -> tuple[Any, ...]:
    """The numbers that an autograd node saved under the name of one of its operator's arguments, as they were given."""
    found = getattr(node, f"_saved_{name}", None)
    several = found if isinstance(found, tuple) else (found,)
    return tuple(n - (1 << 64) if isinstance(n, int) and n >= 1 << 63 else n for n in several)  # it shows no sign


CUMPROD_BY_DATA = torch.__version__.startswith("2.11.")
"""Whether autograd's gradient of `cumprod` rounds otherwise where it must not look at the data; not since 2.12."""


# The kinds of what fake tensors refuse, by the names and, in torch 2.11, by the words of their errors.
_REFUSALS = {
    "DataDependentOutputException": "data",
    "DynamicOutputShapeException": "data",
    "UnsupportedOperatorException": "operator",
    "FakeTensorDeviceMismatchError": "device",
    "Unhandled FakeTensor Device Propagation": "device",
    "no fake impl registered": "operator",
    "NestedTensorImpl": "operator",
    "its data is not allocated yet": "memory",
    "_share_fd_: only available on CPU": "memory",
    "on tensor with symbolic sizes/strides": "symbols",
}


def makes_subclass(error: Exception) -> bool:
    """True where C++ could not make a tensor of a subclass (``Subclass(tensor)``), since a mode made it of another."""
    return isinstance(error, RuntimeError) and "raw Tensor object is already associated" in str(error)


def fake_refusal(error: RuntimeError) -> str | None:
    """Why fake tensors refuse a call; None when the error is the operator's own.

    Returns:
        "data": the result's shape or value depends on data; "operator": it has no rule for fake tensors;
        "device": tensors of two devices; "memory": C++ reads a tensor's memory past the dispatcher; "symbols": C++ asks
        for sizes that are symbols as plain numbers.
    """
    found = f"{type(error).__name__}: {error}"
    return next((kind for words, kind in _REFUSALS.items() if words in found), None)


def is_linearized() -> bool:
    """Whether `torch.func.linearize` calls, which runs parts of what it has traced. Seen in torch 2.13."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.func.linearize.__code__:
        frame = frame.f_back
    return frame is not None


def held_by_cpp(tensor: Any) -> bool:
    """Whether C++ holds a tensor besides Python, and so one reference to its object. Seen from torch 2.12 on."""
    known = isinstance(tensor, torch.Tensor) and not torch.__version__.startswith("2.11")
    return known and tensor._use_count() > 1  # type: ignore[attr-defined]


def needs_memory(error: BaseException | None) -> bool:
    """True for the error of C++ that asks tensors past the dispatcher: no operator may be deferred before it."""
    return isinstance(error, RuntimeError) and (makes_subclass(error) or fake_refusal(error) == "memory")


def refuse_addresses(mode: FakeTensorMode) -> None:
    """Has a mode's tensors refuse to give an address ("Cannot access data pointer of Tensor …")."""
    mode._allow_unsafe_data_ptr_access = False


_mkldnn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
_threads, _deterministic = torch.get_num_threads, torch._C._get_deterministic_algorithms


def kernel_settings() -> tuple[Any, ...]:
    """Settings of the process by which operators choose among their kernels."""
    return _threads(), _mkldnn_enabled(), _deterministic(), attention_kernels()


_ATTENTION = [getattr(torch._C, f"_get_{name}_sdp_enabled") for name in ("flash", "math", "mem_efficient")]


def attention_kernels() -> tuple[bool, ...]:
    """The kernels among which `scaled_dot_product_attention` chooses, in C++, while a step is traced."""
    return tuple([is_enabled() for is_enabled in _ATTENTION])


def unseen_fakes() -> tuple[Any, str, type]:
    """What to put where libraries find the class of fake tensors, to tell tracing from running: module, name, class."""

    class Unseen(type):
        def __instancecheck__(cls, value: Any) -> bool:
            frame: Any = sys._getframe(1)
            while frame.f_globals.get("__name__") == "wholestep.patches":
                frame = frame.f_back
            return isinstance(value, FakeTensor) and str(frame.f_globals.get("__name__")).startswith("torch.")

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, FakeTensor)

    return torch._subclasses, "FakeTensor", Unseen("FakeTensor", (), {})


@cache
def _attributes_of_fakes() -> frozenset[str]:
    with no_modes():
        return frozenset(vars(FakeTensorMode().from_tensor(torch.empty(0)))) | {"_is_param"}


def is_fakes_own(name: str) -> bool:
    """Whether an attribute of a fake tensor is torch's or this package's, and not one of the step's code."""
    return name in _attributes_of_fakes() or name.startswith("wholestep_")


def empty_fake(mode: FakeTensorMode, like: torch.Tensor, layout: tuple[Any, Any] | None = None) -> FakeTensor:
    """A fake tensor of a strided tensor's dtype and device, in memory of its own; its size and stride unless given.

    Made directly; through the dispatcher it takes four times as long.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        size, stride = layout or (like.size(), like.stride())
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=like.dtype, device="meta"), like.device)


def fake_of(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A fake tensor that stands for another tensor without a history, with as much memory, whoever shares that.

    Made directly for a strided tensor; by torch's converter it takes ten times as long, and where sizes are symbols,
    `set_` and `empty_strided` take thirty times as long as this, to say how much memory they need.
    """
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        with no_modes():
            return mode.from_tensor(tensor.detach(), static_shapes=True)
    # inference mode may be on where the step first reads it; a view of an inference tensor's fake is refused
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        made = torch.empty(0, dtype=tensor.dtype, device="meta")
        torch.ops.inductor.resize_storage_bytes_(made, tensor.untyped_storage().nbytes())
        made = made.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return FakeTensor(mode, made, tensor.device)


def fake_view(base: Any, like: torch.Tensor) -> FakeTensor:
    """A fake tensor in the memory of one, of another's dtype, size, stride and offset."""
    # in inference mode, too, a view is an inference tensor where its base is one
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.inference_mode(base.is_inference()):
        made = torch.empty(0, dtype=like.dtype, device="meta").set_(base.untyped_storage(), 0, (0,), (1,))
        made = made.as_strided(like.size(), like.stride(), like.storage_offset())
        return FakeTensor(base.fake_mode, made, base.fake_device)


def viewed(base: Any, size: torch.Size) -> FakeTensor:
    """A view of a fake tensor as C++ lays it out: torch's rule gives sizes of one other strides."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        like = base.view(size)
    return fake_view(base, like)


class _SizeName(Source):
    """The name of a size, as the shape environment asks for it."""

    def __init__(self, name: str) -> None:
        self.__dict__["text"] = name

    @property
    def _name_template(self) -> str:
        return str(self.__dict__["text"])


class ShapeEnvironment(ShapeEnv):
    """torch's environment of symbolic sizes, which also notes the place of each decision.

    Args:
        place: gives the user's line.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        super().__init__()
        self._place, self._lines = place, dict[int, str]()

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        before = len(self.guards)
        outcome = super().evaluate_expr(*args, **kwargs)
        if len(self.guards) > before:
            self._lines.update(dict.fromkeys(range(before, len(self.guards)), self._place()))
        return outcome

    def conditions(self) -> list[tuple[Any, str]]:
        """Everything that was decided: expressions that are true, and the user's line."""
        return [(guard.expr, self._lines.get(i, "")) for i, guard in enumerate(self.guards)]

    def only(self, symbol: Any) -> tuple[int, str] | None:
        """The one value that a size can have, and the line that decided so; None where there are more."""
        known = self.replace(symbol)
        if not known.is_Integer:
            return None
        lines = [line for guard, line in self.conditions() if symbol in guard.free_symbols]
        return int(known), lines[0] if lines else ""


def size_symbol(env: ShapeEnvironment, name: str, value: int) -> tuple[Any, Any]:
    """A symbol for a size, and the number that stands for it."""
    symbol = env.create_symbol(value, source=_SizeName(name), dynamic_dim=DimDynamic.DYNAMIC)
    return symbol, env.create_symintnode(symbol, hint=value)


def expression_of(number: Any) -> Any:
    """What a symbolic number is, in terms of symbols; anything else as it is."""
    is_symbolic = isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return getattr(number.node, "_expr", number) if is_symbolic else number  # none for what is known at runs alone


def equal_expressions(first: Any, second: Any) -> bool:
    """Whether two numbers are one expression in symbols, which decides nothing on them."""
    return bool(sympy.expand(expression_of(first) - expression_of(second)) == 0)


def simplified(number: Any) -> Any:
    """The same, with sizes that must be equal as one symbol."""
    return number.node.expr if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else number


@cache
def python_text(expression: Any) -> str:
    """An expression, or condition, in Python, with its symbols' names as variables; `math` is among its globals."""
    return str(PythonPrinter().doprint(expression))


def evaluated(number: Any, values: Mapping[Any, int]) -> Any:
    """A symbolic number or expression, given what its symbols are."""
    expression = expression_of(number)
    if not hasattr(expression, "xreplace"):
        return expression
    found = expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    if found.is_Boolean:
        return bool(found)
    return int(found) if found.is_integer else float(found)


@contextmanager
def no_modes() -> Iterator[None]:
    """Real execution inside of a trace: no dispatch mode, no function mode, no gradient."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        keys = torch._C._dispatch_tls_local_include_set() - _MODES  # which torch's tracing sets again by itself
        with torch._C._ForceDispatchKeyGuard(keys, torch._C._dispatch_tls_local_exclude_set()):
            yield


_OFF = torch._C._dispatch_tls_local_exclude_set()
_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python).add(torch._C.DispatchKey.PythonTLSSnapshot)


@contextmanager
def dispatching() -> Iterator[None]:
    """Dispatch modes see what is called also where C++ has switched them off, as in ``torch.LongTensor([tensor])``."""
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _OFF):
        yield


_entry: Callable[[], AbstractContextManager[object]] = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]


def as_called(autograd: bool) -> AbstractContextManager[object]:
    """Context manager, in a dispatch mode: autocast takes part, as where the operator was called, and autograd may."""
    with _entry():
        off = torch._C._dispatch_tls_local_exclude_set()
    off = off if autograd else off | _AUTOGRAD_LAYERS
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off)


def casts_where_called() -> bool:
    """Whether, in a dispatch mode, operators were cast where the one at hand was called."""
    with _entry():
        return casts()


dispatch_modes_off: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""Context manager: no dispatch mode of this thread sees what is called."""

function_modes_disabled: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
"""Context manager: no function mode of this thread sees what is called."""

function_modes_enabled: Callable[[], AbstractContextManager[Any]] = torch._C._EnableTorchFunction
"""Context manager: they see it again."""

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes of this thread see calls of torch's Python API."""

function_modes_off: Callable[[], bool] = torch._C._is_torch_function_all_disabled
"""True where function modes see nothing, as inside of `no_modes`."""

address_of: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr
"""A storage's address, also where a trace has exchanged the method."""


def generator_id(generator: torch.Generator) -> int:
    """Identifies a random generator; Python may hold several objects of one."""
    return int(generator._cdata)  # type: ignore[attr-defined]


# --- capture ---------------------------------------------------------------------------------------------

# The reading of a tensor's version counter, as function modes see it.
GET_VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]

# The questions whether a tensor is a view, and of what.
GET_BASE: Any = torch.Tensor._base.__get__  # type: ignore[union-attr]
IS_VIEW: Any = torch.Tensor._is_view

# By which `torch.distributions` checks what it is given.
IS_ALL_TRUE: Any = torch._is_all_true

# What context managers keep of what they found on entry, by attribute names.
FOUND_ON_ENTRY = frozenset({
    "prev", "prev_cache_enabled", "prev_fastdtype", "prev_idx", "prev_stream", "prev_mode", "old_device", "record",
    "_cupti_monitor_external_id", "_inference_mode_context",
})

# A tensor's hook tables, by the attribute names that set them again; None where no hook was ever added.
HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")


_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """`torch.get_default_device`; where no function mode is active, none can have changed it (0.1 instead of 3 µs)."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


# By which Python learns what function modes are active, of which tracing is one.
FUNCTION_MODES = ("_get_current_function_mode", "_get_current_function_mode_stack", "_len_torch_function_stack")

# Where torch's optimizers find the functions that update a list of parameters one by one.
SINGLE_TENSOR_UPDATES = [
    (module, f"_single_tensor_{path.rpartition('.')[2].lstrip('_')}")
    for path, module in sorted(sys.modules.items()) if path.startswith("torch.optim.")
]  # fmt: skip

# Where the gradient clipping functions find the one that tells whether tensors are of types that have foreach forms.
FOREACH_SUPPORT = importlib.import_module("torch.nn.utils.clip_grad"), "_has_foreach_support"


def has_foreach_support(tensors: Sequence[torch.Tensor | None], device: torch.device) -> bool:
    """That function for fake tensors, which have those forms where real ones do."""
    types = (*_foreach_utils._foreach_supported_types, FakeTensor)
    return _foreach_utils._device_has_foreach_support(device) and all(t is None or type(t) in types for t in tensors)


# The class whose `forward` all BatchNorm modules have.
BatchNorm = _BatchNorm

# Names of functions that read settings, and among these of those that say how torch itself is at work just now.
_GETTER = re.compile(r"(^|_)(get|is|are)_|[eE]nabled|Always|^_check_sparse")
_OF_WORK = re.compile(r"function|grad|inference|autocast|default_d|thread_name|priv|types|group|mps|stats")
_WITHOUT_ARGUMENTS = 4  # METH_NOARGS


def setting_functions() -> tuple[list[Callable[..., Any]], dict[str, Any]]:
    """Functions by which Python reads and sets torch's settings, without those that tracing follows.

    Returns:
        the functions that read one; by name, those that set one: the function that reads it or None, and itself.
    """
    flags = ctypes.pythonapi.PyCFunction_GetFlags
    flags.argtypes, flags.restype = [ctypes.py_object], ctypes.c_int
    functions: dict[str, Any] = {n: f for n, f in vars(torch._C).items() if isinstance(f, BuiltinFunctionType)}
    read = {n: f for n, f in functions.items() if _GETTER.search(n) and flags(f) & _WITHOUT_ARGUMENTS}
    precision = "_get_fp32_precision_getter", "_set_fp32_precision_setter"
    read |= {n: functions[n] for n in (precision[0], "_get_graph_executor_optimize") if n in functions}
    read["_profiler_enabled"] = torch._C._autograd._profiler_enabled
    read = {n: f for n, f in read.items() if not _OF_WORK.search(n)}
    of_python = torch.__future__, torch.backends.mha, torch.hub, torch.multiprocessing
    members = [member for module in of_python for member in vars(module).items() if isinstance(member[1], FunctionType)]
    read |= {n: f for n, f in members if n.startswith("get_") and not f.__code__.co_argcount}
    pairs = {n.replace(word, "set_"): n for n in read for word in ("get_", "is_")}
    pairs |= {precision[1]: precision[0], "_set_check_sparse_tensor_invariants": "_check_sparse_tensor_invariants"}
    set_by = {n: (read.get(pairs.get(n, "")), f) for n, f in functions.items() if n in pairs and pairs[n] != n}
    set_by |= {n: (None, functions[n]) for n in ("set_flush_denormal", "_set_default_tensor_type")}
    set_by["_set_default_dtype"] = torch.get_default_dtype, functions["_set_default_dtype"]
    chosen = re.compile("cu(dnn|blas)|miopen|sdp|onednn")  # of kernels that are chosen while tracing, or not a CPU's
    return list(read.values()), {n: s for n, s in set_by.items() if not chosen.search(n)}


def make_optimizer_state(optimizer: Any, group: dict[str, Any]) -> None:
    """Has one of torch's optimizers make the state of a group's parameters that have gradients, as its step begins."""
    make = inspect.unwrap(type(optimizer)._init_group)  # which Dynamo's import wraps
    make(optimizer, group, *([] for _ in range(make.__code__.co_argcount - 2)))  # lists, which it fills


_einsum = vars(torch.backends.opt_einsum)
_einsum_module = vars(_einsum["m"])
_parametrize = vars(torch.nn.utils.parametrize)
_checkpoint = vars(torch.utils.checkpoint)


def python_flags() -> tuple[Any, ...]:
    """Settings that torch keeps in Python.

    How `torch.einsum` chooses the order of its products, as set by attribute and by functions; whether parametrized
    tensors are computed once for several uses; and whether checkpoints run again to their end.
    """
    own, shared, cached = _einsum, _einsum_module, _parametrize["_cache_enabled"] > 0
    early = _checkpoint["_enable_checkpoint_early_stop"]
    return own.get("enabled"), own.get("strategy"), shared.get("enabled"), shared.get("strategy"), cached, early


_kernels = {"replaced": 0}


def replaced_kernels() -> int:
    """How often Python has registered a kernel of an operator in the place of another one."""
    return _kernels["replaced"]


def _has_kernel(library: torch.library.Library, op_name: Any, fn: Any, dispatch_key: str = "", **_: Any) -> bool:
    """Whether an operator has a kernel where a call of `Library.impl` would put one."""
    name = op_name if isinstance(op_name, str) else op_name.name()
    name = name if "::" in name else f"{library.ns}::{name}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        name, dispatch_key or library.dispatch_key or "CompositeImplicitAutograd")


def _counting(impl: Callable[..., None]) -> Callable[..., None]:
    @wraps(impl)
    def counting(library: torch.library.Library, *args: Any, **options: Any) -> None:
        replaces = False
        with suppress(Exception):  # of an operator that is defined later; else the call itself says it
            replaces = _has_kernel(library, *args, **options)
        impl(library, *args, **options)
        _kernels["replaced"] += replaces

    return counting


# Torch keeps no such number, and nothing else that is quick to compare.
torch.library.Library.impl = _counting(torch.library.Library.impl)  # type: ignore[method-assign]


_SHARED = (vars(sys.modules[kind.__module__]) for kind in (torch.nn.Module, torch.optim.Optimizer))
_GLOBAL_HOOKS = [table for names in _SHARED for name, table in names.items()
                 if name.startswith("_global_") and isinstance(table, dict)]  # fmt: skip


def global_hooks() -> dict[int, Callable[..., Any]]:
    """The hooks that all modules or optimizers have, but for our own, by numbers of which none is given twice."""
    if not any(_GLOBAL_HOOKS):
        return {}
    return {number: hook for table in _GLOBAL_HOOKS for number, hook in [*table.items()]
            if callable(hook) and not str(getattr(hook, "__module__", "")).startswith("wholestep.")}


# The functions behind `torch.nn.utils.rnn.pack_padded_sequence` and `pad_packed_sequence`.
PACKED_SEQUENCES = torch._pack_padded_sequence, torch._pad_packed_sequence


# The operators under which Dynamo puts the regions of `torch.utils.checkpoint`.
CHECKPOINT_OPERATORS: list[type] = [
    type(getattr(torch.ops.higher_order, f"{name}_activation_checkpoint")) for name in ("tag", "wrap")
]


# Where higher-order operators called in eager have Dynamo run them; absent from some versions. Under a dispatch mode it
# does not, and notes that it shall not later either.
COMPILED_OPERATORS = importlib.import_module("torch._higher_order_ops.utils"), "_hop_compile_and_call"

# What `F.cross_entropy` calls: with the targets, weights, kind of reduction, target to ignore, smoothing of labels.
CROSS_ENTROPY = torch._C._nn, "cross_entropy_loss"

# Modules from which C++ asks for the repr of arguments that fit no overload.
DESCRIBING_MODULES = (OpOverload.__module__, "torch._decomp.decompositions")


def checkpoint_contexts(body: fx.GraphModule) -> dict[str, Any]:
    """What Dynamo keeps of a checkpoint's ``context_fn``, as an argument of `torch.utils.checkpoint.checkpoint`."""
    found = body.meta.get("_checkpoint_context_fn")
    return {} if found is None else {"context_fn": found}


# --- lower -----------------------------------------------------------------------------------------------


direct_call: Callable[[OpOverload], Callable[..., Any]] = operator.attrgetter("_op")
"""The C++ entry of an overload, without the Python frame around it (1.7 instead of 2.1 µs a call)."""


def mkl_square_root() -> tuple[int, int]:
    """Addresses in the MKL within torch, 0 for none: the square root, and what sets this thread's number of threads.

    ``void vmsSqrt(int n, const float *a, float *r, int64 mode)``, which torch's own square root calls on the CPU, and
    which does not round correctly; ``int MKL_Set_Num_Threads_Local(int n)``, which returns the number before.
    """
    return _address("vmsSqrt"), _address("MKL_Set_Num_Threads_Local")


@cache
def matrix_product() -> int:
    """Address of the BLAS's ``sgemm_`` within torch; 0 for none."""
    return _address("sgemm_")


@cache
def openmp() -> list[int]:
    """Addresses in the OpenMP within torch: a parallel region, a thread's number there, of how many, and the most."""
    return [*map(_address, ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads"))]


# The class that all tensors' Python objects begin with.
TENSOR_BASE: type = torch._C.TensorBase


def tensor_offsets() -> tuple[int, ...]:
    """Where, in a tensor's Python object, the C++ tensor and the tables of `HOOK_TABLES` lie; empty if not found."""
    probe = torch.zeros(1, requires_grad=True)
    for name in HOOK_TABLES:
        setattr(probe, name, {})
    wanted = [probe._cdata, *(id(getattr(probe, name)) for name in HOOK_TABLES)]  # type: ignore[attr-defined]
    found = {ctypes.c_size_t.from_address(id(probe) + at).value: at for at in range(16, TENSOR_BASE.__basicsize__, 8)}
    return tuple(found[word] for word in wanted) if found.keys() >= {*wanted} else ()


def tensor_functions() -> tuple[int, ...]:
    """Addresses of the functions that read a C++ tensor's dim, dtype, type and number of device, sizes and strides; of
    methods of what it refers to; and of functions that read and move its version counter.
    """
    names = [f"aoti_torch_get_{name}" for name in ("dim", "dtype", "device_type", "device_index", "sizes", "strides")]
    return tuple(map(_address, (*names, *_METHODS)))


def layout_functions() -> tuple[int, ...]:
    """Addresses of those for a tensor's dim, dtype, sizes, strides and offset in its storage."""
    return tuple(_address(f"aoti_torch_get_{name}") for name in ("dim", "dtype", "sizes", "strides", "storage_offset"))


def plain_tensor() -> tuple[tuple[int, ...], int]:
    """Where a tensor's C++ part lies in its Python object, and in that its storage and dispatch keys; and these keys.

    The place is empty if not found. Tensors that are nested, sparse, conjugated, of a class that dispatches in
    Python and so on have other keys.
    """
    probe, at = torch.zeros(1), tensor_offsets()[:1]
    keys = torch._C._dispatch_keys(probe).raw_repr()  # type: ignore[attr-defined]
    wanted, words = (storage_id(probe.untyped_storage()), keys), list[int]()
    for place in range(0, _TENSOR_BYTES, 8):
        words.append(ctypes.c_size_t.from_address(probe._cdata + place).value)  # type: ignore[attr-defined]
        if keys in words:  # the last of its words: torch 2.13 has one less than 2.12
            break
    return (*at, *(8 * words.index(word) for word in wanted)) if at and all(map(words.count, wanted)) else (), keys


_TENSOR_BYTES = 184  # of what a C++ tensor refers to, at most


_METHODS = (  # requires_grad, grad, is_inference, _version, bump_version
    "_ZNK3c1010TensorImpl13requires_gradEv", "_ZNK3c1010TensorImpl4gradEv", "_ZN2at6native12is_inferenceERKNS_6TensorE",
    "_ZNK2at10TensorBase8_versionEv", "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
)  # fmt: skip


# By which C++ tells its settings, each as a byte: of a thread, of a type of device, and of the whole process.
_THREAD = ("aoti_torch_grad_mode_is_enabled", "_ZN3c1013InferenceMode10is_enabledEv",
           "_ZN2at8autocast25is_autocast_cache_enabledEv", "_ZN3c1031get_default_dtype_as_scalartypeEv")  # fmt: skip
_DEVICE = ("_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE",
           "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE")  # fmt: skip
_PROCESS = ("_ZNK2at7Context23deterministicAlgorithmsEv", "_ZNK2at7Context19userEnabledFlashSDPEv",
            "_ZNK2at7Context18userEnabledMathSDPEv", "_ZNK2at7Context26userEnabledMemEfficientSDPEv")  # fmt: skip


def setting_addresses() -> list[tuple[int, int]]:
    """Addresses of these functions, each with its argument; empty where one is missing."""
    context = _address("_ZN2at13globalContextEv")
    whole = ctypes.CFUNCTYPE(ctypes.c_size_t)(context)() if context else 0
    names = [*((name, 0) for name in _THREAD), *((name, kind) for name in _DEVICE for kind in (0, 1)),
             *((name, whole) for name in _PROCESS)]  # fmt: skip
    found = [(_address(name), argument) for name, argument in names]
    return found if whole and all(address for address, _ in found) else []


def _address(name: str) -> int:
    folder = Path(torch.__file__).parent / "lib"
    try:
        found = getattr(ctypes.CDLL(str(folder / "libtorch_cpu.so")), name)
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter


def full_precision() -> bool:
    """Whether products of float32 matrices are computed in float32 on the CPU."""
    return _precision("mkldnn", "matmul") in ("none", "ieee")


storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Identifies a storage, also one without memory, as long as it lives; equal for all that Python holds of it."""


has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage
"""Whether a tensor has a storage; where it has none, torch ends the process if asked for it below autograd."""


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is zeros without memory, as forward-mode differentiation makes them."""
    return tensor._is_zerotensor()


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many owners a storage has in C++: tensors, and its Python object as one."""
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], mode: FakeTensorMode
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Inductor's code for a graph of pure ATen calls: decomposed first, then compiled.

    Args:
        gm: placeholders and ATen calls only.
        inputs: fake tensors of ``mode``, one for each placeholder.
        mode: what the graph's values were made in.

    Returns:
        A callable from a list of tensors, which it empties, to the flat outputs.

    Inductor is loaded here, by name: it takes a second and loads much that no other backend needs.
    """
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    decomposition = importlib.import_module("torch._inductor.decomposition")
    virtualized = importlib.import_module("torch._inductor.virtualized")
    table = {**decomposition.select_decomp_table(), torch.ops.aten.nll_loss_backward.default: nll_loss_backward}
    with torch.no_grad(), mode:
        plain = make_fx(gm, decomposition_table=table, tracing_mode="real")(*inputs)
    with torch.no_grad(), virtualized.V.set_fake_mode(mode):
        return compile_fx.compile_fx_inner(plain, list(inputs))  # type: ignore[no-any-return]


def nll_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int,
    ignored: int, total: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Elementwise, where torch's own fills memory with zeros and scatters into it: half the time for 30,000 classes."""
    target = target.unsqueeze(-1)
    classes = torch.arange(x.shape[-1], device=x.device)
    share = grad / total if reduction == 1 else grad
    share = share.unsqueeze(-1) if share.dim() else share
    if weight is not None:
        share = share * weight
    return torch.where((classes == target) & (target != ignored), -share, 0.0).to(x.dtype)


def inductor_kernels(compiled: Any) -> dict[str, Any]:
    """The globals of the Python that Inductor wrote for a graph; its C++ kernels are those of type `builtin`.

    Each is the function ``kernel`` of a module that is a shared library: it takes tensors, of which it reads and writes
    the memory, and in C a pointer for each of them.
    """
    return compiled.current_callable.__globals__  # type: ignore[no-any-return]


def parse_schema(text: str) -> Any:
    """The schema of an operator, from its text."""
    return torch._C.parse_schema(text)


# --- comm ------------------------------------------------------------------------------------------------


count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many `TorchDispatchMode`s the calling thread is inside of."""


PROFILER: tuple[dict[str, Any], str] = vars(torch.autograd.profiler), "_is_profiler_enabled"
"""A dict and its key of what is True while a profiler runs in this process."""


def begin_profiled_range(name: str, *tensors: torch.Tensor) -> Callable[[], None]:
    """Begins a range of a profile, with the shapes of these tensors; gives what ends it."""
    return partial(torch._C._autograd._record_function_with_args_exit,
                   torch._C._autograd._record_function_with_args_enter(name, *tensors))  # fmt: skip


def gloo_options(engine: Any, address: str, timeout: timedelta) -> Any:
    """Options of the Gloo engine's class ``engine``: listen on that address alone, with that time-out."""
    made = engine._Options()
    made._devices = [engine.create_device(hostname=address)]
    made._timeout = timeout
    return made


def dispatch_modes_active() -> bool:
    """True inside a `TorchDispatchMode`: a recorder, or a fake-tensor mode, sees every call."""
    return count_dispatch_modes() > 0


def modes_active() -> bool:
    """True inside of a mode that sees operators, or calls of torch's Python API; a default device is none of these."""
    if count_dispatch_modes() > 0:
        return True
    return function_modes() > 0 and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def is_inside(mode: TorchDispatchMode) -> bool:
    """True where a dispatch mode is active in the calling thread, which the autograd engine may lend it."""
    return count_dispatch_modes() > 0 and any(active is mode for active in _get_current_dispatch_mode_stack())


def is_deferring() -> bool:
    """True inside of a mode that has operators run later, with real tensors."""
    return count_dispatch_modes() > 0 and any(
        getattr(active, "deferring", False) for active in _get_current_dispatch_mode_stack()
    )


# --- autograd --------------------------------------------------------------------------------------------

set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
"""`torch.set_grad_enabled` as a plain call."""

def transforms_active() -> bool:
    """True inside of `torch.func`'s transforms, and where forward-mode gradients are computed."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""True for many gradients in one, as `torch.autograd.grad(…, is_grads_batched=True)` makes them."""


@contextmanager
def engine_compiler(make: Callable[[], Any]) -> Iterator[None]:
    """The autograd engine describes each backward to an object that ``make`` gives, instead of running it.

    The engine calls the object's methods for a structure that it has not met (`aot_autograd/autograd_graph.py`), then
    what its `end_capture` returned, with the structure's tensors, sizes, scalars, hooks and packed values.
    """
    engine = torch._C._dynamo.compiled_autograd
    prior = engine.set_autograd_compiler(make, False)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        engine.set_autograd_compiler(*prior)


at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Has the autograd engine call a function when the backward ends inside of which this is called."""


def behind(roots: Iterable[Any]) -> Iterator[Any]:
    """All nodes of the autograd graph behind tensors, gradient edges or nodes."""
    starts = [root.node if isinstance(root, torch.autograd.graph.GradientEdge) else root for root in roots]
    waiting = [start.grad_fn if isinstance(start, torch.Tensor) else start for start in starts]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
            yield node


def backward_reaches(node: Any) -> bool | None:
    """Whether the backward inside of which this is called runs that node, too; None for a leaf's in `autograd.grad`."""
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined, no-any-return]
    except RuntimeError:
        return None


def innermost_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The pair of hooks that autograd would now use for what it saves, if there is one."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined, no-any-return]


def others_pack_saved_tensors() -> bool:
    """Whether autograd would now give what it saves to hooks that are neither torch's nor ours, which may change it."""
    hooks = innermost_saved_tensor_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "").split(".")[0] not in ("torch", "wholestep")


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """What autograd saves inside is given to no hooks from outside, as those of a checkpoint around it."""
    hooks: list[Any] = []
    while (innermost := innermost_saved_tensor_hooks()) is not None:
        hooks.append(innermost)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def refresh_flat_weights(module: torch.nn.RNNBase) -> None:
    """Has a recurrent module look up its parameters by name again, for the list that its forward takes."""
    module._init_flat_weights()


plain_subclasses: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""Context manager: functions take tensors of subclasses for plain ones."""

plain_torch_function: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""``(function, types, args, kwargs)``: calls a function that takes tensors of subclasses for plain ones."""

UNSCALE_GRADIENTS = torch._amp_foreach_non_finite_check_and_unscale_
"""The function by which `GradScaler` unscales gradients: ``(gradients, found_inf, factor)``."""

BACKWARD_ENGINE = torch.autograd, "_engine_run_backward"
"""Where `torch.autograd.backward` and `torch.autograd.grad` find the call of the engine by which they end:
``run(roots, grads, keep_graph, create_graph, inputs, ...)``."""


COLLECTIVE_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
"""Where torch.distributed's collectives are operators; all but the first's give new tensors."""


def wait_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for what a functional collective gave; gives the same tensor."""
    return torch.ops._c10d_functional.wait_tensor.default(tensor)  # type: ignore[no-any-return]


_Skipped = TypeVar("_Skipped")


class UnwrappedDispatchMode(TorchDispatchMode):
    """A dispatch mode that torch calls as it is: its wrapper, which keeps Dynamo away, takes 2 microseconds a call."""

    deferring = True  # operators run later

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_AS_WRITTEN: dict[str, Any] = {
    "_callback_from_stance": lambda callback: None, "set_fullgraph_compiled_frame_count": lambda count: 0
}  # fmt: skip


def asks_for_full_state() -> bool:
    """True within torch's ``get_model_state_dict`` or ``get_optimizer_state_dict`` with ``full_state_dict=True``.

    These gather tensors of torch's own classes alone, and give others as they are. Seen in torch 2.11 to 2.13."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("_get_model_state_dict", "_get_optim_state_dict"):
            return bool(getattr(frame.f_locals.get("info"), "full_state_dict", False))
        frame = frame.f_back
    return False


def nested_compiles() -> list[tuple[Any, str, Any]]:
    """Patches by which functions under `torch.compile` run as they are written, as under `set_stance("force_eager")`.

    What Dynamo compiled before reads memory past a dispatch mode; under one it skips frames, an error with its
    ``fullgraph=True``. Seen in torch 2.13."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return [(module, name, stand_in) for name, stand_in in _AS_WRITTEN.items() if hasattr(module, name)]


def floats_as_tensors(graph: fx.Graph) -> set[int]:
    """Which inputs of a graph of Dynamo's are Python floats that it hands on as tensors, where sizes are symbols.

    Their values are guards of its own wherever C++ has read them. NumPy's arrays and random numbers are handed on so,
    too: nobody asks for their `item`. Seen in torch 2.13."""
    found = set()
    for k, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        given, asked = node.meta.get("grapharg"), {(user.op, user.target) for user in node.users}
        number = getattr(given, "pass_arg_as_tensor", False) and not given.is_tensor
        found |= {k} if number and asked == {("call_method", "item")} else set()
    return found


def skipped_by_dynamo(target: _Skipped) -> _Skipped:
    """Decorator of a class or a function: Dynamo runs the methods, and all that they call, as they are.

    It evaluates Python frames that C++ calls between two of its graphs, as collectives of DDP and FSDP are.
    `torch.compiler.disable` does the same for the price of importing Dynamo. Seen in torch 2.13."""
    as_they_are = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for member in vars(target).values() if isinstance(target, type) else (target,):
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(function, FunctionType):
            set_code_exec_strategy(function.__code__, as_they_are)
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return target
