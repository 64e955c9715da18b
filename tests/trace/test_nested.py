"""Nested values: leaves, tensors among them, and what a function makes of the leaves."""

from __future__ import annotations

import torch

from wholestep.nested import leaves, map_leaves, tensors_of


def test_leaves_of_lists_tuples_and_dicts():
    x = torch.zeros(2)
    tree = ({"x": x}, [2, (3.0, None)], torch.Size([4]))
    assert list(leaves(tree)) == [x, 2, 3.0, None, 4]
    assert list(tensors_of(tree)) == [x]
    made = map_leaves(str, ({"x": 1}, [2, (3.0,)], torch.Size([4])))
    assert made == ({"x": "1"}, ["2", ("3.0",)], "torch.Size([4])")
