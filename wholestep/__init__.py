"""Wholestep: an ordinary PyTorch training step, captured whole, as one readable graph."""

from wholestep.api import Compiled, compile, trace

__version__ = "0.1.0"

__all__ = ["Compiled", "__version__", "compile", "trace"]
