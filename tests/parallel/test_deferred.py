"""Models made without memory have, in parts, the numbers that one process draws."""

import copy

import pytest
import torch
from torch import nn

import tests.support.deferred_ranks as programs
from wholestep.deferred_init import fill, part_values, record_of
from wholestep.parallel import deferred, materialize
from wholestep.tensor_parts import Part
from wholestep.testing import run_ranks


@pytest.mark.parametrize("make", [programs.Other, programs.llama])
def test_values_are_those_that_one_process_draws(make):
    torch.manual_seed(0)
    usual, after = make(), torch.rand(3)
    torch.manual_seed(0)
    with deferred():
        lazy = make()
    assert torch.equal(torch.rand(3), after)
    large = [name for name, one in lazy.named_parameters() if one.nbytes >= 2**16 and name != "free"]
    assert all(record_of(lazy.get_parameter(name)) is not None for name in large)
    for name in reversed(large):  # in any order, and parts of them
        whole = usual.get_parameter(name).detach()
        part = Part.rows(whole.shape, 3, 17)
        assert torch.equal(part_values(lazy.get_parameter(name), part), whole[3:17]), name
    materialize(lazy)
    pairs = [*zip(usual.named_parameters(), lazy.parameters(), strict=True)]
    pairs += [*zip(usual.named_buffers(), lazy.buffers(), strict=True)]
    assert [name for (name, one), other in pairs if not torch.equal(one, other) or type(one) is not type(other)] == []
    if make is programs.Other:
        assert lazy.rates == usual.rates and lazy.drawn == usual.drawn and torch.equal(lazy.seen, usual.seen)
        assert lazy.head.weight is lazy.table.weight and lazy.view.data_ptr() == lazy.free[3:].data_ptr()


def test_what_has_no_values_is_not_used():
    with deferred():
        layer = nn.Linear(200, 300)
    x = torch.ones(2, 200)
    uses = (
        lambda: layer(x), lambda: layer.weight.data, lambda: layer.to(torch.bfloat16), lambda: copy.deepcopy(layer),
        lambda: nn.init.normal_(layer.weight), lambda: layer.weight.tolist(), lambda: x @ layer.weight.T,
    )  # fmt: skip
    for use in uses:
        with pytest.raises(RuntimeError, match=r"was given a tensor \[300, 200\] made within deferred"):
            use()
    assert layer.weight.shape == (300, 200) and "200" in repr(layer) and layer.weight.untyped_storage().nbytes() == 0
    with deferred():
        layer.to(torch.bfloat16)
        nn.init.ones_(layer.weight)
    assert torch.equal(materialize(layer).weight, torch.ones(300, 200, dtype=torch.bfloat16))
    given = torch.ones(200, 200)
    with deferred():
        copied = nn.Linear(200, 200)
        copied.weight.data.copy_(given)
    given += 1
    with pytest.raises(RuntimeError, match=r"a tensor \[200, 200\] that copy_ read was changed since"):
        materialize(copied)


def test_what_shares_memory_gets_its_values_together():
    with deferred():
        layer = nn.Linear(200, 300)
        layer.register_buffer("same", layer.weight.detach())
    with pytest.raises(RuntimeError, match="has no values yet"):
        layer.same.sum()
    fill(layer.weight)
    assert torch.equal(layer.same, layer.weight) and layer.same.data_ptr() == layer.weight.data_ptr()


def test_ranks_train_as_with_models_made_whole():
    for found in run_ranks(programs.beside_whole, 2):
        assert found == dict.fromkeys(["eager", *programs.PLANS, "reads"], True)


def test_a_rank_takes_its_parts_and_one_tensor_more():
    layer, beside = 16 * 2**20, 24 * 2**20  # beside: code that is loaded meanwhile
    for making, peak, parts in run_ranks(programs.peaks, 2, args=(8,)):
        assert making < layer + beside, "one tensor on which the generator is moved on"
        assert parts == 4 * layer and peak < parts + layer + beside


def test_mistakes_are_errors_with_names_on_all_ranks():
    for found in run_ranks(programs.mistakes, 2):
        assert "fully_shard: weight, bias is on the meta device, without values: make the model" in found["meta"]
        assert "models differ: parameter 0 is weight float32 [300, 200] made by calls with checksum" in found["seeds"]
        assert "weight made by calls with checksum" in found["compiled"]
        assert "made within deferred(), which has no values yet" in found["used"], "nothing has changed"
        assert found["reset"]
