"""aot_autograd/: a traced function -> a joint graph of forward and backward -> one graph for each.

Takes what trace recorded of a function, with the gradients that PyTorch's own autograd engine made of it in the same
trace. Gives a `Joint` graph and, by a partition, a forward graph, a backward graph and the names of the values that
the first saves for the second.
Its public names, with the functions that need the whole pipeline, are `wholestep.autograd`'s.
May import: capture, errors, fake_evaluate, functional, ir, nested, torch_compat, trace.
"""

from wholestep.aot_autograd.compiled_backward import CompiledBackward, Served
from wholestep.aot_autograd.min_cut_partition import min_cut_partition
from wholestep.aot_autograd.partition import Joint, Partition, Partitioned, default_partition, split
from wholestep.aot_autograd.step_memory import MemoryBudget, fit_memory
