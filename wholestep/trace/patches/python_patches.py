"""The table of what is patched while a step is traced, for the thread that traces it (`wholestep/patches.py`).

Some things that a step does never reach the dispatcher: methods of torch's random generators, `math.sqrt` of a host
number, the end of a `backward()`. For these the functions themselves are replaced for the time of the trace.

`torch.get_rng_state`, `torch.manual_seed`, `torch.random.fork_rng` and what libraries make of them end in three methods
of generators, which become nodes of the graph. Others are refused (`external_calls.py`).
"""

from __future__ import annotations

import builtins
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx
from torch.utils import checkpoint as checkpoints

from wholestep import functional
from wholestep.capture.outside.torch_settings import Settings
from wholestep.capture.substitutes.detached_aliases import refuse_outside
from wholestep.errors import CaptureError, UnsupportedError
from wholestep.ir import Gradient, is_dense
from wholestep.marks import wanted_mean
from wholestep.patches import Replacement, original, patched, reading
from wholestep.torch_compat import (
    CHECKPOINT_OPERATORS,
    COMPILED_OPERATORS,
    FOREACH_SUPPORT,
    BatchNorm,
    FakeTensor,
    checkpoint_contexts,
    has_foreach_support,
    nested_compiles,
    no_modes,
    unseen_fakes,
)
from wholestep.trace.numbers.host_numbers import AWARE, HOSTS, aware_choice
from wholestep.trace.numbers.symbolic_sizes import is_made, is_size
from wholestep.trace.operators.data_dependent_formulas import by_data
from wholestep.trace.patches import types_asked
from wholestep.trace.patches.engine_hook import handled
from wholestep.trace.patches.function_mode import ReplacedGradients
from wholestep.trace.patches.like_updates import LikeUpdates
from wholestep.trace.record.recorder import Recorder, refuse_higher_order

Generator = torch.Generator

_get_state, _set_state, _manual_seed = Generator.get_state, Generator.set_state, Generator.manual_seed


def generator_methods(recorder: Recorder) -> list[Replacement]:
    """What stands in for the methods of generators while the step is traced."""
    builder, refused = recorder.builder, recorder.numbers.refused

    def operand(generator: Generator) -> tuple[fx.Node, ...]:
        try:
            node = recorder.inputs.generator(generator)
        except CaptureError as error:
            raise refused(error) from None
        return () if node is None else (node,)

    def get_state(generator: Generator) -> torch.Tensor:
        with no_modes(), builder.fake_mode:
            fake = torch.empty(_get_state(generator).numel(), dtype=torch.uint8)
            value = builder.detached(fake)
            builder.root(fake, builder.emit(functional.get_rng_state, operand(generator), value=value))
        return fake

    def set_state(generator: Generator, new_state: torch.Tensor) -> Generator:
        with no_modes():
            if not isinstance(new_state, torch.Tensor):
                _set_state(generator, new_state)  # eager's error
            scratch = Generator(generator.device)
            if new_state.dtype != torch.uint8 or new_state.numel() != _get_state(scratch).numel():
                _set_state(scratch, torch.zeros(tuple(new_state.shape), dtype=new_state.dtype))  # eager's error
            read = recorder.inputs.read(new_state)
            builder.emit(functional.set_rng_state, (read, *operand(generator)), value=())
        return generator

    def manual_seed(generator: Generator, seed: int) -> Generator:
        seed = int(seed) if isinstance(seed, torch.SymInt) else seed
        _manual_seed(Generator(generator.device), seed)  # eager's errors
        builder.emit(functional.manual_seed, (seed, *operand(generator)), value=())
        return generator

    recorded: list[Callable[..., Any]] = [get_state, set_state, manual_seed]
    return [(Generator, method.__name__, method) for method in recorded]


def _recorded_backward(
    recorder: Recorder, parameters: list[torch.Tensor], gradients: ReplacedGradients
) -> Callable[..., Any]:
    """`torch.autograd.backward` that also notes which gradients it left, for data parallelism."""
    run = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        grads = [p.grad for p in parameters]
        before = [gradient_memory(recorder, grad) for grad in grads]
        run(*args, **kwargs)
        changed = []
        for parameter, grad, old in zip(parameters, grads, before, strict=True):
            new, group = gradient_memory(recorder, parameter.grad), wanted_mean(parameter.grad)
            if new is None or (new is old and not group) or id(parameter) not in recorder.inputs.by_id:
                continue
            if group and recorder.builder.sizes is not None:
                what = "sizes that are symbols in a step whose gradients a wrapper reduces"
                raise UnsupportedError(what, "compile with dynamic=False, or pad batches to a few sizes")
            if new is not old:
                changed.append(parameter)
            note_gradient(recorder, str(recorder.inputs.of(parameter).source), grad, old, parameter.grad, group)
        gradients.accumulated(changed)

    return backward


