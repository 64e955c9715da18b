"""What is patched while one thread traces acts in that thread alone, whatever it is, and is put back as it was."""

from __future__ import annotations

import datetime
import inspect
import math
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep import patches
from wholestep.patches import Patches, original, patched, reading
from wholestep.torch_compat import BACKWARD_ENGINE


@pytest.fixture
def at_rest() -> dict[Any, Any]:
    """What is patched before a test: what looks at each backward stays, where an earlier test has needed it."""
    return {**patches.active}


class Base:
    flag = True

    def method(self) -> str:
        return "method"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    def __len__(self) -> int:
        return 3


class Derived(Base):
    pass


HERE = types.ModuleType("here")
HERE.Kind = Base  # type: ignore[attr-defined]
HERE.function = lambda x: x + 1  # type: ignore[attr-defined]
OBJECT = Derived()
KINDS: dict[str, tuple[Any, str, Any, Callable[[], Any]]] = {
    "function": (HERE, "function", lambda x: x + 2, lambda: HERE.function(1)),
    "builtin": (math, "sqrt", lambda x: -1.0, lambda: math.sqrt(4.0)),
    "method": (Base, "method", lambda self: "other", lambda: Derived().method()),
    "inherited method": (Derived, "method", lambda self: "other", lambda: (Derived().method(), Base().method())),
    "special method": (Derived, "__len__", lambda self: 5, lambda: (len(Derived()), len(Base()))),
    "class method": (Base, "of_class", staticmethod(lambda: "other"), lambda: Derived.of_class()),
    "flag": (Base, "flag", False, lambda: (Base.flag, Derived().flag)),
    "constructor": (nn.Parameter, "__new__", staticmethod(lambda cls, data: data), lambda: type(nn.Parameter(ONE))),
    "method of C": (torch.Generator, "initial_seed", lambda self: 7, lambda: torch.Generator().initial_seed()),
    "class method of C": (datetime.date, "today", staticmethod(lambda: None), lambda: datetime.date.today() is None),
    "class in a module": (HERE, "Kind", Derived, lambda: (isinstance(Base(), HERE.Kind), issubclass(Base, HERE.Kind))),
    "attribute of an object": (OBJECT, "method", lambda: "other", lambda: OBJECT.method()),
}
ONE = torch.ones(1)


