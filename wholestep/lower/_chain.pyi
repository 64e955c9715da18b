"""Compiled chains of elementwise kernels; see native/chain.c."""

from collections.abc import Sequence
from typing import Any

KERNELS: dict[str, int]

def chain(
    count: int, places: Sequence[tuple[int, int]], steps: Sequence[tuple[int, ...]], /
) -> Any: ...
def run(chain: Any, /, *addresses: int) -> None: ...
def use_mkl(address: int, mode: int, /) -> None: ...
