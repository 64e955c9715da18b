"""More ordinary steps, as recipes of libraries and courses have them: compiled by default, they are as eager."""

import csv
import io
import os
import random
import warnings
from collections import Counter, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.co_run.test_steps import compare, deferring, played
from wholestep.errors import UnsupportedError

__all__ = ["deferring"]  # a fixture


def plateau(r, t):
    if not hasattr(r, "plateau"):
        r.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(r.opt, factor=0.5, patience=0)
    loss = r.loss(t)
    r.update(loss)
    r.plateau.step(loss.item())
    r.log.append(r.opt.param_groups[0]["lr"])


def mixup(r, t):
    share = np.random.beta(0.4, 0.4)
    other = t[torch.randperm(len(t))]
    r.update(share * r.loss(t) + (1 - share) * r.loss(other))


def cut_out(r, t):
    start, length = random.randrange(3), random.choice([1, 2, 3])
    kept = torch.cat([t[:, :start], t[:, start + length :]], 1)
    if kept.shape[1] > 1:
        r.update(r.loss(kept))
    return kept.shape


def teacher_forcing(r, t):
    token, losses = t[:, 0], []
    for place in range(1, t.shape[1]):
        logits = r.model(token[:, None])[:, 0]
        losses.append(F.cross_entropy(logits, t[:, place]))
        token = t[:, place] if random.random() < 0.5 else logits.argmax(-1)
    r.update(torch.stack(losses).mean())


def routed_experts(r, t):
    hidden = r.model.norm(r.model.embed(t)).flatten(0, 1)
    scores, chosen = r.model.head(hidden)[:, :3].softmax(-1).max(-1)
    out = torch.zeros_like(hidden)
    for expert in range(3):
        rows = (chosen == expert).nonzero().flatten()
        if rows.numel():
            mixed = r.model.second(F.relu(r.model.first(hidden[rows])))
            out.index_add_(0, rows, mixed * scores[rows, None])
    r.log.append(Counter(chosen.tolist()))
    r.update(out.square().mean())


def alignment_loss(r, t):
    logits = r.model(t).log_softmax(-1).transpose(0, 1)
    lengths = torch.tensor([1 + int(row.sum()) % 3 for row in t])
    r.update(F.ctc_loss(logits, t[:, :3].clamp(min=1), torch.full((len(t),), t.shape[1]), lengths, zero_infinity=True))


def matching(r, t):
    logits = r.model(t)[0]
    cost = (-logits.softmax(-1)[:, t[1]]).detach()
    pairs, free = [], set(range(cost.shape[1]))
    for row in range(cost.shape[0]):
        best = min(free, key=lambda column, row=row: (cost[row, column].item(), column))
        free.remove(best)
        pairs.append(best)
    r.kept.append(pairs)
    r.update(F.cross_entropy(logits, t[1][pairs]))


def early_stopping(r, t):
    r.recent = getattr(r, "recent", deque(maxlen=2))
    loss = r.loss(t)
    value = loss.item()
    if len(r.recent) == 2 and value > sum(r.recent) / 2:
        return "stopped"
    r.recent.append(value)
    r.update(loss)
    return value


def weighs_losses(r, t):
    first, second = r.loss(t), r.model(t).square().mean()
    r.weight = 0.9 * getattr(r, "weight", 1.0) + 0.1 * (first.item() / second.item())
    r.update(first + r.weight * second)


def writes_a_table(r, t):
    loss = r.loss(t)
    r.update(loss)
    text = io.StringIO()
    csv.writer(text).writerow([r.call, f"{loss:.6f}", *r.model.head.bias.grad.tolist()[:2]])
    r.log.append(text.getvalue())


def warns(r, t):
    loss = r.loss(t)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if loss.item() > 2:
            warnings.warn(f"loss is {loss.item():.4f}", stacklevel=1)
    r.log += [str(w.message) for w in caught]
    r.update(loss)


def histograms(r, t):
    loss = r.loss(t)
    r.update(loss)
    for name, p in r.model.named_parameters():
        r.log.append((name, p.grad.histc(4).tolist(), p.std().item() if p.numel() > 1 else None))


def replay_buffer(r, t):
    r.kept.append(r.model(t).detach().mean(1))
    old = random.sample(r.kept, min(2, len(r.kept)))
    r.update(r.loss(t) + sum(F.mse_loss(r.model(t).mean(1), one) for one in old))


def thaws(r, t):
    for p in r.model.embed.parameters():
        p.requires_grad_(r.call >= 2)
    r.update(r.loss(t))


def checks_itself(r, t):
    loss = r.loss(t)
    assert torch.isfinite(loss), "diverged"
    assert loss.item() < 100
    r.update(loss)
    for p in r.model.parameters():
        assert not torch.isnan(p).any()


def saves_when_best(r, t):
    loss = r.loss(t)
    if loss < getattr(r, "best", float("inf")):
        r.best, memory = loss.item(), io.BytesIO()
        torch.save({"model": r.model.state_dict(), "best": r.best}, memory)
        memory.seek(0)
        r.kept.append(torch.load(memory)["model"]["head.bias"])
    r.update(loss)


def noisy_gradients(r, t):
    loss = r.loss(t)
    r.opt.zero_grad()
    loss.backward()
    total = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in r.model.parameters()]))
    scale = min(1.0, 0.5 / (total.item() + 1e-6))
    for p in r.model.parameters():
        p.grad.mul_(scale).add_(torch.randn_like(p.grad), alpha=1e-3 * np.random.rand())
    r.opt.step()


