"""Methods of C, watched by their definitions; see native/methods.c."""

from collections.abc import Callable
from typing import Any

def watch(address: int, hook: Callable[[Any, Any], Any] | None, /) -> None: ...
