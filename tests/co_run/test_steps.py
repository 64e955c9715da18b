"""Ordinary steps that read, print, log and decide: co-run is as eager, with every effect once and in order."""

import io
import json
import logging
import pickle
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from wholestep.co_run import CoRun
from wholestep.pipeline import Options
from wholestep.spmd import PlanExecutor


class Net(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(8, 11)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = x + self.drop(self.second(F.gelu(self.first(x))))
        return self.head(x)


class Run:
    """What a step works on: the same for eager and co-run."""

    def __init__(self, optimizer="AdamW"):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = Net()
        kinds = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 1e-1, "momentum": 0.9}, "Adagrad": {"lr": 1e-2}}
        self.opt = getattr(torch.optim, optimizer)(self.model.parameters(), **kinds[optimizer])
        self.batches = [torch.randint(11, (4, 6)) for _ in range(8)]
        self.call, self.log, self.kept = 0, [], []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 8)
        self.ema = [p.detach().clone() for p in self.model.parameters()]

    def loss(self, tokens):
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def update(self, loss):
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


def prints(r, t):
    print("a step")
    loss = r.loss(t)
    print(f"loss {loss.item():.5f}", loss, t[0])
    r.update(loss)
    print("done", r.model.head.bias)


def logs(r, t):
    loss = r.loss(t)
    r.update(loss)
    logging.getLogger("wholestep.tests").warning("step %d loss %s", r.call, loss)
    r.log.append(float(loss))


def skips_when_not_finite(r, t):
    loss = r.loss(t)
    if r.call == 3:
        loss = loss * float("inf")
    r.opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(r.model.parameters(), 0.5)
    if torch.isfinite(norm):
        r.opt.step()
    else:
        r.log.append("skipped")


def grad_scaler(r, t):
    r.opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = r.loss(t)
    if r.call == 4:
        loss = loss * float("inf")
    r.scaler.scale(loss).backward()
    r.scaler.unscale_(r.opt)
    r.log.append(nn.utils.clip_grad_norm_(r.model.parameters(), 1.0).item())
    r.scaler.step(r.opt)
    r.scaler.update()
    r.log.append(r.scaler.get_scale())


def python_random(r, t):
    loss = r.loss(t)
    if random.random() < 0.5:
        loss = loss + 0.1 * r.model.head.weight.pow(2).mean()
    loss = loss * (1 + 0.1 * np.random.rand())
    r.update(loss)
    r.log.append(random.random())


def layer_drop(r, t):
    x = r.model.norm(r.model.embed(t[:, :-1]))
    for _ in range(3):
        if torch.rand([]) < 0.6:
            x = x + r.model.second(F.gelu(r.model.first(x)))
    loss = F.cross_entropy(r.model.head(x).flatten(0, 1), t[:, 1:].flatten())
    r.update(loss)
    r.log.append(loss.item())


def masked(r, t):
    logits, target = r.model(t[:, :-1]), t[:, 1:]
    mask = target > 4
    loss = F.cross_entropy(logits[mask], target[mask]) + logits[torch.nonzero(~mask, as_tuple=True)].mean()
    r.update(loss)
    r.log.append(int(mask.sum()))


def uniques(r, t):
    values, counts = torch.unique(t, return_counts=True)
    loss = r.loss(t) + (r.model.embed(values).mean(1) * counts).mean()
    r.update(loss)
    r.log.append(values.tolist())


def clocks(r, t):
    began = time.perf_counter()
    r.update(r.loss(t))
    r.log.append(time.perf_counter() > began)


def files(r, t):
    loss = r.loss(t)
    r.update(loss)
    with tempfile.TemporaryFile() as file:
        torch.save({"loss": loss.detach(), "head": r.model.head.state_dict()}, file)
        file.seek(0)
        found = torch.load(file)
    r.log.append(found["loss"].item())
    r.log.append(pickle.loads(pickle.dumps(loss.detach())).item())
    r.log.append(json.dumps({"loss": round(loss.item(), 4)}))


def memmaps(r, t):
    with tempfile.NamedTemporaryFile() as file:
        stored = np.memmap(file.name, dtype=np.int64, mode="w+", shape=tuple(t.shape))
        stored[:] = t.numpy()
        data = torch.from_numpy(np.array(stored))
    r.update(r.loss(data))


def numpy_views(r, t):
    loss = r.loss(t)
    array = r.model.seen.detach().numpy()
    r.model.seen.add_(loss.detach())
    r.log.append(float(array))
    r.update(loss)
    r.log.append(np.asarray(loss.detach()).item())