def asks_the_environment(r, t):
    debug = os.environ.get("WHOLESTEP_TESTS_DEBUG", "1") == "1"
    loss = r.loss(t)
    if debug and r.call % 2:
        r.log.append(repr(loss.detach()))
    r.update(loss)


def grows_a_cache(r, t):
    r.cache = getattr(r, "cache", None)
    with torch.no_grad():
        last = r.model.embed(t[:, -1:])
        r.cache = last if r.cache is None else torch.cat([r.cache, last], 1)[:, -3:]
    r.update(r.loss(t) + 0.1 * (r.model.embed(t).mean(1) - r.cache.mean(1)).square().mean())


STEPS = [
    plateau, mixup, cut_out, teacher_forcing, routed_experts, alignment_loss, matching, early_stopping, weighs_losses,
    writes_a_table, warns, histograms, replay_buffer, thaws, checks_itself, saves_when_best, noisy_gradients,
    asks_the_environment, grows_a_cache,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_compiled_step_is_as_in_eager(step):
    compiled = ws.compile(step)
    compare(played(step), played(compiled))
    assert compiled.captures or compiled.breaks


def test_a_module_with_its_own_decisions():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            for place, layer in enumerate(self.layers):
                if self.training and torch.rand([]) < 0.3:
                    continue
                x = x + layer(x).relu()
                if not x.isfinite().all():
                    raise FloatingPointError(f"layer {place}")
            return x

    found = []
    for wrap in (lambda m: m, ws.compile):
        torch.manual_seed(0)
        model, seen = wrap(Gated()), []
        for _call in range(6):
            model.zero_grad()
            x = torch.randn(3, 4, requires_grad=True)
            out = model(x)
            out.square().sum().backward()
            seen += [out, x.grad, *(p.grad for p in model.parameters())]
        with pytest.raises(FloatingPointError, match="layer"):
            model.eval()(torch.full((3, 4), float("inf")))
        found.append(seen)
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize("count", [1, 2])
def test_writes_to_lists_of_tensors_count(count):
    """Autograd refuses a backward through what was written since, which it learns from version counters."""
    weights = [torch.ones(3, requires_grad=True) for _ in range(count)]

    def step(x):
        loss = sum((x * weight).exp().sum() for weight in weights)
        print(loss.item())
        with torch.no_grad():
            torch._foreach_add_(weights, 1.0)
        (gradient,) = torch.autograd.grad(loss, x)
        return gradient

    compiled = ws.compile(step)
    for run in (step, compiled, compiled):
        versions = [weight._version for weight in weights]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(torch.ones(3, requires_grad=True))
        assert [weight._version for weight in weights] == [version + 1 for version in versions]
    assert compiled.breaks


def windows(shown):
    return shown[:, :4].unfold(1, 2, 1)  # with gaps between the rows


@pytest.mark.parametrize(("rows", "write"), [
    (1, lambda shown: shown.zero_()), (1, lambda shown: shown[0].mul_(2)), (1, lambda shown: shown[1:2].fill_(3)),
    (3, lambda shown: windows(shown).add_(1)), (3, lambda shown: windows(shown).copy_(torch.ones(3, 3, 2).cumsum(1))),
])  # fmt: skip
@pytest.mark.parametrize("prints", [False, True])
def test_elements_that_lie_in_one_place_are_written_as_in_eager(rows, write, prints):
    def step(shown, x):
        write(shown)
        print(end=f"{x.sum().item()}" if prints else "")
        return shown + x

    seen = []
    for served in (step, ws.compile(step)):
        shown = torch.arange(9.0 * rows).view(rows, 9).expand(3, 9)
        seen.append([*(served(shown, torch.ones(9)) for _ in range(4)), shown])
    assert all(map(torch.equal, *seen)) and len(served.breaks) == 1
    with pytest.raises(UnsupportedError, match="several elements in one place"):
        ws.compile(step, fullgraph=True)(shown, torch.ones(9))


@pytest.mark.parametrize("loss", [
    lambda h, y: h.prod() + torch.prod(h, 1).sum(), lambda h, y: (h.masked_fill(h > 0, h[0, 0]) * h).sum(),
    lambda h, y: F.cross_entropy(h, y, h[0].detach().exp(), label_smoothing=0.1, ignore_index=2),
])  # fmt: skip
def test_gradients_by_formulas_that_follow_the_data(loss, deferring):
    """C++ takes a formula for any data where a dispatch mode is, which rounds otherwise."""
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 5)

        def step(x, y):
            model.zero_grad()  # noqa: B023
            value = loss(model(x), y)  # noqa: B023
            value.backward()
            print(end=f"{value.item()}"[:0])
            return [value, *(p.grad.clone() for p in model.parameters())]  # noqa: B023

        run = ws.compile(step) if compiled else step
        torch.manual_seed(1)
        seen.append([t for _ in range(5) for t in run(torch.randn(6, 8), torch.randint(0, 5, (6,)))])
        assert not compiled or run.breaks
    assert all(map(torch.equal, *seen))


def test_a_segment_that_is_compiled_within_autocast_leaves_its_casts(deferring):
    """Gradients of a weight's cast are summed in half precision, of two casts in single."""
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)

        def step(x):
            model.zero_grad()  # noqa: B023
            with torch.autocast("cpu", torch.bfloat16):
                x = model(x).tanh()  # noqa: B023
                print(end=f"{x.sum().item()}"[:0])
                loss = model(x).float().square().sum()  # noqa: B023
            loss.backward()
            return model.weight.grad.clone()  # noqa: B023

        run = ws.compile(step) if compiled else step
        seen.append([run(torch.randn(16, 8)) for _ in range(4)])
        assert not compiled or run.breaks
    assert all(map(torch.equal, *seen))
