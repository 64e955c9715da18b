"""Capture: a Python callable and its arguments -> a guarded view of what the step can see.

Takes a function and one call's arguments. Gives a `Snapshot` of all that the step can see, the guards that must hold
later, and a `Binder`, the fast check that a call passes before a captured program serves it. In the order of a capture:
`snapshot/` walks from function and arguments to all within reach, by a table from type to handler; each value has a
source (`sources.py`), as a user would write it. `substitutes/` puts stand-ins in the place of numbers, of parts, and of
tensors with a history while the step is traced. `outside/` says what a call into the world outside means: a guard or a
refusal. `effects/` compares what there was with what the step left, and generates the code that does it again.
`guards/` derives what must hold from the walk, and generates the code that checks it and fetches a program's inputs.
What no guard compares and no effect does again is refused here, with line and remedy; `step_runner.py` runs its Python.
May import: cached_property, errors, ir, patches, tensor_parts, torch_compat.
"""

from wholestep.capture.effects.differences import outcome
from wholestep.capture.effects.effects import Effect, forget, new_values, read_by, state_outputs
from wholestep.capture.guards.binder import Binder, refuse_shared_parts, sharing
from wholestep.capture.guards.guards import Guard, GuardFailure, compare
from wholestep.capture.outside.torch_settings import setters
from wholestep.capture.snapshot.called_code import CalledCode
from wholestep.capture.snapshot.garbage_collection import functions_of, new_objects, no_collection, places_of
from wholestep.capture.snapshot.reachable import TensorInput
from wholestep.capture.snapshot.snapshot import Snapshot, unguarded_in_sight
from wholestep.capture.sources import Args, Kwargs
from wholestep.capture.substitutes.optimizer_state import InitialState
from wholestep.capture.substitutes.unbacked import Called, materialize_fakes
from wholestep.capture.substitutes.unsharded_views import PartsOf, UnshardedViews
