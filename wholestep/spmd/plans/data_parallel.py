"""Data parallelism in the local view: reduces gradients over the ranks, in buckets, inside of the graph.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020). A gradient is
its local value inside of `backward()` and the reduced one for everybody who reads it later. Gradients are
packed into buckets in the order in which they are ready; a bucket's all-reduce starts right after its last
gradient and is waited for just before somebody reads one, so that it overlaps the rest of the backward.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from wholestep.errors import PlanError
from wholestep.ir import Gradient, Phase, StepGraph, info
from wholestep.spmd.expand.graph_edits import Runs, call, copy_step, readers, reroute
from wholestep.spmd.schedule.buckets import Bucket, Pending, buckets_of
from wholestep.tensor_parts import Part
from wholestep.torch_compat import OpOverload

aten = torch.ops.aten


def reduce_gradients(step: StepGraph, *, group: str, ranks: int, reduce: str, caps: tuple[int, int]) -> StepGraph:
    """Adds the all-reduces of data parallelism to a step.

    Args:
        step: left as it is.
        group: name of the group, of so many ``ranks``.
        reduce: "mean" or "sum".
        caps: bytes of the first bucket and of all others.

    Raises:
        PlanError: a gradient that cannot be reduced, or a parameter that changes by one that never is.
    """
    step = copy_step(step, "reduce_gradients")
    if ranks > 1:
        Reducer(step, group, ranks, reduce).run(caps)
        step.graph.lint()
        step.gm.recompile()
    return step


class Reducer:
    """Adds the collectives to one step, in place."""

    def __init__(self, step: StepGraph, group: str, ranks: int, reduce: str) -> None:
        self.step, self.group, self.ranks, self.mean = step, group, ranks, reduce == "mean"
        self.runs = Runs(step)
        self.nodes = {node.name: node for node in step.graph.nodes}
        self.reduced: set[fx.Node] = set()
        self.scaled: dict[tuple[str, int], str] = {}
        self.gradients = step.signature.gradients
        inputs = zip(self.step.signature.inputs, self.step.placeholders, strict=True)
        self.parts = {item.source: info(node).placement for item, node in inputs}

    def run(self, caps: tuple[int, int]) -> None:
        pending = self._pending()
        late = {gradient for one in pending for gradient in one.gradients}
        if not self.mean:
            for gradient in self.gradients:
                self._count_once(gradient, late)
        reduced = self._reduce_all(pending, caps)
        self.step.signature.gradients = [
            replace(g, before=reduced.get(g.before or "", g.before), after=reduced[g.after]) for g in late
        ]
        _check_updates(self.step, self.reduced)

    def _reduce_all(self, pending: list[Pending], caps: tuple[int, int]) -> dict[str, str]:
        """Writes all collectives; gives the names of the local values and of the reduced ones."""
        reduced: dict[str, str] = {}
        for bucket in buckets_of(pending, caps):
            reduced |= self._reduce(bucket)
        return reduced

    # Which gradients

    def _pending(self) -> list[Pending]:
        """The gradients that somebody reads other than a later backward which adds to them."""
        by_node: dict[str, list[Gradient]] = {}
        for gradient in self.gradients:
            by_node.setdefault(gradient.after, []).append(gradient)
        found = []
        for name, gradients in by_node.items():
            node = self.nodes[name]
            adds = {self.runs.of(self.nodes[g.after]) for g in self.gradients if g.before == name}
            outside = [r for r in readers(node) if not self._inside(node, r) and self.runs.of(r) not in adds - {None}]
            position = self.runs.position
            if outside:
                # once reduced, the later backward reads it too
                needed = min(position[r] for r in readers(node) if not self._inside(node, r))
            elif self._is_result(node):
                needed = len(position)
            else:
                continue
            found.append(Pending(node, gradients, position[node], needed, self._nbytes(node, gradients)))
        return found

    def _nbytes(self, node: fx.Node, gradients: list[Gradient]) -> int:
        """Of the memory; of whole parameters where ranks hold unequal parts, so that all pack alike."""
        value, wholes = info(node).value, []
        for gradient in gradients if self.step.signature.uneven else ():
            part = self.parts.get(gradient.parameter)
            wholes.append(math.prod(part.shape) if isinstance(part, Part) else math.prod(gradient.place[0]))
        return (sum(wholes) or value.numel()) * value.itemsize  # type: ignore[no-any-return]

    def _inside(self, node: fx.Node, reader: fx.Node) -> bool:
        """True when the backward that made a gradient reads it."""
        mine, other = self.runs.of(node), self.runs.of(reader)
        return other is not None and mine in (other, None)

    def _is_result(self, node: fx.Node) -> bool:
        """A gradient that was made from nothing, hoisted, is left to the user in the input's own memory."""
        return node.op == "placeholder" and node not in (self.step.placeholders[i] for i in self._written())

    def _written(self) -> set[int]:
        return set(self.step.signature.mutations.values())

    def _count_once(self, gradient: Gradient, reduced: set[Gradient]) -> None:
        """Summing: a gradient from before the backward is the same on all ranks, so each adds its part of it."""
        if gradient.before is None or gradient.before not in self.nodes:
            return
        before = self.nodes[gradient.before]
        makers = [g for g in self.gradients if g.after == gradient.before]
        if any(g not in reduced for g in makers) or (not makers and self.runs.of(before) is not None):
            return  # local: another backward of this step made it
        run = self._run_that_adds(before, self.nodes[gradient.after])
        if run is None or (before.name, run) in self.scaled:
            return
        first = min((r for r in readers(before) if self.runs.of(r) == run), key=self.runs.position.__getitem__)
        with self.step.graph.inserting_before(first):
            part = call(self.step.graph, aten.mul.Tensor, before, 1 / self.ranks, phase="backward")
        self.scaled[before.name, run] = part.name
        reroute(before, part, lambda r: r is not part and self.runs.of(r) == run, "backward")

    def _run_that_adds(self, before: fx.Node, after: fx.Node) -> int | None:
        """The backward that adds to a gradient; plans along other axes may have reduced the sum since."""
        adding = {reader for reader in readers(before) if self.runs.of(reader) is not None}
        seen, reached, ahead = set(), [], [after]
        start = min(map(self.runs.position.__getitem__, adding), default=0)
        while ahead and adding:
            node = ahead.pop()
            if node in seen or self.runs.position.get(node, -1) < start:
                continue
            seen.add(node)
            reached += [node] if node in adding else []
            ahead += node.all_input_nodes
        return self.runs.of(max(reached, key=self.runs.position.__getitem__)) if reached else None

    # How

    def _reduce(self, bucket: Bucket) -> dict[str, str]:
        """Writes one bucket's all-reduce; gives the names of the local values and of the reduced ones."""
        graph = self.step.graph
        last = max(bucket.members, key=lambda m: m.ready).node
        flats: dict[str, fx.Node] = {}
        with graph.inserting_before(self._after(last)):
            pieces = []
            for member in bucket.members:
                flats[member.node.name] = self._flat(member)
                pieces += [self._piece(flats[member.node.name], start, size) for start, size in member.blocks]
            packed = pieces[0] if len(pieces) == 1 else call(graph, aten.cat.default, pieces, phase="backward")
            packed, op = self._scaled(packed)
            started = call(
                graph, torch.ops.wholestep.all_reduce.default, packed, op, self.group,
                phase="backward", placement=bucket.parameters,
            )  # fmt: skip
        return self._unpack(bucket, flats, started)

    def _scaled(self, local: fx.Node) -> tuple[fx.Node, str]:
        """What is to be reduced, and how: the mean by a product before the sum, as DistributedDataParallel takes it.

        Of floats the reduction does both in one pass; halves are rounded between the two.
        """
        if not self.mean:
            return local, "sum"
        if info(local).value.dtype in (torch.float32, torch.float64):
            return local, f"premul_sum:{1 / self.ranks!r}"
        return call(self.step.graph, aten.mul.Tensor, local, 1 / self.ranks, phase="backward"), "sum"

    def _unpack(self, bucket: Bucket, flats: dict[str, fx.Node], started: fx.Node) -> dict[str, str]:
        graph, names = self.step.graph, {}
        first = min(m.needed for m in bucket.members)
        nodes = self.runs.nodes
        with graph.inserting_before(nodes[first] if first < len(nodes) else self._output()):
            done = call(graph, torch.ops.wholestep.wait.default, started, phase="optimizer")
            start = 0
            for member in bucket.members:
                whole = flats[member.node.name]
                for offset, size in member.blocks:
                    piece = self._piece(done, start, size, "optimizer")
                    start += size
                    if size == member.value.numel():
                        whole = piece
                    else:
                        span = (0, offset, offset + size)
                        whole = call(graph, aten.slice_scatter.default, whole, piece, *span, phase="optimizer")
                new = self._shaped(whole, member.value)
                self.reduced.add(new)
                self._hand_over(member, new)
                names[member.node.name] = new.name
        return names

    def _hand_over(self, member: Pending, new: fx.Node) -> None:
        """Everybody who reads the gradient after its backward reads the reduced one."""

        def later(reader: fx.Node) -> bool:
            return reader in self.runs.position and not self._inside(member.node, reader)

        reroute(member.node, new, later, "optimizer")
        if self._is_result(member.node):
            outputs = self._output()
            outputs.args = ((*outputs.args[0], new),)  # type: ignore[misc]
            signature = self.step.signature
            signature.mutations[signature.n_outputs] = self.step.placeholders.index(member.node)
            signature.n_outputs += 1

    def _after(self, node: fx.Node) -> fx.Node:
        """The node before which something may stand that reads ``node``."""
        following = node.next
        while following.op in ("placeholder", "get_attr"):
            following = following.next
        return following

    def _output(self) -> fx.Node:
        return next(node for node in reversed(self.step.graph.nodes) if node.op == "output")

    def _flat(self, member: Pending) -> fx.Node:
        """The memory as one row of elements, in the order in which they lie."""
        graph, node, value = self.step.graph, member.node, member.value
        if value.is_contiguous():
            return call(graph, aten.view.default, node, [value.numel()], phase="backward")
        return call(graph, aten.as_strided.default, node, [value.numel()], [1], phase="backward")

    def _piece(self, flat: fx.Node, start: int, size: int, phase: Phase = "backward") -> fx.Node:
        if size == info(flat).value.numel():
            return flat
        return call(self.step.graph, aten.slice.Tensor, flat, 0, start, start + size, phase=phase)

    def _shaped(self, flat: fx.Node, like: torch.Tensor) -> fx.Node:
        graph, size = self.step.graph, list(like.shape)
        if like.is_contiguous():
            return call(graph, aten.view.default, flat, size, phase="optimizer")
        return call(graph, aten.as_strided.default, flat, size, list(like.stride()), phase="optimizer")


def _check_updates(step: StepGraph, reduced: set[fx.Node]) -> None:
    """Refuses a step that changes a parameter by values of a backward that were never reduced."""
    local: dict[fx.Node, str] = {}
    for node in step.graph.nodes:
        if node.op != "call_function" or _is_collective(node) or node in reduced:
            continue
        source = next((local[operand] for operand in node.all_input_nodes if operand in local), None)
        if source is None and info(node).phase == "backward":
            source = info(node).where
        if source is not None:
            local[node] = source
    for output, index in step.signature.mutations.items():
        changed = step.signature.inputs[index]
        if changed.kind == "parameter" and step.outputs[output] in local:
            where = local[step.outputs[output]]
            raise PlanError(
                f"DataParallel: {changed.source} changes by a gradient that is not reduced, so that it would differ "
                f"from rank to rank\n  at: {where}\n  to do: let backward() leave the gradient in .grad, and let the "
                "optimizer step after it; torch.autograd.grad and optimizers in hooks are not reduced"
            )


def _is_collective(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "wholestep"