def note_gradient(
    recorder: Recorder, source: str, before: torch.Tensor | None, memory: Any, grad: torch.Tensor | None,
    group: str | None = None,
) -> None:  # fmt: skip
    """Notes the gradient that a backward has left.

    Args:
        source: the parameter's.
        before: the gradient that was there, and ``memory`` the node that gave its memory then.
        group: of which the step itself wants the mean.
    """
    new = gradient_memory(recorder, grad)
    if memory is None and gradient_memory(recorder, before) is not None:  # a gradient from outside, new to the trace
        memory = recorder.inputs.ref(before).storage.first  # type: ignore[arg-type]
    if new is not None:
        ref = recorder.inputs.ref(grad)  # type: ignore[arg-type]
        place = tuple(ref.geometry.shape), tuple(ref.geometry.stride), ref.geometry.offset - ref.whole.geometry.offset
        recorder.builder.gradients.append(Gradient(source, memory and memory.name, new.name, place, group=group))


def gradient_memory(recorder: Recorder, grad: torch.Tensor | None) -> Any:
    """The node that gives the memory of a gradient; None for one that the step has not used."""
    if grad is None or (not is_made(grad) and id(grad) not in recorder.inputs.by_id):
        return None
    return recorder.inputs.ref(grad).storage.value


def _number_of(value: Any) -> Any:
    """`float` for BatchNorm's cumulative average, which divides by a batch count."""
    return value.item() if isinstance(value, torch.Tensor) else float(value)


_SYM_SUM = torch.sym_sum


def _sum(*args: Any) -> Any:
    """`torch.sym_sum`, which asks the first number for a sum of all."""
    items = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    return sum(items) if any(isinstance(item, HOSTS) for item in items) else _SYM_SUM(*args)


_NEW_PARAMETER = torch.nn.Parameter.__new__


