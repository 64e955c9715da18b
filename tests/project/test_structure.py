"""The shape of the package: who may import whom, and where torch's private names may stand.

Each room, a folder or a file beside the folders, says in its docstring what it may import ("May import: errors, ir.");
these lines are the table that is tested, and they must be neither too narrow nor too wide.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import wholestep

PACKAGE = Path(wholestep.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = [path for path in FILES if path.parent != PACKAGE or not path.name.startswith("__")]
# The way a step flows; a stage imports no later one.
STAGES = ["capture", "trace", "aot_autograd", "spmd", "passes", "lower", "runtime"]

FORBIDDEN = ("torch._dynamo", "torch._functorch", "torch.nn.parallel", "torch.distributed")
# torch.distributed is one engine of comm/ among others, and the place where stock DDP finds our transport.
ENGINES = {"c10d.py", "torch_backend.py"}
# Not documented by torch, yet what its own ecosystem builds on.
USABLE = ("torch.utils._pytree", "torch.utils._python_dispatch")
# Operators carry these names in the public namespaces `torch` and `torch.ops`.
OPERATOR_NAMES = ("_foreach_", "_fused_")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf8"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file names in an import, relative ones resolved, with its line."""
    package = ["wholestep", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes on a name, else ''."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    """True for torch's private names; operators named with an underscore are public under torch.ops."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"] or name.startswith(USABLE):
        return False
    return any(p.startswith("_") and not p.startswith(("__", *OPERATOR_NAMES)) for p in parts[1:])


def home_of(room: str) -> Path:
    """The file whose docstring speaks for a room."""
    return PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"


def allowed(room: str) -> set[str] | None:
    """What a room says that it may import; None where it says nothing."""
    text = ast.get_docstring(parsed(home_of(room))) or ""
    line = re.search(r"^May import: ([^.]*)\.$", text, re.M)
    return None if line is None else set(re.findall(r"\w+", line[1])) - set("nothing of the package".split())


def other_rooms(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    """The other rooms that a file imports, with the line."""
    for name, line in imports(tree, path):
        parts = name.split(".")
        if parts[0] == "wholestep" and len(parts) > 1 and parts[1] != room_of(path):
            yield parts[1], line


def wrong_arrows(tree: ast.AST, path: Path) -> list[str]:
    room = room_of(path)
    says = allowed(room) or set()
    return [f"{path.name}:{line} {room} -> {other}" for other, line in other_rooms(tree, path) if other not in says]


def forbidden_imports(tree: ast.AST, path: Path) -> list[str]:
    engine = room_of(path) == "comm" and path.name in ENGINES
    barred = [f for f in FORBIDDEN if not (engine and f == "torch.distributed")]
    named = [*imports(tree, path), *((dotted(n), n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Attribute))]
    return [f"{path.name}:{line} {name}" for name, line in named if any(f"{name}.".startswith(f"{f}.") for f in barred)]


def private_names(tree: ast.AST, path: Path) -> list[str]:
    named = [*imports(tree, path), *((dotted(n), n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Attribute))]
    return sorted({f"{path.name}:{line} {name}" for name, line in named if is_private(name)})


def inner_imports(tree: ast.AST, path: Path) -> list[str]:
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {n.lineno for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))}
    return [f"{path.name}:{line}" for line in sorted(inside)]


def offences(rule, skip: tuple[str, ...] = ()) -> list[str]:
    return [o for p in FILES if p.name not in skip for o in rule(parsed(p), p)]


@functools.cache
def table() -> dict[str, set[str]]:
    """Room -> the rooms that its files import."""
    found: dict[str, set[str]] = {room_of(path): set() for path in ROOMS}
    for path in ROOMS:
        found[room_of(path)] |= {other for other, _ in other_rooms(parsed(path), path)}
    return found


def test_rooms_import_what_they_say_and_say_what_they_import():
    assert {room: allowed(room) for room in table()} == table()


def test_no_room_leads_back_to_itself():
    list(graphlib.TopologicalSorter(table()).static_order())  # raises CycleError


def test_no_stage_imports_a_later_one():
    found = table()
    assert [(s, late) for i, s in enumerate(STAGES) for late in STAGES[i + 1 :] if late in found[s]] == []


def test_no_basename_stands_twice():
    names = [path.name for path in FILES if path.name != "__init__.py"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_nothing_forbidden_is_imported():
    assert offences(forbidden_imports) == []


def test_private_names_of_torch_stand_in_one_file():
    assert offences(private_names, skip=("torch_compat.py",)) == []


def test_no_import_inside_a_function():
    assert offences(inner_imports) == []


def test_every_room_of_the_flow_says_what_it_takes_and_gives():
    for room in [*STAGES, "comm", "parallel", "simulate", "report"]:
        if not (PACKAGE / room).is_dir():
            continue  # a room appears when the work that needs it begins
        text = ast.get_docstring(parsed(PACKAGE / room / "__init__.py")) or ""
        assert len(text.splitlines()) >= 3, f"{room}/__init__.py: say in five lines what the room is for"
        assert "->" in text or ("takes" in text.lower() and "gives" in text.lower()), f"{room}: takes what, gives what?"


def test_the_public_names_are_exactly_those_listed():
    listed = set(getattr(wholestep, "__all__", ()))
    missing = [name for name in listed if not hasattr(wholestep, name)]
    assert missing == []
    tree = parsed(PACKAGE / "__init__.py")
    bound = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__"
        for alias in node.names
    }
    bound |= {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert {name for name in bound if not name.startswith("_")} <= listed


@pytest.mark.parametrize(
    ("source", "rule", "found"),
    [
        ("from wholestep.runtime import x", wrong_arrows, "runtime"),
        ("from ..runtime import x", wrong_arrows, "runtime"),
        ("import torch.distributed as d", forbidden_imports, "torch.distributed"),
        ("from torch import distributed", forbidden_imports, "torch.distributed"),
        ("import torch\ntorch.distributed.get_rank()", forbidden_imports, "torch.distributed.get_rank"),
        ("from torch._subclasses import FakeTensor", private_names, "torch._subclasses"),
        ("from torch import _C", private_names, "torch._C"),
        ("import torch\ntorch._C.f()", private_names, "torch._C.f"),
        ("def f():\n    import os", inner_imports, ":2"),
    ],
)
def test_the_rules_themselves_see_an_offence(source: str, rule, found: str):
    assert any(found in o for o in rule(ast.parse(source), PACKAGE / "capture" / "made_up.py"))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_add_([], [])",
        "import torch\ntorch.ops.aten._to_copy",
        "from torch.utils._pytree import tree_map",
        "import torch.distributions",
    ],
)
def test_the_rules_let_public_names_pass(source: str):
    path = PACKAGE / "capture" / "made_up.py"
    assert private_names(ast.parse(source), path) + forbidden_imports(ast.parse(source), path) == []
