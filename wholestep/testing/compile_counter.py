"""A backend that counts what it is asked to compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


class CompileCounter:
    """A backend that runs each graph as it is, and counts.

    A step that is replayed is one graph, its backward and its optimizer included, where torch.compile's counter has a
    frame for each part between two graph breaks; where its results can be differentiated outside, their backward is
    another graph. A step whose Python runs at each call has a graph for each *segment*, from one read of a value to the
    next: a frame's other reasons to break, as calls of functions that are not compiled, end no segment. A segment is
    compiled when it comes for the third time, so such a step is counted after three calls.

    Operators are ATen's, where torch.compile counts Python's calls, and in segments the copies into memory that Python
    holds. Each set of sizes is a graph of its own, also where one capture serves them all.

    Attributes:
        graphs: in the order in which they came.
        frame_count: how many graphs there were.
        op_count: how many operators they have together.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begins at zero again."""
        self.graphs: list[fx.GraphModule] = []
        self.frame_count = self.op_count = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.frame_count += 1
        self.op_count += sum(node.op == "call_function" for node in gm.graph.nodes)
        return gm.forward
