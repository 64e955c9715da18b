"""What a binder compares in bulk; see native/bulk.c."""

from collections.abc import Iterable
from typing import Any

import torch

# Dictionary, keys, values, and whether the order of keys counts; `ANY` stands for any value.
Table = tuple[dict[Any, Any], tuple[Any, ...], tuple[Any, ...], bool]
ANY: object

# What `match` is given, besides: made of tables once, and written by it.
def flatten(tables: list[Table], empty: list[dict[Any, Any]], /) -> bytearray: ...

# Whether dictionaries hold what they held, and others nothing.
def match(flat: bytearray, tables: list[Table], empty: list[dict[Any, Any]], /) -> bool: ...

# The values of dictionaries, and of those within others; None where these have other keys. The memo, empty at first, is
# for the same dictionaries at later calls.
def gather(
    memo: bytearray, whole: list[dict[Any, Any]], nested: list[dict[Any, Any]], keys: list[tuple[Any, ...]], /
) -> list[Any] | None: ...

# Fills a list with what weak references (or None) refer to, and says whether another, which begins with what `gather`
# gave for the memo, holds the same.
def recall(found: list[Any], weak: tuple[Any, ...], last: list[Any], memo: bytearray, /) -> bool: ...

# What is equal for tensors of equal sizes, strides, dtypes, devices and `requires_grad`.
def layouts(tensors: tuple[torch.Tensor, ...], /) -> bytes: ...
def hooks(tensors: tuple[torch.Tensor, ...], /) -> list[tuple[int, Any]]: ...
def grads(tensors: tuple[torch.Tensor, ...], /) -> list[torch.Tensor | None]: ...


# The version counters of tensors after so many more writes to each.
def versions(tensors: tuple[torch.Tensor, ...], writes: tuple[int, ...], /) -> tuple[int, ...]: ...

# Moves version counters on; whether each is then at its number.
def advance(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...], /) -> bool: ...

# Whether two iterables of one length hold the very same objects.
def identical(left: Iterable[Any], right: Iterable[Any], /) -> bool: ...

# What functions give for their arguments, of which the bytes hold the addresses and words.
def settings(functions: bytes, /) -> bytes: ...
def use(kind: type, offsets: tuple[int, ...], functions: tuple[int, ...], probe: torch.Tensor, /) -> None: ...

# Says where, within a dictionary, the number lies that each change of it replaces; 0: nowhere.
def use_versions(offset: int, /) -> None: ...
