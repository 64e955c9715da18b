"""What other threads do while a step is traced is not part of the step."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import wholestep as ws
from wholestep import patches
from wholestep.ir import info


def elsewhere(errors):
    """Ordinary work, all of it through functions that tracing exchanges or looks at."""
    try:
        torch.manual_seed(3)
        state = torch.get_rng_state()
        assert type(state) is torch.Tensor
        torch.set_rng_state(state)
        model = nn.Linear(2, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        opt.register_step_pre_hook(lambda *_: started.set() or goes_on.wait() and None)
        opt.step()
    except Exception as error:  # noqa: BLE001 - for the test to show
        errors.append(error)


started, goes_on = threading.Event(), threading.Event()


def test_another_thread_is_not_part_of_the_step():
    model, errors = nn.Linear(3, 3), []
    thread = threading.Thread(target=elsewhere, args=(errors,))

    class Meets(nn.Module):
        def forward(self, x):
            if not started.is_set():
                with patches.suspended():  # which a step of a whole graph may not do
                    thread.start()
                started.wait(10)  # the other thread is inside of its optimizer's step now
            return model(x)

    step = ws.compile(lambda x: Meets()(x).exp(), fullgraph=True)
    with torch.no_grad():
        step(torch.ones(1, 3))
    goes_on.set()
    thread.join()
    assert errors == []
    assert {info(n).phase for n in step.graphs[0].graph.nodes if n.op == "call_function"} == {"forward"}


def test_threads_that_call_one_module_at_once_have_eagers_gradients():
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.LayerNorm(128), nn.Linear(128, 128), nn.Tanh())
    compiled = ws.compile(model, fullgraph=True)
    inputs = [[torch.randn(64, 32, requires_grad=True) for _ in range(100)] for _ in range(3)]

    def gradients(module, x):
        return torch.autograd.grad(module(x).square().sum(), [x, *model.parameters()])

    expected = [[gradients(model, x) for x in given] for given in inputs]

    def wrong(k):
        pairs = zip(inputs[k], expected[k], strict=True)
        return sum(not all(map(torch.equal, gradients(compiled, x), wanted)) for x, wanted in pairs)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(wrong, range(3))) == [0, 0, 0]
    finally:
        sys.setswitchinterval(before)
