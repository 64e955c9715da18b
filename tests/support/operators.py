"""torch's own samples of every operator and module, and the judge: compiled against eager, gradients included."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import wholestep as ws
from wholestep.autograd import Partition, aot_function, default_partition
from wholestep.errors import DataDependentError

for module in list(sys.modules.values()):  # seeds inside of each call, which a step may not; we seed before it
    if hasattr(module, "wrapper_set_seed"):
        module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    if hasattr(module, "extract_test_fn"):  # looks through all modules for a test of `unittest`: half of the time
        module.extract_test_fn = lambda: None

Run = Callable[..., Any]

# Operators that eager cannot run on this CPU either.
NOT_HERE = {
    "jiterator_unary", "jiterator_binary", "jiterator_4inputs_with_extra_args", "jiterator_binary_return_by_ref",
    "jiterator_2inputs_2outputs", "torch._scaled_mm", "torch._scaled_mm_v2",
    "torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward",
    "nn.functional.batch_norm.without_cudnn",
}  # fmt: skip
# Their results are whatever lay in memory: only shapes are compared.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Of what only some dtypes have, this comes first.
DTYPES = (torch.float32, torch.float64, torch.int64, torch.complex64, torch.bool)

OPERATORS = {op.full_name: op for op in op_db if op.full_name not in NOT_HERE}
MODULES = {info.formatted_name: info for info in module_db}


class Different(AssertionError):
    """A compiled operator gives something else than eager."""


@dataclass
class Case:
    """One sample: `make` gives, anew each time, a function of tensors, the tensors and the module that it calls."""

    make: Callable[[], tuple[Run, list[Tensor], nn.Module | None]]


def operator_cases(name: str, dtype: torch.dtype | None = None) -> Iterator[Case]:
    """torch's samples of an operator, of a dtype or of the first one that it knows."""
    op = OPERATORS[name]
    known = op.supported_dtypes("cpu")
    chosen = dtype if dtype in known else next(d for d in DTYPES if d in known)
    differentiable = op.supports_autograd and chosen.is_floating_point
    for sample in op.sample_inputs("cpu", chosen, requires_grad=differentiable):
        fn, tensors = of_tensors(op.op, (sample.input, *sample.args), sample.kwargs)
        yield Case(lambda fn=fn, tensors=tensors: (fn, [_copied(t) for t in tensors], None))


