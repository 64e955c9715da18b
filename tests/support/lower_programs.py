"""Whole training steps as `StepGraph`s, made without the recorder: for the tests of lower/ and passes/."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from wholestep.fake_evaluate import run
from wholestep.functional import Functionalized
from wholestep.ir import GETITEM, Input, NodeInfo, Signature, StepGraph, check, info, set_info
from wholestep.nested import tensors_of
from wholestep.passes.canonicalize import copy_step
from wholestep.torch_compat import FakeTensorMode

aten = torch.ops.aten


class Builder:
    """Writes a graph call by call; fake values are computed along."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.graph = fx.Graph()
        self.inputs: list[Input] = []
        self.real: list[Any] = []
        self.phase: Any = "forward"
        self.where = ""

    def input(self, name: str, value: Any, kind: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        fake = self.mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value
        set_info(node, NodeInfo(fake, self.phase))
        self.inputs.append(Input(name, f"L['{name}']", kind))
        self.real.append(value)
        return node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        node = self.graph.call_function(op, args, kwargs)
        fakes = fx.map_arg((args, kwargs), lambda n: info(n).value)
        with self.mode, torch.no_grad():
            value = 3.0 if op is aten._local_scalar_dense.default else op(*fakes[0], **fakes[1])
        return set_info(node, NodeInfo(value, self.phase, where=self.where))

    def items(self, node: fx.Node) -> list[fx.Node]:
        return [self.call(GETITEM, node, i) for i in range(len(info(node).value))]

    def inline(self, gm: fx.GraphModule, args: list[fx.Node]) -> list[Any]:
        """Repeats a traced graph here; gives its outputs."""
        env: dict[fx.Node, Any] = {}
        given = iter(args)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                env[node] = self.constant(getattr(gm, node.target))
            elif node.op == "call_function":
                new_args, new_kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
                self.where = f"model.py:{len(env)}"
                env[node] = self.pure(node.target, *new_args, **new_kwargs)
                if mutable(node.target):
                    env[node.args[0]] = env[node]
            else:
                return list(fx.map_arg(node.args[0], lambda n: env[n]))
        raise AssertionError("no output")

    def pure(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """The functional form of a call that may write its first argument."""
        if not mutable(op):
            return self.call(op, *args, **kwargs)
        if op is aten.div_.Scalar:
            return self.call(aten.div.Scalar, *args)
        return self.call(GETITEM, self.call(Functionalized(op), *args, **kwargs), 0)

    def constant(self, value: torch.Tensor) -> fx.Node:
        self.owner = getattr(self, "owner", torch.nn.Module())
        name = f"constant_{len(dict(self.owner.named_buffers()))}"
        self.owner.register_buffer(name, value)
        node = self.graph.create_node("get_attr", name)
        return set_info(node, NodeInfo(self.mode.from_tensor(value), self.phase))

    def finish(self, outputs: list[Any], mutations: dict[int, int]) -> tuple[StepGraph, list[Any]]:
        self.graph.output(tuple(outputs))
        gm = fx.GraphModule(getattr(self, "owner", torch.nn.Module()), self.graph)
        signature = Signature(self.inputs, len(outputs), mutations)
        return check(StepGraph(gm, signature), "test"), self.real


def training_step(
    model: torch.nn.Module,
    loss_of: Callable[..., torch.Tensor],
    batch: list[torch.Tensor],
    optimizer: str = "adamw",
    lr: float = 1e-3,
    keep_grads: bool = False,
) -> tuple[StepGraph, list[Any]]:
    """Forward, backward and an optimizer of `OPTIMIZERS` as one graph; returns it with real inputs."""
    build = Builder()
    names = [n for n, _ in model.named_parameters()]
    values = [p for _, p in model.named_parameters()]

    def forward_backward(parameters: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
        parameters = [p.detach().requires_grad_() for p in parameters]
        loss = loss_of(lambda *a: functional_call(model, dict(zip(names, parameters, strict=True)), a), *given)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    traced = make_fx(forward_backward, tracing_mode="fake")(values, batch)
    params = [build.input("p_" + n.replace(".", "_"), v, "parameter") for n, v in zip(names, values, strict=True)]
    given = [build.input(f"batch_{i}", v, "tensor") for i, v in enumerate(batch)]
    state: list[list[fx.Node]] = []
    count = {"sgd": 0, "sgd_twice": 0, "momentum": 1, "nesterov": 1, "adagrad": 1, "adam": 3}.get(optimizer, 2)
    for index, value in enumerate(values):
        made = [torch.rand_like(value.detach()) * 0.01 for _ in range(count)]
        if optimizer.startswith("ada"):
            made.insert(0, torch.tensor(3.0))
        state.append([build.input(f"state_{index}_{k}", v, "state") for k, v in enumerate(made)])
    rate = build.input("lr", lr, "number")
    loss, *grads = build.inline(traced, params + given)
    build.phase, build.where = "optimizer", "train.py:7"
    new_params, new_state = OPTIMIZERS[optimizer](build, params, grads, state, rate)
    outputs: list[Any] = [loss]
    mutations: dict[int, int] = {}
    old = params + [s for row in state for s in row]
    for before, after in zip(old, new_params + [s for row in new_state for s in row], strict=True):
        mutations[len(outputs)] = [i.name for i in build.inputs].index(str(before.target))
        outputs.append(after)
    if keep_grads:
        outputs += grads
    return build.finish(outputs, mutations)


def adamw(b: Builder, params: Any, grads: Any, state: Any, lr: Any) -> Any:
    """The default AdamW on the CPU, operator by operator: steps read with ``.item()``."""
    new_p, new_s = [], []
    for p, g, (step, m, v) in zip(params, grads, state, strict=True):
        step = b.call(aten.add.Tensor, step, 1)
        p = b.call(aten.mul.Tensor, p, b.call(operator.sub, 1, b.call(operator.mul, lr, 0.01)))
        m = b.call(aten.lerp.Scalar, m, g, 1 - 0.9)
        v = b.call(aten.mul.Tensor, v, 0.999)
        v = b.call(aten.addcmul.default, v, g, g, value=1 - 0.999)
        t = b.call(aten._local_scalar_dense.default, step)
        c1 = b.call(operator.sub, 1, b.call(operator.pow, 0.9, t))
        c2 = b.call(operator.sub, 1, b.call(operator.pow, 0.999, t))
        size = b.call(operator.truediv, lr, c1)
        root = b.call(operator.pow, c2, 0.5)
        d = b.call(aten.div.Tensor, b.call(aten.sqrt.default, v), root)
        d = b.call(aten.add.Tensor, d, 1e-8)
        p = b.call(aten.addcdiv.default, p, m, d, value=b.call(operator.neg, size))
        new_p.append(p)
        new_s.append([step, m, v])
    return new_p, new_s


def adamw_foreach(b: Builder, params: Any, grads: Any, state: Any, lr: Any) -> Any:
    """AdamW with ``foreach=True``."""
    steps, ms, vs = (list(c) for c in zip(*state, strict=True))
    steps = b.items(b.call(aten._foreach_add.Scalar, steps, 1))
    params = b.items(b.call(aten._foreach_mul.Scalar, params, b.call(operator.sub, 1, b.call(operator.mul, lr, 0.01))))
    ms = b.items(b.call(aten._foreach_lerp.Scalar, ms, grads, 1 - 0.9))
    vs = b.items(b.call(aten._foreach_mul.Scalar, vs, 0.999))
    vs = b.items(b.call(aten._foreach_addcmul.Scalar, vs, grads, grads, 1 - 0.999))
    ts = [b.call(aten._local_scalar_dense.default, s) for s in steps]
    c1 = [b.call(operator.sub, 1, b.call(operator.pow, 0.9, t)) for t in ts]
    c2 = [b.call(math.sqrt, b.call(operator.sub, 1, b.call(operator.pow, 0.999, t))) for t in ts]
    sizes = [b.call(operator.neg, b.call(operator.truediv, lr, c)) for c in c1]
    ds = b.items(b.call(aten._foreach_sqrt.default, vs))
    ds = b.items(b.call(aten._foreach_div.ScalarList, ds, c2))
    ds = b.items(b.call(aten._foreach_add.Scalar, ds, 1e-8))
    params = b.items(b.call(aten._foreach_addcdiv.ScalarList, params, ms, ds, sizes))
    return params, [list(row) for row in zip(steps, ms, vs, strict=True)]


def adamw_fused(b: Builder, params: Any, grads: Any, state: Any, lr: Any) -> Any:
    """AdamW with ``fused=True``; results nest as the functional overload gives them."""
    steps, ms, vs = (list(c) for c in zip(*state, strict=True))
    steps = b.items(b.call(aten._foreach_add.Scalar, steps, 1))
    result = b.call(aten._fused_adamw.default, params, grads, ms, vs, [], steps, lr=lr, beta1=0.9, beta2=0.999,
                    weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip
    params, ms, vs = (b.items(b.call(GETITEM, result, i)) for i in (0, 2, 3))
    return params, [list(row) for row in zip(steps, ms, vs, strict=True)]


def momentum(b: Builder, params: Any, grads: Any, state: Any, lr: Any) -> Any:
    """SGD with momentum 0.9 and weight decay 0.1."""
    new_p, new_s = [], []
    for p, g, (buf,) in zip(params, grads, state, strict=True):
        g = b.call(aten.add.Tensor, g, p, alpha=0.1)
        buf = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, buf, 0.9), g)
        new_p.append(b.call(aten.add.Tensor, p, buf, alpha=b.call(operator.neg, lr)))
        new_s.append([buf])
    return new_p, new_s


def sgd(b: Builder, params: Any, grads: Any, state: Any, lr: Any) -> Any:
    """Plain SGD."""
    minus = b.call(operator.neg, lr)
    return [b.call(aten.add.Tensor, p, g, alpha=minus) for p, g in zip(params, grads, strict=True)], [
        [] for _ in params
    ]


def adam(b: Builder, params: Any, grads: Any, state: Any, lr: Any) -> Any:
    """Adam with amsgrad and L2 weight decay 0.1."""
    new_p, new_s = [], []
    for p, g, (step, m, v, top) in zip(params, grads, state, strict=True):
        step = b.call(aten.add.Tensor, step, 1)
        g = b.call(aten.add.Tensor, g, p, alpha=0.1)
        m = b.call(aten.lerp.Scalar, m, g, 1 - 0.9)
        v = b.call(aten.addcmul.default, b.call(aten.mul.Tensor, v, 0.999), g, g, value=1 - 0.999)
        top = b.call(aten.maximum.default, top, v)
        t = b.call(aten._local_scalar_dense.default, step)
        size = b.call(operator.truediv, lr, b.call(operator.sub, 1, b.call(operator.pow, 0.9, t)))
        root = b.call(operator.pow, b.call(operator.sub, 1, b.call(operator.pow, 0.999, t)), 0.5)
        d = b.call(aten.add.Tensor, b.call(aten.div.Tensor, b.call(aten.sqrt.default, top), root), 1e-8)
        new_p.append(b.call(aten.addcdiv.default, p, m, d, value=b.call(operator.neg, size)))
        new_s.append([step, m, v, top])
    return new_p, new_s


def nesterov(b: Builder, params: Any, grads: Any, state: Any, lr: Any) -> Any:
    """SGD with Nesterov momentum 0.9."""
    new_p, new_s = [], []
    for p, g, (buf,) in zip(params, grads, state, strict=True):
        buf = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, buf, 0.9), g)
        g = b.call(aten.add.Tensor, g, buf, alpha=0.9)
        new_p.append(b.call(aten.add.Tensor, p, g, alpha=b.call(operator.neg, lr)))
        new_s.append([buf])
    return new_p, new_s


