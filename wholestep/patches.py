"""Patches: attributes of modules, classes and objects replaced for one thread, while others see the originals.

An attribute of a module is one object for all threads, so a callable that asks which thread calls stands in its place;
an attribute of a class, be it a function, a flag or a method of C, becomes a descriptor that asks the same; a name in
the globals of functions, which are given as a dict, stands there until the end. A name that one function alone is to
find otherwise (`float`, a list) is none of these: the function is patched with a copy of itself that reads another
(`reading`). The last context that ends puts back what it found.
May import: nothing of the package.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, ModuleType
from typing import Any

Replacement = tuple[Any, str, Any]  # an owner, the name of its attribute, and what a thread finds there instead
Here = Callable[[], bool]  # whether the calling thread is the one

_ABSENT = object()
_LASTING = {"torch", *sys.stdlib_module_names}  # packages of which nothing goes away
_lock = threading.RLock()


class _Suspended(threading.local):
    here = False


_suspended = _Suspended()
active: dict[tuple[int, str], Patch] = {}
"""The attributes that are patched now, by the id of their owner and their name."""


class Patch:
    """One patched attribute.

    Attributes:
        original: what is there otherwise; of a class as in its dictionary, or in that of a base.
        acting: for each open context, which thread it is for, and what that thread finds.
        lasts: it is kept for the next context.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.acting: list[tuple[Here, Any]] = []
        self._own = _names(owner).get(name, _ABSENT)
        self.original = _found(owner, name)
        of_class = _DataDescriptor if hasattr(self.original, "__set__") else _Descriptor
        self.put: Any = of_class(self) if isinstance(owner, type) else _callable(self)
        module = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", "")
        self.lasts = isinstance(owner, (type, ModuleType)) and module.partition(".")[0] in _LASTING

    def begin(self) -> None:
        """Stands in the attribute's place from now on."""
        _write(self.owner, self.name, self.put)

    def fits(self) -> bool:
        """Whether what is there is what was there."""
        own = _names(self.owner).get(self.name, _ABSENT)
        return own is self._own and _found(self.owner, self.name) is self.original

    def chosen(self) -> Any:
        """What the calling thread finds."""
        if not _suspended.here:
            for here, replacement in reversed(self.acting):
                if here():
                    return replacement
        return self.original

    def remove(self) -> None:
        """Puts back what was there, unless somebody has set the attribute since."""
        if _names(self.owner).get(self.name) is self.put:
            _write(self.owner, self.name, self._own)


