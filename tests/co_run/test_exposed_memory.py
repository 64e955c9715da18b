"""Memory that Python reads without torch, and threads that are handed tensors: as in eager."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.support.equal import World, assert_same_run
from wholestep.errors import CaptureError


def array_of(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def numbers_at(tensor: Tensor) -> Any:
    return (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("share", [array_of, numbers_at])
def test_an_array_of_a_parameter_sees_each_write(share: Callable[[Tensor], Any], reads: bool) -> None:
    def make(seed: int) -> World:
        model, seen = nn.Linear(3, 1, bias=False), list[Any]()
        shared, opt = share(model.weight), torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            if reads:
                seen.append(loss.item())
            loss.backward()
            opt.step()
            opt.zero_grad()
            seen.extend(float(n) for n in numpy.asarray(shared).ravel())
            return loss

        return World(step, [(torch.randn(4, 3),) for _ in range(5)], {"model": model, "opt": opt, "seen": seen})

    assert_same_run(make, 5, ws.compile)


def test_an_array_that_the_step_makes_sees_each_write() -> None:
    def make(seed: int) -> World:
        state, seen = torch.zeros(3), list[Any]()
        kept: dict[str, Any] = {}

        def step(x: Tensor) -> Tensor:
            array = kept.setdefault("array", state.numpy())
            state.add_(x)
            seen.append(float(array.sum()))
            state.mul_(2)
            seen.append(float(array.sum()))
            return state + 1

        return World(step, [(torch.randn(3),) for _ in range(5)], {"state": state, "seen": seen})

    assert_same_run(make, 5, ws.compile)


def test_an_array_beside_what_cannot_be_walked_sees_each_write() -> None:
    class Lazy:  # whose slots are read with an error of its own
        __slots__ = ("_value",)

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("not yet")

    def make(seed: int) -> World:
        state, seen, lazy = torch.zeros(3), list[Any](), Lazy()
        nested, array = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), state.numpy()

        def step(x: Tensor) -> Tensor:
            if (nested, lazy) is not None:
                state.add_(x)
            seen.append(float(array.sum()))
            return state + 1

        return World(step, [(torch.randn(3),) for _ in range(5)], {"state": state, "seen": seen})

    assert_same_run(make, 5, ws.compile)


def test_whole_graphs_refuse_arrays_that_share_what_they_write() -> None:
    state = torch.zeros(2)
    array = state.numpy()

    def step(x: Tensor) -> Tensor:
        state.add_(x)
        return x * float(array[0])

    with pytest.raises(CaptureError, match=r"can read L\['array'\], a NumPy array"):
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert state.sum() == 0


class Box:
    tensor: Any = None
    found: Any = None


def test_a_thread_that_polls_finds_what_is_there() -> None:
    def make(seed: int) -> World:
        weight, box, seen = torch.ones(2), Box(), list[Any]()

        def work() -> None:
            while box.tensor is None:
                pass
            box.found = box.tensor.tolist()

        def step(x: Tensor) -> Tensor:
            thread = threading.Thread(target=work)
            thread.start()
            box.tensor = x * weight * 2
            while thread.is_alive():
                pass
            seen.append(box.found)
            box.tensor = None
            return x + weight

        return World(step, [(torch.randn(2),) for _ in range(4)], {"seen": seen})

    assert_same_run(make, 4, ws.compile)


def test_whole_graphs_start_no_threads() -> None:
    def step(x: Tensor) -> Tensor:
        threading.Thread(target=print).start()
        return x * 2

    with pytest.raises(CaptureError, match=r"the step calls Thread.start\(\)"):
        ws.compile(step, fullgraph=True)(torch.ones(2))
