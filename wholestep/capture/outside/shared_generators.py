"""The random generators of Python and NumPy that all modules share, by whatever name code draws from them.

Modules have bound their methods (`from random import random`), which C then calls past the class. So each such name is
patched; what else holds one, a closure or a partial of a library's, is seen by the generator that has moved.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy

from wholestep.patches import suspended, unpatched

OF_C: Any = random.Random.__mro__[1]  # the class of C in whose methods those of Python's generators end
_PYTHONS: Any = random.random
_NUMPYS: Any = numpy.random.rand
SHARED = (_PYTHONS.__self__, "random"), (_NUMPYS.__self__, "numpy.random")
_METHODS = {id(method): method for module in (random, numpy.random) for method in vars(module).values()
            if any(getattr(method, "__self__", None) is generator for generator, _ in SHARED)
            and not isinstance(getattr(method, "__func__", None), FunctionType)}  # fmt: skip
_searched: dict[str, int] = {}  # name of a module -> its id
_names: list[tuple[ModuleType, str, Any]] = []


def looked_up(method: Any) -> Callable[..., Any]:
    """A bound method that is looked up anew at each call."""
    return lambda *args, **kwargs: getattr(method.__self__, method.__name__)(*args, **kwargs)


def names() -> Iterator[tuple[ModuleType, str, Any]]:
    """The names by which modules know methods that are bound to these generators."""
    for name, module in list(sys.modules.items()):
        if _searched.get(name) != id(module):
            _searched[name] = id(module)
            known = list(vars(module).items()) if isinstance(module, ModuleType) else []
            _names.extend((module, key, _METHODS[id(value)]) for key, value in known if id(value) in _METHODS)
    return ((module, key, method) for module, key, method in _names if unpatched(vars(module).get(key)) is method)


class States:
    """The states of these generators before a step is traced; of none where other threads run, which may draw."""

    def __init__(self, known: bool) -> None:
        alone = known and len(sys._current_frames()) == 1
        self._before = [self._of(generator) for generator, _ in SHARED] if alone else []

    def _of(self, generator: Any) -> Any:
        with suspended():
            return OF_C.getstate(generator) if isinstance(generator, OF_C) else generator.get_state()

    def put_back(self) -> str:
        """Has the generators go on from there, once; gives the name of one that the step had moved."""
        moved = ""
        for before, (generator, name) in zip(self._before, SHARED, strict=False):
            if str(before) != str(self._of(generator)):
                moved = name
                with suspended():
                    OF_C.setstate(generator, before) if isinstance(generator, OF_C) else generator.set_state(before)
        self._before = []
        return moved
