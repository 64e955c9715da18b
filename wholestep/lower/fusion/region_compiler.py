"""The process that compiles regions: ``python -m wholestep.lower.fusion.region_compiler FOLDER THREADS``.

It reads one line of JSON, ``{name: [Python of a region, layouts of its inputs]}``, and leaves in the folder, for each,
the libraries that Inductor compiled and ``name.json``: which kernels to call, and with which tensors. What fails is
told on standard output, a line of JSON each. Inductor itself is loaded here alone, not in the process that trains.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch

from wholestep.errors import LoweringError
from wholestep.torch_compat import FakeTensorMode, compile_with_inductor, inductor_kernels, make_fx

NAMES = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def compile_region(name: str, text: str, inputs: list[Any], folder: Path) -> None:
    """Compiles one region, tries it against ATen's kernels, and leaves it in the folder.

    Raises:
        LoweringError: what Inductor made is not kernels alone, lays results out otherwise, or gives other numbers.
    """
    names: dict[str, Any] = dict(NAMES)
    exec(text, names)
    given, mode = [_example(*one) for one in inputs], FakeTensorMode()
    expected = names["forward"](None, *given)
    gm = make_fx(lambda *args: names["forward"](None, *args))(*given)
    record = _Recorded(compile_with_inductor(gm, [mode.from_tensor(t) for t in given], mode), given, expected)
    for made, right in zip(record.results, expected, strict=True):
        if made.shape != right.shape or made.dtype != right.dtype or _strides(made) != _strides(right):
            raise LoweringError(f"a result is laid out as {_strides(made)}, the step has {_strides(right)}")
        torch.testing.assert_close(made, right, equal_nan=True, **TOLERANCE)
    calls = []
    for number, (library, places) in enumerate(record.calls):
        shutil.copy(library, folder / f"{name}_{number}.{os.getpid()}")
        os.replace(folder / f"{name}_{number}.{os.getpid()}", folder / f"{name}_{number}.so")
        calls.append((f"{name}_{number}.so", places))
    temporary = folder / f"{name}.{os.getpid()}"
    temporary.write_text(json.dumps({"calls": calls, "temporaries": record.temporaries}))
    os.replace(temporary, folder / f"{name}.json")


class _Recorded:
    """One run of what Inductor compiled.

    Attributes:
        results: what it gave.
        calls: the library of each kernel, and the places of its arguments among inputs, results and temporaries.
        temporaries: bytes of each.
    """

    def __init__(self, compiled: Any, given: list[torch.Tensor], expected: Any) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        called: list[tuple[str, Any]] = []
        names = inductor_kernels(compiled)
        for name, kernel in list(names.items()):
            if isinstance(kernel, BuiltinFunctionType) and kernel.__name__ == "kernel":
                names[name] = partial(_call, kernel, called)
        self.results = list(compiled(list(given)))
        memory = [t.untyped_storage().data_ptr() for t in (*given, *self.results)]
        if len(set(memory)) < len(memory) or any(t.storage_offset() for t in self.results):
            raise LoweringError("results share memory")
        sizes = []
        for library, tensors in called:
            for tensor in tensors:
                if tensor.untyped_storage().data_ptr() not in memory:
                    memory.append(tensor.untyped_storage().data_ptr())
                    sizes.append(tensor.untyped_storage().nbytes())
            self.calls.append((library, [memory.index(t.untyped_storage().data_ptr()) for t in tensors]))
        written = {place for _, places in self.calls for place in places}
        if not written.issuperset(range(len(given), len(given) + len(self.results))):
            raise LoweringError("results come from other calls than of its own kernels")
        self.temporaries = sizes


def _call(kernel: Any, called: list[tuple[str, Any]], *tensors: torch.Tensor) -> None:
    called.append((kernel.__self__.__file__, tensors))
    kernel(*tensors)


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _example(shape: list[int], strides: list[int], dtype: str) -> torch.Tensor:
    """Numbers for one input; zeros where they may be indices."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = torch.zeros(last + 1, dtype=getattr(torch, dtype))
    if flat.is_floating_point():
        flat.copy_(torch.rand(flat.shape).add_(0.1))
    return flat.as_strided(shape, strides)


def main(folder: Path, threads: int) -> None:
    """Compiles what stands on standard input; ends when that does, since then nobody waits any more."""
    os.nice(10)
    torch.set_num_threads(threads)
    regions = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    for name, (text, inputs) in regions.items():
        try:
            compile_region(name, text, inputs, folder)
        except Exception as error:
            print(json.dumps([name, f"{type(error).__name__}: {error}"]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
