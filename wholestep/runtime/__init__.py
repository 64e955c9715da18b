"""runtime/: a lowered program and the live objects of one call -> one executed step.

Takes a `Traced` step, the binder that capture made for it and a callable on flat inputs. Gives an `Entry`:
called, it checks guards, fetches inputs, runs, and leaves results, gradients, state and version counters
as eager execution would.
May import: errors, ir, torch_compat, trace's and autograd's records, lower's interpreter. Must not import spmd,
passes, api.
"""

from wholestep.runtime.backward import Backward
from wholestep.runtime.entry import Entry, Missed
from wholestep.runtime.memory import give_back
from wholestep.runtime.module import compiled_module
from wholestep.runtime.program import Program, saved_places
from wholestep.runtime.spent import Spending, spending

__all__ = [
    "Backward",
    "Entry",
    "Missed",
    "Program",
    "Spending",
    "compiled_module",
    "give_back",
    "saved_places",
    "spending",
]
