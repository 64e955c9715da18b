"""A sharded optimizer: each rank updates some rows of every large parameter and keeps their state alone.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1. The
gradient's own rows are reduced, the update runs on them, and the parameter's rows are shared: together what an
all-reduce of the gradient sends, while the update costs 1/n of its time and memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.comm.ops.rows import piece, piece_size
from wholestep.ir import StepGraph, fake_tensors, info, nbytes, set_info
from wholestep.spmd.expand.graph_edits import call, copy_step, is_view, part_of_whole, readers
from wholestep.spmd.expand.uneven_shards import least, most
from wholestep.spmd.mesh import Line
from wholestep.spmd.placements import Shard
from wholestep.spmd.plans.data_parallel import Reducer
from wholestep.spmd.plans.optimizer_updates import Update, column_of, find_updates
from wholestep.spmd.schedule.buckets import Pending
from wholestep.torch_compat import below_autograd

aten = torch.ops.aten
collectives = torch.ops.wholestep


def shard_optimizer(step: StepGraph, *, line: Line, reduce: str, caps: tuple[int, int], min_bytes: int) -> StepGraph:
    """Adds data parallelism with a sharded optimizer to a step.

    Args:
        step: left as it is.
        line: the ranks.
        reduce: "mean" or "sum".
        caps: bytes of the first bucket and of all others, for gradients that are reduced whole.
        min_bytes: smaller parameters are updated on every rank.

    Raises:
        PlanError: a gradient that cannot be reduced, or a parameter that changes by one that never is.
    """
    step = copy_step(step, "shard_optimizer")
    if line.size > 1:
        _Sharder(step, line, reduce, min_bytes).run(caps)
        step.graph.lint()
        step.gm.recompile()
    return step


class _Sharder(Reducer):
    def __init__(self, step: StepGraph, line: Line, reduce: str, min_bytes: int) -> None:
        super().__init__(step, line.group, line.size, reduce)
        self.line = line
        found = [(step.signature.inputs[step.placeholders.index(u.parameter)].source, u) for u in find_updates(step)]
        trained = {gradient.parameter for gradient in self.gradients}  # an average of weights is no such
        self.updates = {source: u for source, u in found if source in trained and self._is_worth_it(u, min_bytes)}
        self.place = {node: place for place, node in enumerate(step.graph.nodes)}
        self.rows: dict[fx.Node, fx.Node] = {}  # memory of a gradient -> its reduced rows

    def _is_worth_it(self, update: Update, min_bytes: int) -> bool:
        value, smallest = most(update.parameter), least(update.parameter)
        size = smallest.shape[0] if value.dim() else 0
        everybody = size > (self.ranks - 1) * piece_size(size, self.ranks)  # the last rank has a row, too
        return value.is_contiguous() and nbytes(value) >= min_bytes and everybody

    def _reduce_all(self, pending: list[Pending], caps: tuple[int, int]) -> dict[str, str]:
        whole = []
        for one in pending:
            update = self._update_by(one)
            if update is None:
                whole.append(one)
            else:
                self._reduce_rows(one, update)
        reduced = super()._reduce_all(whole, caps) | {g.name: rows.name for g, rows in self.rows.items()}
        for update in sorted(self.updates.values(), key=lambda update: self.place[update.new]):
            self._narrow(update)
            self._share(update)  # before another update, which may read the parameter, takes its rows of it
        return reduced

    # The gradient

    def _update_by(self, one: Pending) -> Update | None:
        """The update that alone reads a gradient, where that fills its memory in the parameter's layout."""
        (first, *more) = one.gradients
        update = self.updates.get(first.parameter)
        if update is None or any(g.parameter != first.parameter for g in more) or self._is_result(one.node):
            return None
        like, (size, stride, offset) = info(update.parameter).value, first.place
        if (tuple(size), tuple(stride), offset) != (
            tuple(like.shape),
            like.stride(),
            0,
        ) or one.value.dtype != like.dtype:
            return None
        later = [r for r in readers(one.node) if not self._inside(one.node, r)]
        calls = {*update.calls, *(column[0] for column in map(column_of, update.calls) if column is not None)}
        fills = one.value.numel() == like.numel() and one.value.is_contiguous()
        seen = {o for node in calls for o in node.all_input_nodes if one.node in _views(o)}
        as_is = all(info(o).value.shape != like.shape or info(o).value.stride() == like.stride() for o in seen)
        return update if fills and as_is and set(later) <= calls else None

    def _reduce_rows(self, one: Pending, update: Update) -> None:
        graph, node, like = self.step.graph, one.node, info(update.parameter).value
        with graph.inserting_before(self._after(node)):
            rows = node
            if one.value.shape != like.shape:
                rows = call(graph, aten.view.default, node, list(like.shape), phase="backward")
            rows, op = self._scaled(rows)
            names = tuple(g.parameter for g in one.gradients)
            started = call(
                graph, collectives.reduce_rows.default, rows, op, self.group, phase="backward", placement=names
            )
        with graph.inserting_before(self.runs.nodes[one.needed]):
            done = call(graph, collectives.wait.default, started, phase="optimizer")
            self.reduced.add(done)
            mine = self._cut(done, like)
        self.rows[node] = mine

    # The update

    def _mine(self, like: torch.Tensor) -> tuple[int, int]:
        return piece(like.shape[0], self.line.size, self.line.rank)

    def _cut(self, node: fx.Node, like: torch.Tensor) -> fx.Node:
        return call(self.step.graph, aten.slice.Tensor, node, 0, *self._mine(like), phase="optimizer")

    def _narrow(self, update: Update) -> None:
        """Makes all calls of an update work on this rank's rows."""
        like = info(update.parameter).value
        for state in update.states:
            set_info(state, part_of_whole(info(state), Shard(0), self.line))
        own = {*update.calls, *update.states}
        cuts: dict[fx.Node, fx.Node] = {}

        def local(operand: Any, reader: fx.Node) -> Any:
            if not isinstance(operand, fx.Node) or operand in own:
                return operand
            value = info(operand).value
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                return operand
            if operand not in cuts:
                ready = next((self.rows[node] for node in _views(operand) if node in self.rows), None)
                with self.step.graph.inserting_before(reader):
                    cuts[operand] = self._cut(operand, like) if ready is None else ready
            return cuts[operand]

        columns = dict.fromkeys(column for column in map(column_of, update.calls) if column is not None)
        for node in update.calls:
            column = column_of(node)
            if column is None:
                change = partial(local, reader=node)
                node.args, node.kwargs = fx.map_arg(node.args, change), fx.map_arg(node.kwargs, change)
                _run_again(node)
                continue
            if column not in columns:
                continue
            del columns[column]
            owner, index = column
            change = partial(local, reader=owner)
            owner.args = tuple(_at(argument, index, change) for argument in owner.args)
            owner.kwargs = {name: _at(argument, index, change) for name, argument in owner.kwargs.items()}
            _run_again(owner)
            for picked in _picks(owner):
                _run_again(picked)

    def _share(self, update: Update) -> None:
        """The parameter with all ranks' new rows, for everybody else who reads it."""
        graph, new, like = self.step.graph, update.new, info(update.parameter).value
        source = next(source for source, one in self.updates.items() if one is update)
        inside = {*update.calls, *(c[0] for c in map(column_of, update.calls) if c is not None)}
        others = [user for user in new.users if user not in inside]
        with graph.inserting_before(self._after_all(new)):
            mine = call(
                graph, aten.slice_scatter.default, update.parameter, new, 0, *self._mine(like), phase="optimizer"
            )
            started = call(
                graph, collectives.share_rows.default, mine, self.group, phase="optimizer", placement=(source,)
            )
        first = min(others, key=self.place.__getitem__)
        with graph.inserting_before(first):
            done = call(graph, collectives.wait.default, started, phase="optimizer")
        self.reduced.add(done)
        for user in others:
            user.replace_input_with(new, done)

    def _after_all(self, node: fx.Node) -> fx.Node:
        """Past the results of the operator on lists that a value is one of."""
        following = node.next
        column = column_of(node)
        while column is not None and following in _picks(column[0]):
            following = following.next
        return following


def _views(node: fx.Node) -> list[fx.Node]:
    """A value, what it is a view of, and so on."""
    found = [node]
    while node.op == "call_function" and is_view(node):
        found.append(node := node.all_input_nodes[0])
    return found


def _at(argument: Any, index: int, change: Any) -> Any:
    """A list with another item at one place."""
    if not isinstance(argument, (list, tuple)) or index >= len(argument):
        return argument
    return [change(one) if place == index else one for place, one in enumerate(argument)]


def _picks(owner: fx.Node) -> list[fx.Node]:
    """All items taken of a call's results, lists before their items."""
    return [one for user in owner.users if user.target is not None and user.op == "call_function" and _is_pick(user)
            for one in (user, *_picks(user))]  # fmt: skip


def _is_pick(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _run_again(node: fx.Node) -> None:
    """Gives a record the value that the call has on its present operands."""
    values, keywords = fx.map_arg((node.args, node.kwargs), lambda n: info(n).value)
    tensor = next(fake_tensors([info(n).value for n in node.all_input_nodes]))
    with tensor.fake_mode, torch.no_grad(), below_autograd():  # type: ignore[attr-defined]
        set_info(node, replace(info(node), value=node.target(*values, **keywords)))  # type: ignore[operator]