def adagrad(b: Builder, params: Any, grads: Any, state: Any, lr: Any) -> Any:
    """Adagrad with a learning-rate decay of 0.1."""
    new_p, new_s = [], []
    for p, g, (step, total) in zip(params, grads, state, strict=True):
        step = b.call(aten.add.Tensor, step, 1)
        t = b.call(aten._local_scalar_dense.default, step)
        decay = b.call(operator.add, 1, b.call(operator.mul, b.call(operator.sub, t, 1), 0.1))
        total = b.call(aten.addcmul.default, total, g, g, value=1)
        d = b.call(aten.add.Tensor, b.call(aten.sqrt.default, total), 1e-10)
        minus = b.call(operator.neg, b.call(operator.truediv, lr, decay))
        new_p.append(b.call(aten.addcdiv.default, p, g, d, value=minus))
        new_s.append([step, total])
    return new_p, new_s


def sgd_twice(b: Builder, params: Any, grads: Any, state: Any, lr: Any) -> Any:
    """Two plain updates after another with the same gradients."""
    return sgd(b, sgd(b, params, grads, state, lr)[0], grads, state, lr)


OPTIMIZERS = {
    "adam": adam, "nesterov": nesterov, "adagrad": adagrad, "sgd_twice": sgd_twice, "adamw": adamw,
    "adamw_foreach": adamw_foreach, "adamw_fused": adamw_fused, "momentum": momentum, "sgd": sgd,
}  # fmt: skip


