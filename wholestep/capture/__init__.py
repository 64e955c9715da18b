"""Capture: a Python callable and its arguments -> what the step can see, guarded.

`snapshot` walks everything in reach and can put it back, describe what a run changed (`effects`) and say what
must still hold later (`guards`); `compile_binder` makes the fast check that a call passes before a captured
program serves it. Imports nothing above `ir`, `errors` and `torch_compat`.
"""

from wholestep.capture.binder import Binder, compile_binder
from wholestep.capture.effects import (
    Const, DelAttr, DelItem, Effect, Existing, New, SetAttr, SetContents, SetGrad, SetItem, Tree, new_values, replay,
)
from wholestep.capture.guards import Guard, GuardFailure
from wholestep.capture.snapshot import Snapshot, snapshot
from wholestep.capture.source import Call, Source
from wholestep.capture.walk import Found, Number

__all__ = ["Binder", "Call", "Const", "DelAttr", "DelItem", "Effect", "Existing", "Found", "Guard", "GuardFailure",
           "New", "Number", "SetAttr", "SetContents", "SetGrad", "SetItem", "Snapshot", "Source", "Tree",
           "compile_binder", "new_values", "replay", "snapshot"]
