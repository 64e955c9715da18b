"""What kernels and `torch.distributions` refuse, depending on data: caught where eager's is, raised where it is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wholestep as ws
from tests.support.equal import World, assert_same_run
from wholestep.co_run import CoRun
from wholestep.errors import CaptureError
from wholestep.pipeline import Options
from wholestep.spmd import PlanExecutor
from wholestep.trace.record.caught_errors import is_caught

GOOD, BAD = (torch.tensor([0, 1]),), (torch.tensor([0, 9]),)


def embeds(weight: Tensor, index: Tensor, log: list[str]) -> Tensor:
    try:
        out = F.embedding(index, weight)
    except IndexError as error:
        log.append(str(error))
        out = weight[:2]
    log.append("after")
    return out.sum()


def factors(weight: Tensor, index: Tensor, log: list[str]) -> Tensor:
    matrix = torch.eye(2) * (5 - index[1])
    with suppress(RuntimeError):
        log.append("tries")
        matrix = torch.linalg.cholesky(matrix)
        log.append("did")
    return matrix + weight.sum()


def distributes(weight: Tensor, index: Tensor, log: list[str]) -> Tensor:
    try:
        return torch.distributions.Bernoulli(probs=index / 2.0).log_prob(torch.ones(2))
    except ValueError:
        log.append("invalid")
        return weight


@pytest.mark.parametrize("step", [embeds, factors, distributes])
@pytest.mark.parametrize("reads", [False, True])
def test_what_a_step_catches_decides_as_in_eager(step: Callable[..., Tensor], reads: bool) -> None:
    def make(seed: int) -> World:
        weight, log = torch.arange(6.0).reshape(3, 2), list[str]()

        def whole(index: Tensor) -> Tensor:
            if reads:
                log.append(str(float(weight.sum())))
            return step(weight, index, log)

        return World(whole, [GOOD, GOOD, GOOD, BAD, GOOD, BAD], {"weight": weight, "log": log})

    assert_same_run(make, 6, ws.compile)


LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_select": lambda table, index: table.index_select(0, index),
    "gather": lambda table, index: table.gather(0, index[:, None].expand(-1, 2)),
    "embedding": lambda table, index: F.embedding(index, table),
    "index": lambda table, index: table[index, index - 1],
    "scatter_add": lambda table, index: table.scatter_add(0, index[:, None].expand(-1, 2), torch.ones(2, 2)),
    "index_add_": lambda table, index: table.clone().index_add_(0, index, torch.ones(2, 2)),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_indices_that_a_kernel_takes_are_a_decision(lookup: str) -> None:
    def step(table: Tensor, index: Tensor) -> Tensor:
        try:
            return LOOKUPS[lookup](table, index) * 2
        except (IndexError, RuntimeError):
            return table - 1

    compiled, table = ws.compile(step), torch.arange(6.0).reshape(3, 2)
    for index in (torch.tensor([0, 1]), torch.tensor([1, 0])):
        assert compiled(table, index).equal(step(table, index))
    assert compiled.captures == 1 and not compiled.breaks
    for index in (torch.tensor([0, 9]), torch.tensor([0, 1]), torch.tensor([-4, 1])):
        assert compiled(table, index).equal(step(table, index))
    assert "on some data" in compiled.breaks[0]


def test_whole_graphs_name_the_line_that_may_fail() -> None:
    with pytest.raises(CaptureError, match="catches the IndexError that aten.embedding") as caught:
        ws.compile(embeds, fullgraph=True)(torch.ones(3, 2), *GOOD, [])
    assert f"{__file__}:{embeds.__code__.co_firstlineno + 2}" in str(caught.value)


def test_norms_refuse_no_data() -> None:
    def step(x: Tensor) -> Tensor:
        with suppress(RuntimeError):
            x = torch.linalg.vector_norm(x, dim=-1)
        return x

    run = ws.compile(step)
    assert torch.equal(run(torch.ones(2, 3)), step(torch.ones(2, 3))) and not run.breaks


def test_which_clauses_catch() -> None:
    def around(error: type[Exception]) -> list[bool]:
        found = []
        try:
            found.append(is_caught(error))
            with torch.no_grad():
                found.append(is_caught(error))
            try:
                found.append(is_caught(error))
            except (TypeError, torch.OutOfMemoryError):
                raise
            except LookupError as other:
                print(other)
        except KeyError:
            found.append(is_caught(error))
        finally:
            found.append(is_caught(error))
        return found

    served = CoRun(around, around, Options(PlanExecutor(None, None)))
    assert served(IndexError) == [False, False, True, False]
    assert served(RuntimeError) == [False] * 4
    assert served(KeyError) == [True, True, True, False]


def test_clauses_with_long_bodies() -> None:
    """Jumps across them, and names after many others, take more than one instruction."""
    names = "; ".join(f"name{i}" for i in range(300))
    source = f"""
def around(error):
    try:
        return [is_caught(error)]
        {names}
    except OverflowError:
        {names}
    except (KeyError, IndexError):
        {names}
"""
    known: dict[str, Any] = {"is_caught": is_caught}
    exec(source, known)
    around = known["around"]
    served = CoRun(around, around, Options(PlanExecutor(None, None)))
    assert [served(kind) for kind in (IndexError, ValueError, OverflowError)] == [[True], [False], [True]]


class Bad(Exception):
    pass


def test_clauses_on_classes_of_the_users_own() -> None:
    def around(kinds: Any) -> list[bool]:
        found = []
        try:
            found.append(is_caught(IndexError))
        except (Bad, torch.linalg.LinAlgError):
            raise
        try:
            found.append(is_caught(torch.linalg.LinAlgError))
        except torch.linalg.LinAlgError:
            raise
        try:
            found.append(is_caught(IndexError))
        except kinds:  # which may be any
            raise
        return found

    assert CoRun(around, around, Options(PlanExecutor(None, None)))(Bad) == [False, True, True]

    def looks_up(weight: Tensor, index: Tensor) -> Tensor:
        try:
            return F.embedding(index, weight).sum()
        except Bad:
            return weight.sum()

    step = ws.compile(looks_up, fullgraph=True)
    for _ in range(2):
        assert torch.equal(step(torch.ones(3, 2), torch.tensor([0, 2])), torch.tensor(4.0))


def test_distributions_check_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # off once Dynamo was imported

    def step(scale: Tensor) -> Tensor:
        return torch.distributions.Normal(0.0, scale).log_prob(scale)

    compiled = ws.compile(step, fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), step(torch.ones(2)))
    with pytest.raises(ValueError, match="Expected scale of Normal to be within its constraint"):
        compiled(-torch.ones(2))
    torch.distributions.Distribution.set_default_validate_args(False)
    assert compiled(-torch.ones(2)).isnan().all()
    assert "distributions_validate" in compiled.recompiles[-1]


def test_an_index_of_two_elements() -> None:
    """A TypeError where other reads of several elements raise a RuntimeError."""

    def step(x: Tensor) -> Tensor:
        try:
            return x * x.shape[torch.tensor([1, 1])]
        except TypeError:
            return x.sum()

    x = torch.ones(2, 3)
    assert torch.equal(ws.compile(step, fullgraph=True)(x), step(x))