def elsewhere(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@contextmanager
def here(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    me = threading.get_ident()
    with patched([(owner, name, replacement)], lambda: threading.get_ident() == me):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_a_patch_acts_in_one_thread_alone(kind: str) -> None:
    owner, name, replacement, read = KINDS[kind]
    before, own, raw = read(), dict(vars(owner)), inspect.getattr_static(owner, name)
    with here(owner, name, replacement):
        assert read() != before and elsewhere(read) == before and original(owner, name) is not vars(owner)[name]
    assert read() == before and inspect.getattr_static(owner, name) is raw
    assert vars(owner).keys() == own.keys() and all(vars(owner)[key] is own[key] for key in own)


@pytest.mark.parametrize("own", [{}, {"type": len}], ids=["a builtin", "a name of its own"])
def test_a_name_in_the_globals_of_functions(own: dict[str, Any], at_rest: dict[Any, Any]) -> None:
    names = {"__builtins__": __builtins__, **own}
    before = dict(names)

    def read() -> Any:
        return eval("type('ab')", names)

    with here(names, "type", lambda value: 7):
        assert read() == 7 and elsewhere(read) == own.get("type", type)("ab")
        with here(names, "type", lambda value: 8):
            assert read() == 8 and (own or eval("isinstance(int, type)", names))
        assert read() == 7
    assert names == before and patches.active == at_rest


def test_patches_that_end_in_another_order(at_rest: dict[Any, Any]) -> None:
    one, two, always = Patches(), Patches(), lambda: True
    sqrt = math.sqrt
    one.put([(math, "sqrt", lambda x: 1.0)], always)
    two.put([(math, "sqrt", lambda x: 2.0)], always)
    assert math.sqrt(9.0) == 2.0
    one.restore()
    assert math.sqrt(9.0) == 2.0
    two.restore()
    assert math.sqrt is sqrt and patches.active == at_rest


def test_what_another_thread_sets_meanwhile_stays() -> None:
    with here(Base, "flag", False):
        elsewhere(lambda: setattr(Base, "flag", None))
        assert Base.flag is None
    assert Base.flag is None
    Base.flag = True


def test_who_keeps_what_stands_there_has_the_original_afterwards() -> None:
    with here(math, "sqrt", lambda x: -1.0):
        kept = math.sqrt
        assert kept == original(math, "sqrt") and pickle.loads(pickle.dumps(kept)) is kept

        class Holds:
            root = kept

        assert Holds().root(4.0) == -1.0  # type: ignore[call-arg, arg-type] - a builtin is not bound
    assert kept(4.0) == 2.0


def test_a_function_that_reads_another_global() -> None:
    def size() -> int:
        return len(ONE)

    assert reading(size, ONE=[1, 2])() == 2 and size() == 1  # type: ignore[arg-type]


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    torch.save  # noqa: B018 - named, as what follows
    loss = torch.distributions.Normal(model(x), 1.0).log_prob(x).square().sum() * torch.rand(())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss


def test_every_patch_of_a_capture_is_of_its_thread(at_rest: dict[Any, Any]) -> None:
    """Whatever is patched now or will be: another thread finds the original of each."""
    clocks = ["time", "urandom", "now", "today", "exists", "environ", "open", "random", "normal"]
    met: list[str] = []

    def found() -> list[str]:  # backwards of all threads are counted, and otherwise as they are
        others = (p for p in patches.active.values() if (p.owner, p.name) != BACKWARD_ENGINE)
        return [f"{p.owner}.{p.name}" for p in others if p.chosen() is not p.original]

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not met:
                met.extend(found())
                with patches.suspended():  # as a step may start no thread
                    assert elsewhere(found) == [] and len(clocks) == 9
            return super().forward(x)

    model = Looks(3, 3)
    ws.compile(step, fullgraph=True)(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3))
    assert len(met) > 100 and patches.active == at_rest


def _distributions() -> None:
    with pytest.raises(ValueError, match="Expected parameter"):
        torch.distributions.Normal(torch.zeros(1), torch.full((1,), -1.0))


def _streams() -> None:
    mine, theirs = random.Random(3), numpy.random.RandomState(3)
    assert [mine.random(), mine.gauss(0, 1), mine.randint(0, 9)] == NUMBERS[0]
    assert [*theirs.rand(2), theirs.randint(9)] == NUMBERS[1]
    torch_own = torch.Generator().manual_seed(3)
    state = torch_own.get_state()
    assert type(state) is Tensor and torch.equal(torch.rand(2, generator=torch_own), NUMBERS[2])
    assert torch_own.set_state(state) is torch_own and torch_own.clone_state().initial_seed() == 3


def _modules() -> None:
    assert nn.LSTM(3, 4)(torch.ones(1, 3))[0].shape == (1, 4)
    norm = nn.BatchNorm1d(2, momentum=None)
    norm(torch.ones(2, 2))
    assert type(norm.num_batches_tracked.item()) is int and type(nn.Parameter(ONE)) is nn.Parameter
    assert torch.ones(2).untyped_storage().resize_(0).nbytes() == 0


def _python() -> None:
    now = datetime.datetime.now()
    assert pickle.loads(pickle.dumps(now)) == now and type(now) is datetime.datetime
    assert max(1, 2) == 2 and math.sqrt(4.0) == 2.0 and max is max


WORK = (_distributions, _streams, _modules, _python)
_mine, _theirs = random.Random(3), numpy.random.RandomState(3)
NUMBERS: Any = (
    [_mine.random(), _mine.gauss(0, 1), _mine.randint(0, 9)],
    [*_theirs.rand(2), _theirs.randint(9)],
    torch.rand(2, generator=torch.Generator().manual_seed(3)),
)


def test_threads_that_work_while_another_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do captures disturb other threads, nor those a capture; streams of numbers go on without a repeat."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # off once Dynamo was imported
    stop = threading.Event()
    drawn: list[float] = []

    def works(work: Callable[[], None]) -> int:
        count = 0
        while not stop.is_set():
            work()
            count += 1
        return count

    def draws() -> None:
        drawn.extend((random.random(), float(numpy.random.rand())))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(WORK) + 1) as pool:
            running = [pool.submit(works, work) for work in (*WORK, draws)]
            try:
                for _ in range(4):
                    model = nn.Linear(3, 3)
                    compiled = ws.compile(step, fullgraph=True)
                    compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3))
            finally:
                stop.set()
            assert all(future.result() > 0 for future in running)
    finally:
        sys.setswitchinterval(before)
    assert len(set(drawn)) == len(drawn)


def test_two_threads_that_capture_at_once(at_rest: dict[Any, Any]) -> None:
    def capture(scale: float) -> list[Tensor]:
        weight = torch.full((3,), scale, requires_grad=True)

        def own(x: Tensor) -> Tensor:
            nn.utils.clip_grad_norm_([weight], 1.0)
            return torch.distributions.Normal(x * scale, 1.0).mean + math.sqrt(scale)

        return [ws.compile(own, fullgraph=True)(torch.ones(3)) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(capture, (1.0, 4.0)))
    assert all(torch.equal(x, torch.full((3,), v)) for xs, v in zip(found, (2.0, 6.0), strict=True) for x in xs)
    assert patches.active == at_rest


def test_an_interrupt_while_patches_end() -> None:
    class Owner:
        interrupts = False

        def __delattr__(self, name: str) -> None:
            object.__delattr__(self, name)
            if self.interrupts:
                object.__setattr__(self, "interrupts", False)
                raise KeyboardInterrupt

        def first(self) -> int:
            return 1

        def second(self) -> int:
            return 1

    owner = Owner()
    with pytest.raises(KeyboardInterrupt), \
            patched([(owner, name, lambda: 2) for name in ("first", "second")], lambda: True):
        assert (owner.first(), owner.second()) == (2, 2)
        owner.interrupts = True
    assert (owner.first(), owner.second(), vars(owner)) == (1, 1, {"interrupts": False})
