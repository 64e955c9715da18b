"""Dictionaries compared in bulk; see native/tables.c."""

from typing import Any

ANY: object

def match(
    tables: list[tuple[dict[Any, Any], tuple[Any, ...], tuple[Any, ...], bool]], empty: list[dict[Any, Any]], /
) -> bool: ...