def early_exit(r, t):
    loss = r.loss(t)
    if loss.item() < 2.3:
        r.log.append("stopped")
        return loss
    r.update(loss)
    return loss


def raises_midway(r, t):
    loss = r.loss(t)
    loss.backward()
    with torch.no_grad():
        r.model.seen += 1
        r.model.head.bias.mul_(0.5)
    if r.call % 3 == 2:
        raise KeyError(f"call {r.call}")
    r.opt.step()
    r.opt.zero_grad()


def returns_many(r, t):
    logits = r.model(t[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), t[:, 1:].flatten())
    r.update(loss)
    r.log.append(loss.item())
    return {"loss": loss.detach(), "top": logits.argmax(-1)[0], "views": logits.detach().unbind(0)[:2]}


def accumulates(r, t):
    r.opt.zero_grad()
    for part in t.chunk(2):
        loss = r.loss(part) / 2
        loss.backward()
        r.log.append(loss.item())
    r.opt.step()


def ema(r, t):
    loss = r.loss(t)
    r.update(loss)
    with torch.no_grad():
        for mean, p in zip(r.ema, r.model.parameters(), strict=True):
            mean.lerp_(p, 0.1)
    r.log.append(sum(m.sum().item() for m in r.ema))


def schedules(r, t):
    r.update(r.loss(t))
    r.schedule.step()
    r.log.append(r.schedule.get_last_lr()[0])
    if r.log[-1] < 0.005:
        print("small", r.log[-1])


def keeps_tensors(r, t):
    loss = r.loss(t)
    r.kept.append(loss.detach())
    r.kept.append(r.model.head.weight.detach().clone()[0])
    r.update(loss)
    if len(r.kept) > 6:
        r.log.append(torch.stack(r.kept[::2][:4]).mean().item())
        del r.kept[:2]


def hooks(r, t):
    handle = r.model.head.weight.register_hook(lambda g: (r.log.append(g.norm().item()), g * 0.5)[1])
    r.update(r.loss(t))
    handle.remove()


def retained(r, t):
    x = r.model.embed(t)
    x.retain_grad()
    loss = r.model.head(x).logsumexp(-1).mean()
    r.opt.zero_grad()
    loss.backward()
    r.log.append(x.grad.norm().item())
    r.opt.step()


def checkpointed(r, t):
    x = r.model.embed(t[:, :-1])
    x = checkpoint(lambda y: r.model.drop(r.model.second(F.gelu(r.model.first(y)))), x, use_reentrant=False)
    loss = F.cross_entropy(r.model.head(x).flatten(0, 1), t[:, 1:].flatten())
    r.log.append(loss.item())
    r.update(loss)


def seeds_generators(r, t):
    state = torch.get_rng_state()
    first = r.loss(t)
    torch.set_rng_state(state)
    second = r.loss(t)
    r.log.append(torch.equal(first, second))
    r.update(first + second)
    torch.manual_seed(r.call)


def threads(r, t):
    loss = r.loss(t)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda x: x.sum().item(), loss.detach() * 2)
        r.log.append(future.result())
    r.update(loss)


def writes_views(r, t):
    loss = r.loss(t)
    with torch.no_grad():
        block = r.model.head.weight.detach()[2:5]
        block.mul_(0.9)
        r.log.append(block.sum().item())
        r.model.head.weight.data.clamp_(-0.3, 0.3)
        block.t().add_(0.01)
    r.opt.zero_grad()
    r.loss(t).backward()
    r.opt.step()
    r.log.append(loss.item())


def products_in_place(r, t):
    x = r.model.embed(t)
    with torch.no_grad():
        scores = (x @ x.transpose(1, 2)).clamp_min_(0).sqrt_()  # a product's own result, seen by a view
    r.log.append(scores.sum().item())
    r.update(r.loss(t) + (x @ x.transpose(1, 2)).mul_(0.5).square().mean())
    return scores


def metrics(r, t):
    logits = r.model(t[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), t[:, 1:].flatten())
    right = (logits.argmax(-1) == t[:, 1:]).sum().item()
    r.log.append((right, t[:, 1:].numel(), right / t.numel()))
    r.update(loss)
    r.log.append({name: p.grad.norm().item() for name, p in r.model.named_parameters()})


def gradient_penalty(r, t):
    x = r.model.embed(t).detach().requires_grad_()
    score = r.model.head(x).logsumexp(-1).sum()
    (grad,) = torch.autograd.grad(score, x, create_graph=True)
    penalty = ((grad.norm(dim=-1) - 1) ** 2).mean()
    if penalty > 0.5:
        r.log.append(penalty.item())
    r.update(penalty + r.loss(t))