def module_cases(name: str, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    """torch's samples of a module, in training and in evaluation."""
    info = MODULES[name]
    for training in (True, False):
        for sample in info.module_inputs_func(info, "cpu", dtype, True, training):
            if sample.forward_input is not None:
                yield Case(partial(_module, info.module_cls, sample, dtype, training))


def _module(cls: type[nn.Module], sample: Any, dtype: torch.dtype, training: bool) -> Any:
    torch.manual_seed(0)
    how, given = sample.constructor_input, sample.forward_input
    module = cls(*how.args, **how.kwargs).to(dtype).train(training)
    fn, tensors = of_tensors(module, given.args, given.kwargs)
    return fn, [_copied(t) for t in tensors], module


def of_tensors(call: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Run, list[Tensor]]:
    """A call as a function of the tensors among its arguments, and these tensors."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def fn(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        return call(*args, **kwargs)

    return fn, [leaves[i] for i in places]


def judge(case: Case, partition: Partition = default_partition, **rules: bool) -> None:
    """Runs a case eagerly and compiled, with its gradients, from the same seed, and compares everything.

    It is called twice, with other data the second time: no value of the first call may be part of the program.

    Args:
        partition: which values the forward saves.
        rules: `values`, `exact`, `strides`: what is compared, all True by default.

    Raises:
        Different: in words.
    """
    compile = partial(aot_function, fw_compiler="aten", partition_fn=partition)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wants, gots = _outcomes(case, lambda fn: fn), _outcomes(case, compile)
        if any(isinstance(got, DataDependentError) for got in gots):  # a shape follows from data: Python runs
            gots = _outcomes(case, ws.compile)
    for want, got in zip(wants, gots, strict=True):
        _judge(want, got, rules)


def _judge(want: Any, got: Any, rules: dict[str, bool]) -> None:
    if isinstance(want, Exception) or isinstance(got, Exception):
        if type(want) is not type(got):
            cause = got if isinstance(got, Exception) else None
            raise Different(f"eager: {want!r:.300}\ncompiled: {got!r:.300}") from cause
        return
    for what, one, two in zip(("result", "gradient", "input or buffer afterwards"), want, got, strict=True):
        _compare(what, one, two, **rules)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _outcomes(case: Case, compile: Callable[[Run], Run]) -> list[Any]:
    """What each of two calls gives; the gradients of the second's results lie otherwise than the results do."""
    fn, tensors, module = case.make()
    run = compile(fn)
    other = [_other_data(t) for t in tensors]
    return [_outcome(run, tensors, module, _halves), _outcome(run, other, module, expanded)]


def _halves(like: Tensor) -> Tensor:
    return torch.ones_like(like) * 0.5


def _other_data(tensor: Tensor) -> Tensor:
    """The same elements in another order, along the first dimension that has two."""
    for dim, size in enumerate(tensor.shape):
        if size > 1 and tensor.layout is torch.strided:
            turned = _copied(tensor)
            with torch.no_grad():
                turned.copy_(tensor.detach().flip(dim))
            return turned
    return _copied(tensor)


def expanded(like: Tensor) -> Tensor:
    """A gradient as that of `sum()`."""
    return torch.full((), 0.5, dtype=like.dtype).expand(like.shape)


def turned(like: Tensor) -> Tensor:
    """A gradient whose dimensions lie in memory in the opposite order."""
    return torch.full(like.shape[::-1], 0.5, dtype=like.dtype).permute(*range(like.dim())[::-1])


def gapped(like: Tensor) -> Tensor:
    """A gradient with gaps between its elements."""
    wide = torch.full((*like.shape, 2), 0.5, dtype=like.dtype)
    return wide[..., 0]


def _outcome(run: Run, tensors: list[Tensor], module: nn.Module | None, gradient: Callable[[Tensor], Tensor]) -> Any:
    """Results, gradients, inputs and buffers afterwards; or the error."""
    try:
        torch.manual_seed(0)
        leaves = tree_leaves(run(*tensors))
        parameters, buffers = (list(module.parameters()), list(module.buffers())) if module is not None else ([], [])
        outs = [o for o in leaves if isinstance(o, Tensor) and o.requires_grad]
        inputs = [t for t in [*tensors, *parameters] if t.requires_grad]
        grads: Any = ()
        if outs and inputs:
            weights = [gradient(o) for o in outs]
            grads = torch.autograd.grad(outs, inputs, weights, allow_unused=True)
    except Exception as error:  # compared with what the other run raises
        return error
    return leaves, list(grads), [*tensors, *buffers]


def _compare(what: str, one: Any, two: Any, values: bool = True, exact: bool = True, strides: bool = True) -> None:
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        if len(one) != len(two):
            raise Different(f"{what}: {len(one)} and {len(two)} of them")
        for index, pair in enumerate(zip(one, two, strict=True)):
            _compare(f"{what} {index}", *pair, values, exact, strides)
    elif isinstance(one, Tensor) and isinstance(two, Tensor):
        _compare_tensors(what, one, two, values, exact, strides)
    elif type(one) is not type(two) or repr(one) != repr(two):
        raise Different(f"{what}: {one!r:.200} and {two!r:.200}")


def _compare_tensors(what: str, one: Tensor, two: Tensor, values: bool, exact: bool, strides: bool) -> None:
    facts = [(t.shape, t.dtype, t.layout, t.requires_grad, t.is_leaf) for t in (one, two)]
    if facts[0] != facts[1]:
        raise Different(f"{what}: {facts[0]} and {facts[1]}")
    if one.layout is not torch.strided:
        one, two = one.detach().to_dense(), two.detach().to_dense()
    elif strides and _dense_strides(one) != _dense_strides(two) and _dense_strides(one) is not None:
        raise Different(f"{what}: strides {one.stride()} and {two.stride()} for shape {[*one.shape]}")
    try:
        if values:
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
            torch.testing.assert_close(two, one, equal_nan=True, **tolerance)
    except AssertionError as error:
        raise Different(f"{what}: {error}") from None


def _dense_strides(tensor: Tensor) -> list[int] | None:
    """Strides of dimensions that have any; None where elements are left out or repeated: a copy may lie otherwise."""
    pairs = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    expected = 1
    for stride, size in sorted(pairs):
        if stride != expected or size == 0:
            return None
        expected *= size
    return [stride for stride, _ in pairs]
