"""Patterns that name parameters and modules in plans."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence

from wholestep.errors import PlanError
from wholestep.ir import InputKind, StepGraph


def parameter_path(source: str) -> str:
    """A parameter's path in its model: ``L['model'].layers.0.weight`` -> ``layers.0.weight``."""
    return source.rpartition("]")[2].removeprefix(".") or source


def argument_path(source: str) -> str:
    """An argument's path in the step: ``L['batch']['mask']`` -> ``batch.mask``."""
    return ".".join(re.findall(r"[^\[\]'\".]+", source.removeprefix("L")))


def paths_of(step: StepGraph, *kinds: InputKind) -> list[str]:
    """The paths of all parameters, or buffers, that a step reads."""
    return [parameter_path(item.source) for item in step.signature.inputs if item.kind in kinds]


def matches(path: str, pattern: str) -> bool:
    """True when a path, or the end of it after a dot, fits a pattern; ``*`` stands for dots, too."""
    return any(fnmatch.fnmatchcase(path, form) for form in (pattern, f"*.{pattern}"))


def check_patterns(
    plan: str, patterns: Sequence[str], names: Sequence[str], what: str = "parameter or module of the step"
) -> None:
    """Refuses a pattern that matches nothing.

    Args:
        what: the names are of.

    Raises:
        PlanError: naming the nearest names.
    """
    names = list(dict.fromkeys(names))
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or names[:3]
            found = f"such as {', '.join(map(repr, near))}" if near else "none"
            raise PlanError(
                f"{plan}: the pattern {pattern!r} matches no {what}\n  found: {found}\n"
                "  to do: correct the pattern; * stands for any text, dots included"
            )
