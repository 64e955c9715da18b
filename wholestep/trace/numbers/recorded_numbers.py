"""What the recorder does with host numbers: calls in the graph, decisions that become guards, and C++ doubles."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import fx

from wholestep.errors import CaptureError, DataDependentError, UnsupportedError
from wholestep.functional import bound_arguments
from wholestep.ir import ancestors, info
from wholestep.nested import leaves, map_leaves
from wholestep.torch_compat import current_autograd_node, is_one_operator, no_modes, saved_numbers
from wholestep.trace.numbers.decisions import (
    MAX_NODES,
    MOST,
    OTHERWISE,
    REMEDY,
    Predicate,
    RealValues,
    can_be_known,
    follows_from_numbers,
    refuse_repeated,
)
from wholestep.trace.numbers.host_numbers import HostNode, make_host
from wholestep.trace.numbers.symbolic_sizes import decided, is_size
from wholestep.trace.record.caught_errors import is_caught
from wholestep.trace.record.inputs import Inputs
from wholestep.trace.record.user_line import user_line

aten = torch.ops.aten


class PythonCall:
    """A call of torch's Python API; C++ may ask for numbers until the outermost one ends.

    Attributes:
        tokens: floats that stand for host numbers in it -> whether its operator has been given them.
    """

    def __init__(self, numbers: RecordedNumbers, function: Any, args: Any, kwargs: Any) -> None:
        self.numbers, self.function, self.args, self.kwargs = numbers, function, args, kwargs
        self.tokens: dict[float, bool] = {}

    def __enter__(self) -> None:
        self.numbers.call = self.numbers.call or self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self.numbers.call is self:
            self.numbers.call = None
            if error is None and not all(self.tokens.values()):
                raise UnsupportedError(f"{self.function} computed with a number that may change")


class RecordedNumbers:
    """The host numbers of one run (`host_numbers.py`).

    Args:
        outcomes: see `RealValues`.

    Attributes:
        predicates: node that Python decided on -> the decision, where it is a guard.
        decided: node that Python decided on -> the decision.
        decides: Python may decide on other bools besides.
        real: the values that decisions follow from.
        refusal: the first error of this run's, whether the step let it pass or not.
        tokens: float that stands for a host number where C++ wants a double -> the number, and the names of the
            operators' arguments that were given it.
        call: the outermost call of torch's Python API that runs now.
    """

    def __init__(self, inputs: Inputs, decides: bool, outcomes: Sequence[str] | None = None) -> None:
        self.inputs, self.builder, self.decides = inputs, inputs.builder, decides
        self.watch, self.real = self.builder.watch, RealValues(inputs, outcomes)
        self.predicates: dict[fx.Node, Predicate] = {}
        self.decided: dict[fx.Node, Any] = {}
        self.refusal: CaptureError | None = None
        self._recorded: dict[tuple[Any, ...], fx.Node] = {}
        self.call: PythonCall | None = None
        self._fresh = (0.5 + n * 2.0**-45 for n in itertools.count(1))
        self.tokens: dict[float, tuple[HostNode, set[str]]] = {}

    def input(self, source: Any, value: float) -> Any:
        """A Python float or int as an input of the step: the host number that stands for it."""
        return make_host(HostNode(self, self.inputs.number(source, value).node, value, known=True))

    def record(
        self, function: Callable[..., Any], args: tuple[Any, ...], hint: Any, error: Exception | None = None
    ) -> Any:
        """Adds a call of a Python function on host numbers; gives what stands for its result; a bool is decided on.

        Args:
            error: what it raises, where the numbers are those of this call.

        Raises:
            Exception: that error.
            DataDependentError: code around the call would catch one.
        """
        function = pow if function is operator.pow else function  # which fx prints, of -2 and p, as -2 ** p
        hosts = [isinstance(getattr(a, "node", None), HostNode) for a in args]
        nodes = tuple(a.node.fx_node if host else a for a, host in zip(args, hosts, strict=True))
        known = all(a.node.known for a, host in zip(args, hosts, strict=True) if host)
        if any(map(is_caught, errors_of(function))):
            what = f"the step catches what may be raised where numbers are others, by {function.__name__}"
            remedy = "check them before, or compile without fullgraph=True"
            raise self.refused(DataDependentError(what, remedy))
        if error is not None and known:
            raise error
        positive = type(args[0]) is float and args[0] >= 0
        if known and function is pow and self.builder.sizes is None and not positive:
            self.record(power_is(type(hint).__name__), args, True)  # a guard: 2 ** -1 is no integer
        hint = 1.0 if isinstance(hint, complex) and not known else hint  # a root of what stands for the number
        key = (function, *((type(n), str(n) if is_size(n) else n) for n in nodes))
        if key not in self._recorded:  # pure functions of numbers: the same call is the same number
            self._recorded[key] = self.builder.emit(function, nodes, value=hint)
        if isinstance(hint, (bool, complex, numpy.bool_)):
            return self.decide(self._recorded[key])
        return make_host(HostNode(self, self._recorded[key], hint, known))

    def size(self, number: Any) -> Any:
        """A number that follows from symbolic sizes, as a host number; any other as it is."""
        return self.record(operator.pos, (number,), number.node.hint) if is_size(number) else number

    def item(self, tensor: torch.Tensor) -> Any:
        """`.item()`: a host number, or the decision at once for a boolean."""
        kind = tensor.dtype
        value = False if kind == torch.bool else 0.5 if kind.is_floating_point else 1  # until it is known
        node = self.builder.emit(aten._local_scalar_dense.default, (self.inputs.read(tensor),), value=value)
        if kind == torch.bool:
            return self.decide(node)
        if kind.is_complex:
            raise DataDependentError("Python needs the value of a complex tensor")
        return make_host(HostNode(self, node, value, known=False))

    def as_list(self, tensor: torch.Tensor) -> Any:
        """`.tolist()` of a tensor that is fixed."""
        with no_modes():
            node = self.builder.emit(_read_list, (self.inputs.read(tensor),), value=[])
            return self.decide(node, fixed=True)

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the same values at each call."""
        with no_modes():
            return follows_from_numbers([self.inputs.read(tensor)])

    def decide(self, node: fx.Node, fixed: bool = False) -> Any:
        """Python needs a value now, which serves all calls, or becomes a guard or a part of the program.

        Args:
            fixed: it is the same at each call.
        """
        if node not in self.decided:
            try:
                self.decided[node] = self._value(node, fixed)
            except CaptureError as error:
                self.refused(error)
                raise
        return self.decided[node]

    def _value(self, node: fx.Node, fixed: bool) -> Any:
        nodes = ancestors([node], MAX_NODES)
        known = fixed or can_be_known(nodes, self._is_data)
        is_bool, together = isinstance(info(node).value, bool), self.real.outcomes is not None
        if not known or (is_bool and together and not fixed and self.real.parts(nodes)):
            if not (is_bool and (self.may_decide or (known and self._has_room))):
                raise DataDependentError("Python decides on a value that is only known when the step runs", REMEDY)
            refuse_repeated(node.graph.nodes)
            if together:
                found = self.real.assumed(node)
                self.real.expect(node, found)
                return found
        if fixed:
            decided([one.args for one in nodes])  # for these sizes alone, where it follows from symbols
        found = self.real.of(node)
        if known and not fixed:
            self.predicates[node] = self.real.guard(node, nodes, found)
        elif not known:
            self.real.expect(node, found)
        return found

    @property
    def may_decide(self) -> bool:
        """Whether the program may depend on one more bool that it computes."""
        return self.decides and self._has_room

    @property
    def _has_room(self) -> bool:
        return len(self.real.decided) < MOST

    def refused(self, error: CaptureError) -> CaptureError:
        """Remembers an error, which ends the capture even where the step catches it, and the user's line."""
        if not error.where:
            error.locate(user_line())
        self.refusal = self.refusal or error
        return error

    def _is_data(self, node: fx.Node) -> bool:
        kinds = ("batch", "tensor", "buffer")
        return any(i.name == node.target and i.kind in kinds for i in self.builder.inputs)

    def escaped(self, number: HostNode, how: str) -> Any:
        """The value that a number has now, for what needs the number itself: a guard, or an error."""
        if not isinstance(number.fx_node, fx.Node):
            return number.hint
        fixed = follows_from_numbers([number.fx_node])
        if fixed or number.known or number.is_int():  # of ints there are few
            return self.decide(number.fx_node, fixed)
        remedy = f"use it in arithmetic and as operators' arguments only, return it from the step, or {OTHERWISE}"
        what = f"Python needs a number that is only known when the step runs: {how}"
        raise self.refused(DataDependentError(what, remedy))

    def forget(self) -> None:
        """Lets go of numbers, of which each holds this object, and of an error, whose traceback does."""
        self.tokens.clear()
        self.refusal = None
        self.real.forget()

    # -- C++ doubles ---------------------------------------------------------------------------------------

    def token(self, number: HostNode) -> float:
        """A float that stands for a host number where C++ wants a double.

        That of one operator: what C++ does besides with the number, such as a size, would be done with the token.
        """
        call = self.call
        if call is None or not (call.function in PASSING_ON or is_one_operator(call.function)):
            return float(self.escaped(number, "C++ computes with its value"))
        own = {leaf for leaf in leaves((call.args, call.kwargs)) if type(leaf) is float}
        token = next(token for token in self._fresh if token not in own)
        call.tokens[token], self.tokens[token] = False, (number, set())
        return token

    def with_numbers(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An operator's arguments with the nodes of host numbers for tokens."""
        bound = bound_arguments(func, args, kwargs)
        exchanged = {name: map_leaves(partial(self._for_token, name), given) for name, given in bound.items()}
        return tuple(exchanged.values())[: len(args)], {name: exchanged[name] for name in kwargs}

    def _for_token(self, name: str, leaf: Any) -> Any:
        """What an argument stands for; a float counts as a token only where it cannot be the user's own number.

        That is in the call that it was made for, which has no such float among its arguments, and in an autograd node
        that saved it there.
        """
        if type(leaf) is not float or leaf not in self.tokens:
            return leaf
        number, saved_as = self.tokens[leaf]
        if self.call is not None and leaf in self.call.tokens:
            self.call.tokens[leaf] = True
            saved_as.add(name)
        elif not any(leaf in saved_numbers(current_autograd_node(), name) for name in saved_as):
            raise UnsupportedError(f"the step uses {leaf!r}, by which tracing knows another number")
        return number.fx_node


# Functions of several operators that hand their numbers on to one as they are.
PASSING_ON = (torch.batch_norm, torch.instance_norm, torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)


def errors_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """What a function of numbers raises where they are out of its domain."""
    if getattr(function, "__module__", "") == "math":
        return ValueError, OverflowError
    if function is pow:
        return ZeroDivisionError, OverflowError
    return (ZeroDivisionError,) if function in (operator.truediv, operator.floordiv, operator.mod) else ()


@functools.cache
def power_is(kind: str) -> Callable[..., bool]:
    """Whether a power of numbers is there, and of a type."""

    def given(*args: Any) -> bool:
        try:
            return type(pow(*args)).__name__ == kind
        except ArithmeticError:
            return False

    given.__name__ = f"power_is_{kind}"
    return given


_read_list = torch.Tensor.tolist  # not what a trace puts there
