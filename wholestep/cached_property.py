"""What is computed once: attributes, when they are first read, and what is asked of classes.

`functools.cached_property` of Python 3.11 has one lock for all instances of a class: two threads whose properties read
each other's wait for ever. `functools.cache` keeps classes alive, and all that the closures of their methods hold.
May import: nothing of the package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

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


def cached_by_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """The function, with its result for each class kept for as long as there is that class."""
    results: WeakKeyDictionary[type, T] = WeakKeyDictionary()

    @functools.wraps(function)
    def cached(kind: type) -> T:
        try:
            return results[kind]
        except KeyError:
            result = results[kind] = function(kind)
            return result

    return cached
