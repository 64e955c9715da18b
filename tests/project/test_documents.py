"""What the documents say is so: the README's example runs, names exist, links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wholestep

ROOT = Path(__file__).parents[2]
GUIDES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCUMENTS = [*GUIDES, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(encoding="utf8"), re.S | re.M)


def execute(source: str, name: str) -> dict:
    """Runs source text as a module whose lines tracebacks and `inspect` can find."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace: dict = {"__name__": "__documented__"}
    exec(compile(source, name, "exec"), namespace)
    return namespace


def test_the_readmes_example_runs_and_learns():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = execute(blocks("README.md")[0], "readme_example.py")
    x, y = torch.randn(32, 10), torch.zeros(32, 1)
    losses = [names["train_step"](names["model"], names["opt"], x, y).item() for _ in range(50)]
    assert losses[-1] < losses[0]
    compile(printed.getvalue(), "printed_program.py", "exec")
    assert "readme_example.py" in printed.getvalue(), "the program names the user's lines"


def test_every_block_of_the_page_that_shows_the_whole_library_runs(capsys: pytest.CaptureFixture[str]):
    execute("\n".join(blocks("docs/all-of-wholestep.md")), "all_of_wholestep.py")
    printed = capsys.readouterr().out
    assert "all_of_wholestep.py" in printed and "axis tp, 8 ranks" in printed


def test_the_step_that_reads_and_decides_under_a_plan_runs(capsys: pytest.CaptureFixture[str]):
    (source,) = (block for block in blocks("docs/spmd.md") if "train_step.breaks" in block)
    names = execute(source, "reads_and_decides.py")
    assert len(names["log"]) == 3 and all(isinstance(loss, float) for loss in names["log"])
    assert "reads_and_decides.py" in capsys.readouterr().out


def before(script: str) -> str:
    """A script of docs/your-script.md without its new lines."""
    kept = [line for line in script.splitlines() if "# +" not in line]
    return "\n".join(kept)


SCRIPTS = blocks("docs/your-script.md")


@pytest.mark.parametrize("number", [i for i, text in enumerate(SCRIPTS) if "init_process_group" not in text])
def test_a_script_prints_what_it_printed_before(number: int, capsys: pytest.CaptureFixture[str]):
    printed = []
    for script in (before(SCRIPTS[number]), SCRIPTS[number]):
        execute(script, f"your_script_{number}.py")
        lines = capsys.readouterr().out.splitlines()
        printed.append([re.sub(r"\d+\.\d s", "", line) for line in lines if "  at: " not in line])
    assert printed[0] and "@ws.compile" in SCRIPTS[number] and printed[0] == printed[1]


@pytest.mark.parametrize("number", [i for i, text in enumerate(SCRIPTS) if "init_process_group" in text])
def test_a_script_runs_on_two_ranks(number: int, tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPTS[number], encoding="utf8")
    command = [sys.executable, "-m", "wholestep", "run", "-n", "2", "train.py"]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "[rank 0]" in done.stdout, done.stderr


def test_the_map_in_contributing_names_each_room_and_its_folders_once():
    table = re.search(r"^\| room .*?\n\n", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8"), re.S | re.M)
    assert table is not None
    rows = [row.split("|") for row in table[0].splitlines()[2:] if row]
    package = ROOT / "wholestep"
    code = [path for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    rooms = [*(f"{path.name}/" for path in code), *(path.name for path in package.glob("[a-z]*.py"))]
    assert sorted(name for row in rows for name in re.findall(r"`([^`]+)`", row[1])) == sorted(rooms)
    for row in rows:
        for name in re.findall(r"`(\w+)/`", row[1]):
            folders = [f"{path.parent.name}/" for path in (package / name).glob("*/__init__.py")]
            assert {*re.findall(r"`(\w+/)`", row[3])} == {*folders}, name


def test_the_example_engine_in_contributing_gathers():
    gathered = execute(blocks("CONTRIBUTING.md")[1], "contributing_engine.py")["gathered"]
    assert torch.equal(gathered[0], torch.ones(2))


def test_the_example_pass_in_contributing_leaves_a_real_step_right():
    drop = execute(blocks("CONTRIBUTING.md")[0], "contributing_example.py")["drop_double_negation"]
    x = torch.randn(4)

    def twice_negated(x: torch.Tensor) -> torch.Tensor:
        return x.neg().neg() + 1

    step = wholestep.compile(twice_negated, passes=[drop])
    assert torch.equal(step(x), x + 1)
    assert "neg" not in step.code


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_name_under_ws_exists(document: str):
    text = (ROOT / document).read_text(encoding="utf8")
    named = set(re.findall(r"\bws\.([A-Za-z_]\w*)", text))
    assert sorted(name for name in named if not hasattr(wholestep, name)) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_and_named_path_leads_somewhere(document: str):
    text = (ROOT / document).read_text(encoding="utf8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:docs|examples|benchmarks|tests|wholestep)/[\w./]*)`", text)
    assert [link for link in links if not (ROOT / document).parent.joinpath(link).exists()] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {t for d in GUIDES for t in re.findall(r"\bmake ([a-z][\w-]*)", (ROOT / d).read_text(encoding="utf8"))}
    assert named and named <= targets
    paths = re.findall(r"\b(?:docs|examples|tests)/[\w./]*", (ROOT / "Makefile").read_text())
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
