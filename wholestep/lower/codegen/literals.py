"""Python literals of the generated program: values, keyword arguments, comments, lists that fit a line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from keyword import iskeyword
from typing import Any

import torch

from wholestep.sizes import Size

WIDTH = 90  # characters after which a list goes on in the next line
INDENT = " " * 12
LONGEST = 160


def commas(parts: Iterable[str]) -> str:
    """The parts of a list between brackets."""
    text = ""
    for part in parts:
        full = len(text) - text.rfind("\n") + len(part) > WIDTH
        text += (f",\n{INDENT}" if full else ", ") + part if text else part
    return text


def targets(names: Iterable[str]) -> str:
    """What a tuple is unpacked into, or what is deleted."""
    names = list(names)
    text = commas(names)
    return f"{text}," if len(names) == 1 else f"({text})" if "\n" in text else text


def keyword(name: str, text: str) -> str:
    """A keyword argument; ``uniform_`` has one called ``from``."""
    return f"**{{'{name}': {text}}}" if iskeyword(name) else f"{name}={text}"


def commented(text: str, comment: str) -> list[str]:
    """A line with a comment behind it, or before it where both are long."""
    comment = " ".join(comment.split())  # sources may hold any key of a user's dict, line breaks in it too
    comment = f"# {comment if len(comment) < LONGEST else comment[:LONGEST] + '…'}"
    if comment == "# ":
        return [text]
    both = f"{text}  {comment}"
    return [both] if len(both) - both.rfind("\n") < LONGEST else [comment, text]


def literal(value: Any) -> str:
    """Python source of a value."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, complex):  # its own text loses the signs of zeros, and names that are not there
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, Size):
        return repr(value) if repr(value).isidentifier() else f"({value!r})"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        return f"({value!r})"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    return repr(value)
