"""Parts: what each rank holds of a tensor, and the whole again."""

from __future__ import annotations

import copy

import pytest
import torch

import tests.support.spmd_parts as programs
from wholestep.tensor_parts import Part, mark_part, narrow_to, part_of
from wholestep.testing import run_ranks


def test_a_part_says_what_it_is():
    part = Part.of(torch.Size([4, 6]), [(0, 2), (3, 6)])
    assert (part.size, part.numel, part.is_whole) == ((2, 3), 6, False)
    assert str(part) == "rows 0 to 2, 3 to 6 of dimension 1 of [4, 6]"
    assert str(Part.rows((4, 6), 0, 4)) == "all of [4, 6]" and Part.rows((4, 6), 0, 4).is_whole
    assert str(Part.rows((4,), 1, 3)) == "rows 1 to 3 of [4]"


def test_narrowing_keeps_the_object_and_frees_the_rest():
    whole = torch.arange(24.0).view(4, 6)
    tensor = torch.nn.Parameter(whole.clone())
    narrow_to(tensor, part := Part.of((4, 6), [(0, 2), (3, 6)]))
    assert torch.equal(tensor, whole[:2, 3:]) and tensor.is_contiguous() and part_of(tensor) == part
    assert tensor.untyped_storage().nbytes() == 24 and tensor.is_leaf and tensor.requires_grad
    assert part_of(copy.deepcopy(mark_part(torch.zeros(2), Part.rows((4,), 0, 2)))) == Part.rows((4,), 0, 2)
    assert part_of(mark_part(tensor, None)) is None


def test_a_part_is_narrowed_further():
    tensor = torch.arange(24.0).view(4, 6)
    half, corner = Part.rows((4, 6), 2, 4), Part.of((4, 6), [(3, 4), (0, 2)])
    narrow_to(tensor, half)
    narrow_to(tensor, corner, half)
    assert tensor.tolist() == [[18.0, 19.0]] and part_of(tensor) == corner
    assert half.inside(corner) is None and Part.rows((4, 6), 1, 3).inside(half) is None


@pytest.mark.parametrize("transport", ["thread", "shm"])
def test_whole_states_come_from_blocks_of_any_kind(transport):
    for found in run_ranks(programs.whole_states, 4, transport):
        assert found["model"] and found["state"]
        assert "of the 35 elements of 0.weight" in found["too few"] and "(default: all ranks)" in found["too few"]
        assert "parts of different tensors" in found["another"]
