"""Training steps of what libraries offer by name: models, layers, losses, metrics, augmentations and optimizers.

Each function yields candidates, the likeliest to run first: what a candidate is called, and how its world is made.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.support.worlds import Make, World

STEPS, MOST_PARAMETERS, TRIED = 3, 62_000_000, 8
SMALL = ("test_", "pico", "femto", "atto", "nano", "xxs", "xxt", "xs", "tiny", "_t", "small", "_s", "b0", "18", "11")
FEWER = ({"depth": 2}, {"depths": (1, 1, 1, 1)}, {"layers": (1, 1, 1, 1)}, {})

# Arguments of constructors and of `forward`, by name.
ARGUMENTS: dict[str, Any] = {
    "in_channels": 8, "out_channels": 8, "embedding_size": 8, "descriptors_dim": 8, "num_classes": 4, "num_labels": 4,
    "task": "multiclass", "K": 2, "l": 4, "Tn": 0.5, "margin": 0.5, "size": (12, 12), "num_features": 8, "heads": 2,
    "num_relations": 3, "edge_dim": 4, "num_layers": 2, "alpha": 0.1, "dim": 3, "kernel_size": 3, "channels": 8,
    "space_dimensions": 3, "propagate_dimensions": 8, "k": 3, "num_nodes": 6, "degrees": 10.0, "mean": 0.5, "std": 0.5,
    "max_size": 12, "padding_size": 1, "first_aggr": True, "num_outputs": 4, "aggregators": ["mean"],
    "scalers": ["identity"], "x_0": torch.randn(6, 8), "edge_type": torch.arange(10) % 3,
    "deg": torch.tensor([0, 1, 2]), "shape": (3, 16, 16), "nn": nn.Linear(8, 8), "edge_weight": torch.rand(10),
    "edge_index": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [1, 2, 3, 4, 5, 0, 2, 3, 4, 5]]),
    "edge_attr": torch.randn(10, 4), "pos": torch.randn(6, 3), "normal": torch.randn(6, 3),
    "hyperedge_index": torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1]]), "h": torch.randn(6, 8),
    "sigma": (0.1, 2.0), "angle": 35.0, "direction": 0.5, "shear": (-5.0, 5.0), "times": (1, 3),
}  # fmt: skip


def loss_of(output: Any) -> Tensor:
    """The mean square of all that a model gives."""
    floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([value.float().square().mean() for value in floats]).sum()


def trained(model: nn.Module, forward: Callable[..., Any], *args: Any) -> World:
    """A step of SGD on what ``forward`` gives."""
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)

    def step(*batch: Any) -> Tensor:
        opt.zero_grad()
        loss = loss_of(forward(*batch))
        loss.backward()
        opt.step()
        return loss

    return World(step, [args], {"model": model, "opt": opt}, versions=False)


def smallest(names: Iterable[str], create: Callable[[str], nn.Module]) -> str:
    """The member with the fewest parameters among those whose names promise few."""
    found = []
    for name in sorted(names, key=lambda n: next((i for i, word in enumerate(SMALL) if word in n), 99))[:TRIED]:
        try:
            with torch.device("meta"):
                model = create(name)
        except RuntimeError:  # a constructor that reads what it draws
            model = create(name)
        found.append((sum(p.numel() for p in model.parameters()), name))
    if min(found)[0] > MOST_PARAMETERS:
        raise LookupError(f"{min(found)[1]} has {min(found)[0]} parameters")
    return min(found)[1]


def timm_models(module: str) -> Iterator[tuple[str, Make]]:
    timm = importlib.import_module("timm")
    name = smallest(timm.list_models(module=module), functools.partial(timm.create_model, num_classes=10))
    sizes = (64, 96, 224, 256)

    def make(few: dict[str, Any], rates: dict[str, float], side: int, sized: bool, seed: int) -> World:
        size = {"img_size": side} if sized else {}
        model = timm.create_model(name, num_classes=10, **few, **rates, **size).train()
        return trained(model, model, torch.randn(2, 3, side, side))

    rates = ({"drop_rate": 0.1, "drop_path_rate": 0.1}, {})
    for few, rate, side, sized in itertools.product(FEWER, rates, sizes, (True, False)):
        yield f"{name} {few or ''}", functools.partial(make, few, rate, side, sized)


def torchvision_families() -> list[str]:
    models = importlib.import_module("torchvision.models")
    return sorted({models.get_model_builder(n).__module__.split("models.")[1] for n in models.list_models()})


def torchvision_models(family: str) -> Iterator[tuple[str, Make]]:
    models = importlib.import_module("torchvision.models")
    builders = {n: models.get_model_builder(n) for n in models.list_models()}
    names = [n for n, builder in builders.items() if builder.__module__ == f"torchvision.models.{family}"]
    bare = {"weights_backbone": None} if family.startswith(("detection", "segmentation")) else {}
    name = smallest(names, lambda n: builders[n](**bare))
    boxes, masks = torch.tensor([[4.0, 4, 30, 30], [9, 9, 50, 40]]), torch.ones(2, 64, 64, dtype=torch.uint8)
    found = {"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": masks, "keypoints": torch.full((2, 17, 3), 20.0)}

    def make(settings: dict[str, Any], shapes: list[tuple[int, ...]], detects: bool, seed: int) -> World:
        model = models.get_model(name, weights=None, **settings).train()
        images = [torch.randn(shape) for shape in shapes]
        return trained(model, model, images, [found] * 2) if detects else trained(model, model, *images)

    few = ({"num_classes": 5}, {"num_keypoints": 17}, {})
    if family.startswith("detection"):
        for settings, side in itertools.product(few, ({"min_size": 64, "max_size": 64}, {})):
            sized = {**bare, **side, **settings}
            yield name, functools.partial(make, sized, [(3, 64, 64)] * 2, True)
        return
    sides = [[(2, 3, s, s)] for s in (64, 128, 224, 299)]
    videos = [[(2, 3, 8, 64, 64)], [(1, 3, 16, 224, 224)], [(1, 3, 128, 128)] * 2]
    moves = family.startswith(("video", "optical_flow"))
    for settings, shapes in itertools.product(few[::2], videos if moves else sides):
        yield name, functools.partial(make, bare | settings, shapes, False)


class Net(nn.Module):
    """Convolution, normalisation and linear layers, for optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.LayerNorm(64)
        self.a, self.drop, self.b = nn.Linear(64, 16), nn.Dropout(0.1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv(x)).flatten(1)
        return self.b(self.drop(F.relu(self.a(self.norm(x)))))


