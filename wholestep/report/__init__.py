"""report/: the graph of one rank -> what it will send and hold, as data and as text.

Takes graphs, a mesh and the words that capture left. Gives an `Explanation`. Nothing runs and nothing communicates.
May import: errors, ir, torch_compat, parts, comm and every stage. Must not import api.
"""

from wholestep.report.explanation import Explanation, explain
from wholestep.report.holding import Memory
from wholestep.report.sending import Sending
from wholestep.report.stages import Stage, code
from wholestep.report.unruled import Unruled

__all__ = ["Explanation", "Memory", "Sending", "Stage", "Unruled", "code", "explain"]
