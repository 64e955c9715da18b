"""Seed 000's tests of wrapped modules that one rank is enough for; where each of the seed's tests stands.

Guards with their sources, duplicate tensors, static methods and attributes of a module under `fully_shard`, and
Inductor. The same on two ranks, with values: `tests/support/seed_000_ranks.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import wholestep as ws
from tests.seeds.test_seed_000_split import Toy
from wholestep import comm
from wholestep.errors import UnsupportedError
from wholestep.parallel import DistributedDataParallel as DDP
from wholestep.parallel import fully_shard
from wholestep.testing import CompileCounter

RANKS, ONE = "support/seed_000_ranks", "seeds/test_seed_000"
SPLIT, HERE = "seeds/test_seed_000_split", "seeds/test_seed_000_sharded"
# The seed's test -> files, each with what stands for it.
TABLE = {
    "test_hf_bert_ddp_inductor": [(RANKS, "test_hf_bert_ddp_aot_eager"), (HERE, "test_inductor")],
    "test_hf_bert_ddp_inductor_static_graph": [(RANKS, "test_hf_bert_ddp_aot_eager_static_graph")],
    "test_hf_bert_ddp_aot_eager": [(RANKS, "test_hf_bert_ddp_aot_eager"), (SPLIT, "test_hf_bert_split")],
    "test_hf_bert_ddp_aot_eager_static_graph": [(RANKS, "test_hf_bert_ddp_aot_eager_static_graph")],
    "test_issue90375": [(ONE, "test_a_forward_of_no_arguments")],
    "test_symbol_splitting": [(ONE, "test_sizes_that_are_symbols_through_several_weights")],
    "test_call_method_forward": [(ONE, "test_forward_called_as_a_method")],
    "test_ddp_baseline_aot_eager_multiprocess": [(RANKS, "test_ddp_baseline_aot_eager")],
    "test_ddp_baseline_aot_eager": [(RANKS, "test_ddp_baseline_aot_eager")],
    "test_ddp_baseline_inductor": [(HERE, "test_inductor")],
    "test_ddp_activation_checkpointing": [(RANKS, "test_ddp_activation_checkpointing")],
    "test_fsdp_aot_eager": [(RANKS, "test_fsdp_aot_eager"), (RANKS, "test_fsdp_aot_eager, recursive")],
    "test_fsdp_setattr": [(RANKS, "test_fsdp_setattr"), (HERE, "test_attributes_set_in_the_forward")],
    "test_fsdp_inductor": [(HERE, "test_inductor")],
    "test_fsdp_activation_checkpointing": [(RANKS, "test_fsdp_activation_checkpointing")],
    "test_hf_bert_fsdp": [(RANKS, "test_hf_bert_fsdp")],
    "test_hf_bert_fsdp_activation_checkpointing": [(RANKS, "test_hf_bert_fsdp_activation_checkpointing")],
    "test_graph_split": [(SPLIT, "test_graph_split")],
    "test_graph_split_ctx_manager": [(SPLIT, "test_graph_split_ctx_manager")],
    "test_graph_split_inductor": [(HERE, "test_inductor")],
    "test_graph_split_inductor_layout_optimizations_training": [
        (RANKS, "test_graph_split_inductor_layout_optimizations")
    ],
    "test_graph_split_inductor_layout_optimizations_inference": [
        (RANKS, "test_graph_split_inductor_layout_optimizations")
    ],
    "test_graph_split_inductor_transpose": [(RANKS, "test_graph_split_inductor_transpose")],
    "test_no_split": [(SPLIT, "test_no_split")],
    "test_aot_autograd": [(RANKS, "test_aot_autograd")],
    "test_custom_layer": [(SPLIT, "test_custom_layer")],
    "test_empty_graph_inductor": [(SPLIT, "test_empty_graph")],
    "test_ignored_parameters": [(RANKS, "test_ignored_parameters"), (SPLIT, "test_ignored_parameters")],
    "test_higher_order_op": [(RANKS, "test_higher_order_op"), (SPLIT, "test_higher_order_op")],
    "test_fsdp_orig_params_assert": [(HERE, "test_flat_parameters_of_torchs_wrapper")],
    "test_fsdp_skip_guards": [(HERE, "test_guards_of_a_sharded_module")],
    "test_fsdp_skip_register_attr_or_module": [(RANKS, "test_fsdp_skip_register_attr_or_module")],
    "test_fsdp_dup_tensors_same_source": [(RANKS, "test_fsdp_dup_tensors"), (HERE, "test_a_tensor_in_two_places")],
    "test_fsdp_dup_tensors_diff_source": [(RANKS, "test_fsdp_dup_tensors"), (HERE, "test_a_tensor_in_two_places")],
    "test_fsdp_staticmethod": [(RANKS, "test_fsdp_staticmethod"), (HERE, "test_static_methods_are_captured_once")],
    "test_async_subclass_no_specialize": [(ONE, "test_one_capture_for_two_sizes")],
}


@pytest.mark.parametrize("name", TABLE)
def test_every_test_of_the_seed_has_a_place(name: str) -> None:
    for file, what in TABLE[name]:
        text = (Path(__file__).parents[1] / f"{file}.py").read_text("utf8")
        assert f"def {what}(" in text or f'"{what}"' in text


@pytest.fixture(autouse=True)
def one_rank() -> None:
    comm.init_process_group("thread", store=comm.HashStore(), rank=0, world_size=1)


def counted(model: nn.Module) -> tuple[Any, CompileCounter]:
    counter = CompileCounter()
    return ws.compile(fully_shard(model), backend=counter, fullgraph=True), counter


def test_guards_of_a_sharded_module() -> None:
    """The module and what it holds are guarded with their sources, sharded or not: a change is another capture."""
    compiled, counter = counted(Toy((10, 32, 5)))
    x = torch.rand(20, 10)
    compiled(x)
    said = [*map(str, compiled.guards)]
    wanted = {"": "FSDPToy", ".net": "Sequential", ".net.0": "Linear", ".net.0.weight": "ShardParameter"}
    places = [said.index(f"L['self']{below} type: {kind}") for below, kind in wanted.items()]
    assert places == sorted(places) and counter.frame_count == 2
    assert not any("_parameter_group." in one for one in said), "the wrapper's own state is none of the user's"


def test_attributes_set_in_the_forward() -> None:
    class Mutating(Toy):
        state = 1

        def forward(self, inputs: Tensor) -> Tensor:
            self.state = 2
            return self.net(inputs) * self.state  # type: ignore[no-any-return]

    model = Mutating((10, 32, 5))
    plain, x = copy.deepcopy(model), torch.rand(20, 10)
    compiled, _ = counted(model)
    for _ in range(2):
        model.state = 7
        assert torch.equal(compiled(x), plain(x)) and model.state == compiled.state == 2


def test_a_tensor_in_two_places() -> None:
    """A buffer by two sources, one of which is written, and twice by one: one input, and one capture for all calls."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("_buf", torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self._buf + self._buf

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._param, self.inner = nn.Parameter(torch.randn(1)), Inner()
            self.register_buffer("_buf", self.inner._buf)

        def forward(self, x: Tensor) -> Tensor:
            self._buf.mul_(2)
            z = self.inner(x + self._buf)
            z += self._param + self._param
            return z

    model = Model()
    plain, x = copy.deepcopy(model), torch.randn(2, 3)
    compiled, counter = counted(model)
    for _ in range(15):
        assert torch.equal(compiled(x), plain(x)) and torch.equal(model._buf, plain._buf)
    assert counter.frame_count == 2 and compiled.recompiles == []
    assert sum(node.op == "placeholder" for node in counter.graphs[0].graph.nodes) == 3


