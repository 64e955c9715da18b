"""Seed 002: the whole train step on two ranks, overrides, graph transformations, collectives over meshes."""

import pytest
import torch

from tests.support import spmd_seed
from wholestep.testing import run_ranks


@pytest.fixture(scope="module", params=["shm", "thread"])
def found(request):
    return run_ranks(spmd_seed.everything, 2, request.param, timeout=300)


def test_gradients_and_updates_are_by_sums(found):
    for each in found:
        assert each["simple"] and each["sgd"]
        assert each["adam foreach"] == each["adam fused"] == [(True, [1]), (True, [1])]


def test_modules_are_replaced_in_the_trace_and_the_expanded_graph_transformed(found):
    for each in found:
        assert each["overrides"] == [["ddm", "ddm_backward"], ["ddm", "ddm", "ddm_backward", "ddm_backward"]]


def test_a_transformation_is_called_once(found):
    for each in found:
        assert each["cache"] == (1, True, 1)


def test_a_buffer_may_want_a_gradient_and_is_no_parameter(found):
    for each in found:
        assert each["buffer"] == (True, True, True)


def test_sizes_in_the_backward_are_those_of_the_ranks_own_batch(found):
    for each in found:
        assert each["expand"] and all(size == [2, 10] for size in each["expand"])


@pytest.mark.parametrize("name", spmd_seed.COVERAGE)
def test_coverage(name, found):
    for each in found:
        assert each["coverage"][name]


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 2)])
def test_traced_collectives_over_the_axes_of_a_mesh(shape):
    kinds = ("all_reduce", "broadcast", "scatter", "all_gather")
    names = {f"{kind} {axis}" for kind in kinds for axis in range(len(shape))}
    for each in run_ranks(spmd_seed.collectives, torch.Size(shape).numel(), "thread", (shape,)):
        assert each == dict.fromkeys(names, True)
