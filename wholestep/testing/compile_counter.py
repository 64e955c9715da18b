"""A backend that counts what it is asked to compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


class CompileCounter:
    """A backend that runs each graph as it is, and counts.

    Attributes:
        frame_count: how many graphs there were.
        op_count: how many operators they have together.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begins at zero again."""
        self.frame_count = self.op_count = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.frame_count += 1
        self.op_count += sum(node.op == "call_function" for node in gm.graph.nodes)
        return gm.forward
