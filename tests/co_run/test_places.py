"""Places of tensors, and what stands for arguments: those of C are those of Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._lazy.ts_backend
from torch import Tensor, nn

import wholestep as ws
from wholestep.co_run import places
from wholestep.co_run.places import parts, place_of, storage_at
from wholestep.co_run.segment import FALSE, FLOAT, TRUE


class Mine(Tensor):
    """A tensor of a class of the user's."""


def kinds_of_tensors() -> dict[str, Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    with torch.inference_mode():
        made_in_inference = torch.ones(3)
    return {
        "whole": base, "alias": base.detach(), "parameter": nn.Parameter(base), "buffer": nn.Buffer(base),
        "rows": base[1:], "columns": base[:, 1:], "transposed": base.t(), "flat": base.view(-1), "one": base[0, 0],
        "other type": base.view(torch.int32), "empty": base[:0], "expanded": base[0].expand(3, 6),
        "other memory": base.clone(), "negated": base._neg_view(), "complex": torch.ones(2, dtype=torch.cfloat),
        "conjugated": torch.ones(2, dtype=torch.cfloat).conj(), "of a class": base.as_subclass(Mine),
        "meta": torch.empty(2, 3, device="meta"), "many dimensions": base.view(1, 1, 1, 1, 1, 1, 1, 4, 6),
        "in inference": made_in_inference, "with a history": nn.Parameter(base) * 2,
    }  # fmt: skip


def naive(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


def test_places_are_equal_where_elements_and_layouts_are() -> None:
    tensors = kinds_of_tensors()
    assert all(storage_at(tensor) == place_of(tensor)[0] == naive(tensor)[0] for tensor in tensors.values())
    del tensors["negated"], tensors["of a class"]  # which have no slots
    for name, one in tensors.items():
        equal = {other for other, tensor in tensors.items() if place_of(tensor) == place_of(one)}
        assert equal == {other for other, tensor in tensors.items() if naive(tensor) == naive(one)}, name


def test_what_is_not_plain_has_its_place_from_python() -> None:
    assert places._NATIVE, "C does not find what it reads of tensors in this version of torch"
    found = {name for name, tensor in kinds_of_tensors().items() if type(place_of(tensor)[1]) is not bytes}
    assert found == {"negated", "conjugated", "of a class", "meta", "many dimensions"}


def test_arguments_in_c() -> None:
    known, unknown = torch.ones(2), torch.ones(2)
    slots, numbers, asked = {place_of(known): "slot"}, [0.5], []

    def other(value: Any) -> Any:
        asked.append(value)
        return "other"

    given = known, nn.Parameter(known), unknown, [known, (1, None)], True, False, 7, 2.5, "text", torch.float32
    expected = ["slot", "slot", "other", ("slot", (1, None)), TRUE, FALSE, 7, FLOAT, "other", "other"]
    assert parts(given, slots, numbers, other) == tuple(expected)
    assert asked == [unknown, "text", torch.float32]
    assert numbers == [0.5, 2.5]
    assert parts((2.5,), slots, None, other) == ("other",)
    with pytest.raises(ZeroDivisionError):
        parts(([unknown],), slots, None, lambda value: 1 / 0)


def test_tensors_without_a_storage() -> None:
    """Below autograd, tensors of a lazy device have none."""
    torch._lazy.ts_backend.init()
    x, y = torch.ones(3, 4, device="lazy"), torch.ones(3, 4)

    def step(x: Tensor) -> float:
        view = x.t()
        view.add_(1)
        return view.sum().item()

    compiled = ws.compile(step)
    for _ in range(4):
        assert compiled(x) == step(y)
