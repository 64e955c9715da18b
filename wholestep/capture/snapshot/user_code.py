"""What tells a library from the user's own code: one rule for guards, for what may be asked, and for lines in errors.

A library is torch, the standard library and this package; what somebody has installed, in whatever environment: below a
folder of installed or of vendored packages, or listed by an installer beside it (`pip install --target`); and packages
of another project than the script's: those found through PYTHONPATH, a ``.pth`` file or an editable install. Code of
the script's own project or package is the user's, installed or not, and so is that of a function that is compiled.
"""

from __future__ import annotations

import functools
import glob
import os
import sys
import sysconfig
from types import ModuleType
from typing import Literal

import torch

from wholestep.errors import PACKAGE

_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_STANDARD = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")})
_GENERATED = ("<frozen", "<__array", "<eval_with_key", "<wholestep")
# Folders that hold what others wrote; of the second kind, where no code of the user's own lies below them.
FOLDERS = frozenset({"site-packages", "dist-packages"})
VENDORED = frozenset({"third_party", "thirdparty", "vendor", "vendored", "_vendor"})
TRACKING = frozenset({"asyncio", "importlib", "logging", "multiprocessing", "socket", "subprocess",
                      "tempfile", "threading", "typing", "weakref"})  # fmt: skip
MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_own: set[str] = set()  # files of functions that were compiled


def own(filename: str) -> None:
    """Notes a file that is the user's: its project is, or its package where that is installed."""
    if filename not in _own and not filename.startswith("<"):
        _own.add(filename)
        for cached in (origin, is_system, _is_user_module, _installed):
            cached.cache_clear()


@functools.cache
def origin(filename: str) -> Literal["wholestep", "torch", "standard", "installed", "user"]:
    """Whose code a file is, as far as its place tells; what these libraries generate counts as standard."""
    if filename.startswith(PACKAGE):
        return "wholestep"
    if filename.startswith(_TORCH):
        return "torch"
    installed = _installed(filename)
    if filename.startswith(_GENERATED) or (filename.startswith(_STANDARD) and not installed):
        return "standard"
    folder = os.path.dirname(filename)
    if filename.endswith(".pyx"):  # a name as Cython gives it to frames, relative to who knows what
        return "installed"
    if not installed and (not os.path.isabs(filename) or not os.path.exists(os.path.join(folder, "__init__.py"))):
        return "user"  # a script, a module by itself, a notebook's cell
    return "user" if _holds_own(installed or _project(folder)) else "installed"


def _holds_own(place: str) -> bool:
    """Whether code that is certainly the user's lies in a folder, or is a file."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    ours = (*_own, os.path.abspath(main or ""), os.getcwd())
    return any(os.path.join(path, "").startswith(os.path.join(place, "")) for path in ours)


@functools.cache
def _installed(filename: str) -> str:
    """The package or the module of somebody's that is installed, in which a file lies; empty where it is in none."""
    below, folder = filename, os.path.dirname(filename)
    while folder != below:
        name = os.path.basename(folder)
        if name in FOLDERS or (name in VENDORED and not _holds_own(folder)) or \
                os.path.basename(below) in _listed(folder):  # fmt: skip
            return below
        below, folder = folder, os.path.dirname(folder)
    return ""


@functools.cache
def _listed(folder: str) -> frozenset[str]:
    """The packages and modules that installers say to have put into a folder."""
    names: set[str] = set()
    for record in glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with open(record, encoding="utf-8") as lines:
            names.update(line.partition(",")[0].partition("/")[0] for line in lines)
    return frozenset(names)


def is_library(filename: str) -> bool:
    """True for code that the user did not write."""
    return origin(filename) != "user"


@functools.cache
def is_system(filename: str) -> bool:
    """True for code of torch, of this package and of the standard library, and for what they generate."""
    return origin(filename) in ("wholestep", "torch", "standard")


_OF_PYTHON = 1 << 9  # of the flags of a class: it was made while Python ran


@functools.cache
def _is_user_module(name: str) -> bool:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return not is_library(file) if file else module is None or name == "__main__"


def is_user_class(kind: type) -> bool:
    """True for classes whose module is neither built in nor a library, and for those of code that has none."""
    return _is_user_module(kind.__module__) or kind.__module__ == "builtins" and bool(kind.__flags__ & _OF_PYTHON)


def is_user_module(module: object) -> bool:
    """True for a Python module that is neither built in nor of a library; for one that was made by hand, too."""
    if not isinstance(module, ModuleType):
        return False
    name = module.__name__
    return bool(vars(module).get("__file__") or name not in sys.modules) and _is_user_module(name)


def is_installed(kind: type) -> bool:
    """True for classes of installed packages and of torch, whose instances hold what a step uses."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return bool(file) and origin(str(file)) in ("torch", "installed")


def is_holder(kind: type) -> bool:
    """True for these, and for classes of the standard library, but those that keep track of what runs and is logged."""
    file, module = getattr(sys.modules.get(kind.__module__), "__file__", None), kind.__module__.partition(".")[0]
    return is_installed(kind) or bool(file) and module not in TRACKING and origin(str(file)) == "standard"


@functools.cache
def _project(folder: str) -> str:
    """The folder of a package's project: the nearest with a marker, else the one above the package."""
    outermost = folder
    while os.path.exists(os.path.join(outermost, "__init__.py")):
        outermost = os.path.dirname(outermost)
    place = folder
    while os.path.dirname(place) != place:
        if any(os.path.exists(os.path.join(place, name)) for name in MARKERS):
            return place
        place = os.path.dirname(place)
    return outermost
