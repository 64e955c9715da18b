"""What one `backward()` will do, before it does it: its nodes, saved tensors and hooks, as the engine knows them.

Python cannot list the hooks of an autograd node, nor every value that one saves. The engine can: for a backward that
is to be compiled it walks its own graph, puts nodes, edges and constants into a key, and hands tensors, sizes and
hooks out as lists. That walk alone is used here (50 µs for a small model); what the engine offers beyond it, a call
for each node of a backward of new structure, is answered with dummies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.torch_compat import engine_compiler, storage_id
from wholestep.trace.patches.engine_hook import walking

Engine = Callable[..., Any]


class Shape:
    """One structure of a backward, made when the engine meets it for the first time; its identity is the key.

    The methods, which the engine calls by name, stand for an execution on dummies: each gives as many as are asked for.

    Attributes:
        outside: hooks made in C++, which only the engine can call.
    """

    def __init__(self) -> None:
        self.outside = 0

    def begin_capture(
        self, inputs: Sequence[Any], sizes: Sequence[int], scalars: Sequence[Any], *_: Any
    ) -> tuple[str, list[torch.Tensor], list[int], list[Any]]:
        return "", _dummies(inputs), list(sizes), list(scalars)

    def bind_function(self, name: str, *_: Any) -> str:
        return name

    def apply_functional(self, name: str, grads: Any, args: Any, outputs: Sequence[Any]) -> list[torch.Tensor]:
        return _dummies(outputs)

    def proxy_call_backward(self, inputs: Any, outputs: Sequence[Any], *_: Any) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if output is None else torch.empty(0) for output in outputs)

    def validate_outputs(self, name: str, outputs: Sequence[Any], *_: Any) -> Sequence[Any]:
        return outputs

    def accumulate(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return old

    def accumulate_grad(self, variable: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        return torch.empty(0) if len(rest) == 3 else None  # torch before 2.13 wants nothing

    def unpack_hook(self, hook: int, packed: int) -> torch.Tensor:
        return torch.empty(0)

    def tensor_pre_hook(self, tensors: Sequence[Any], *_: Any) -> list[Any]:
        return list(tensors)

    pre_hook = post_hook = post_acc_grad_hook = tensor_pre_hook

    def cpp_tensor_pre_hook(self, inputs: Sequence[Any], *_: int) -> list[Any]:
        self.outside += 1
        return list(inputs)

    def call_copy_slices_prologue(self, *_: Any) -> list[torch.Tensor]:
        return _dummies(range(3))

    def call_copy_slices_epilogue(self, needs_grad: Sequence[bool], *_: Any) -> list[torch.Tensor]:
        return _dummies(needs_grad)

    def end_capture(self, outputs: Sequence[Any]) -> tuple[Callable[..., Any], Callable[[], Shape]]:
        return _hand_out, (lambda: self)

    def close(self, *_: Any) -> None:
        """Nothing is open, named or logged."""

    set_node_origin = log_compile_reasons = close


def _dummies(like: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.empty(0) for _ in like]


@dataclass(frozen=True)
class Structure:
    """One backward that is about to run.

    Attributes:
        key: equal for backwards that run the same nodes with the same constants on the same hooks' places; which
            saved tensors share memory is part of it.
        outside: hooks made in C++ (`retain_grad` on an intermediate tensor among them).
        tensors: root gradients, saved tensors, leaves and their gradients, in the order of the nodes.
        hooks: hooks and contexts of `autograd.Function`s in the order of the nodes.
        packed: what `saved_tensors_hooks` made of the tensors that they packed.
    """

    key: tuple[Any, ...]
    outside: int
    tensors: list[torch.Tensor]
    hooks: tuple[Any, ...]
    packed: tuple[Any, ...]


_handed: list[tuple[Any, ...]] = []


def _hand_out(shape: Callable[[], Shape], *lists: Any) -> list[Any]:
    """What the engine calls in place of the backward."""
    _handed.append((shape(), *lists))
    return [None] * _outputs


_outputs = 0


def structure(
    call: Engine, roots: Sequence[Any], grads: Sequence[Any], inputs: Sequence[Any], accumulate: bool
) -> Structure:
    """Walks the graph of a backward without running it.

    Args:
        call: the engine, called as ``call(roots, grads, keep_graph, create_graph, inputs, allow_unused,
            accumulate_grad=accumulate)``.

    Raises:
        RuntimeError: eager's error when the graph was freed, or a saved tensor changed.
        NotImplementedError: a node that the engine cannot describe.
    """
    shape, tensors, sizes, scalars, hooks, packed = _walk(call, roots, grads, inputs, accumulate, True)
    tensors = [t for t in tensors if t is not _MARK and t is not _MARK_GRAD]
    key = (shape, accumulate, tuple(sizes), tuple(scalars), _sharing(tensors), _numbers(tensors))
    return Structure(key, shape.outside, tensors, hooks, packed)


def free(call: Engine, roots: Sequence[Any], grads: Sequence[Any], inputs: Sequence[Any], accumulate: bool) -> None:
    """Lets go of what the graph of a backward saved, as running it does; arguments as for `structure`."""
    _walk(call, roots, grads, inputs, accumulate, False)


def _walk(call: Engine, roots: Any, grads: Any, inputs: Sequence[Any], accumulate: bool, keep: bool) -> tuple[Any, ...]:
    global _outputs
    with walking(), engine_compiler(Shape):
        _outputs = len(inputs)
        _handed.clear()
        call((*roots, _MARK), (*grads, _MARK_GRAD), keep, False, inputs, True, accumulate_grad=accumulate)
        return _handed.pop()


def _numbers(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The Python numbers that nodes saved as tensors: operators are called with their values, which are constants."""
    return tuple((i, t.dtype, t.item()) for i, t in enumerate(tensors) if t.dim() == 0 and _is_number(t))


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor of no dimensions stands for a Python number, which widens no other such tensor's type."""
    smaller = _SMALLER.get(tensor.dtype)
    return smaller is not None and torch.result_type(tensor, smaller) != tensor.dtype


def _sharing(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor the first one that begins at the same place of the same memory."""
    first: dict[Any, int] = {}
    places = ((storage_id(t.untyped_storage()), t.storage_offset()) if t.layout == torch.strided else i
              for i, t in enumerate(tensors))
    return tuple(first.setdefault(place, i) for i, place in enumerate(places))


# The types that Python numbers become -> a smaller one of the same kind.
_SMALLER = {
    torch.float64: torch.zeros((), dtype=torch.float16),
    torch.int64: torch.zeros((), dtype=torch.int8),
    torch.complex128: torch.zeros((), dtype=torch.float16),
    torch.bool: torch.zeros((), dtype=torch.int8),
}

# The engine keeps one table of structures for a process, in which torch's own compiler of backwards looks too. A root
# that nobody else has (on no device, of a type without kernels) keeps our structures apart from its.
_MARK = torch.empty(0, dtype=torch.float8_e5m2fnuz, device="meta", requires_grad=True)
_MARK_GRAD = torch.empty(0, dtype=torch.float8_e5m2fnuz, device="meta")

