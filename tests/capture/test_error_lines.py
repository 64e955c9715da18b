"""Refusals name a line of the user's own, and a remedy that can be followed; and which code is the user's."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import runpy
import site
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._higher_order_ops import invoke_quant_packed
from torch._higher_order_ops import map as control_map
from torch._higher_order_ops.cond import cond as control_cond
from torch._higher_order_ops.scan import scan as control_scan

import wholestep as ws
from wholestep.capture.snapshot.user_code import is_library, origin
from wholestep.errors import CaptureError

MODEL = nn.Linear(4, 2)
NUMBERS = iter(range(100))


def scaler_step(x: torch.Tensor) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(MODEL.parameters(), fused=False)
    scaler.scale(MODEL(x).sum()).backward()
    scaler.step(optimizer)


def random_decision(x: torch.Tensor) -> Any:
    return x if torch.rand(()) > 0.5 else x * 2


def kept_generator(x: torch.Tensor) -> Iterator[Any]:
    return (x * 2 for _ in range(2))


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any], str]] = {
    "decision": (lambda x: x if (MODEL(x) * x.sum()).norm() > 0 else x * 2, {}, "without fullgraph=True"),
    "scaler": (scaler_step, {}, "fused=True"),
    "shape from data": (lambda x: MODEL(x).nonzero(), {}, "fixed shape"),
    "numpy's draw": (lambda x: x * numpy.random.rand(), {}, "draw with torch"),
    "python's draw": (lambda x: x * random.random(), {}, "draw with torch"),
    "iterator": (lambda x: x * next(NUMBERS), {}, "pass the value"),
    "map": (lambda x: control_map(lambda row: row * 2, x), {}, "Python loop"),
    "generator": (kept_generator, {}, "containers"),
    "numpy": (lambda x: numpy.asarray(MODEL(x).detach()), {}, ""),
    "data pointer": (lambda x: MODEL(x).data_ptr(), {}, ""),
    "save": (lambda x: torch.save(MODEL(x), "file"), {}, "after the step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_a_line_and_a_remedy(name: str) -> None:
    step, options, remedy = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        ws.compile(step, **options, fullgraph=True)(torch.ones(3, 4))
    assert caught.value.where.startswith(f"{__file__}:") and not is_library(__file__)
    assert caught.value.remedy and remedy in caught.value.remedy


def test_a_module_of_a_library_is_refused_by_the_line_of_the_call() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return (x for _ in range(2))

    with pytest.raises(CaptureError) as caught:
        ws.compile(Module(), fullgraph=True)(torch.ones(1))
    assert caught.value.where.startswith(f"{__file__}:")


@pytest.mark.parametrize("by_name", [True, False])
def test_cond_is_as_in_eager_or_refused(by_name: bool) -> None:
    def step(x: torch.Tensor, *more: Any) -> torch.Tensor:
        cond = control_cond if by_name else torch.cond
        return cond(x.sum() > 0, lambda a, *b: a * 2, lambda a, *b: a * 3, (x, *more))  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="higher-order operator") as refused:
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert refused.value.where.startswith(f"{__file__}:") and "torch.where" in refused.value.remedy
    compiled = ws.compile(step)
    for value in (1.0, -1.0, 2.0):
        x = torch.full((2,), value)
        assert torch.equal(compiled(x), x * (2 if value > 0 else 3))
    for run in (step, ws.compile(step)):
        with pytest.raises(RuntimeError, match="only consists of tensor leaves"):
            run(x, 3)


def test_operators_of_higher_order_that_dynamo_does_not_run_are_refused_by_line() -> None:
    def step(x: torch.Tensor) -> Any:
        return invoke_quant_packed(lambda a: (a.sin(),), x)[0]

    x = torch.ones(2)
    with pytest.raises(CaptureError, match="higher-order operator") as refused:
        ws.compile(step, fullgraph=True)(x)
    assert refused.value.where.startswith(f"{__file__}:")
    assert torch.equal(ws.compile(step)(x), step(x))


@pytest.mark.filterwarnings("ignore")  # Dynamo's, which eager's cond asks
def test_cond_whose_branch_has_no_gradients_requires_grad_as_in_eager() -> None:
    w, factor = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def step(taken: torch.Tensor) -> Any:
        results = torch.cond(taken, lambda w: w * factor, lambda w: torch.ones(2), (w,))
        return results, results.requires_grad

    compiled = ws.compile(step)
    for taken in (torch.tensor(False), torch.tensor(True)):
        (got, graded), (wanted, expected) = compiled(taken), step(taken)
        assert torch.equal(got, wanted) and graded == expected and got.requires_grad
    assert "higher-order operator" in compiled.breaks[0]


class Scaled(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self, key) * 10

    def __setitem__(self, key: str, value: Any) -> None:
        dict.__setitem__(self, key, value + 1)


class Closed(dict[str, Any]):
    def __iter__(self) -> Any:
        raise AssertionError("read by the step alone")

    keys = values = items = __len__ = __iter__


class Doubled(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return list.__getitem__(self, index) * 2


def test_containers_with_methods_of_their_own_are_read_past_them() -> None:
    found = []
    for wrap in (lambda f: f, functools.partial(ws.compile, fullgraph=True)):
        kept, closed, doubled = Scaled(), Closed(), Doubled([torch.ones(2)])
        dict.__setitem__(kept, "a", torch.ones(2))
        dict.__setitem__(closed, "a", 3.0)

        def make(kept: Any, closed: Any, doubled: Any) -> Callable[[Any, torch.Tensor], Any]:
            def step(batch: Any, x: torch.Tensor) -> Any:
                kept["b"] = x
                return batch["a"] * kept["a"] + doubled[0] * closed["a"]

            return step

        run, results = wrap(make(kept, closed, doubled)), []
        for value in (1.0, 2.0, 3.0):
            results.append(run(Scaled(a=torch.full((2,), value)), torch.full((2,), value)).tolist())
            results.append(dict.__getitem__(kept, "b").tolist())
        found.append(results)
    assert found[0] == found[1]


LIBRARY = """
    import random, time
    import torch
    CALLS = 0
    STARTED = time.time()
    STATE = {"seen": []}

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            global CALLS
            CALLS += 1  # what a library counts is its own
            self.last = time.time()
            return x * self.weight
