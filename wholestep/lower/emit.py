"""Writes the program: straight-line Python, one line for each kernel, from a plan.

The source defines ``bind(inputs, arena, scratch, tile)``, which makes every view of lasting memory once and
returns ``run(inputs)``, the hot path. What the source refers to is in the namespace that comes with it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.ir import GETITEM, info, is_host
from wholestep.lower.memory import Recycler, at, cells_of, filled, pieces, tiles
from wholestep.lower.ops import (
    FILLS,
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
from wholestep.lower.order import BATCH_OPS, Item
from wholestep.lower.plan import Plan, variable
from wholestep.lower.spell import NUMBER_AS_TENSOR, Speller, keyword, literal, one_line
from wholestep.lower.values import device_key, origin_of, recyclable

STABLE_KINDS = ("parameter", "buffer", "state", "grad")

_SYMBOLS: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**",
    operator.floordiv: "//", operator.mod: "%", operator.lt: "<", operator.le: "<=", operator.gt: ">",
    operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


@dataclass
class Source:
    """The program's text and what it refers to.

    Attributes:
        text: Python source of ``bind``.
        namespace: globals for it.
        viewed: indices of inputs whose memory is bound ahead.
        scratch: number of scratch buffers by dtype.
    """

    text: str
    namespace: dict[str, Any]
    viewed: list[int]
    scratch: dict[torch.dtype, int] = field(default_factory=dict)


def emit(plan: Plan) -> Source:
    """Writes the program of a plan."""
    return _Writer(plan).write()


class _Writer(Speller):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.inputs = plan.step.placeholders
        self.made: set[str] = set()
        self.lists: dict[str, str] = {}
        self.dying: dict[int, list[str]] = {}
        self.scratch: dict[torch.dtype, int] = {}
        self.phase = ""
        self.assigned: set[str] = set()
        self.scanned = 0
        self.constants = set(plan.constant)

    def write(self) -> Source:
        kinds = [i.kind for i in self.plan.step.signature.inputs]
        written = set(self.plan.step.signature.mutations.values())
        viewed = []
        for index, node in enumerate(self.inputs):
            if kinds[index] in STABLE_KINDS and isinstance(info(node).value, torch.Tensor):
                self.stable.add(variable(node))
                viewed.append(index)
                if node.users or index in written:
                    self.bound.append(f"{variable(node)} = inputs[{index}].detach()  # {self._source(index)}")
            elif node.users or index in written:
                self.body.append(f"{variable(node)} = inputs[{index}]  # {self._source(index)}")
        for node in self.plan.step.graph.nodes:
            if node.op == "get_attr":
                self.stable.add(variable(node))
                self.namespace[variable(node)] = _constant(plan_owner(self.plan), str(node.target))
        for node in self.plan.constant:
            self._constant(node)
        self._find_deaths()
        self._copies(-1)
        for index, item in enumerate(self.plan.items):
            self._item(index, item)
            self._copies(index)
            self._delete(index)
        self._finish()
        return Source(self._text(), self.namespace, viewed, self.scratch)

    def _source(self, index: int) -> str:
        return one_line(self.plan.step.signature.inputs[index].source)

    # Items

    def _item(self, index: int, item: Item) -> None:
        nodes = [n for n in item.nodes if self.plan.how[n] not in ("skip",) and n not in self.constants]
        if not nodes:
            return
        phase = info(nodes[0]).phase
        if phase != self.phase and not all(self.plan.how[n] == "view" for n in nodes):
            self.body += ["", f"# {phase}"]
            self.phase = phase
        if item.kind == "tile":
            self._tile(index, nodes)
        elif item.kind == "batch":
            self._batch(nodes)
        else:
            self._single(nodes[0], self.body)

    def _constant(self, node: fx.Node) -> None:
        self.stable.add(variable(node))
        if node.target in FILLS:
            value, number = info(node).value, FILLS[node.target](*node.args, **node.kwargs)
            self.namespace.setdefault("filled", filled)
            spec = f"{tuple(value.shape)}, {value.stride()}, {value.dtype}, '{value.device}'"
            self.bound.append(f"{variable(node)} = filled({literal(number)}, {spec})")
        else:
            self.bound.append(f"{variable(node)} = {self._call(node)}")

    def _single(self, node: fx.Node, lines: list[str]) -> None:
        how = self.plan.how[node]
        write = {
            "host": self._host, "view": self._view, "fill": self._fill, "copy": self._copy, "scatter": self._scatter,
            "wait": self._wait, "collective": self._collective,
            "inplace": self._out, "out": self._out, "call": self._functional, "mutable": self._mutable,
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
            elif store.kind == "fresh":
                lines.append(f"{name} = {self._fresh(node, value, spec)}")
        return self.in_tile.get(name, name)

    def _collective(self, node: fx.Node, lines: list[str]) -> None:
        target, (source, *rest) = self._destination(node, lines), node.args
        if self._arg(source) != target:
            lines.append(f"{target}.copy_({self._arg(source)})")
        twin = inplace_variant(node.target)  # type: ignore[arg-type]
        self._say(lines, f"{self._function(twin)}({', '.join([target, *map(self._arg, rest)])})", node)

    def _wait(self, node: fx.Node, lines: list[str]) -> None:
        self._say(lines, f"{self._function(node.target)}({self._arg(node.args[0])})", node)

    def _fresh(self, node: fx.Node, value: torch.Tensor, spec: str) -> str:
        if not recyclable(value):
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

    def _scatter(self, node: fx.Node, lines: list[str]) -> None:
        base, source, *rest = node.args
        target = self._destination(node, lines)
        if self._arg(base) != target:
            lines.append(f"{target}.copy_({self._arg(base)})")
        view = SCATTERS[node.target]
        args = ", ".join(
            [target, *(self._arg(a) for a in rest), *(keyword(k, self._arg(v)) for k, v in node.kwargs.items())]
        )
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
        self._say(lines, self._out_call(node, overload, extra, outs[0], target), node)

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
        return f"{self._function(overload)}({', '.join(args + keywords)}, {out}={target})"

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
                lines.append(f"{name} = {self._name(entry.old)}.clone()")
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

    # Groups

    def _tile(self, index: int, nodes: list[fx.Node]) -> None:
        shape = info(nodes[0]).value.shape
        count = math.prod(shape)
        names: dict[str, str] = {}  # variable -> expression for its tiles
        self._scratch_buffers(index)
        for node in nodes:
            operands = [o for o in node.all_input_nodes if isinstance(info(o).value, torch.Tensor)]
            for one in [o for o in operands if info(o).value.shape == shape] + [node]:
                name = self._name(one)
                if name in names:
                    continue
                if self.plan.store[one].kind == "scratch":
                    dtype = info(one).value.dtype
                    names[name] = f"pieces(scratch[{dtype}, {self.plan.store[one].index}], {count}, tile)"
                    self.stable.add(name)
                else:
                    if one is node:
                        self._destination(node, self.body)
                    names[name] = f"tiles({name}, tile)"
        self.namespace["tiles"], self.namespace["pieces"] = tiles, pieces
        self.in_tile = {name: f"{name}_t" for name in names}
        lasting = all(name in self.stable for name in names)
        zipped = f"zip({', '.join(names.values())})"
        inner: list[str] = []
        for node in nodes:
            self._single(node, inner)
        if lasting:
            self.bound.append(f"tiles_{index} = list({zipped})")
            zipped = f"tiles_{index}"
        self.body.append(f"for {', '.join(self.in_tile.values())}, in {zipped}:  # {count:,} elements by tiles")
        self.body += ["    " + line for line in inner]
        self.in_tile = {}

    def _scratch_buffers(self, index: int) -> None:
        for number, dtype in enumerate(self.plan.scratch.get(index, [])):
            self.scratch[dtype] = max(self.scratch.get(dtype, 0), number + 1)

    def _batch(self, nodes: list[fx.Node]) -> None:
        over = [n for n in nodes if isinstance(n.args[0], fx.Node) and self._name(n.args[0]) == self._name(n)]
        if not over and self._flat_unary(nodes):
            return
        text = (self._flat_inplace(over) or self._foreach(over)) if len(over) > 2 else None
        for node in nodes:
            if text is None or node not in over:
                self._single(node, self.body)
        if text is not None:
            self._say(self.body, text, over[0])

    def _flat_of(self, nodes: list[fx.Node]) -> str | None:
        """The variable of one tensor over all the places of some values, where they lie side by side."""
        store = self.plan.store[nodes[0]]
        mates = self.plan.flat.get(store.index) if store.kind == "slot" else None
        if mates is None or {self._name(n) for n in nodes} != {self._name(n) for n in mates}:
            return None
        name = f"flat_{store.index}"
        if name not in self.stable:
            slot, dtype = self.plan.slots[store.index], info(nodes[0]).value.dtype
            self.namespace["at"] = at
            shape = f"({slot.nbytes // dtype.itemsize},), (1,)"
            self.bound.append(f"{name} = at(arena['{slot.device}'], {slot.offset}, {shape}, {dtype})")
            self.stable.add(name)
        return name

    def _flat_unary(self, nodes: list[fx.Node]) -> bool:
        """Copies the operands side by side, then runs the operator once."""
        sources = [self._name(n.args[0]) for n in nodes]  # type: ignore[arg-type]
        flat = self._flat_of(nodes)
        twin = inplace_variant(nodes[0].target)  # type: ignore[arg-type]
        if flat is None or twin is None or not all(name in self.stable for name in sources):
            return False
        for node in nodes:
            self._destination(node, self.body)
        parts = f"[{', '.join(f'{name}.view(-1)' for name in sources)}]"
        self._say(self.body, f"torch.cat({self._list_of(parts)}, out={flat})", nodes[0])
        self._say(self.body, f"{flat}.{base_name(twin)}()", nodes[0])
        return True

    def _flat_inplace(self, nodes: list[fx.Node]) -> str | None:
        """One call for values side by side that all meet the same number."""
        op: Any = nodes[0].target
        if op not in NUMBER_AS_TENSOR or (flat := self._flat_of(nodes)) is None:
            return None
        numbers = {self._number(n, n.args[1]) for n in nodes}
        if len(numbers) != 1 or any(isinstance(a, fx.Node) and not is_host(a) for a in (n.args[1] for n in nodes)):
            return None
        return f"{flat}.{base_name(op)}_({numbers.pop()})"

    def _foreach(self, nodes: list[fx.Node]) -> str | None:
        op = nodes[0].target
        columns = list(zip(*[n.args for n in nodes], strict=True))
        lists = [self._list([self._name(a) for a in columns[0]])]  # type: ignore[arg-type]
        scale: str | None = None
        for column in columns[1:]:
            tensors = all(isinstance(a, fx.Node) and isinstance(info(a).value, torch.Tensor) for a in column)
            if op in NUMBER_AS_TENSOR:
                items = [self._number(n, a) for n, a in zip(nodes, column, strict=True)]
                lists.append(self._list(items))
            elif tensors:
                lists.append(self._list([self._name(a) for a in column]))  # type: ignore[arg-type]
            elif len(set(column)) == 1:
                scale = self._arg(column[0])
            else:
                return None
        values = [n.kwargs.get("value", 1) for n in nodes]
        if op in (aten.addcmul.default, aten.addcdiv.default):
            same = len({repr(v) for v in values}) == 1
            scale = f"value={self._arg(values[0])}" if same else f"[{', '.join(self._arg(v) for v in values)}]"
        return f"torch.{BATCH_OPS[op]}({', '.join(lists + ([scale] if scale else []))})"

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

    # Ends

    def _find_deaths(self) -> None:
        last: dict[str, int] = {}
        for item in self.plan.items:
            for node in item.nodes:
                kind = self.plan.store.get(node)
                if kind is None or kind.kind not in ("call", "fresh") or node in self.constants:
                    continue
                if not isinstance(info(node).value, torch.Tensor):
                    continue
                root = self.plan.root[node]
                name = self._name(node)
                last[name] = max(last.get(name, -1), self.plan.last_item.get(root, -1))
        for name, index in last.items():
            self.dying.setdefault(index, []).append(name)

    def _delete(self, index: int) -> None:
        assigned = self._scan()
        live = [n for n in self.dying.get(index, []) if n in assigned]
        if live:
            self.body.append(f"del {', '.join(live)}")

    def _scan(self) -> set[str]:
        """Variables that the body has assigned so far."""
        for line in self.body[self.scanned :]:
            head = line.split(" = ", 1)[0] if " = " in line else ""
            self.assigned |= {part.strip(" ()*") for part in head.split(",")}
        self.scanned = len(self.body)
        return self.assigned

    def _copies(self, index: int) -> None:
        for into, node in self.plan.copies.get(index, []):
            self.body.append(f"{variable(self.inputs[into])}.copy_({self._name(node)})  # {self._source(into)}")

    def _finish(self) -> None:
        """Clones first, since they may read old values; then the last copies; then the result."""
        last = len(self.plan.items)
        results = []
        for index, (kind, value) in enumerate(self.plan.returned):
            if kind == "input":
                results.append(f"inputs[{value}]")
            elif kind == "clone":
                self.body.append(f"result_{index} = {self._name(value)}.clone()")
                results.append(f"result_{index}")
            else:
                results.append(self._arg(value))
        pairs = self.plan.copies.get(last, [])
        safe = []
        for number, (into, node) in enumerate(pairs):
            name = self._name(node)
            if self.plan.store[self.plan.root[node]].kind == "input":
                self.body.append(f"new_{number} = {name}.clone()")
                name = f"new_{number}"
            safe.append(f"{variable(self.inputs[into])}.copy_({name})  # {self._source(into)}")
        self.body += [*safe, f"return [{', '.join(results)}]"]

    def _text(self) -> str:
        for dtype, cells in self.cells.items():
            short = str(dtype).removeprefix("torch.")
            self.namespace["cells"] = cells_of
            self.bound.insert(0, f"{short}_cells, tensors_{short} = cells({cells}, {dtype})")
        plan, kernels = self.plan, sum(h in _KERNELS for h in self.plan.how.values())
        total = sum(plan.arena.values())
        lines = [
            f"# after {plan.step.stage}: {kernels} kernels, arena {total:,} bytes (most alive at once {plan.peak:,})",
            *self.head,
            "",
            "def bind(inputs, arena, scratch, tile):",
            *("    " + line for line in self.bound),
            "",
            "    def run(inputs):",
            *("        " + line if line else "" for line in self._with_cells()),
            "",
            "    return run",
        ]
        return "\n".join(lines) + "\n"


_KERNELS = ("fill", "copy", "scatter", "collective", "inplace", "out", "call", "mutable")


def plan_owner(plan: Plan) -> Any:
    """The module that holds a graph's constants."""
    return plan.step.gm


def _constant(owner: Any, target: str) -> Any:
    for part in target.split("."):
        owner = getattr(owner, part)
    return owner
