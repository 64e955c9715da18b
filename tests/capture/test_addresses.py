"""Reads of an input's memory by Python that C++ has called: operators, backward functions, dispatch modes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.utils.dlpack
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import wholestep as ws
from wholestep.errors import CaptureError, DataDependentError

ADDRESS, VALUE = "Cannot access data pointer", "Python needs the value"
READS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "data_ptr": (lambda x: x.data_ptr(), ADDRESS),
    "ctypes": (lambda x: ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0], ADDRESS),
    "storage": (lambda x: x.untyped_storage().data_ptr(), ADDRESS),
    "typed storage": (lambda x: x.storage().data_ptr(), ADDRESS),
    "of a view": (lambda x: x[1:].data_ptr(), ADDRESS),
    "numpy": (lambda x: x.detach().numpy(), VALUE),
    "array": (lambda x: numpy.asarray(x.detach()), VALUE),
    "tolist": (lambda x: x.tolist(), VALUE),
    "repr": (lambda x: repr(x), VALUE),
    "dlpack": (lambda x: numpy.from_dlpack(x.detach()), VALUE),
    "capsule": (lambda x: torch.utils.dlpack.to_dlpack(x.detach()), VALUE),
}
LIBRARY = torch.library.Library("wholestep_tests_addresses", "DEF")
LIBRARY.define("read(Tensor x, str how) -> Tensor")


def read(x: Tensor, how: str) -> Tensor:
    READS[how][0](x)
    return x * 2


LIBRARY.impl("read", read, "CompositeImplicitAutograd")


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.how = how
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        read(ctx.saved_tensors[0], ctx.how)
        return grad * 2, None


class InMode(TorchDispatchMode):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor:
            READS[self.how][0](args[0])
        return func(*args, **(kwargs or {}))


def under_mode(x: Tensor, how: str) -> Tensor:
    with InMode(how):
        return x * 2


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("fn", [read, torch.ops.wholestep_tests_addresses.read, InBackward.apply, under_mode],
                         ids=["step", "operator", "backward", "mode"])  # fmt: skip
def test_an_inputs_memory_is_not_read_while_tracing(fn: Any, how: str) -> None:
    x = torch.arange(3.0).requires_grad_()
    with pytest.raises(DataDependentError, match=READS[how][1]) as error:
        ws.compile(lambda x: fn(x, how).sum(), fullgraph=True)(x)
    assert f"at: {__file__}:" in str(error.value)
    READS[how][0](x)  # all is as before


def test_an_operators_kernel_may_read_memory_when_the_step_runs() -> None:
    addresses: list[int] = []

    @torch.library.custom_op("wholestep_tests_addresses::noted", mutates_args=())
    def noted(x: Tensor) -> Tensor:
        addresses.append(x.data_ptr())
        return torch.tensor(x.tolist()) * 2

    noted.register_fake(torch.empty_like)
    step = ws.compile(noted, fullgraph=True)
    for start in (0.0, 5.0):
        x = torch.arange(3.0) + start
        assert torch.equal(step(x), x * 2)
        assert addresses.pop() == x.data_ptr()


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor
    number: int


WEIGHT = torch.nn.Parameter(torch.ones(2))
KNOWN = id(WEIGHT)
OTHER_NUMBERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "id": lambda x, y: float(id(x) % 1009),
    "hash": lambda x, y: x + hash(x),
    "of a parameter": lambda x, y: y * (id(WEIGHT) == KNOWN),
    "text": lambda x, y: {f"{id(x)}": y},
    "order": lambda x, y: sorted([x, y], key=id)[0],
    "of what is made": lambda x, y: torch.tensor(id(x * 2)),
    "of an object that is made": lambda x, y: float(id(SimpleNamespace(x=x))),
    "hash of a tuple": lambda x, y: y * (hash((x, 1)) % 1009),
    "hash of a dataclass": lambda x, y: y * (hash(Frozen(x, 1)) % 1009),
    "_cdata": lambda x, y: float(x.untyped_storage()._cdata == y.untyped_storage()._cdata),
    "is_set_to": lambda x, y: x.is_set_to(y) + y,
}


@pytest.mark.parametrize("how", OTHER_NUMBERS)
def test_numbers_that_objects_have_are_not_baked_in(how: str) -> None:
    def step(x: Tensor, y: Tensor) -> Any:
        return OTHER_NUMBERS[how](x, y), y + 1

    with pytest.raises(CaptureError, match="memory|another number") as error:
        ws.compile(step, fullgraph=True)(torch.ones(2), torch.ones(2))
    assert f"at: {__file__}:" in str(error.value) and "to do: " in str(error.value)
    compiled, x = ws.compile(step), torch.ones(2)
    for y in (x, torch.zeros(2), x):
        got, want = compiled(x, y)[0], step(x, y)[0]
        assert str(got) == str(want) or "made" in how
    assert compiled.breaks


def test_ids_are_keys() -> None:
    model = torch.nn.Linear(2, 2)
    whole = id(model)

    def known(x: Tensor) -> Tensor:
        return model(x) * (2 if id(model) == whole else 3)

    def step(x: Tensor, y: Tensor) -> Any:
        memo = {id(t): t + i for i, t in enumerate((x, y, x * 2))}
        assert len({(x, 1), (x, 1), (x, 2)}) == 2 and len({Frozen(x, 1), Frozen(x, 2)}) == 2
        return sum(memo.values()) * known(x).sum(), len({hash(x), hash(y)}), id(x) == id(y), id(y)

    compiled, replayed, x = ws.compile(step), ws.compile(known, fullgraph=True), torch.ones(2)
    for fresh in (False, True):
        for y in (torch.ones(2), torch.zeros(2), x):
            got, want = compiled(x, y), step(x, y)
            assert torch.equal(got[0], want[0]) and got[1:] == want[1:] and type(got[3]) is int
            assert torch.equal(replayed(x), known(x))
        assert replayed.captures == 1 + fresh
        model = torch.nn.Linear(2, 2)
        whole = id(model)
