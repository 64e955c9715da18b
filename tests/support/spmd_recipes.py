"""Models with their training, and plans, for which one device and many ranks are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.spmd_programs import tensors
from tests.zoo import hf, nets
from wholestep.spmd import DataParallel, FullyShard, Replicate, Shard, ShardedOptimizer, TensorParallel

STEPS = 20
IGNORED = -100

Batch = dict[str, Tensor]


# Models ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained.

    Attributes:
        model: on one device; dropout and BatchNorm as in training.
        batch: the whole batch of a step.
        loss: of the model and a batch, a mean over what counts.
        optimizer: made of the parameters.
        roles: for `TensorParallel`: of linear layers, of tables, of results that are split along the sequence.
        parts: backward passes whose gradients add up.
        clip: largest norm of the gradients.
        keep: gradients are set to nothing in every so manieth call alone.
        rate: of the optimizer's learning rate at a step, its share of the first one.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    roles: Mapping[str, Mapping[str, Any]]
    parts: int = 1
    clip: float | None = None
    keep: int = 1
    rate: Callable[[int], float] | None = None


def rows(g: torch.Generator) -> Batch:
    return {"x": torch.randn(16, 6, generator=g), "y": torch.randint(4, (16,), generator=g)}


def images(g: torch.Generator) -> Batch:
    return {"x": torch.randn(16, 3, 8, 8, generator=g), "y": torch.randint(4, (16,), generator=g)}


def tokens(g: torch.Generator) -> Batch:
    ids = torch.randint(19, (8, 9), generator=g)
    return {"x": ids[:, :-1], "y": ids[:, 1:]}


def words(g: torch.Generator) -> Batch:
    """Ids, a mask of what is no padding, and labels of which some do not count: most of them in the first rows."""
    ids, labels = (torch.randint(3, 23, (8, 8), generator=g) for _ in range(2))
    keep = torch.rand(8, 8, generator=g) < torch.linspace(0.2, 1, 8)[:, None]
    keep[:, 0] = True
    mask = torch.ones_like(ids)
    mask[1::2, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.where(keep, IGNORED)}


def two_of_words(g: torch.Generator) -> Batch:
    """Ids and labels for two backward passes, one after the other along dimension 1."""
    one, two = words(g), words(g)
    return {key: torch.cat([one[key], two[key]], 1) for key in one}


def classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def own(model: nn.Module, batch: Batch) -> Tensor:
    return tensors(model(batch["x"], batch["y"]))[-1]


def of_words(model: nn.Module, batch: Batch) -> Tensor:
    """transformers' own losses are float32 whatever the model is."""
    logits = model(**batch).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


