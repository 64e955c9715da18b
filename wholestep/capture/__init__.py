"""Capture: a Python callable and its arguments -> a guarded view of what the step can see.

Takes a function and one call's arguments. Gives a `Snapshot` (tensors and numbers with their sources, everything
in reach put back by `restore`, changes described by `effects`), the guards that must hold later, and a `Binder`:
the fast check that a call passes before a captured program serves it.
May import: errors, ir, parts, torch_compat. Must not import trace, autograd, spmd, passes, lower, runtime, api.
"""

from wholestep.capture.binder import Binder, compile_binder, refuse_shared_parts, sharing
from wholestep.capture.births import births
from wholestep.capture.effects import (
    CallMethod,
    DelAttr,
    DelItem,
    Effect,
    SetAttr,
    SetContents,
    SetGrad,
    SetItem,
    forget,
    new_values,
    read_by,
)
from wholestep.capture.guards import Guard, GuardFailure, compare
from wholestep.capture.hollow import hollow
from wholestep.capture.initial_state import InitialState
from wholestep.capture.places import Found, Number
from wholestep.capture.replay import replay
from wholestep.capture.snapshot import Snapshot, no_collection, snapshot
from wholestep.capture.source import Call, Source
from wholestep.capture.values import Const, Existing, New, Tree
from wholestep.capture.wholes import PartsOf, Wholes

__all__ = [
    "Binder",
    "Call",
    "CallMethod",
    "Const",
    "DelAttr",
    "DelItem",
    "Effect",
    "Existing",
    "Found",
    "Guard",
    "GuardFailure",
    "InitialState",
    "New",
    "Number",
    "PartsOf",
    "SetAttr",
    "SetContents",
    "SetGrad",
    "SetItem",
    "Snapshot",
    "Source",
    "Tree",
    "Wholes",
    "births",
    "compare",
    "compile_binder",
    "forget",
    "hollow",
    "new_values",
    "no_collection",
    "read_by",
    "refuse_shared_parts",
    "replay",
    "sharing",
    "snapshot",
]
