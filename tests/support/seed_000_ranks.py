"""What the seed about compiled wrappers does on several ranks, with our wrappers: programs that every rank runs.

Each gives True where outputs, losses and gradients of the compiled form are those of the wrapper in eager, bit for bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForMaskedLM, BertConfig
from transformers.models.bert.modeling_bert import BertLayer

import wholestep as ws
from wholestep.parallel import DistributedDataParallel as DDP
from wholestep.parallel import fully_shard
from wholestep.testing import CompileCounter


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = 1
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]


class Mutating(Toy):
    def forward(self, inputs: Tensor) -> Tensor:
        self.state = 2
        return self.net(inputs) * self.state  # type: ignore[no-any-return]


class Static(Toy):
    @staticmethod
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def forward(self, inputs: Tensor) -> Tensor:
        return self.add(self.net(inputs), Static.add(self.net[0].bias.sum(), self.net[2].bias.sum()))


class Duplicate(Toy):
    """One tensor twice by one source, and one by two sources, of which one is written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(5, affine=False)
        self.register_buffer("same", self.inner.running_mean)

    def forward(self, inputs: Tensor) -> Tensor:
        self.same.mul_(2)
        return self.inner(self.net(inputs)) + self.same + self.same  # type: ignore[no-any-return]


class Checkpoints(Toy):
    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.cos(checkpoint(self.net[:2], inputs, use_reentrant=False))
        return checkpoint(self.net[2:], x, use_reentrant=False)  # type: ignore[no-any-return]


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear0, self.linear1 = nn.Linear(6, 7), nn.Linear(5 * 7, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear1(self.linear0(x.transpose(2, 1)).flatten(1))  # type: ignore[no-any-return]


def convolutions() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 1, bias=False), nn.ReLU())]
    return nn.Sequential(*layers)


def bert() -> nn.Module:
    config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return AutoModelForMaskedLM.from_config(config).train()  # type: ignore[no-any-return]


def checkpointed(model: nn.Module, kind: type) -> nn.Module:
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda one: isinstance(one, kind))
    return model


def ignoring() -> nn.Module:
    model = Toy()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["net.0.weight", "net.2.bias"])
    return model


def sharded(model: nn.Module, kind: type = nn.Linear) -> nn.Module:
    for one in list(model.modules()):
        if isinstance(one, kind) and one is not model:
            fully_shard(one)
    return fully_shard(model)


VECTORS, IMAGES, CUBES = torch.ones(6, 10), torch.ones(2, 16, 4, 4), torch.ones(4, 6, 5)
# The seed's test -> the model, how it is wrapped, its input (None: BERT's), and whether no Python may run at each call.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], Tensor | None, bool]] = {
    "test_ddp_baseline_aot_eager": (Toy, DDP, VECTORS, True),
    "test_aot_autograd": (Toy, functools.partial(DDP, bucket_cap_mb=25), VECTORS, True),
    "test_hf_bert_ddp_aot_eager": (bert, DDP, None, True),
    "test_hf_bert_ddp_aot_eager_static_graph": (bert, functools.partial(DDP, static_graph=True), None, True),
    "test_ddp_activation_checkpointing": (lambda: checkpointed(Toy(), nn.Linear), DDP, VECTORS, True),
    "test_higher_order_op": (Checkpoints, functools.partial(DDP, bucket_cap_mb=1), VECTORS, True),
    "test_ignored_parameters": (ignoring, DDP, VECTORS, True),
    "test_graph_split_inductor_layout_optimizations": (convolutions, DDP, IMAGES, True),
    "test_graph_split_inductor_transpose": (Transposed, DDP, CUBES, True),
    "test_fsdp_aot_eager": (Toy, fully_shard, VECTORS, True),
    "test_fsdp_aot_eager, recursive": (Toy, sharded, VECTORS, True),
    "test_fsdp_setattr": (Mutating, fully_shard, VECTORS, True),
    "test_fsdp_activation_checkpointing": (lambda: checkpointed(Toy(), nn.Sequential), sharded, VECTORS, True),
    "test_fsdp_dup_tensors": (Duplicate, fully_shard, VECTORS, True),
    "test_fsdp_staticmethod": (Static, fully_shard, VECTORS, True),
    "test_hf_bert_fsdp": (bert, fully_shard, None, True),
    "test_hf_bert_fsdp_activation_checkpointing": (
        lambda: checkpointed(bert(), BertLayer), lambda m: sharded(m, BertLayer), None, True,
    ),
}  # fmt: skip


def _inputs(like: Tensor | None) -> Iterator[dict[str, Tensor] | Tensor]:
    for number in range(3):
        if like is None:
            yield {key: torch.randint(0, 60, (2, 8)) for key in ("input_ids", "labels")}
        else:
            yield torch.randn(like.shape) * (number + 1)


def _loss(model: nn.Module, given: Any) -> Tensor:
    return model(**given).loss if isinstance(given, dict) else model(given).square().sum()  # type: ignore[no-any-return]


def _trained(model: Any, wrapper: Any, like: Tensor | None, compiled: str) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    made = wrapper(copy.deepcopy(model) if compiled != "inside" else ws.compile(copy.deepcopy(model)))
    module = ws.compile(made) if compiled == "module" else made
    step = ws.compile(_step) if compiled == "step" else _step
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(1337 + ws.comm.get_rank())
    found = [step(module, opt, given).detach().clone() for given in _inputs(like)]
    found += [one.detach().clone() for one in (*module.parameters(), *module.buffers())]
    return found, {"module": module, "step": step, "inside": getattr(made, "module", made)}.get(compiled)


def _step(model: nn.Module, opt: torch.optim.Optimizer, given: Any) -> Tensor:
    loss = _loss(model, given)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def equal(name: str) -> dict[str, Any]:
    make, wrapper, like, whole = CASES[name]
    torch.manual_seed(0)
    model = make()
    want, _ = _trained(model, wrapper, like, "")
    found = {}
    for way in ("module", "step", *(("inside",) if whole else ())):
        have, compiled = _trained(model, wrapper, like, way)
        broken = compiled.breaks if whole else []
        found[way] = all(map(torch.equal, want, have)) and (not broken or str(broken))
    return found


def inputs_of_graphs() -> bool:
    """Parameters of a sharded module, and of one with a wrapper, are inputs of graphs and no attributes."""
    counter = CompileCounter()
    x = torch.ones(2, 10)
    for model in (DDP(Toy()), fully_shard(Toy())):
        compiled = ws.compile(model, backend=counter)
        if not torch.equal(compiled(x), model(x)):
            return False
    return not any(node.op == "get_attr" for graph in counter.graphs for node in graph.graph.nodes)


def everything(names: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"test_fsdp_skip_register_attr_or_module": inputs_of_graphs()}
    for name in names:
        try:
            found[name] = equal(name)
        except Exception as error:  # noqa: BLE001 - it is what the test shows
            found[name] = f"{type(error).__name__}: {error}"
            break  # the other ranks are elsewhere
    return found

