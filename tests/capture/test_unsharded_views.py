"""Parts are whole tensors while a step is captured, and parts again afterwards."""

from __future__ import annotations

import resource
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from wholestep.capture.substitutes.unsharded_views import whole_strides
from wholestep.capture_call import capture
from wholestep.errors import UnsupportedError
from wholestep.ir import info
from wholestep.tensor_parts import Part, mark_part


@dataclass
class Data:
    x: Tensor


class Keeper:
    """An object of the user's own, which keeps a tensor between calls."""

    def __init__(self) -> None:
        self.table = torch.ones(3)


def test_the_batch_is_what_arguments_hold_and_no_object_keeps():
    far = torch.ones(3)

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.mask = torch.ones(3)
            self.register_buffer("held", torch.ones(3))

    def step(model, x, pair, named, space, users, data, keeper, *rest, key):
        values = [*pair, named["a"][0], space.x, users["x"], data.x, *rest, key]
        return model(x).sum() + sum(v.sum() for v in (*values, keeper.table, far, model.mask, model.held))

    fresh = (torch.ones(3) for _ in iter(int, 1))
    args = (
        Model(), torch.ones(3), (next(fresh), next(fresh)), {"a": [next(fresh)]}, SimpleNamespace(x=next(fresh)),
        UserDict(x=next(fresh)), Data(next(fresh)), Keeper(), next(fresh),
    )  # fmt: skip
    inputs = capture(step, args, {"key": next(fresh)})[1].step.signature.inputs
    by_kind = {item.source: item.kind for item in inputs}
    batch = {source for source, kind in by_kind.items() if kind == "batch"}
    assert batch == {
        "L['x']", "L['pair'][0]", "L['pair'][1]", "L['named']['a'][0]", "L['space'].x", "L['users'].data['x']",
        "L['data'].x", "L['rest'][0]", "L['key']",
    }  # fmt: skip
    assert {by_kind[s] for s in by_kind if "keeper" in s or "mask" in s or "far" in s} == {"tensor"}
    assert by_kind["L['model'].held"] == "buffer" and by_kind["L['model'].weight"] == "parameter"


def test_whole_shapes_take_no_memory_and_go_when_the_capture_is_over():
    whole = Part.rows((1 << 18, 1 << 12), 5, 9)  # 4 GiB
    weight = mark_part(nn.Parameter(torch.randn(4, 1 << 12)), whole)
    weight.grad = torch.ones(4, 1 << 12)  # no mark: of the same part as its tensor
    before, values, grad = weight.data_ptr(), weight.detach().clone(), weight.grad

    def step(weight, fails):
        assert weight.shape == weight.grad.shape == whole.shape
        weight.square().sum().backward()
        if fails:
            raise KeyError("in the step")
        return weight.numel()

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    traced = capture(step, (weight, ""), {})[1]
    with pytest.raises(KeyError, match="in the step"):
        capture(step, (weight, "yes"), {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000, "in KiB"
    assert all(tuple(info(node).value.shape) == whole.shape for node in traced.step.placeholders)
    assert weight.data_ptr() == before and torch.equal(weight, values) and weight.shape == (4, 1 << 12)
    assert weight.grad is grad and grad.shape == (4, 1 << 12) and torch.equal(grad, torch.ones(4, 1 << 12))


def test_what_a_step_leaves_behind_is_named_as_a_later_step_finds_it():
    model = nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), momentum=0.9)

    def step(model, opt, x):
        loss = model(x).sum()
        loss.backward()
        opt.step()
        return loss.detach()

    homes = capture(step, (model, opt, torch.ones(2, 3)), {})[1].step.signature.state_outputs
    weight = "L['model'].weight"
    assert {item.source: item.kind for item in homes.values() if "weight" in item.source} == {
        f"{weight}.grad": "grad",
        f"L['opt'].state[{weight}]['momentum_buffer']": "state",
    }
    step(model, opt, torch.ones(2, 3))
    again = capture(step, (model, opt, torch.ones(2, 3)), {})[1].step.signature.inputs
    assert {item.source for item in homes.values()} <= {item.source for item in again}


@pytest.mark.parametrize("make", [
    lambda n: torch.zeros(n, 4),
    lambda n: torch.zeros(n, 9)[:, :-1],
    lambda n: torch.zeros(n, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda n: torch.zeros(4, n).t(),
    lambda n: torch.zeros(1, 4).expand(n, 4),
])  # fmt: skip
def test_a_whole_is_laid_out_as_its_part(make):
    part, whole = make(2), make(6)
    assert whole_strides(part, Part.rows(whole.shape, 0, 2)) == whole.stride()


def test_parts_in_inference_mode_are_refused():
    with torch.inference_mode():
        x = mark_part(torch.ones(2), Part.rows((4,), 0, 2))
    with pytest.raises(UnsupportedError, match=r"L\['x'\], of which each rank holds a part, is an inference tensor"):
        capture(lambda x: x + 1, (x,), {})
