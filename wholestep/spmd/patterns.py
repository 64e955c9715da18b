"""Patterns that name parameters and modules in plans."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from wholestep.errors import PlanError
from wholestep.ir import StepGraph


def parameter_path(source: str) -> str:
    """A parameter's path in its model: ``L['model'].layers.0.weight`` -> ``layers.0.weight``."""
    return source.rpartition("]")[2].removeprefix(".") or source


def parameter_paths(step: StepGraph) -> list[str]:
    """The paths of all parameters that a step reads."""
    return [parameter_path(item.source) for item in step.signature.inputs if item.kind == "parameter"]


def matches(path: str, pattern: str) -> bool:
    """True when a path, or the end of it after a dot, fits a pattern; ``*`` stands for dots, too."""
    return any(fnmatch.fnmatchcase(path, form) for form in (pattern, f"*.{pattern}"))


def check_patterns(plan: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Refuses a pattern that matches nothing.

    Raises:
        PlanError: naming the nearest names.
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or list(names[:3])
            raise PlanError(
                f"{plan}: the pattern {pattern!r} matches no parameter or module of the step\n  found: such as "
                f"{', '.join(map(repr, near))}\n  to do: correct the pattern; * stands for any text, dots included"
            )
