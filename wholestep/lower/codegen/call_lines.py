"""The lines of one call: by its way of execution, into the memory that the plan gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.graph import magic_methods

from wholestep.functional import OFFSETS
from wholestep.ir import GETITEM, arguments, info
from wholestep.lower.codegen.bind_memory import Recycler
from wholestep.lower.codegen.literals import commas, keyword, literal, targets
from wholestep.lower.codegen.program_text import ProgramText
from wholestep.lower.fusion.blocked_matmuls import in_parts
from wholestep.lower.fusion.blocking_collectives import blocking_collectives, blocking_form
from wholestep.lower.fusion.chains import Named
from wholestep.lower.fusion.draws import bernoulli_
from wholestep.lower.fusion.straight_calls import straight_step
from wholestep.lower.plan.operator_facts import (
    SCATTERS,
    UNSET,
    aten,
    inplace_variant,
    is_pointwise,
    is_sure_view,
    mutable_variant,
    out_variant,
)
from wholestep.lower.plan.value_facts import (
    RECYCLE_FROM,
    RECYCLE_GRADIENTS_FROM,
    dense,
    device_key,
    fill_number,
    origin_of,
    recyclable,
    variable,
)

OWN_KERNELS: dict[Any, Any] = {aten.bernoulli_.float: bernoulli_}  # with the bits of the operators that they stand for


class CallWriter:
    """Writes calls: one method for each way in which they are carried out (`How`).

    Attributes:
        made: variables whose memory is bound or taken already.
        saved: values that wait for a backward: kept for the next call as well, their memory would serve nothing else.
        blocking: collectives that run to their end where they start.
    """

    def __init__(self, source: ProgramText) -> None:
        self.source, self.plan, self.reuse = source, source.plan, source.plan.reuse
        self.made: set[str] = set()
        signature = self.plan.step.signature
        last = self.plan.step.outputs[signature.n_outputs - signature.saved :]
        self.saved = {self.plan.live.root[n] for n in last if isinstance(n, fx.Node)}
        self.blocking = blocking_collectives(self.plan)

    def write(self, node: fx.Node) -> None:
        """Writes what a call takes to run, if anything."""
        if (how := self.reuse.how[node]) not in ("skip", "pick"):
            getattr(self, f"_{how}")(node)

    def destination(self, node: fx.Node) -> str:
        """The variable that a call writes to, bound or made first where it must be."""
        name, store, value = self.source.name(node), self.reuse.store[node], info(node).value
        spec = f"{tuple(value.shape)}, {value.stride()}, {value.dtype}"
        if name == variable(node) and name not in self.made:
            self.made.add(name)
            slot = store.slot
            if store.kind == "arena" and slot is not None:
                place = self.source.place(slot, self.reuse.offset.get(node))
                self.source.bind(name, f"at(arena['{slot.device}'], {place}, {spec})")
            elif store.kind == "lent" and slot is not None:
                self.source.namespace.setdefault("loans", {})
                lent = f"Loan(arena['cpu'], {self.source.place(slot)}, {spec})"
                self.source.bind(f"lend_{name}", f"loans[{node.name!r}] = {lent}")
                self.source.assign(name, f"lend_{name}()")
            elif store.kind == "fresh":
                self.source.assign(name, self._new_memory(node, spec))
        return self.source.in_rows.get(name, name)

    def _new_memory(self, node: fx.Node, spec: str) -> str:
        value, least = info(node).value, RECYCLE_GRADIENTS_FROM if self.plan.step.signature.donated else RECYCLE_FROM
        if not recyclable(value, least) or node in self.saved:
            return self.source.new_memory(value)
        self.source.namespace.setdefault("fresh", Recycler())
        return f"fresh({len(self.made)}, {spec})"

    def cloned(self, node: fx.Node) -> str:
        """A copy of a value with its own strides."""
        name = self.source.name(node)
        return f"{name}.clone()" if dense(info(node).value) else f"clone_as_it_lies({name})"

    def _over(self, target: str, source: Any) -> None:
        """Copies what a call reads to where it writes, unless it lies there."""
        if (text := self.source.arg(source)) != target:
            self.source.line(f"{target}.copy_({text})")

    def _host(self, node: fx.Node) -> None:
        args = [self.source.arg(a) for a in node.args]
        target: Any = node.target
        if target is aten._local_scalar_dense.default:
            text = f"{args[0]}.item()"
        elif target.__module__ == "_operator" and target.__name__ in magic_methods:
            text = magic_methods[target.__name__].format(*args)
        else:
            text = f"{self.source.function(target)}({commas([*args, *self.source.keywords(node)])})"
        self.source.number(node, text, node)

    def _view(self, node: fx.Node) -> None:
        name, operands = variable(node), [self.source.name(o) for o in node.all_input_nodes]
        if node.target is GETITEM:
            text = f"{operands[0]}[{node.args[1]}]"
        else:
            text = self.source.call(node.target, self.source.arguments(node), node)
        owner = origin_of(node)[0]
        if is_sure_view(owner.target) and self.source.lasting.issuperset(operands):
            self.source.bind(name, text)
        else:
            self.source.assign(name, text, node)

    def _wait(self, node: fx.Node) -> None:
        if node.args[0] not in self.blocking:
            self.source.line(f"{self.source.function(node.target)}({self.source.arg(node.args[0])})", node)

    def _collective(self, node: fx.Node) -> None:
        target, (source, *rest) = self.destination(node), node.args
        self._over(target, source)
        inplace: Any = inplace_variant(node.target)  # type: ignore[arg-type]
        function = self.source.function(blocking_form(self.plan, node) if node in self.blocking else inplace)
        self.source.line(f"{function}({commas([target, *map(self.source.arg, rest)])})", node)

    def _fill(self, node: fx.Node) -> None:
        target, number = self.destination(node), fill_number(node)
        if number is not UNSET:
            zero = repr(number) in ("0", "0.0")
            self.source.line(f"{target}.zero_()" if zero else f"{target}.fill_({self.source.arg(number)})", node)

    def _copy(self, node: fx.Node) -> None:
        source = node.args[1] if node.target is aten.copy.default else node.args[0]
        self.source.line(f"{self.destination(node)}.copy_({self.source.arg(source)})", node)

    def _concat(self, node: fx.Node) -> None:
        whole = self.destination(node)
        for number, (operand, start, size) in enumerate(self.reuse.unpacked[node]):
            part = self.source.bind(f"{whole}_part_{number}", f"{whole}[{start}:{start + size}]")
            self.source.line(f"{part}.copy_({self.source.arg(operand)})", node)

    def _scatter(self, node: fx.Node) -> None:
        base, source = node.args[:2]
        target = self.destination(node)
        self._over(target, base)
        rest = [self.source.arg(a) for a in node.args[2 : OFFSETS.get(node.target)]]
        args = [target, *rest, *self.source.offset(node, target), *self.source.keywords(node)]
        view = f"{self.source.function(SCATTERS[node.target])}({commas(args)})"
        self.source.line(f"{view}.copy_({self.source.arg(source)})", node)

    def _inplace(self, node: fx.Node) -> None:
        target, op = self.destination(node), inplace_variant(node.target)  # type: ignore[arg-type]
        self._over(target, node.args[0])
        text = self.source.call(op, [target, *self.source.arguments(node)[1:]], node)
        self.source.line(text, node, self._straight(node, target, over_first=True))

    def _straight(self, node: fx.Node, target: str, over_first: bool = False) -> Named | None:
        """A call as a straight one, where all of its memory lasts and is of one size; else None.

        Args:
            over_first: whether its first operand lies where it writes.
        """
        tensors = [o for o in node.all_input_nodes if isinstance(info(o).value, torch.Tensor)]
        names = {target, *map(self.source.name, tensors)}
        fixed = self.source.lasting >= names and self.source.sized.isdisjoint(names)
        step = straight_step(node) if fixed and not self.source.in_rows else None
        if step is None:
            return None
        first, *others = map(self.source.name, step.operands)
        number = None if step.number is None else self.source.operand(node, step.number)
        if number is not None and number not in self.source.lasting:
            return None
        return step.kernel, target, (target if over_first else first, *others), number

    def _out(self, node: fx.Node) -> None:
        first, op = node.args[0], node.target
        over_first = isinstance(first, fx.Node) and self.source.name(first) == self.source.name(node)
        if over_first and is_pointwise(op) and inplace_variant(op) is not None:  # type: ignore[arg-type]
            self._inplace(node)
            return
        target = self.destination(node)
        found = out_variant(op, device_key(info(node).value))  # type: ignore[arg-type]
        assert found is not None, op
        overload, extra, (out,) = found
        if in_parts(node) and not self.source.in_rows:
            left, right = (self.source.arg(a) for a in node.args)
            with self.source.loop(["some", "part"], f"parts({left}, {target})"):
                self.source.line(f"torch.mm(some, {right}, out=part)", node)
            return
        args = [*self.source.arguments(node), *map(literal, extra)]
        if node in self.blocking:
            text = f"{self.source.function(blocking_form(self.plan, node))}({commas([*args, f'{out}={target}'])})"
        else:
            text = self.source.call(overload, [*args, f"{out}={target}"], node, extra, **{out: info(node).value})
        self.source.line(text, node, self._straight(node, target))

    def _call(self, node: fx.Node) -> None:
        value, text = info(node).value, self.source.call(node.target, self.source.arguments(node), node)
        if value is None or (isinstance(value, (list, tuple)) and not value):
            self.source.line(text, node)
        elif isinstance(value, (list, tuple)):
            names: list[str] = []
            self.source.assign(self._pattern(node, value, names), text, node, names)
        else:
            self.source.assign(variable(node), text, node)

    def _pattern(self, node: fx.Node, values: Any, names: list[str]) -> str:
        """A tuple to unpack results into; ``_`` where nothing reads one."""
        picked = {u.args[1]: u for u in node.users if u.target is GETITEM}
        texts = []
        for index, value in enumerate(values):
            user = picked.get(index)
            if user is not None and isinstance(value, (list, tuple)):
                texts.append(f"({self._pattern(user, value, names)})")
            else:
                texts.append(self.source.name(user) if user is not None else "_")
                names.append(texts[-1])
        return targets(texts)

    def copies(self, node: fx.Node) -> dict[tuple[str, int | None], str]:
        """Makes copies of what a call writes and may not: by argument and index in its list, the copy's variable."""
        made: dict[tuple[str, int | None], str] = {}
        for number, entry in enumerate(entry for entry in self.plan.live.written[node] if entry.writes):
            if not entry.in_place:
                name = variable(entry.leaf) if entry.leaf is not None else f"{variable(node)}_copy_{number}"
                self.source.assign(name, self.cloned(entry.old))
                made[entry.argument, entry.index] = name
        return made

    def _mutable(self, node: fx.Node) -> None:
        self.write_mutable(node, self.copies(node))

    def _given(self, copy: str | None, value: Any) -> str:
        return self.source.arg(value) if copy is None else self.source.in_rows.get(copy, copy)

    def write_mutable(self, node: fx.Node, swap: dict[tuple[str, int | None], str]) -> None:
        """A call that writes its arguments, or copies in their place."""
        variant = mutable_variant(node.target)
        assert variant is not None
        texts = []
        for name, value in arguments(node).items():
            if isinstance(value, (list, tuple)) and value and all(isinstance(v, fx.Node) for v in value):
                items = [self._given(swap.get((name, i)), v) for i, v in enumerate(value)]
                texts.append(keyword(name, self.source.list_of(items)))
            else:
                texts.append(keyword(name, self._given(swap.get((name, None)), value)))
        text = f"{self.source.function(OWN_KERNELS.get(variant.op, variant.op))}({commas(texts)})"
        if not variant.fresh:
            self.source.line(text, node)
            return
        picked = {u.args[1]: self.source.name(u) for u in node.users if u.target is GETITEM}
        names = [picked.get(i, "_") for i in range(variant.fresh)]
        more = any(r.alias_info and r.alias_info.is_write for r in variant.op._schema.returns)
        target = targets([*names, *["*_"] * more]) if more or len(names) > 1 else names[0]
        self.source.assign(target, text, node, names)
