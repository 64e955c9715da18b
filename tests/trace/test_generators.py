"""Methods of random generators are part of a step: recorded, or refused with line and remedy; never baked in."""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
from collections.abc import Callable
from random import gauss
from random import random as draw
from typing import Any

import numpy
import pytest
import torch
from numpy.random import rand
from torch import Tensor, nn
from torch.random import fork_rng, get_rng_state
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from wholestep import patches
from wholestep.errors import DataDependentError, UnsupportedError

OWN = torch.Generator()
HELD = torch.default_generator.get_state, torch.default_generator.set_state
STATE = torch.Generator().manual_seed(11).get_state()


def saved(x: Tensor) -> Tensor:
    state = torch.default_generator.get_state()
    y = x + torch.rand(3)
    torch.default_generator.set_state(state)
    return y + torch.rand(3)


def saved_of_its_own(x: Tensor) -> Tensor:
    state = OWN.get_state()
    y = x + torch.rand(3, generator=OWN)
    assert OWN.set_state(state) is OWN
    return y + torch.randn(3, generator=OWN)


def held(x: Tensor) -> Tensor:
    state = HELD[0]()
    y = x + torch.rand(3)
    HELD[1](state)
    return y + torch.rand(3)


def forked(x: Tensor) -> Tensor:
    with fork_rng():
        torch.manual_seed(1)
        y = x + torch.rand(3)
    return y + torch.rand(3)


def seeded_twice(x: Tensor) -> Tensor:
    first = torch.default_generator.manual_seed(3)
    y = x + torch.rand(3, generator=first)
    return y + torch.rand(3, generator=OWN.manual_seed(4))


def from_one_to_the_other(x: Tensor) -> Tensor:
    OWN.set_state(get_rng_state())
    return x + torch.rand(3, generator=OWN) - torch.rand(3)


def set_from_outside(x: Tensor) -> Tensor:
    torch.set_rng_state(STATE)
    return x + torch.rand(3)


def returned(x: Tensor) -> Any:
    return x + torch.rand(3), torch.get_rng_state(), OWN.get_state()


def caught(x: Tensor) -> Tensor:
    try:
        OWN.set_state(torch.zeros(3, dtype=torch.uint8))
    except RuntimeError:
        x = x + 1
    return x + torch.rand(3, generator=OWN)


def in_a_checkpoint(x: Tensor) -> Tensor:
    y = x.clone().requires_grad_()
    checkpoint(lambda y: nn.functional.dropout(y).square().sum(), y, use_reentrant=False).backward()
    return y.grad + torch.rand(3)  # type: ignore[operator]


STEPS = [saved, saved_of_its_own, held, forked, seeded_twice, from_one_to_the_other, set_from_outside, returned,
         caught, in_a_checkpoint]  # fmt: skip


def begin() -> None:
    torch.manual_seed(5)
    OWN.manual_seed(6)


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_generators_are_moved_as_in_eager(step: Callable[[Tensor], Any]) -> None:
    def run(step: Callable[[Tensor], Any]) -> list[Tensor]:
        begin()
        results = [step(torch.ones(3)) for _ in range(3)]
        flat = [t for result in results for t in (result if isinstance(result, tuple) else (result,))]
        return [*flat, torch.get_rng_state(), OWN.get_state()]

    expected, compiled = run(step), ws.compile(step, fullgraph=True)
    assert all(map(torch.equal, run(compiled), expected)) and compiled.captures == 1


@pytest.mark.parametrize("state", [torch.zeros(3, dtype=torch.uint8), torch.zeros(3), [1], None])
def test_states_of_no_generator_in_eagers_words(state: Any) -> None:
    def step(x: Tensor) -> Tensor:
        torch.set_rng_state(state)
        return x

    with pytest.raises((TypeError, RuntimeError)) as expected:
        step(torch.ones(1))
    with pytest.raises(type(expected.value)) as caught:
        ws.compile(step, fullgraph=True)(torch.ones(1))
    assert str(caught.value) == str(expected.value)