def lbfgs(r, t):
    opt = torch.optim.LBFGS([r.model.head.weight], lr=0.1, max_iter=3)

    def closure():
        opt.zero_grad()
        loss = r.loss(t)
        loss.backward()
        return loss

    torch.manual_seed(r.call)
    r.log.append(opt.step(closure).item())


def samples(r, t):
    with torch.no_grad():
        probs = r.model(t).softmax(-1)
        action = torch.distributions.Categorical(probs).sample()
        r.log.append(action[0].tolist())
    loss = F.cross_entropy(r.model(t).flatten(0, 1), action.flatten())
    r.update(loss)


def sizes_change(r, t):
    t = t[: 2 + r.call % 3]
    loss = r.loss(t)
    r.log.append((loss.item(), t.shape))
    r.update(loss)


def evaluates(r, t):
    r.update(r.loss(t))
    if r.call % 2:
        r.model.eval()
        with torch.inference_mode():
            r.log.append(r.loss(t).item())
        r.model.train()


def module_attributes(r, t):
    loss = r.loss(t)
    r.model.last_loss = loss.detach()
    r.model.history = [*getattr(r.model, "history", []), loss.item()][-3:]
    r.update(loss)
    r.log.append(list(r.model.history))


def stdout_progress(r, t):
    for i, part in enumerate(t.chunk(2)):
        loss = r.loss(part)
        r.update(loss)
        sys.stdout.write(f"\r{i} {loss.item():.3f}")
        sys.stdout.flush()


def set_data(r, t):
    loss = r.loss(t)
    r.update(loss)
    r.model.head.bias.data = r.model.head.bias.data * 0.5
    r.log.append(r.model.head.bias.abs().max().item())


def resizes(r, t):
    scratch = torch.empty(0)
    torch.add(r.model.head.bias.detach(), 1, out=scratch)
    r.log.append(scratch.sum().item())
    r.update(r.loss(t) + r.model.head.bias.mean())


def complex_numbers(r, t):
    x = torch.fft.rfft(r.model.embed(t), dim=1)
    loss = x.abs().mean() + x.conj().imag.mean() + torch.view_as_real(x)[..., 1].pow(2).mean()
    r.log.append(loss.item())
    r.update(loss)


def sparse_gradients(r, t):
    x = F.embedding(t, r.model.embed.weight, sparse=True)
    loss = r.model.head(x).logsumexp(-1).mean()
    r.opt.zero_grad()
    loss.backward()
    r.log.append(r.model.embed.weight.grad.coalesce().values().sum().item())
    r.model.embed.weight.grad = None
    r.opt.step()


def lists_of_tensors(r, t):
    logits = r.model(t[:, :-1])
    rows, columns = (t[0, 0] % 4, t[1, 1] % 4), (t[0, 2] % 5, t[1, 0] % 5)
    chosen = logits[rows, columns].sum()
    weights = torch.tensor([logits.detach().sum(), 2.0]) + torch.tensor((t[0, 0], t[0, 1]))
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[rows, columns] = True
    parts = torch.tensor_split(logits, torch.stack(rows).sort().values)
    r.log.append(torch.LongTensor([t[1, 1] * 3, t[0, 2] + 1]).tolist())  # in which C++ has switched modes off
    r.update(chosen + (weights * parts[1].sum()).mean().tanh() + logits[mask].mean())
    r.log.append(chosen.item())


def errors_on_the_way(r, t):
    x = r.model.embed(t) * 2
    try:
        x @ torch.ones(3, 3)
    except RuntimeError as error:
        r.log.append(str(error))
    loss = r.model.head(x).logsumexp(-1).mean() + r.loss(t)
    r.update(loss)
    r.log.append(loss.item())


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if getattr(func, "__name__", "") == "logsumexp" else found


def function_modes(r, t):
    with Doubling():
        loss = r.model.head(r.model.embed(t)).logsumexp(-1).mean()
        loss = loss + torch.vmap(lambda row: row.expand(2, -1).sum())(r.model.embed(t[0])).mean()
    r.update(loss)
    r.log.append(loss.item())


def recurrent(r, t):
    torch.manual_seed(5)
    net = nn.LSTM(8, 8, batch_first=True)
    x, _ = net(r.model.embed(t))
    loss = r.model.head(x).logsumexp(-1).mean()
    r.update(loss)
    r.log.append((loss.item(), net.weight_hh_l0.grad.norm().item()))


