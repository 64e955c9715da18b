"""Random programs with reads, branches, masks, views, writes, exceptions and kept tensors: co-run is as eager."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wholestep as ws
from tests.co_run.test_steps import co_run, equal

CALLS = 5


class State:
    """Tensors that outlive a call, and a log of what was read."""

    def __init__(self):
        torch.manual_seed(0)
        self.weights = [torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
        self.buffers = [torch.randn(4, 3), torch.randn(3, 4), torch.randn(4)]
        self.kept, self.log = [], []
        self.opt = torch.optim.SGD(self.weights, lr=0.1, momentum=0.9)


def _pick(pool, index):
    return pool[index % len(pool)]


def _like(tensor, other):
    """The other tensor in the shape of the first."""
    flat = other.flatten()
    return flat[torch.arange(tensor.numel()) % max(flat.numel(), 1)].view(tensor.shape) if flat.numel() else tensor * 0


OPERATIONS = {
    "add": lambda s, pool, a, b, n: pool.append(a + _like(a, b)),
    "scale": lambda s, pool, a, b, n: pool.append(a * (n / 3)),
    "sin": lambda s, pool, a, b, n: pool.append(a.sin()),
    "transpose": lambda s, pool, a, b, n: pool.append(a.t() if a.dim() == 2 else a.flip(0) if a.dim() else a.clone()),
    "select": lambda s, pool, a, b, n: pool.append(a[n % len(a)] if a.dim() and len(a) else a.view(a.shape)),
    "slice": lambda s, pool, a, b, n: pool.append(a[n % 2 :: 2] if a.dim() else a.unsqueeze(0)),
    "reshape": lambda s, pool, a, b, n: pool.append(a.reshape(-1)),
    "detach": lambda s, pool, a, b, n: pool.append(a.detach()),
    "expand": lambda s, pool, a, b, n: pool.append(a.unsqueeze(0).expand(2, *a.shape).contiguous()),
    "write": lambda s, pool, a, b, n: a.detach().mul_(0.5 + n / 7),
    "write_other": lambda s, pool, a, b, n: a.detach().copy_(_like(a, b).detach().clone()),
    "write_buffer": lambda s, pool, a, b, n: _pick(s.buffers, n).add_(a.detach().mean().nan_to_num()),
    "random": lambda s, pool, a, b, n: pool.append(a + torch.rand_like(a)),
    "dropout": lambda s, pool, a, b, n: pool.append(torch.nn.functional.dropout(a, 0.3)),
    "mask": lambda s, pool, a, b, n: pool.append(a[a > 0]),
    "read": lambda s, pool, a, b, n: s.log.append(a.sum().item()),
    "print": lambda s, pool, a, b, n: s.log.append(repr(a.detach())),
    "list": lambda s, pool, a, b, n: s.log.append(a.tolist()),
    "numpy": lambda s, pool, a, b, n: s.log.append(a.detach().numpy().copy().tolist()),
    "branch": lambda s, pool, a, b, n: pool.append(a.exp() if a.sum() > 0 else a.cos()),
    "keep": lambda s, pool, a, b, n: s.kept.append(a.detach()),
    "keep_copy": lambda s, pool, a, b, n: s.kept.append(a.detach().clone()),
    "use_kept": lambda s, pool, a, b, n: pool.append(_pick(s.kept, n) + 1 if s.kept else a),
    "write_kept": lambda s, pool, a, b, n: _pick(s.kept, n).mul_(0.9) if s.kept else None,
    "set_data": lambda s, pool, a, b, n: setattr(s.buffers[0], "data", s.buffers[0].data * 0.5 + n),
    "drop": lambda s, pool, a, b, n: pool.pop() if len(pool) > 5 else None,
    "backward": lambda s, pool, a, b, n: _backward(s, pool),
    "step": lambda s, pool, a, b, n: s.opt.step(),
    "zero": lambda s, pool, a, b, n: s.opt.zero_grad(set_to_none=n % 2 == 0),
    "raise": lambda s, pool, a, b, n: _raise() if n == 5 and a.sum() > 0 else None,
    "seed": lambda s, pool, a, b, n: torch.manual_seed(n),
    "sum_to_float": lambda s, pool, a, b, n: s.log.append(float(a.double().mean())),
    "stack": lambda s, pool, a, b, n: pool.append(torch.stack([a, _like(a, b)]).amax(0)),
    "out": lambda s, pool, a, b, n: torch.add(_like(s.buffers[2], a).detach(), 1, out=s.buffers[2]),
}  # fmt: skip


def _backward(s, pool):
    loss = sum(t.double().tanh().sum() for t in pool if t.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward(retain_graph=True)


def _raise():
    raise KeyError("the step's own")


def step(program, s):
    pool = [*s.weights, *s.buffers]
    for name, first, second, number in program:
        OPERATIONS[name](s, pool, _pick(pool, first), _pick(pool, second), number)
    return pool[-1]


def played(served, program):
    s = State()
    results = []
    for _ in range(CALLS):
        try:
            results.append(served(program, s))
        except (KeyError, RuntimeError) as error:  # such as a saved tensor that was written since
            results.append(type(error).__name__)
    everything = [s.weights, s.buffers, s.kept, s.log, [w.grad for w in s.weights], s.opt.state_dict(), results]
    return everything, torch.get_rng_state(), [t._version for t in [*s.weights, *s.buffers]]


calls = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 6))


@given(program=st.lists(calls, min_size=3, max_size=14))
def test_a_random_program_is_as_in_eager(program):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wholestep.co_run.step.TIMED", 10**9)
        patch.setattr("wholestep.co_run.step.MANY", 10**9)
        eager, served = played(step, program), played(co_run(step), program)
    for one, other in zip(eager, served, strict=True):
        assert equal(one, other), program


DECIDING = sorted(OPERATIONS.keys() - {"read", "print", "list", "numpy", "sum_to_float", "mask", "keep", "write_kept"})


@given(program=st.lists(
    st.tuples(st.sampled_from([*DECIDING, "branch", "branch", "raise"]), *(st.integers(0, n) for n in (9, 9, 6))),
    min_size=3, max_size=12,
))  # fmt: skip
def test_a_random_program_that_decides_is_as_in_eager(program):
    """Replayed where it can be: by programs that end where an outcome is another."""
    for one, other in zip(played(step, program), played(ws.compile(step), program), strict=True):
        assert equal(one, other), program
