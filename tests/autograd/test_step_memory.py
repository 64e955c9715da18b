"""Memory budgets of whole steps: what is computed again, the same bits, what is possible, bad input."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from wholestep.aot_autograd import MemoryBudget, fit_memory, step_memory
from wholestep.errors import MemoryBudgetError
from wholestep.ir import info
from wholestep.lower.plan.peak_memory import fullest
from wholestep.testing import run_ranks

WIDTH, ROWS = 64, 256


class Block(nn.Module):
    """Attention and a layer of its own, with dropout and a statistic."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.qkv, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.norm, self.batch = nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, WIDTH)
        if self.checkpointed:
            return x + checkpoint(self.wide, x, use_reentrant=False)
        return x + self.wide(x)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.down(functional.gelu(self.up(self.batch(x)))), 0.1, self.training)


def run(calls: int = 3, batches: int = 1, checkpointed: bool = False, blocks: int = 3, **options):
    """Some steps of a small model; gives the losses, all that is left, and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(checkpointed) for _ in range(blocks)), nn.Linear(WIDTH, 10))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = torch.randn(batches, ROWS, WIDTH), torch.randint(10, (batches, ROWS))

    def step(xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for x, y in zip(xs, ys, strict=True):
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    compiled = ws.compile(step, fullgraph=True, **options) if options else step
    losses = [compiled(*batch) for _ in range(calls)]
    state = [*model.state_dict().values(), *(v for s in opt.state.values() for v in s.values())]
    return [*losses, *state, torch.get_rng_state()], compiled, batch


def same(one, two) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("budget", "batches"), [(0.8, 1), (0.5, 1), (0.8, 2)])
def test_a_budget_changes_no_bit(budget, batches):
    whole, plain, batch = run(batches=batches, memory_budget=1.0)
    left, compiled, batch = run(batches=batches, memory_budget=budget)
    assert same(run(batches=batches)[0], left) and same(whole, left)
    before, after = plain.explain(*batch), compiled.explain(*batch)
    assert not before.recomputed and after.recomputed
    inputs = sum(after.memory.by_class[kind] for kind in ("parameters", "states", "buffers", "batch"))
    assert after.memory.total - inputs <= budget * (before.memory.total - inputs) * 1.02
    assert "computed again in the backward" in str(after)


def test_bytes_bound_all_that_a_step_holds():
    _, plain, batch = run(calls=1, memory_budget=1.0)
    total = plain.explain(*batch).memory.total
    bound = int(total * 0.8)
    left, compiled, batch = run(memory_budget=f"{bound}B")
    assert compiled.explain(*batch).memory.total <= bound
    assert same(run()[0], left)


def test_what_a_user_checkpoints_is_still_made_again_once():
    left, compiled, batch = run(checkpointed=True, memory_budget=0.7)
    assert compiled.explain(*batch).recomputed
    assert same(run(checkpointed=True)[0], left)


def test_a_budget_where_the_forward_goes_on_from_gradients():
    left = []
    for options in ({}, {"memory_budget": 0.9}):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(WIDTH, 1))

        def step(x):
            loss = model(x).square().mean()  # noqa: B023
            (gradient,) = torch.autograd.grad(loss, model[-1].weight, create_graph=True)  # noqa: B023
            (loss + gradient.square().sum().sqrt() * gradient.mean()).backward()
            return loss

        compiled = ws.compile(step, fullgraph=True, **options) if options else step
        x = torch.randn(ROWS, WIDTH)
        left.append([compiled(x), *(p.grad for p in model.parameters())])
        assert not options or compiled.explain(x).recomputed
    assert same(*left)


def test_a_budget_that_cannot_be_met_says_what_can(monkeypatch):
    monkeypatch.setattr(step_memory, "ROUNDS", 4)
    with pytest.raises(MemoryBudgetError, match=r"cannot do with 0.05 .* the least that was found is 0\.\d+") as error:
        run(memory_budget=0.05)
    assert error.value.least > 0
    assert pickle.loads(pickle.dumps(error.value)).least == error.value.least, "ranks send their errors"
    with pytest.raises(MemoryBudgetError, match=r"cannot do with 1.0 MiB; .* MiB are parameters, states and the batch"):
        run(memory_budget="1MiB")


def test_after_a_refused_budget_everything_is_as_before():
    model = nn.Linear(4, 4)
    opt = torch.optim.AdamW(model.parameters())

    def step(x):
        model(x).square().mean().backward()
        opt.step()

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MemoryBudgetError):
        ws.compile(step, memory_budget="10B")(torch.randn(2, 4))
    assert not opt.state and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(("given", "words"), [
    ("1.5 Gb8", "expected a number with B, KB, KiB"), ("12", "expected a number"), ("3 parsecs", "expected a number"),
    (0.0, "above 0 and at most 1"), (1.5, "above 0 and at most 1"), (True, "above 0"), (-0.5, "above 0"),
])  # fmt: skip
def test_bad_budgets(given, words):
    with pytest.raises(ValueError, match=words):
        ws.compile(lambda x: x, memory_budget=given)


def test_units():
    assert MemoryBudget.of("1.5GiB").amount == 3 << 29
    assert MemoryBudget.of("800 MB").amount == 800_000_000
    assert MemoryBudget.of("64kib").amount == 1 << 16


def test_a_module_takes_a_part():
    model = nn.Sequential(*(Block() for _ in range(2)))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    torch.manual_seed(3)
    found = torch.autograd.grad(ws.compile(model, memory_budget=0.2)(x).sum(), x)[0]
    assert torch.equal(expected, found)
    with pytest.raises(ValueError, match="give a module a part"):
        ws.compile(model, memory_budget="1GiB")


def test_steps_whose_python_runs_take_as_little_as_they_can(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(f"{loss.item():.4f}")

    compiled = ws.compile(step, memory_budget=0.01)
    for _ in range(4):
        compiled(torch.ones(ROWS, WIDTH))
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert compiled.breaks


PLANS = {
    "sharded optimizer": (ws.ShardedOptimizer, {}),
    "fully shard": (ws.FullyShard, {"min_bytes": 1, "gather": "always"}),
}


def on_ranks(name: str):
    mesh = ws.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    kind, options = PLANS[name]
    how = {"calls": 2, "blocks": 1, "mesh": mesh, "plan": kind("dp", **options)}
    plain, less = run(**how, memory_budget=1.0), run(**how, memory_budget=0.9)
    sent = [[(t.kind, t.count, t.nbytes) for t in step.explain(*batch).collectives] for _, step, batch in (plain, less)]
    return same(plain[0], less[0]), sent[0] == sent[1], bool(less[1].explain(*less[2]).recomputed)


@pytest.mark.parametrize("name", PLANS)
def test_ranks_send_what_they_sent(name):
    assert run_ranks(on_ranks, 2, "shm", (name,)) == [(True, True, True)] * 2


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([0.1, 0.3, 0.5, 0.7]), st.lists(st.sampled_from(range(7)), min_size=2, max_size=6),
       st.sampled_from(range(50)))
def test_any_step_keeps_its_bits(budget, kinds, seed):
    layers = [
        lambda x, w: torch.tanh(x @ w), lambda x, w: functional.dropout(x, 0.3), lambda x, w: x * x.sin(),
        lambda x, w: x.view(-1, 2, 16).transpose(0, 1).reshape(-1, 32) @ w, lambda x, w: x.softmax(-1) + x,
        lambda x, w: torch.cat([x[:, 16:], x[:, :16] * 2], 1), lambda x, w: functional.rrelu(x, training=True) @ w,
    ]  # fmt: skip

    def losses(passes):
        torch.manual_seed(seed)
        weights = [torch.randn(32, 32).div_(6).requires_grad_() for _ in kinds]
        opt, x = torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.randn(512, 32)

        def step(x):
            h = x
            for kind, weight in zip(kinds, weights, strict=True):
                h = layers[kind](h, weight)
            loss = h.square().mean() + weights[0].sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        run = step if passes is None else ws.compile(step, passes=passes, fullgraph=True)
        return [run(x) for _ in range(2)] + weights

    fit = functools.partial(fit_memory, budget=MemoryBudget(budget, required=False), usage=fullest)
    assert same(losses(None), losses([fit]))


def test_what_is_made_again_runs_just_before_its_reader():
    """Made again all at once, at the beginning of the backward, it would take the memory that it shall spare."""
    _, compiled, _ = run(calls=1, memory_budget=0.5)
    calls = [node for node in compiled.graphs[0].graph.nodes if node.op == "call_function"]
    again = [info(node).recomputed for node in calls]
    first, last = again.index(True), len(again) - 1 - again[::-1].index(True)
    assert not all(again[first:last])
