"""Numbers that are only known when the step runs: nodes of the graph, and the decisions that Python takes on them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from wholestep.errors import CaptureError, DataDependentError
from wholestep.torch_compat import is_one_operator, no_modes
from wholestep.trace.numbers.host_numbers import HostNode, make_host
from wholestep.trace.numbers.predicates import Predicate, decide, follows_from_numbers
from wholestep.trace.numbers.symbolic_sizes import is_size
from wholestep.trace.record.inputs import Inputs, Lifted
from wholestep.trace.record.options import Setting
from wholestep.trace.record.provenance import user_line

aten = torch.ops.aten


class Numbers(Inputs):
    """A tape with host numbers (`host_numbers.py`).

    Attributes:
        refusal: the first that the step was met with, whether it let it pass or not.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.guard_data = setting.guard_data
        self.tokens: dict[float, HostNode] = {}
        self.spent: set[float] = set()
        self.in_call = 0
        self.callee: Any = None  # the function of torch's Python API that the step is calling
        self.host: dict[tuple[Any, ...], fx.Node] = {}
        self.predicates: dict[fx.Node, Predicate] = {}
        self.refusal: CaptureError | None = None

    def lift_number(self, source: Any, value: float) -> Any:
        """A placeholder for a Python float or int; gives the host number that stands for it."""
        node = self.placeholder(source, "number", value)
        self.lifted.append(Lifted(node, source, value))
        return make_host(HostNode(self, node, value, known=True))

    def record_host(self, function: Callable[..., Any], args: tuple[Any, ...], hint: Any) -> Any:
        """Adds a call of a Python function on host numbers; gives the number that stands for its result."""
        hosts = [isinstance(getattr(a, "node", None), HostNode) for a in args]
        nodes = tuple(a.node.fx_node if host else a for a, host in zip(args, hosts, strict=True))
        known = all(a.node.known for a, host in zip(args, hosts, strict=True) if host)
        key = (function, *((type(n), str(n) if is_size(n) else n) for n in nodes))
        if key not in self.host:  # pure functions of numbers: the same call is the same number
            self.host[key] = self.emit(function, nodes, value=hint)
        return make_host(HostNode(self, self.host[key], hint, known))

    def size(self, number: Any) -> Any:
        """A number that follows from symbolic sizes, as a host number."""
        return self.record_host(operator.pos, (number,), number.node.hint)

    def item(self, tensor: torch.Tensor) -> Any:
        """`.item()`: a host number, or the decision at once for a boolean."""
        node = self.emit(aten._local_scalar_dense.default, (self.ref(tensor).read(self.emit),), value=_stand_in(tensor))
        if tensor.dtype == torch.bool:
            return self.decide(node, False, user_line())
        if self.guard_data and (tensor.dtype.is_complex or self.callee is not torch.Tensor.item):
            return self.decide(node, None, user_line())  # C++ asked
        if tensor.dtype.is_complex:
            raise DataDependentError("Python needs the value of a complex tensor", user_line())
        return make_host(HostNode(self, node, node.meta["info"].value, known=False))

    def as_list(self, tensor: torch.Tensor) -> Any:
        """`.tolist()`: its numbers now become a guard, if they are cheap to know."""
        with no_modes():
            node = self.emit(to_list, (self.ref(tensor).read(self.emit),), value=[])
            return self.decide(node, None, user_line())

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the same values at each call."""
        with no_modes():
            return follows_from_numbers([self.ref(tensor).read(self.emit)])

    def decide(self, node: fx.Node, hint: Any, line: str, fixed: bool = False) -> Any:
        """Python branches on a host number: its value now becomes a guard, if it is cheap to know.

        Args:
            fixed: it is the same at each call.
        """
        predicate = self.predicates.get(node)
        if predicate is None:
            absent = {item.node for item in self.lifted if id(item.value) in self.parts}
            try:
                given = self.lifted, self.constants, self._is_data, line, self.guard_data or fixed, absent
                predicate = decide(node, *given)
            except CaptureError as error:
                self.refusal = self.refusal or error
                raise
            self.predicates[node] = predicate
        return predicate.expected

    def _is_data(self, node: fx.Node) -> bool:
        return any(i.name == node.target and i.kind in ("batch", "tensor", "buffer") for i in self.inputs)

    def token(self, number: HostNode) -> float:
        """A float that stands for a host number where C++ wants a double.

        That of one operator: what C++ does besides with the number, such as a size, would be done with the token.
        """
        if not self.in_call or not (self.callee in PASSING_ON or is_one_operator(self.callee)):
            return self.escaped(number, "C++ computes with its value")
        token = 0.5 + (len(self.tokens) + 1) * 2.0**-45
        self.tokens[token] = number
        return token

    def escaped(self, number: HostNode, how: str) -> Any:
        """The value that a number has now, for what needs the number itself: a guard, or an error."""
        if not isinstance(number.fx_node, fx.Node):
            return number.hint
        if self.guard_data or number.known or follows_from_numbers([number.fx_node]):
            return self.decide(number.fx_node, number.hint, user_line(), fixed=True)
        if number.is_int():  # of which there are few: a program for each, where it is cheap to know
            return self.decide(number.fx_node, number.hint, user_line())
        error = DataDependentError(
            f"Python needs a number that is only known when the step runs: {how}",
            user_line(),
            "use it in arithmetic and as operators' arguments only, return it from the step, or pass guard_data=True "
            "to ws.compile",
        )
        self.refusal = self.refusal or error
        raise error


# Functions of several operators that hand their numbers on to one as they are.
PASSING_ON = (torch.batch_norm, torch.instance_norm, torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)

_read_list = torch.Tensor.tolist  # not what a trace puts there


def to_list(tensor: torch.Tensor) -> Any:
    """``tensor.tolist()`` as a node's target."""
    return _read_list(tensor)


def _stand_in(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1
