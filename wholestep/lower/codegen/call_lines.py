"""Writes the line of one call: by its way of execution, into the memory that the plan gives it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from wholestep.functional import clone_as_it_lies
from wholestep.ir import GETITEM, info
from wholestep.lower.codegen.bind_memory import Loans, Recycler, at
from wholestep.lower.codegen.literals import Speller, keyword, literal, one_line
from wholestep.lower.fusion.blocked_matmuls import in_parts, parts
from wholestep.lower.fusion.blocking_collectives import form_at_once, prompt_starts
from wholestep.lower.plan.liveness import Plan, variable
from wholestep.lower.plan.operator_facts import (
    FILLS,
    OFFSETS,
    SCATTERS,
    UNSET,
    aten,
    base_name,
    inplace_variant,
    is_pointwise,
    is_sure_view,
    mutable_twin,
    out_variant,
    reaches,
)
from wholestep.lower.plan.value_facts import (
    RECYCLE_FROM,
    RECYCLE_GRADIENTS_FROM,
    device_key,
    is_dense,
    origin_of,
    recyclable,
)

_SYMBOLS: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**",
    operator.floordiv: "//", operator.mod: "%", operator.lt: "<", operator.le: "<=", operator.gt: ">",
    operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


class CallWriter(Speller):
    """One method for each way in which a call is carried out.

    Attributes:
        made: variables whose memory is bound or taken already.
        lists: text of a list -> the variable that `bind` gives it.
        held: values that wait for a backward: kept for the next call as well, their memory would serve nothing else.
        prompt: collectives that run to their end where they start.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.made: set[str] = set()
        self.lists: dict[str, str] = {}
        signature = plan.step.signature
        last = plan.step.outputs[signature.n_outputs - signature.kept :]
        self.held = {plan.root[n] for n in last if isinstance(n, fx.Node)}
        self.prompt = prompt_starts(plan)

    def _single(self, node: fx.Node, lines: list[str]) -> None:
        how = self.plan.how[node]
        write = {
            "host": self._host, "view": self._view, "fill": self._fill, "copy": self._copy, "scatter": self._scatter,
            "wait": self._wait, "collective": self._collective,
            "inplace": self._out, "out": self._out, "call": self._functional, "mutable": self._mutable,
            "pack": self._pack,
        }.get(how)  # fmt: skip
        if write is not None:
            write(node, lines)

    def _say(self, lines: list[str], text: str, node: fx.Node) -> None:
        record = info(node)
        where = "  ".join(part for part in (record.where.rsplit("/", 1)[-1], record.module) if part)
        lines.append(f"{text}  # {one_line(where)}" if where else text)

    def _host(self, node: fx.Node, lines: list[str]) -> None:
        args = [self._arg(a) for a in node.args]
        target: Any = node.target
        if target is aten._local_scalar_dense.default:
            text = f"{args[0]}.item()"
        elif target in _SYMBOLS and len(args) == 2:
            text = f"{args[0]} {_SYMBOLS[target]} {args[1]}"
        elif target is operator.neg:
            text = f"-{args[0]}"
        else:
            keywords = [keyword(k, self._arg(v)) for k, v in node.kwargs.items()]
            text = f"{self._function(target)}({', '.join(args + keywords)})"
        self._say(lines, f"{variable(node)} = {text}", node)

    def _view(self, node: fx.Node, lines: list[str]) -> None:
        operands = node.all_input_nodes
        base = operands[0]
        owner = origin_of(node)[0] if node.target is GETITEM else node
        lasting = is_sure_view(owner.target) and all(self._name(o) in self.stable for o in operands)
        name = variable(node)
        text = f"{self._name(base)}[{node.args[1]}]" if node.target is GETITEM else self._call(node)
        if lasting:
            self.bound.append(f"{name} = {text}")
            self.stable.add(name)
        else:
            self._say(lines, f"{name} = {text}", node)

    def _destination(self, node: fx.Node, lines: list[str]) -> str:
        """The variable that a call writes to, bound or made first where it must be."""
        name, store, value = self._name(node), self.plan.store[node], info(node).value
        spec = f"{tuple(value.shape)}, {value.stride()}, {value.dtype}"
        if name == variable(node) and name not in self.made:
            self.made.add(name)
            if store.kind == "slot":
                slot = self.plan.slots[store.index]
                self.bound.append(f"{name} = at(arena['{slot.device}'], {slot.offset + store.offset}, {spec})")
                self.namespace["at"] = at
                self.stable.add(name)
            elif store.kind == "lent":
                offset = self.plan.slots[store.index].offset
                lender, self.namespace["loans"] = f"lend_{name}", self.namespace.get("loans") or Loans()
                self.bound.append(f"{lender} = loans.lend({node.name!r}, arena['cpu'], {offset}, {spec})")
                lines.append(f"{name} = {lender}()")
            elif store.kind == "fresh":
                lines.append(f"{name} = {self._fresh(node, value, spec)}")
        return self.in_tile.get(name, name)

    def _collective(self, node: fx.Node, lines: list[str]) -> None:
        target, (source, *rest) = self._destination(node, lines), node.args
        if self._arg(source) != target:
            lines.append(f"{target}.copy_({self._arg(source)})")
        twin = form_at_once(self.plan, node) if node in self.prompt else inplace_variant(node.target)  # type: ignore[arg-type]
        self._say(lines, f"{self._function(twin)}({', '.join([target, *map(self._arg, rest)])})", node)

    def _wait(self, node: fx.Node, lines: list[str]) -> None:
        if node.args[0] in self.prompt:
            return
        self._say(lines, f"{self._function(node.target)}({self._arg(node.args[0])})", node)

    def _fresh(self, node: fx.Node, value: torch.Tensor, spec: str) -> str:
        least = RECYCLE_GRADIENTS_FROM if self.plan.step.signature.dying else RECYCLE_FROM
        if not recyclable(value, least) or node in self.held:
            shape = f"{tuple(value.shape)}, {value.stride()}"
            return f"torch.empty_strided({shape}, dtype={value.dtype}, device='{value.device}')"
        self.namespace.setdefault("fresh", Recycler())
        return f"fresh({len(self.made)}, {spec})"

    def _fill(self, node: fx.Node, lines: list[str]) -> None:
        number = FILLS[node.target](*node.args, **node.kwargs)
        if number is UNSET:
            self._destination(node, lines)
            return
        zero = not isinstance(number, fx.Node) and number == 0
        text = "zero_()" if zero else f"fill_({self._arg(number)})"
        self._say(lines, f"{self._destination(node, lines)}.{text}", node)

    def _copy(self, node: fx.Node, lines: list[str]) -> None:
        source = node.args[1] if node.target is aten.copy.default else node.args[0]
        self._say(lines, f"{self._destination(node, lines)}.copy_({self._arg(source)})", node)

    def _pack(self, node: fx.Node, lines: list[str]) -> None:
        whole = self._destination(node, lines)
        for number, (operand, start, size) in enumerate(self.plan.unpacked[node]):
            part = f"{whole}_part_{number}"
            self.bound.append(f"{part} = {whole}[{start}:{start + size}]")
            self.stable.add(part)
            self._say(lines, f"{part}.copy_({self._arg(operand)})", node)

    def _scatter(self, node: fx.Node, lines: list[str]) -> None:
        base, source = node.args[:2]
        target = self._destination(node, lines)
        if self._arg(base) != target:
            lines.append(f"{target}.copy_({self._arg(base)})")
        view = SCATTERS[node.target]
        rest = [self._arg(a) for a in node.args[2 : OFFSETS.get(node.target)]] + self._offset(node, target)
        args = ", ".join([target, *rest, *(keyword(k, self._arg(v)) for k, v in node.kwargs.items())])
        self._say(lines, f"{self._function(view)}({args}).copy_({self._arg(source)})", node)

    def _out(self, node: fx.Node, lines: list[str]) -> None:
        target = self._destination(node, lines)
        op: Any = node.target
        first = node.args[0]
        twin = inplace_variant(op)
        over_first = isinstance(first, fx.Node) and self._name(first) == self._name(node)
        if over_first and twin is not None and (is_pointwise(op) or self.plan.how[node] == "inplace"):
            self._say(lines, self._inplace(node, twin, target), node)
            return
        found = out_variant(op, device_key(info(node).value))
        assert found is not None, op
        overload, extra, outs = found
        if not self.in_tile and in_parts(node):
            self._in_parts(node, target, lines)
        else:
            self._say(lines, self._out_call(node, overload, extra, outs[0], target), node)

    def _in_parts(self, node: fx.Node, target: str, lines: list[str]) -> None:
        """A product of few rows of a batch, by some of its own rows at a time."""
        left, right = (self._arg(a) for a in node.args)
        self.namespace["parts"] = parts
        lines.append(f"for some, part in parts({left}, {target}):")
        self._say(lines, f"    torch.mm(some, {right}, out=part)", node)
        lines.append("del some, part")

    def _inplace(self, node: fx.Node, twin: Any, target: str) -> str:
        method = getattr(torch.Tensor, base_name(twin), None)
        args, keywords = self._arguments(node)
        values, named = self._values(node)
        if method is not None and reaches(twin, method, base_name(twin), values, named):
            return f"{target}.{base_name(twin)}({', '.join(args[1:] + keywords)})"
        return f"{self._function(twin)}({', '.join(args + keywords)})"

    def _out_call(self, node: fx.Node, overload: Any, extra: Any, out: str, target: str) -> str:
        args, keywords = self._arguments(node)
        args += [literal(e) for e in extra]
        values, named = self._values(node)
        entry = getattr(torch, base_name(overload), None)
        call = {**named, "out": info(node).value}
        if entry is not None and reaches(overload, entry, base_name(overload), [*values, *extra], call):
            return f"torch.{base_name(overload)}({', '.join(args + keywords)}, out={target})"
        called = form_at_once(self.plan, node) if node in self.prompt else overload
        return f"{self._function(called)}({', '.join(args + keywords)}, {out}={target})"

    def _functional(self, node: fx.Node, lines: list[str]) -> None:
        value = info(node).value
        if isinstance(value, (list, tuple)) and value:
            self._say(lines, f"{self._pattern(node, value)} = {self._call(node)}", node)
        elif value is None or isinstance(value, (list, tuple)):
            self._say(lines, self._call(node), node)
        else:
            self._say(lines, f"{variable(node)} = {self._call(node)}", node)

    def _pattern(self, node: fx.Node, values: Any) -> str:
        """A tuple to unpack results into; ``_`` where nothing reads one."""
        picked = {u.args[1]: u for u in node.users if u.target is GETITEM}
        names = []
        for index, value in enumerate(values):
            user = picked.get(index)
            if user is None:
                names.append("_")
            elif isinstance(value, (list, tuple)):
                names.append(f"({self._pattern(user, value)})")
            else:
                names.append(self._name(user))
        return ", ".join(names) + ("," if len(names) == 1 else "")

    def _mutable(self, node: fx.Node, lines: list[str]) -> None:
        twin = mutable_twin(node.target)
        assert twin is not None
        schema = [a.name for a in twin.op._schema.arguments]
        bound: dict[str, Any] = dict(zip(schema, node.args, strict=False)) | dict(node.kwargs)
        swap: dict[tuple[str, int | None], str] = {}
        for number, entry in enumerate(self.plan.written[node]):
            if not entry.in_place:
                name = variable(entry.leaf) if entry.leaf is not None else f"{variable(node)}_copy_{number}"
                lines.append(f"{name} = {self._cloned(entry.old)}")
                swap[entry.argument, entry.index] = name
        texts = []
        for name, value in bound.items():
            if isinstance(value, (list, tuple)) and value and all(isinstance(v, fx.Node) for v in value):
                items = [swap.get((name, i)) or self._arg(v) for i, v in enumerate(value)]
                texts.append(keyword(name, self._list(items)))
            else:
                texts.append(keyword(name, swap.get((name, None)) or self._arg(value)))
        call = f"{self._function(twin.op)}({', '.join(texts)})"
        if twin.fresh:
            picked = {u.args[1]: self._name(u) for u in node.users if u.target is GETITEM}
            names = [picked.get(i, "_") for i in range(twin.fresh)]
            extra = [r for r in twin.op._schema.returns if r.alias_info and r.alias_info.is_write]
            unpacked = ", ".join(names) if len(names) + len(extra) > 1 else names[0]
            call = f"{unpacked}{', *_' if extra else ''} = {call}"
        self._say(lines, call, node)

    def _cloned(self, node: fx.Node) -> str:
        if is_dense(info(node).value):
            return f"{self._name(node)}.clone()"
        self.namespace["clone_as_it_lies"] = clone_as_it_lies
        return f"clone_as_it_lies({self._name(node)})"

    def _list(self, names: list[str]) -> str:
        """A list of tensors, made once where all of them last."""
        text = f"[{', '.join(names)}]"
        return self._list_of(text) if all(name in self.stable for name in names) else text

    def _list_of(self, text: str) -> str:
        """A variable that `bind` gives the value of ``text``, once."""
        if text not in self.lists:
            self.lists[text] = f"list_{len(self.lists)}"
            self.bound.append(f"{self.lists[text]} = {text}")
        return self.lists[text]