REFUSED: dict[str, Callable[[], Any]] = {
    "Generator.seed": torch.seed,
    "Generator.clone_state": OWN.clone_state,
    "Generator.initial_seed": torch.initial_seed,
    "Generator.graphsafe_get_state": lambda: OWN.graphsafe_get_state(),
    "makes, or that is out of its sight": lambda: torch.Generator().manual_seed(1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_of_generators_is_refused(what: str) -> None:
    def step(x: Tensor) -> Tensor:
        REFUSED[what]()
        return x + torch.rand(3)

    begin()
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=what) as caught:
        ws.compile(step, fullgraph=True)(torch.ones(3))
    assert f"{__file__}:" in str(caught.value) and "to do: " in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_that_asks_for_a_seed_runs_its_python() -> None:
    def step(x: Tensor) -> Tensor:
        return x * torch.initial_seed() + torch.rand(3, generator=OWN.manual_seed(4)) + OWN.initial_seed()

    compiled = ws.compile(step)
    for seed in (5, 7, 7, 5):
        torch.manual_seed(seed)
        assert torch.equal(compiled(torch.ones(3)), step(torch.ones(3)))
    assert len(compiled.breaks) == 1 and "Generator.initial_seed" in compiled.breaks[0]


# What a library has bound at its import: C calls it past the generator's class.
LIBRARY = types.ModuleType("drawing_library")
LIBRARY.__file__ = "/nowhere/site-packages/drawing_library.py"
sys.modules["drawing_library"] = LIBRARY
exec(
    compile(
        """
from functools import partial
from random import Random, gauss, random
from numpy.random import default_rng, uniform

def of_half(draw=gauss): return draw(0, 1)
def named(): return random()
def numpys(): return uniform()
def of_default(draw=random): return draw()
part = partial(random)
def of_partial(): return part()
class Kept:
    draw = staticmethod(random)
def of_class(): return Kept.draw()
def enclosed(draw):
    return lambda: draw()
of_closure = enclosed(random)
own = Random(3)
def of_own(): return own.random()
numpys_own = default_rng(3)
def of_numpys_own(): return numpys_own.random()
""",
        LIBRARY.__file__,
        "exec",
    ),
    vars(LIBRARY),
)
BITS = numpy.random.default_rng(3)
SEEDED, SEEDS = BITS.bit_generator.state, numpy.random.SeedSequence(3)
LIBRARYS = "named numpys of_default of_partial of_class of_closure of_half of_own of_numpys_own".split()

DRAWS: dict[str, Callable[[], float]] = {
    **{f"library's {name}": lambda name=name: getattr(LIBRARY, name)() for name in LIBRARYS},  # type: ignore[misc]
    "random": lambda: random.random(),
    "held": draw,
    "held and kept": gauss,
    "integers": lambda: random.randint(0, 9),
    "seed": lambda: random.seed(0) or 1.0,
    "state of bits": lambda: setattr(BITS.bit_generator, "state", SEEDED | {"has_uint32": 1}) or 1.0,  # type: ignore[func-returns-value]
    "state that is there": lambda: setattr(BITS.bit_generator, "state", SEEDED) or 1.0,  # type: ignore[func-returns-value]
    "read": lambda: random.getstate()[1][0] / 2**32,
    "read of bits": lambda: float(BITS.bit_generator.state["has_uint32"]),
    "put back": lambda: random.setstate(random.getstate()) or 1.0,  # type: ignore[func-returns-value]
    "spawned": lambda: float(SEEDS.spawn(1)[0].spawn_key[0]),
    "swallowed": lambda: swallowed(),
    "numpy": lambda: numpy.random.normal(),
    "numpy's held": rand,
    "numpy's sample": lambda: numpy.random.sample(),
    "numpy's seed": lambda: numpy.random.seed(0) or 1.0,  # type: ignore[func-returns-value]
}


def swallowed() -> float:
    try:
        return random.random()
    except RuntimeError:
        return 1.0


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_of_python_and_numpy_are_refused_where_they_are_made(kind: str) -> None:
    take = DRAWS[kind]

    def step(x: Tensor) -> Tensor:
        return x * float(take())

    random.gauss(0, 1)  # the next one is there already
    before = random.getstate(), numpy.random.get_state()[2]
    sources = r"random|numpy.random|a library|G\['BITS'\].*"
    with pytest.raises(DataDependentError, match=rf"draws from ({sources}),.* a replay would repeat") as caught:
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert f"at: {__file__}:" in str(caught.value)
    assert (random.getstate(), numpy.random.get_state()[2]) == before


def test_draws_of_other_threads_go_on_as_they_are() -> None:
    """While steps are captured that draw by what no module names, as where tqdm's monitor or a loader's feeder runs."""
    drawn: list[float] = []
    errors: list[Exception] = []
    stop = threading.Event()

    def other() -> None:
        while not stop.is_set():
            drawn.append(random.random())
            try:
                numpy.random.randint(5, 3)
            except ValueError as error:
                errors.append(error)

    def step(x: Tensor) -> Tensor:
        return x * LIBRARY.of_closure() + LIBRARY.of_partial()

    random.seed(0)
    thread = threading.Thread(target=other)
    thread.start()
    taken = []
    try:
        for _ in range(5):
            compiled = ws.compile(step)
            results = [float(compiled(torch.ones(()))) for _ in range(3)]
            taken += results
            assert "draws from random" in compiled.breaks[0]
    finally:
        stop.set()
        thread.join()
    assert len({*drawn}) == len(drawn) and len({*taken}) == 15 and len(errors) > 1
    random.seed(0)
    every = [random.random() for _ in range(len(drawn) + 30)]
    assert {*drawn} < {*every}, "a draw was put back, or lost"


def test_the_second_number_of_gauss_is_another_threads() -> None:
    drawn: list[float] = []
    other = threading.Thread(target=lambda: drawn.append(random.gauss(0, 1)))

    class Meets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not drawn:
                with patches.suspended():  # which a step may not do
                    other.start()
                    other.join()
            return x + 1

    generator = random.Random(0)
    random.seed(0)
    drawn_before = random.gauss(0, 1)
    ws.compile(Meets(), fullgraph=True)(torch.ones(2))
    expected = [generator.gauss(0, 1) for _ in range(4)]
    assert [drawn_before, *drawn, random.gauss(0, 1), random.gauss(0, 1)] == expected


def test_generators_that_a_step_makes_are_its_own() -> None:
    def step(x: Tensor) -> Tensor:
        return x * random.Random(3).random() * numpy.random.default_rng(3).random()

    assert torch.equal(ws.compile(step, fullgraph=True)(torch.ones(2)), step(torch.ones(2)))


def test_a_method_of_a_generator_in_a_partial() -> None:
    generator = torch.Generator()
    seed = functools.partial(generator.manual_seed, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        seed()
        return x + torch.rand(3, generator=generator)

    compiled = ws.compile(step, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), step(torch.ones(3)))
    assert seed.func == generator.manual_seed and seed.args == (3,)
