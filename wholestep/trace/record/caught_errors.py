"""Errors that kernels raise on the data they are given, where code around the call may catch them.

What that code does then depends on the data. So such a kernel runs where it is called, not when a program does; but for
indices, of which a program can tell before whether a kernel takes them.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import sys
from types import CodeType, FrameType
from typing import Any

import torch

from wholestep.capture.snapshot.user_code import is_system
from wholestep.functional import base_name
from wholestep.torch_compat import OpOverload, current_autograd_node

# How the names begin of operators that refuse data, each with what they raise; more particular ones first.
REFUSING: dict[str, type[Exception]] = {
    **dict.fromkeys(("embedding_dense", "_embedding_bag_dense", "index_add"), RuntimeError),
    **dict.fromkeys(("embedding", "nll_loss", "index", "take", "put"), IndexError),
    **dict.fromkeys(
        ("gather", "scatter", "_embedding_bag", "multi", "max_unpool", "segment_reduce", "repeat_interleave",
         "bincount", "histc", "bernoulli", "normal", "poisson", "binary_cross_entropy", "_assert_async", "lu_"),
        RuntimeError,
    ),
    **dict.fromkeys(("cholesky", "_linalg", "linalg"), torch.linalg.LinAlgError),
}  # fmt: skip


@functools.cache
def refuses(op: OpOverload) -> type[Exception] | None:
    """The error that an operator's kernel may raise on data."""
    name = base_name(op)
    if name.endswith(("_ex", "vector_norm", "linalg_cross")):  # which give what is wrong, or take any data
        return None
    return next((error for prefix, error in REFUSING.items() if name.startswith(prefix)), None)


def index_ranges(op: OpOverload, arguments: dict[str, Any]) -> list[tuple[torch.Tensor, int, int]] | None:
    """Where a kernel refuses indices alone: these, with the least and the most that each may be."""
    name = base_name(op).rstrip("_")
    table, low = arguments.get("weight" if name == "embedding" else "self"), 0
    if name == "embedding":
        pairs = [(arguments["indices"], 0)]
    elif name == "index":
        pairs, low = [(index, dim) for dim, index in enumerate(arguments["indices"]) if index is not None], -1
    elif name in INDEXED_ALONG and isinstance(table, torch.Tensor) and table.dim():
        pairs = [(arguments["index"], arguments["dim"])]
    else:
        return None
    found = [(index, low * table.shape[dim], table.shape[dim] - 1) for index, dim in pairs]  # type: ignore[union-attr]
    plain = all(index.dtype in (torch.int32, torch.int64) and type(most) is int for index, _, most in found)
    return found if plain else None


# Operators with indices along one dimension.
INDEXED_ALONG = {
    "gather", "index_add", "index_copy", "index_fill", "index_select", "scatter", "scatter_add", "scatter_reduce",
}  # fmt: skip


def is_caught(error: type[Exception]) -> bool:
    """Whether code of a step, of the user's or of a library, would catch an error that a call raised here."""
    if current_autograd_node() is not None:  # the forward, with the same indices, comes first
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in BEGINNINGS:
        if not is_system(frame.f_code.co_filename):
            if any(_catches(names, error, frame.f_globals) for names in _clauses(frame.f_code, frame.f_lasti)):
                return True
        frame = frame.f_back
    return False


# Modules that call the step.
BEGINNINGS = ("wholestep.trace.record.trace_step", "wholestep.co_run.step")


def _catches(names: tuple[str, ...], error: type[Exception], known: dict[str, Any]) -> bool:
    """Whether an except clause on classes of some names catches an error; of what is no class, it is not known."""
    found = [_named(name.split("."), known) for name in names]
    return any(not isinstance(kind, type) or issubclass(error, kind) for kind in found)


def _named(parts: list[str], known: dict[str, Any]) -> Any:
    first = known.get(parts[0], getattr(builtins, parts[0], None))
    return functools.reduce(lambda found, part: getattr(found, part, None), parts[1:], first)


@functools.cache
def _clauses(code: CodeType, at: int) -> list[tuple[str, ...]]:
    """The names in each except clause around an instruction; of one that catches all, a name of no class."""
    instructions, places = list[Any](), dict[int, int]()
    for instruction in dis.get_instructions(code):
        places[instruction.offset] = len(instructions)
        if instruction.opname != "EXTENDED_ARG":  # part of the next
            instructions.append(instruction)
    entries, clauses = vars(dis.Bytecode(code))["exception_entries"], list[tuple[str, ...]]()
    while (entry := next((e for e in entries if e.start <= at < e.end), None)) is not None:
        at = entry.target
        place: int | None = places[at] + (instructions[places[at]].opname == "PUSH_EXC_INFO")
        while place is not None:
            loads = list(itertools.takewhile(_gives_class, instructions[place:]))
            check, jump = instructions[place + len(loads) : place + len(loads) + 2]
            place = None
            if check.opname == "CHECK_EXC_MATCH":
                clauses.append(_names(loads))
                place = places[jump.argval]  # of the next clause
            elif check.opname == "POP_TOP" or (check.opname == "WITH_EXCEPT_START" and "suppress" in code.co_names):
                clauses.append(("",))
    return clauses


def _gives_class(instruction: Any) -> bool:
    return instruction.opname.startswith("LOAD") or instruction.opname == "BUILD_TUPLE"


def _names(loads: list[Any]) -> tuple[str, ...]:
    """The global names that are loaded, dotted ones whole; "" for a local one."""
    names = list[str]()
    for one in loads:
        if one.opname == "LOAD_ATTR":
            names[-1] += f".{one.argval}"
        elif one.opname != "BUILD_TUPLE":
            names.append(one.argval if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") else "")
    return tuple(names)