def _traced_parameter(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> torch.Tensor:
    """`torch.nn.Parameter(data)`, which shares the memory of data from outside without the dispatcher's knowing."""
    if isinstance(data, torch.Tensor) and not is_made(data):
        data = data.detach()
    return _NEW_PARAMETER(cls, data, requires_grad)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


def _is_overridden(relevant_args: Any) -> bool:
    """`has_torch_function` blind to our own mode: where it is true, transformers leave the way that eager takes."""
    return any(type(v) not in _PLAIN and hasattr(type(v), "__torch_function__") for v in relevant_args)


def _size_aware(recorder: Recorder) -> list[Replacement]:
    """Functions of Python on numbers, which record what they do with host numbers.

    Floats that follow from symbolic sizes are host numbers too: as expressions they would round in another order. So is
    what follows from a symbolic size and a host number.
    """
    number = recorder.numbers.size

    def aware(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*map(number, args), **kwargs)

    def method(name: str) -> Callable[..., Any]:
        original = getattr(torch.SymInt, name)

        def call(size: Any, other: Any) -> Any:
            hosts = isinstance(other, (float, torch.SymFloat, *HOSTS)) or "truediv" in name
            if not hosts or not is_size(size):
                return original(size, other)
            return getattr(number(size), name)(number(other))

        return call

    functions = [(owner, name, aware(function)) for owner, name, function in AWARE
                 if isinstance(original(owner, name), BuiltinFunctionType)]  # none of the user's  # fmt: skip
    methods = SIZE_METHODS if recorder.builder.sizes is not None else []
    return [*functions, *((torch.SymInt, name, method(name)) for name in methods)]


SIZE_METHODS = [
    method for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow") for side in ("", "r")
    if hasattr(torch.SymInt, method := f"__{side}{name}__")
]  # fmt: skip


class _CheckpointInput(torch.autograd.Function):
    """What a reentrant checkpoint differentiates as a leaf: gradients are summed within, and lie as it does."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.stride = tensor.stride() if is_dense(tensor.shape, tensor.stride()) else None
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if ctx.stride is None or grad.stride() == ctx.stride:
            return grad if ctx.stride is not None else grad.contiguous()
        return grad.new_empty_strided(grad.shape, ctx.stride).copy_(grad)


def _checkpointed(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """A checkpoint that gives gradients where a reentrant one does, and runs no backward inside of another."""
    checkpoints.check_backward_validity(args)
    wanted = [torch.is_grad_enabled() and isinstance(a, torch.Tensor) and a.requires_grad for a in args]
    if any(wanted):
        # to its end, as a reentrant one: what a kernel fills is read then, and all numbers are drawn again
        options: dict[str, Any] = {"use_reentrant": False, "early_stop": False}
        options["preserve_rng_state"] = preserve_rng_state
        args = tuple([_CheckpointInput.apply(a) if leaf else a for a, leaf in zip(args, wanted, strict=True)])
        return checkpoints.checkpoint(function, *args, **options)
    with torch.no_grad():
        return function(*args)


def _dynamos_checkpoint(operator: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint as the user wrote it: the operator's own call leaves random states to later passes of torch's.

    Dynamo makes arguments of a module's buffers too; only what has gradients is one, since others may be written.
    """
    wanted = [isinstance(a, torch.Tensor) and a.requires_grad for a in args]

    def run(*differentiable: Any) -> Any:
        given = iter(differentiable)
        return body(*(next(given) if graded else a for a, graded in zip(args, wanted, strict=True)))

    options = kwargs | checkpoint_contexts(body) | {"use_reentrant": False}
    if kwargs.get("use_reentrant"):
        options["early_stop"] = False
    return checkpoints.checkpoint(run, *(a for a, graded in zip(args, wanted, strict=True) if graded), **options)


def _inside(settings: Settings, run: Callable[..., Any], roots: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the autograd engine for a backward of the step's own, which stops at the step's inputs."""
    settings.refuse_saved_tensor_hooks()
    roots = tuple(roots)
    refuse_outside(roots, args[3])
    return by_data(run, roots, *args, **kwargs)


@contextmanager
def patched_python(
    recorder: Recorder, parameters: list[torch.Tensor], gradients: ReplacedGradients, reentrant: bool = True,
    more: Iterable[Replacement] = (),
) -> Iterator[None]:
    """Patches what must be seen while tracing; everything is as before on exit, however it ends.

    Args:
        reentrant: see `trace_step`.
        more: what else is patched.
    """
    replacements: list[Replacement] = [
        *more,
        *_size_aware(recorder),
        *recorder.storages.patches(),
        *((operator, "__call__", _dynamos_checkpoint) for operator in CHECKPOINT_OPERATORS),
        *generator_methods(recorder),
        *LikeUpdates(recorder).patches(),
        *nested_compiles(),
        *types_asked.patches(recorder.inputs, recorder.builder.sizes is not None),
        (builtins, "max", aware_choice(max)),
        (builtins, "min", aware_choice(min)),
        (torch, "sym_max", aware_choice(torch.sym_max)),  # which Dynamo writes for these
        (torch, "sym_min", aware_choice(torch.sym_min)),
        (torch, "sym_sum", _sum),
        (torch.autograd, "backward", _recorded_backward(recorder, parameters, gradients)),
        (torch.nn.Parameter, "__new__", staticmethod(_traced_parameter)),
        (BatchNorm, "forward", reading(vars(BatchNorm)["forward"], float=_number_of)),
        (*FOREACH_SUPPORT, has_foreach_support),
        (torch.overrides, "has_torch_function", _is_overridden),
        (torch.overrides, "has_torch_function_unary", lambda value: _is_overridden((value,))),
        (torch.overrides, "has_torch_function_variadic", lambda *values: _is_overridden(values)),
        unseen_fakes(),
        # fake tensors report each of eager's own errors as their own
        (logging.getLogger(FakeTensor.__module__), "handle", lambda record: None),
    ]
    known = hasattr(*COMPILED_OPERATORS)
    replacements.append((*(COMPILED_OPERATORS if known else (torch, "cond")), refuse_higher_order))
    if not reentrant:
        replacements.append((checkpoints.CheckpointFunction, "apply", staticmethod(_checkpointed)))
    inside = functools.partial(_inside, recorder.inputs.world.reachable.outside.settings)
    with patched(replacements, recorder.builder.provenance.is_here), handled(inside):
        yield
