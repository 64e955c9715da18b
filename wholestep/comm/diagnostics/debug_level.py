"""How much the collectives check and say: `DebugLevel`, from the environment variable that the ecosystem uses."""

from __future__ import annotations

import enum
import os

VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


class DebugLevel(enum.Enum):
    """OFF; INFO: notes where groups are made; DETAIL: every backend compares all ranks' calls before one goes on."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_level = DebugLevel.OFF


def set_debug_level_from_env() -> None:
    """Takes the level from TORCH_DISTRIBUTED_DEBUG: OFF (also when unset), INFO or DETAIL, in any case.

    Raises:
        ValueError: another value.
    """
    value = os.environ.get(VARIABLE, "OFF")
    if value.upper() not in DebugLevel.__members__:
        raise ValueError(f"The value of {VARIABLE} must be OFF, INFO or DETAIL, found {value!r}")
    set_debug_level(DebugLevel[value.upper()])


def set_debug_level(level: DebugLevel) -> None:
    """Sets the level for groups made from here on."""
    global _level
    _level = level


def get_debug_level() -> DebugLevel:
    """The level in force."""
    return _level