def optimizer_worlds(create: Callable[[nn.Module], Any]) -> Iterator[tuple[str, Make]]:
    """Steps that an optimizer may ask for: plain, with second derivatives, with a closure."""

    def make(form: str, seed: int) -> World:
        model = Net()
        opt = create(model)
        if form == "closure" and not hasattr(opt, "step"):
            raise TypeError("no step")
        if not isinstance(opt, nn.Module) and hasattr(opt, "train"):
            opt.train()

        def forward(x: Tensor, y: Tensor) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward(create_graph=form == "graph")
            return loss

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor
            if form == "closure":
                loss = opt.step(lambda: forward(x, y))
            else:
                loss = forward(x, y)
                opt.step()
            return loss.detach()

        batches = [(torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))) for _ in range(STEPS)]
        return World(step, batches, {"model": model, "opt": opt}, versions=False)

    for form in ("plain", "closure", "graph"):
        yield form, functools.partial(make, form)


def optimizer(module: str, name: str) -> Iterator[tuple[str, Make]]:
    """An optimizer by its name in a library's table."""
    library = importlib.import_module(module)

    def create(settings: dict[str, Any], model: nn.Module) -> Any:
        if hasattr(library, "create_optimizer_v2"):
            return library.create_optimizer_v2(model, opt=name, **settings)
        if hasattr(library, "load_optimizer"):
            return library.load_optimizer(name)(model.parameters(), **settings)
        return getattr(library, name)(model.parameters(), **settings)

    for settings in ({"lr": 1e-2, "weight_decay": 0.05}, {"lr": 1e-2}, {}, {"lr": 1e-2, "num_iterations": 10}):
        yield from optimizer_worlds(functools.partial(create, settings))


