"""What tells a library from the user's own code: one rule for guards, for what may be asked, and for lines in errors.

A library is torch, the standard library and this package; what lies below a folder of installed or of vendored
packages, in whatever environment; and packages of another project than the script's: those found through PYTHONPATH, a
``.pth`` file or an editable install. Code of the script's own project is the user's, installed or not, and so is what
is compiled.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

import torch

from wholestep.errors import PACKAGE

_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_STANDARD = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")})
_GENERATED = ("<frozen", "<__array", "<eval_with_key", "<wholestep")
# Folders that hold what others wrote.
FOLDERS = frozenset({"site-packages", "dist-packages", "third_party", "thirdparty", "vendor", "vendored", "_vendor"})
MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_own: set[str] = set()  # files of functions that were compiled


def own(filename: str) -> None:
    """Notes a file that is the user's: its project is."""
    if filename not in _own and not filename.startswith("<"):
        _own.add(filename)
        is_library.cache_clear()


@functools.cache
def is_standard(filename: str) -> bool:
    """True for code of the standard library, which keeps nothing that a step uses."""
    return filename.startswith(_STANDARD) and FOLDERS.isdisjoint(filename.split(os.sep))


@functools.cache
def is_system(filename: str) -> bool:
    """True for code of torch, of this package and of the standard library, and for what they generate."""
    return filename.startswith((_TORCH, PACKAGE, *_GENERATED)) or is_standard(filename)


def is_ours(filename: str) -> bool:
    """True for code of this package, whose objects hold nothing that a step may look into."""
    return filename.startswith(PACKAGE)


@functools.cache
def is_library(filename: str) -> bool:
    """True for code that the user did not write, as far as its place tells."""
    if is_system(filename) or not FOLDERS.isdisjoint(filename.split(os.sep)):
        return True
    folder = os.path.dirname(filename)
    if not os.path.isabs(filename) or not os.path.exists(os.path.join(folder, "__init__.py")):
        return False  # a script, a module by itself, a notebook's cell
    project = os.path.join(_project(folder), "")
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    ours = (*_own, os.path.abspath(main or ""), os.path.join(os.getcwd(), ""))
    return not any(path.startswith(project) for path in ours)


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