"""

SCRIPT = """
    import torch, wholestep as ws
    import some_library, helpers
    layer = some_library.Layer()
    step = ws.compile(lambda x: layer(x) * helpers.scale())
    for scale in (2.0, 2.0, 3.0):
        helpers.SCALE = scale
        assert step(torch.ones(2)).tolist() == [scale, scale]
    from wholestep.capture.snapshot.user_code import is_library
    assert is_library(some_library.__file__) and not is_library(helpers.__file__)
"""


def play(script: Path, *paths: Path, sites: Sequence[Path] = ()) -> None:
    """Runs a script as the program of a process, which has torch already."""
    said = script.parent / "stderr"
    process = multiprocessing.get_context("forkserver").Process(target=_played, args=(script, paths, sites, said))
    process.start()
    process.join(300)
    assert process.exitcode == 0, said.read_text()


def _played(script: Path, paths: Sequence[Path], sites: Sequence[Path], said: Path) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    os.chdir(script.parent)
    for folder in sites:
        site.addsitedir(str(folder))
    sys.path[:0] = map(str, (script.parent, *paths))
    torch.set_num_threads(1)  # as each rank does: the server's pool of threads is not here
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("way", ["path", "pth", "packages", "vendored", "target", "below_vendor"])
def test_a_library_is_one_wherever_it_lies(tmp_path: Path, way: str) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    if way == "target":  # `pip install --target libs`, in a project that is marked as one
        elsewhere = project / "libs"
        for folder, name, text in ((elsewhere / "some_library-1.0.dist-info", "RECORD", "some_library/__init__.py,,\n"),
                                   (project, "pyproject.toml", "")):  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    if way == "below_vendor":
        project = tmp_path / "vendor" / "project"
    if way == "packages":
        elsewhere = project / "env" / "site-packages"
    if way == "vendored":
        elsewhere = project / "third_party"
    for folder, name, text in (
        (elsewhere / "some_library", "__init__.py", LIBRARY),
        (project, "train.py", SCRIPT),
        (project / "helpers", "__init__.py", "SCALE = 1.0\ndef scale():\n    return SCALE\n"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    if way == "pth":
        (project / "extra.pth").write_text(str(elsewhere))
        play(project / "train.py", sites=[project])
    else:
        play(project / "train.py", elsewhere)


MODULE = """
    class Base:
        scale = 2
    class Steps(Base):
        def step(self, x):
            return super().scale * x
"""
OF_ANOTHER_PROJECT = """
    import functools, torch, wholestep as ws
    from steps.module import Base, Steps
    calls = ws.compile(Steps().step), ws.compile(functools.partial(Steps.step, Steps()))
    for Base.scale in (2, 3):
        assert [call(torch.ones(2)).tolist() for call in calls] == [[Base.scale] * 2] * 2
"""


@pytest.mark.parametrize("there", ["there", "site-packages"])
def test_what_is_compiled_is_the_users_also_as_a_method(tmp_path: Path, there: str) -> None:
    for name, text in (("here/train.py", OF_ANOTHER_PROJECT), (f"{there}/steps/__init__.py", ""),
                       (f"{there}/steps/module.py", MODULE)):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    play(tmp_path / "here" / "train.py", tmp_path / there)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_operators_on_functions_are_refused_or_served_and_run_afterwards_as_before(fullgraph: bool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return control_map(lambda row: row.sin(), x) * 2  # type: ignore[no-any-return]

    x = torch.ones(3)
    compiled = ws.compile(step, fullgraph=fullgraph)
    for _ in range(3):
        if fullgraph:
            with pytest.raises(CaptureError, match="higher-order operator"):
                compiled(x)
        else:
            assert torch.equal(compiled(x), x.sin() * 2)
    assert torch.equal(step(x), x.sin() * 2)


def test_no_file_of_the_package_is_the_users() -> None:
    files = [str(file) for file in Path(ws.__file__).parent.rglob("*.py")]
    assert len(files) > 100 and [file for file in files if origin(file) != "wholestep"] == []
    assert origin(__file__) != "wholestep"


def test_a_scan_is_served_with_its_backward_inside() -> None:
    def step(weight: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        last, ys = control_scan(lambda h, x: (h * weight + x, h.sin()), torch.zeros(2), xs)
        (last.sum() + (ys * 2.0).sum()).backward()
        return ys.detach()

    weight, xs = torch.tensor([0.5, 2.0], requires_grad=True), torch.randn(4, 2)
    compiled, expected = ws.compile(step), (step(weight, xs), weight.grad)
    for _ in range(3):
        assert torch.equal(compiled(weight, xs), expected[0]) and torch.equal(weight.grad, expected[1])