def mutable(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable


def mlp(sizes: list[int]) -> torch.nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[torch.nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class Block(torch.nn.Module):
    """One transformer layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.n1, self.n2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.heads, self.drop = heads, torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, w = x.shape
        q, k, v = (y.view(n, t, self.heads, w // self.heads).transpose(1, 2) for y in self.qkv(self.n1(x)).split(w, 2))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(n, t, w)))
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.n2(x)))))


class Gpt(torch.nn.Module):
    """A small GPT over bytes."""

    def __init__(
        self, layers: int = 2, width: int = 32, heads: int = 4, dropout: float = 0.1, context: int = 16
    ) -> None:
        super().__init__()
        self.tok, self.pos = torch.nn.Embedding(256, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Conv(torch.nn.Module):
    """Two convolutions with pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3, padding=1)
        self.fc = torch.nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool2d(torch.relu(self.a(x)), 2)
        x = torch.nn.functional.max_pool2d(torch.relu(self.b(x)), 2)
        return self.fc(x.flatten(1))


def mean_square(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def cross_entropy(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = model(x)
    return torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), y.reshape(-1))


def program(name: str, optimizer: str = "adamw", **options: Any) -> tuple[StepGraph, list[Any]]:
    """One of the named training steps, with real inputs."""
    torch.manual_seed(0)
    if name == "mlp":
        return training_step(
            mlp([8, 16, 16, 4]), mean_square, [torch.randn(5, 8), torch.randn(5, 4)], optimizer, **options
        )
    if name == "wide":
        return training_step(
            mlp([10, 600, 701, 5]), mean_square, [torch.randn(20, 10), torch.randn(20, 5)], optimizer, **options
        )
    if name == "conv":
        return training_step(
            Conv(), cross_entropy, [torch.randn(4, 3, 16, 16), torch.randint(10, (4,))], optimizer, **options
        )
    ids = torch.randint(256, (2, 17))
    return training_step(Gpt(), cross_entropy, [ids[:, :-1], ids[:, 1:]], optimizer, **options)


def on_cuda(step: StepGraph, state_too: bool = True) -> StepGraph:
    """A copy whose values are fake tensors on a GPU.

    Args:
        state_too: whether counts of steps are, as those of fused optimizers.
    """
    step = copy_step(step)
    for node in step.graph.nodes:
        value = info(node).value if node.op != "output" else None
        if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor) and (value.dim() or state_too):
            with value.fake_mode:  # type: ignore[attr-defined]
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            set_info(node, replace(info(node), value=made))
        elif node.op == "call_function" and not isinstance(value, (int, float)):
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: info(n).value)
            mode = next(tensors_of(value)).fake_mode  # type: ignore[attr-defined]
            set_info(node, replace(info(node), value=run(mode, node.target, args, kwargs)))
    return check(step, "test")


def clone_inputs(inputs: list[Any]) -> list[Any]:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, inputs)


def arena_bytes(program: Any) -> int:
    """Bytes that a program's arenas hold between calls, all devices together."""
    return sum(program._sizes.values())