def test_static_methods_are_captured_once() -> None:
    class Static(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._param = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            z = self._add(x, self._param) + Static._add(x, self._param)
            z *= 2
            return z

        @staticmethod
        def _add(x: Tensor, y: Tensor) -> Tensor:
            return x + y

    model = Static()
    plain, x = copy.deepcopy(model), torch.randn(2, 3)
    compiled, counter = counted(model)
    assert all(torch.equal(compiled(x), plain(x)) for _ in range(3)) and counter.frame_count == 2


@pytest.mark.parametrize(("wrap", "split"), [(partial(DDP, bucket_cap_mb=0.0005), "buckets"), (fully_shard, None)])
def test_inductor(wrap: Any, split: Any) -> None:
    """Whole, or a graph for each bucket: as in eager to float tolerance."""
    model = Toy((10, 32, 5))
    plain, x = copy.deepcopy(model), torch.rand(20, 10)
    plain(x).square().sum().backward()
    wrapped = wrap(model)
    compiled = ws.compile(wrapped, backend="inductor", fullgraph=True, split=split)
    compiled(x).square().sum().backward()
    for mine, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and torch.allclose(mine.grad, other.grad, rtol=1e-4)
    assert compiled.explain(x).graph_count == (4 if split else 1)


@contextmanager
def torchs_group(folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_flat_parameters_of_torchs_wrapper(tmp_path: Path) -> None:
    """torch asserts that parameters are the original ones; here either kind runs its Python, or is refused by name."""
    x = torch.rand(20, 10)
    with torchs_group(tmp_path):
        model = FullyShardedDataParallel(Toy((10, 32, 5)), use_orig_params=False, device_id=torch.device("cpu"))
        with pytest.raises(UnsupportedError, match="FullyShardedDataParallel inside of a compiled step"):
            ws.compile(model, fullgraph=True)(x)
        assert torch.equal(ws.compile(model)(x), model(x))