def made(cls: type) -> Any:
    """An object of a class, with the same memory each time where the library leaves some unwritten."""
    return copy.deepcopy(original(cls))


@functools.cache
def original(cls: type) -> Any:
    """An object of a class, what its constructor needs taken by name."""
    asked = inspect.signature(cls).parameters.values()
    needed = [p.name for p in asked if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    given = {name: ARGUMENTS[name] for name in needed}
    with torch.random.fork_rng():
        return cls(**given | ({"num_classes": 4} if "task" in given else {}))


def layer(module: str, name: str) -> Iterator[tuple[str, Make]]:
    """A layer of a graph network, called with what its `forward` asks for by name."""
    cls = getattr(importlib.import_module(module), name)

    def make(every: bool, seed: int) -> World:
        model = nn.ModuleList([nn.Linear(8, 8), made(cls)])
        _, *asked = inspect.signature(model[1].forward).parameters.values()
        named = [p.name for p in asked if p.name in ARGUMENTS and p.name != "size"]
        given = {p.name: ARGUMENTS[p.name] for p in asked if p.name in named and (p.default is p.empty or every)}
        return trained(model, lambda x: model[1](model[0](x), **given), torch.randn(6, 8))

    for every in (False, True):
        yield name, functools.partial(make, every)


def called(calls: Iterable[Callable[..., Any]], module: str, name: str) -> Iterator[tuple[str, Make]]:
    """A loss, metric or augmentation, called in one of several ways."""
    cls = getattr(importlib.import_module(module), name)

    def make(call: Callable[..., Any], seed: int) -> World:
        module = made(cls)
        model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(12, 8)), "conv": nn.Conv2d(3, 3, 3, padding=1)})
        if isinstance(module, nn.Module):
            model["library"] = module
        x, y = (torch.randn(6, 12), torch.randn(6, 12)), torch.arange(6) // 2
        return trained(model, lambda a, b, y, i: call(module, model["net"](a), model["net"](b), y, model["conv"](i)),
                       *x, y, torch.rand(2, 3, 16, 16))  # fmt: skip

    for call in calls:
        yield name, functools.partial(make, call)


LOSSES = (
    lambda loss, a, b, y, image: loss(a, y), lambda loss, a, b, y, image: loss(a, b),
    lambda loss, a, b, y, image: loss(a),
    lambda loss, a, b, y, image: loss([a, b], [b, a]), lambda loss, a, b, y, image: loss([a, b]),
    lambda loss, a, b, y, image: loss(a[None], b[None]), lambda loss, a, b, y, image: loss(a, b, y),
)  # fmt: skip
IMAGES = (
    lambda change, a, b, y, image: change(image), lambda change, a, b, y, image: change(image, y[:2]),
    lambda change, a, b, y, image: change(image[:, :, None].expand(-1, -1, 8, -1, -1)),
    lambda change, a, b, y, image: change(image, (image > 0.5).float()),
)  # fmt: skip
METRICS = (
    lambda metric, a, b, y, image: (a, metric(a.detach()[:, :4].softmax(1), y), metric.compute()),
    lambda metric, a, b, y, image: (a, metric(a.detach(), b.detach()), metric.compute()),
    lambda metric, a, b, y, image: (a, metric(a.detach()[:, 0], b.detach()[:, 0]), metric.compute()),
    lambda metric, a, b, y, image: (image, metric(image.detach().abs(), image.detach().abs() * 0.9), metric.compute()),
    lambda metric, a, b, y, image: (image, metric(image.detach()), metric.compute()),
    lambda metric, a, b, y, image: (a, metric(a.detach()[None, :, :4], y[None] % 4), metric.compute()),
    lambda metric, a, b, y, image: (a, metric(a.detach()[:, 0].sigmoid(), y > 0, indexes=y), metric.compute()),
    lambda metric, a, b, y, image: (a, metric(["a cat sat"], ["a cat sits"]), metric.compute()),
    lambda metric, a, b, y, image: (a, metric(["a cat sat"], [["a cat sits"]]), metric.compute()),
)  # fmt: skip
