"""Capture: a Python callable and its arguments -> a guarded view of what the step can see.

Takes a function and one call's arguments. Gives a `Snapshot` (tensors and numbers with their sources, everything
in reach put back by `restore`, changes described by `effects`), the guards that must hold later, and a `Binder`:
the fast check that a call passes before a captured program serves it.
May import: errors, functional, ir, nested, patches, tensor_parts, torch_compat.
"""

from wholestep.capture.effects.differences import outcome
from wholestep.capture.effects.effects import Effect, forget, new_values, read_by, state_outputs
from wholestep.capture.guards.binder import Binder, refuse_shared_parts, sharing
from wholestep.capture.guards.guards import Guard, GuardFailure, compare
from wholestep.capture.outside.torch_settings import setters
from wholestep.capture.snapshot.new_objects import new_objects
from wholestep.capture.snapshot.reachable import TensorInput
from wholestep.capture.snapshot.snapshot import Snapshot, no_collection, snapshot
from wholestep.capture.sources import Call
from wholestep.capture.substitutes.optimizer_state import InitialState
from wholestep.capture.substitutes.unbacked import materialize_fakes
from wholestep.capture.substitutes.unsharded_views import PartsOf, UnshardedViews