def _names(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _found(owner: Any, name: str) -> Any:
    """An attribute: of a class as in its dictionary, or in that of a base."""
    if isinstance(owner, dict):
        return owner[name] if name in owner else getattr(builtins, name)
    if not isinstance(owner, type):
        return getattr(owner, name)
    for base in owner.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return inspect.getattr_static(owner, name, _OfInstances(name))


class _OfInstances:
    """What a class has of an attribute that its instances alone have."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return vars(instance)[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value


class _Descriptor:
    """Stands in a class: no data descriptor, so that instances may have an attribute of their own."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        found = self.patch.chosen()
        get = getattr(type(found), "__get__", None)
        return found if get is None else get(found, instance, owner)

    def __call__(self, *args: Any) -> Any:
        return self.patch.chosen()(*args)  # as C calls a special method that it looked up itself: `__get__`


class _DataDescriptor(_Descriptor):
    """Stands for one that instances are also set by."""

    def __set__(self, instance: Any, value: Any) -> None:
        self.patch.chosen().__set__(instance, value)


class _Object:
    """Stands in a module for what is no function of Python: not bound by a class, and asked about as a class."""

    __slots__ = ("__weakref__", "patch")

    def __init__(self, patch: Patch) -> None:
        self.patch = patch

    def __getattribute__(self, name: str) -> Any:
        patch = object.__getattribute__(self, "patch")
        return object.__getattribute__(self, name) if name in _OWN else getattr(patch.original, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.patch.chosen()(*map(unpatched, args), **kwargs)
        return self if result is self.patch.original else result  # `type(cls) is type`

    def __getitem__(self, item: Any) -> Any:
        return self.patch.original[item]

    def __repr__(self) -> str:
        return repr(self.patch.original)

    def __dir__(self) -> list[str]:
        return dir(self.patch.original)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(unpatched(value), _kind(self.patch))

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(unpatched(kind), _kind(self.patch))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self.patch.original,)

    def __or__(self, other: Any) -> Any:  # in annotations of modules that are imported meanwhile
        return self.patch.original | other

    def __ror__(self, other: Any) -> Any:
        return other | self.patch.original

    def __eq__(self, other: object) -> bool:
        return other is self or bool(self.patch.original == other)

    def __hash__(self) -> int:
        return hash(self.patch.original)

    def __reduce__(self) -> str:
        return self.patch.name


_OWN = frozenset(("patch", "__reduce__", "__reduce_ex__", "__mro_entries__"))  # what is its own of an `_Object`


def _kind(patch: Patch) -> Any:
    chosen = patch.chosen()
    return chosen if isinstance(chosen, type) else patch.original


def unpatched(value: Any) -> Any:
    """The original of a value that a patch has put into a module; any other value itself."""
    return value.patch.original if type(value) is _Object else value


def is_put_into(owner: Any, name: Any) -> bool:
    """Whether what a module, or a dictionary of globals, has by a name is there for the time of a patch alone."""
    return (id(owner), name) in active


def is_added(name: Any, value: Any) -> bool:
    """Whether a value is what stands by a name in globals which do not have it otherwise."""
    return type(value) is _Object and value.patch.name == name and value.patch._own is _ABSENT


def _callable(patch: Patch) -> Any:
    if not isinstance(patch.original, FunctionType):
        return _Object(patch)

    @functools.wraps(patch.original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return patch.chosen()(*args, **kwargs)

    return call


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        if value is _ABSENT:
            del owner[name]
        else:
            owner[name] = value
        return
    try:
        delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)
    except TypeError:  # a class of C, whose attributes Python does not set: in its dictionary, behind the proxy
        (table,) = gc.get_referents(vars(owner))
        if value is _ABSENT:
            del table[name]
        else:
            table[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


_lasting: dict[tuple[int, str], Patch] = {}  # what stands in attributes' places again and again is made once


def _patch(owner: Any, name: str) -> Patch:
    made = _lasting.get((id(owner), name))
    if made is None or not made.fits():
        made = Patch(owner, name)
        if made.lasts:
            _lasting[id(owner), name] = made
    return made


def to_its_end(undo: Callable[[], None]) -> None:
    """Undoes something, from the beginning again where an interrupt (Ctrl-C) comes, which is raised when it is done."""
    interrupt: BaseException | None = None
    while True:
        try:
            undo()
            break
        except Exception:
            raise
        except BaseException as found:
            interrupt = found
    if interrupt is not None:
        raise interrupt


class Patches:
    """Patches that begin and end together."""

    def __init__(self) -> None:
        self._open: list[tuple[Patch, tuple[Here, Any]]] = []

    def put(self, replacements: Iterable[Replacement], here: Here) -> None:
        """Begins: threads for which ``here()`` is true see the replacements from now on."""
        with _lock:
            for owner, name, replacement in replacements:
                key, entry = (id(owner), name), (here, replacement)
                patch = active.get(key)
                if patch is None:
                    patch = active[key] = _patch(owner, name)
                    patch.begin()
                self._open.append((patch, entry))
                patch.acting.append(entry)

    def restore(self) -> None:
        """Ends them: attributes that nothing else patches are restored."""
        to_its_end(self._restore)

    def _restore(self) -> None:
        with _lock:
            while self._open:
                patch, entry = self._open[-1]
                patch.acting[:] = [one for one in patch.acting if one is not entry]
                if not patch.acting:
                    patch.remove()
                    active.pop((id(patch.owner), patch.name), None)
                self._open.pop()
                if not patch.acting and not patch.lasts:
                    patch.put = None  # which leads to the patch: without the cycle, all of this goes at once

    @contextmanager
    def during(self, replacements: Iterable[Replacement], here: Here) -> Iterator[None]:
        """The same for a ``with`` statement."""
        try:
            self.put(replacements, here)
            yield
        finally:
            self.restore()


def patched(replacements: Iterable[Replacement], here: Here) -> AbstractContextManager[None]:
    """Patches for one ``with`` statement."""
    return Patches().during(replacements, here)


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, nothing is patched for the calling thread."""
    before, _suspended.here = _suspended.here, True
    try:
        yield
    finally:
        _suspended.here = before


def is_suspended() -> bool:
    """Whether the calling thread is inside of `suspended`."""
    return _suspended.here


def original(owner: Any, name: str) -> Any:
    """An attribute as threads without patches see it."""
    patch = active.get((id(owner), name))
    return _found(owner, name) if patch is None else patch.original


def reading(function: FunctionType, **names: Any) -> FunctionType:
    """A copy of a function that finds other objects under some names of its module."""
    table = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, table, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
