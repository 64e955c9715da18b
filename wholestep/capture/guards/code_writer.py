"""The generated function of a binder while it is written, with names for what its code refers to."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from types import CodeType
from typing import Any

from wholestep.capture.container_access import is_exact, item
from wholestep.capture.guards.bulk import gather, grads, hooks, identical, match
from wholestep.capture.guards.compared_values import memory, quick_state, same_plain
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.reachable import Container


class CodeWriter:
    """Lines of code, each of which may return None where something differs.

    Attributes:
        names: id of an object -> the name that stands for it in the code.
        space: the code's global variables.
        spaces: these, and those of the code that goes with it.
        weak: references to what the code does not keep alive; where one of these dies, the spaces are emptied.
        tensors: id of a tensor of a persistent container -> an expression for it.
    """

    def __init__(self, state: tuple[Any, ...]) -> None:
        self.names: dict[int, str] = {}
        self.space: dict[str, Any] = {
            "identical": identical, "same": same_plain, "chain": chain.from_iterable, "match": match, "gather": gather,
            "hooks": hooks, "grads": grads, "quick_state": quick_state, "STATE": state, "memory": memory,
        }
        self.spaces = [self.space]
        self.weak: list[Any] = []
        self.lines: list[str] = []
        self.tensors: dict[int, str] = {}

    def name(self, value: Any) -> str:
        """The name of a constant that the code refers to by its identity."""
        if id(value) not in self.names:
            self.names[id(value)] = self.constant(value, "c")
        return self.names[id(value)]

    def constant(self, value: Any, prefix: str = "k") -> str:
        """A new name for a constant."""
        name = f"{prefix}{len(self.space)}"
        self.space[name] = value
        return name

    def variable(self, value: Any, expression: str, prefix: str = "v") -> str:
        """A variable of the code for an object, given the expression that finds it."""
        name = self.names[id(value)] = f"{prefix}{len(self.names)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def require(self, condition: str) -> None:
        """Has the function return None where a condition does not hold."""
        self.lines.append(f"if not ({condition}): return None")

    def require_absent(self, container: Container, expression: str) -> None:
        """Requires that a container of a kind whose keys may be absent has no more of them than it had."""
        kind, before, value = container.kind, container.before, container.value
        if kind in (kinds.SLOTS, kinds.CELL) and not kinds.is_complete(value, before):
            self.require(f"len({self.constant(kind.read)}({expression})) == {len(before)}")
        elif kind is kinds.CLASS:
            self.require(f"len({expression}.__dict__) == {len(vars(value))}")
        elif kind in kinds.USED and len(value.names) > len(before):
            absent = [name for name in value.names if name not in before]
            self.require(f"{self.name(value.table)}.keys().isdisjoint({self.constant(absent)})")

    def at(self, container: Container, key: Any) -> str:
        """An expression for what a container has at a key."""
        name = self.name(container.value if container.kind not in kinds.USED else container.value.table)
        if container.kind in _ACCESS:
            return _ACCESS[container.kind].format(name, key)
        key = str(key) if type(key) is int else repr(key) if type(key) is str else self.name(key)
        return f"{name}[{key}]" if is_exact(container.value) else f"{self.name(item)}({name}, {key})"

    def function(self, signature: str, name: str) -> Any:
        """Compiles the lines to a function."""
        body = "\n        ".join(self.lines)
        self.code = f"def {name}({signature}):\n    try:\n        {body}\n    except (LookupError, AttributeError, " \
                    "TypeError, ValueError, RuntimeError, NameError):\n        return None\n"
        exec(compiled(self.code), self.space)
        return self.space[name]


_ACCESS = {
    kinds.CELL: "{0}.cell_contents", kinds.GLOBALS: "{0}[{1!r}]", kinds.CLASS_VALUES: "{0}[{1!r}]",
    kinds.SLOTS: "{0}.{1}", kinds.FIELDS: "{0}.{1}", kinds.CLASS: "{0}.__dict__[{1!r}]",
}


@lru_cache(maxsize=64)
def compiled(text: str) -> CodeType:
    """The code object of generated text; captures that differ in their constants alone share it."""
    return compile(text, "<wholestep binder>", "exec")
