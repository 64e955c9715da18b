"""runtime/: a lowered program and the live objects of one call -> one executed step.

Takes a `Traced` step, the binder that capture made for it and a callable on flat inputs. Gives an `Entry`:
called, it runs, and leaves results, gradients, state and version counters as eager execution would. A
`ProgramCache` holds the entries of one step and tells which serves a call.
May import: aot_autograd, cached_property, capture, errors, functional, ir, lower, nested, packed_graph, patches,
tensor_parts, torch_compat, trace.
"""

from wholestep.runtime.backward_programs import Backward
from wholestep.runtime.compiled_module import compiled_module
from wholestep.runtime.entry import Entry, Ready
from wholestep.runtime.program import DonatedInputs, Program, donated_inputs, give_back
from wholestep.runtime.program_cache import ProgramCache, Run
