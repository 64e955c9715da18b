"""Attributes that are computed when they are first read, without a lock.

`functools.cached_property` of Python 3.11 has one lock for all instances of a class: two threads whose properties read
each other's wait for ever.
May import: nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801 - as Python's own
    """The result of a method, kept in the object; two threads that read it first at one time may both compute it."""

    def __init__(self, method: Callable[[Any], T]) -> None:
        self._method, self.__doc__ = method, method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value = instance.__dict__[self._name] = self._method(instance)
        return value