HF_ROLES = {"*.q_proj": "column", "*.k_proj": "column", "*.v_proj": "column", "*.o_proj": "row",
            "*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}  # fmt: skip
GPT_ROLES = {"*.qkv": "column", "*.proj": "row", "*.mlp.0": "column", "*.mlp.2": "row"}
BERT_ROLES = {"*.query": "column", "*.key": "column", "*.value": "column", "*.attention.output.dense": "row",
              "*.intermediate.dense": "column", "*.layer.*.output.dense": "row"}  # fmt: skip
T5_ROLES = {"*.q": "column", "*.k": "column", "*.v": "column", "*.o": "row", "*.wi": "column", "*.wo": "row"}


def first(build: Callable[[], nn.Module], *lists: str) -> Callable[[], nn.Module]:
    """A model of whose lists of blocks the first blocks alone stay: a second one costs time and shows little."""

    def make() -> nn.Module:
        model = build()
        for path in lists:
            home, _, name = path.rpartition(".")
            owner = model.get_submodule(home)
            setattr(owner, name, getattr(owner, name)[:1])
        return model

    return make


def along(roles: Mapping[str, str]) -> dict[str, Any]:
    """The results of layers whose inputs are split are split along the sequence."""
    return {pattern: ["row", "sequence"] if role == "row" else role for pattern, role in roles.items()}


def forms(layers: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {"": layers, "embedding": {**tables, **layers}, "sequence": along(layers)}


RECIPES: dict[str, Recipe] = {
    "mlp": Recipe(
        lambda: nets.MLP(dropout=0.1), rows, own,
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        {"": {"fc1": "column", "fc2": "row"}}, keep=3,
    ),
    "convnet": Recipe(
        nets.ConvNet, images, classes,
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
        {"": {"conv1.weight": Shard(0), "conv2.weight": Shard(0), "fc": "row"}},
    ),
    "gpt": Recipe(
        lambda: nets.GPT(layers=1), tokens, own, lambda p: torch.optim.AdamW(p, lr=5e-3),
        forms(GPT_ROLES, {"embed": "embedding", "position": "embedding"}), clip=0.5, rate=lambda i: (i + 1) / STEPS,
    ),
    "bert": Recipe(
        first(hf.bert, "bert.encoder.layer"), words, of_words, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        forms(BERT_ROLES, {"*_embeddings": "embedding"}),
    ),
    "llama": Recipe(
        first(hf.llama, "model.layers"), words, of_words, lambda p: torch.optim.Adam(p, lr=3e-3, foreach=True),
        forms(HF_ROLES, {"embed_tokens": "embedding", "lm_head": "column"}), clip=1.0,
    ),
    "t5": Recipe(
        first(hf.t5, "encoder.block", "decoder.block"), two_of_words, of_words,
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        forms(T5_ROLES, {"shared": "embedding"}), parts=2,
    ),
}  # fmt: skip


def step(model: nn.Module, opt: torch.optim.Optimizer, batch: Batch, how: Recipe, share: float) -> tuple[Tensor, ...]:
    """One step: its loss, and the norm of the gradients where they are clipped."""
    losses = []
    for part in range(how.parts):
        one = batch
        if how.parts > 1:
            one = {key: value.chunk(how.parts, 1)[part].contiguous() for key, value in batch.items()}
        losses.append(how.loss(model, one) * (share / how.parts))
        losses[-1].backward()
    loss = torch.stack(losses).sum().detach()
    if how.clip is None:
        opt.step()
        return (loss,)
    norm = nn.utils.clip_grad_norm_(model.parameters(), how.clip)
    opt.step()
    return loss, norm


# Plans ----------------------------------------------------------------------------------------------------------------


def fully(axis: str, **settings: Any) -> Callable[[Recipe], FullyShard]:
    return lambda recipe: FullyShard(axis, min_bytes=1, **settings)


def tensor(axis: str, form: str = "") -> Callable[[Recipe], TensorParallel]:
    return lambda recipe: TensorParallel(axis, recipe.roles[form])


def data(axis: str, **settings: Any) -> Callable[[Recipe], DataParallel]:
    return lambda recipe: DataParallel(axis, bucket_bytes=1 << 12, first_bucket_bytes=1 << 10, **settings)


def state(axis: str, **settings: Any) -> Callable[[Recipe], ShardedOptimizer]:
    return lambda recipe: ShardedOptimizer(axis, min_bytes=1, **settings)


# Number of axes -> plans by their names. A form that a recipe lacks leaves its cell empty.
PLANS: dict[int, dict[str, Sequence[Callable[[Recipe], Any]]]] = {
    1: {
        "FullyShard": [fully("a")],
        "FullyShard(gather='cheaper')": [fully("a", gather="cheaper")],
        "FullyShard(again=False)": [fully("a", again=False)],
        "FullyShard(batch=Replicate())": [fully("a", batch=Replicate())],
        "TensorParallel": [tensor("a")],
        "TensorParallel, embedding": [tensor("a", "embedding")],
        "TensorParallel, sequence": [tensor("a", "sequence")],
        "DataParallel": [data("a")],
        "DataParallel(reduce='sum')": [data("a", reduce="sum")],
        "ShardedOptimizer": [state("a")],
        "ShardedOptimizer(reduce='sum')": [state("a", reduce="sum")],
    },
    2: {
        "[TensorParallel, FullyShard]": [tensor("a"), fully("b")],
        "[FullyShard, TensorParallel]": [fully("a"), tensor("b")],
        "[TensorParallel embedding, FullyShard cheaper]": [tensor("a", "embedding"), fully("b", gather="cheaper")],
        "[TensorParallel sequence, FullyShard]": [tensor("a", "sequence"), fully("b")],
        "[TensorParallel, TensorParallel sequence]": [tensor("a"), tensor("b", "sequence")],
        "[FullyShard, FullyShard]": [fully("a"), fully("b")],
        "[FullyShard, DataParallel]": [fully("a"), data("b")],
        "[TensorParallel, ShardedOptimizer]": [tensor("a"), state("b")],
        "[FullyShard, ShardedOptimizer(reduce='sum')]": [fully("a"), state("b", reduce="sum")],
        "[DataParallel, ShardedOptimizer]": [data("a"), state("b")],
        "[DataParallel(reduce='sum'), ShardedOptimizer]": [data("a", reduce="sum"), state("b")],
        "[DataParallel(reduce='sum'), ShardedOptimizer(reduce='sum')]": [
            data("a", reduce="sum"), state("b", reduce="sum"),
        ],
    },
    3: {
        "[TensorParallel, FullyShard, DataParallel]": [tensor("a"), fully("b"), data("c")],
        "[FullyShard, TensorParallel, FullyShard cheaper]": [fully("a"), tensor("b"), fully("c", gather="cheaper")],
        "[TensorParallel sequence, FullyShard, FullyShard]": [tensor("a", "sequence"), fully("b"), fully("c")],
        "[TensorParallel embedding, FullyShard, ShardedOptimizer]": [tensor("a", "embedding"), fully("b"), state("c")],
        "[DataParallel, TensorParallel, ShardedOptimizer(reduce='sum')]": [
            data("a"), tensor("b"), state("c", reduce="sum"),
        ],
    },
}  # fmt: skip


def plans_of(recipe: Recipe, makers: Sequence[Callable[[Recipe], Any]]) -> list[Any] | None:
    """The plans for a model; None where they need a form that it lacks."""
    try:
        return [make(recipe) for make in makers]
    except KeyError:
        return None
