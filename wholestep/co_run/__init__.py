"""co_run/: a step whose Python runs at each call, while its operators are deferred and run as compiled segments.

Takes a callable and one call's arguments. Gives what the callable returns, with every effect in eager's order: below
autograd, operators are put into a queue and answered at once with tensors whose memory nobody has written yet; where a
value is read, and at the end, the queue is flushed, by a compiled program if the same operators came before. With
plans, a segment's program is that of one rank (`ranks.py`), which all ranks agree on before it runs.
May import: capture, capture_call, comm, errors, fake_evaluate, fake_layouts, functional, ir, lower, nested, patches,
pipeline, runtime, spmd, tensor_parts, torch_compat, trace.
"""

from wholestep.co_run.step import CoRun, is_deferring, outside_of_programs
