"""report/: the graph of one rank -> what it will send and its peak memory, as data and as text.

Takes graphs, a mesh and the words that capture left. Gives an `Explanation`. Nothing runs and nothing communicates.
May import: aot_autograd, comm, errors, functional, ir, lower, nested, spmd.
"""

from wholestep.report.explanation import Explanation, Stage, code, explain, explain_segments
from wholestep.report.traffic_and_memory import Memory, MissingRule, Traffic
