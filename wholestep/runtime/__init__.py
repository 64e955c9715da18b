"""runtime/: a lowered program and the live objects of one call -> one executed step.

Takes a `Traced` step, the binder that capture made for it and a callable on flat inputs. Gives an `Entry`:
called, it checks guards, fetches inputs, runs, and leaves results, gradients, state and version counters
as eager execution would.
May import: errors, ir, torch_compat, trace's records. Must not import spmd, passes, lower, api.
"""

from wholestep.runtime.entry import Entry, Missed, Program

__all__ = ["Entry", "Missed", "Program"]