def numbers_that_lay_out(r, t):
    x = r.model.embed(t)
    scaled = F.interpolate(x.detach().transpose(1, 2), scale_factor=(1.5, 2.0, 0.5)[r.call % 3], mode="linear")
    r.log.append((scaled.shape, scaled.sum().item(), torch.arange(0.0, 1.0 + r.call, 0.5).tolist()))
    r.model.drop.p = 0.1 * (r.call % 4)
    r.update(r.loss(t) + (x * (-0.0 if r.call % 2 else 0.0)).sum())
    r.log.append(torch.full((2,), -0.0 if r.call % 2 else 0.0).sign().tolist())


def default_types(r, t):
    torch.set_default_dtype((torch.float32, torch.float64)[r.call % 2])
    try:
        zeros = torch.zeros(3) + torch.full((3,), 0.5)
        torch.set_default_dtype(torch.float32)
        r.log.append((zeros.dtype, zeros.tolist()))
        r.update(r.loss(t) + zeros.sum().float())
    finally:
        torch.set_default_dtype(torch.float32)


def small_draws(r, t):
    x = torch.rand(3)
    r.model.seen.bernoulli_(0.5)
    y = torch.rand(()) + x.sum()
    r.log.append((r.model.seen.item(), y.item()))
    r.update(r.loss(t) * y)


STEPS = [
    prints, logs, skips_when_not_finite, grad_scaler, python_random, layer_drop, masked, uniques, clocks, files,
    memmaps,
    numpy_views, early_exit, raises_midway, returns_many, accumulates, ema, schedules, keeps_tensors, hooks, retained,
    checkpointed, seeds_generators, threads, writes_views, products_in_place, metrics, gradient_penalty, lbfgs, samples,
    sizes_change,
    evaluates, module_attributes, stdout_progress, set_data, resizes, complex_numbers, sparse_gradients,
    lists_of_tensors, errors_on_the_way, function_modes, recurrent, numbers_that_lay_out,
    default_types, small_draws,
]  # fmt: skip


def co_run(step):
    return CoRun(step, step, Options(PlanExecutor(None, None)))


def played(served, optimizer="AdamW", calls=6):
    """Everything observable of some calls."""
    run = Run(optimizer)
    results, versions = [], []
    out, stream = io.StringIO(), logging.StreamHandler()
    stream.setStream(out)
    logger = logging.getLogger("wholestep.tests")
    logger.addHandler(stream)
    try:
        with redirect_stdout(out):
            for call in range(calls):
                run.call = call
                try:
                    results.append(served(run, run.batches[call]))
                except KeyError as error:
                    results.append(str(error))
                versions.append([p._version for p in run.model.parameters()])
    finally:
        logger.removeHandler(stream)
    state = [run.model.state_dict(), [p.grad for p in run.model.parameters()], run.opt.state_dict(), run.log, results,
             run.kept, run.ema]  # fmt: skip
    chances = [torch.get_rng_state(), random.random(), np.random.rand()]
    return state, chances, out.getvalue(), versions


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b or (a != a and b != b)


@pytest.fixture(autouse=True)
def deferring(monkeypatch):
    monkeypatch.setattr("wholestep.co_run.step.TIMED", 10**9)  # else a small step ends in eager
    monkeypatch.setattr("wholestep.co_run.step.MANY", 10**9)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_is_as_in_eager(step):
    compare(played(step), played(co_run(step)))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_compiled_step_is_as_in_eager(step):
    compiled = ws.compile(step)
    compare(played(step, "SGD"), played(compiled, "SGD"))
    assert compiled.captures or compiled.breaks


def compare(eager, served):
    for name, one, other in zip(("state", "random", "output", "versions"), eager, served, strict=True):
        assert equal(one, other), name


def trained_in_one_buffer(serve):
    """Weights, gradients' counts and values of weights that are views of one buffer, as `serve` has them trained."""
    flat = torch.linspace(-1, 1, 12)
    weights = [torch.nn.Parameter(flat[i : i + 4]) for i in (0, 4, 8)]
    inner = [torch.nn.Parameter(part) for part in weights[0].data.chunk(2)]
    optimizer, log = torch.optim.AdamW([*weights, *inner], lr=0.1, foreach=False), []

    def step(x):
        sum((weight * x[: len(weight)]).sin().sum() for weight in [*weights, *inner]).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append(weights[0].sum().item())

    served = serve(step)
    for call in range(5):
        served(torch.arange(4) + call)
        log.append([weight._version for weight in [*weights, *inner]])
    return log, flat.tolist(), [weight.tolist() for weight in inner]


def test_updates_of_views_of_one_buffer_are_as_in_eager():
    assert trained_in_one_buffer(co_run) == trained_in_one_buffer(lambda step: step)
