"""Writes the lines of a group: a chain, the loop over tiles, and one call for many small tensors."""

from __future__ import annotations

import math

import torch
from torch import fx

from wholestep.ir import info
from wholestep.lower.codegen.bind_memory import at, pieces, tiles
from wholestep.lower.codegen.call_lines import CallWriter
from wholestep.lower.codegen.literals import NUMBER_AS_TENSOR
from wholestep.lower.fusion.blocked_matmuls import by_rows, is_product, rows_at_once
from wholestep.lower.fusion.chains import chain, chain_step, kernel_of
from wholestep.lower.fusion.fusible import BATCH_OPS
from wholestep.lower.plan.liveness import Plan, variable
from wholestep.lower.plan.operator_facts import aten, base_name


class GroupWriter(CallWriter):
    """Tiles and batches.

    Attributes:
        scratch: number of scratch buffers by dtype.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.scratch: dict[torch.dtype, int] = {}

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
        if not lasting:
            self.body.append(f"del {', '.join(self.in_tile.values())}")  # they hold the memory of their tensors
        self.in_tile = {}

    def _chain(self, index: int, nodes: list[fx.Node]) -> None:
        """One call of a compiled kernel; the operators that it runs follow as comments."""
        memory: dict[str, str] = {}
        given: list[str] = []
        rows, words = [], []
        (product, *_) = *(node for node in nodes if is_product(node)), None
        if product is not None and self.plan.store[product].kind != "scratch":
            self._single(product, self.body)
        for node in nodes:
            if node is product:
                continue
            step = chain_step(node)
            assert step is not None
            operands = [self._name(o) for o in step.operands]
            number = None if step.number is None else self._number(node, step.number)
            for one in [*step.operands, node]:
                if one is node and self.plan.store[one].kind != "scratch":
                    self._destination(node, self.body)
                if self.plan.store[one].kind != "scratch":
                    self._operand(self._name(one), memory, given)
            if number is not None:
                self._operand(number, memory, given)
            name = self._name(node)
            rows.append((kernel_of(node, step), name, tuple(operands), number))
            called = ", ".join([*operands, *([number] if number else [])])
            words.append(f"#   {name} = {base_name(node.target)}({called})")  # type: ignore[arg-type]
        self.namespace["chain"] = chain
        count = math.prod(info(nodes[-1]).value.shape)
        lasting = f"{{{', '.join(f'{name!r}: {name}' for name in memory)}}}"
        addresses = [f"{name}.data_ptr()" for name in given]
        if product in self.plan.pieces:
            piece = self._piece(product)
            self.bound.append(f"chain_{index} = chain({count}, {rows}, {lasting}, {given}, {self._name(product)!r})")
            self._by_rows(index, product, piece, addresses)
        else:
            self.bound.append(f"chain_{index} = chain({count}, {rows}, {lasting}, {given})")
            self._say(self.body, f"chain_{index}({', '.join(addresses)})", nodes[-1])
        self.body += words

    def _by_rows(self, index: int, product: fx.Node, piece: str, addresses: list[str]) -> None:
        """The loop over a product's pieces, each of which the chain reads from the cache."""
        left = self._name(product.args[0])  # type: ignore[arg-type]
        self.namespace["by_rows"], parts = by_rows, f"by_rows({left}, {piece})"
        if left in self.stable:
            self.bound.append(f"parts_{index} = list({parts})")
            parts = f"parts_{index}"
        self.in_tile = {left: "some", self._name(product): "part"}
        inner: list[str] = []
        self._out(product, inner)
        self.in_tile = {}
        inner.append(f"chain_{index}({', '.join(['first', 'part', *addresses])})")
        self.body += [f"for first, some, part in {parts}:", *("    " + line for line in inner)]
        if left not in self.stable:
            self.body.append("del some, part")

    def _piece(self, product: fx.Node) -> str:
        """The variable of memory for some rows of a product."""
        value, slot = info(product).value, self.plan.slots[self.plan.pieces[product]]
        name = f"{variable(product)}_rows"
        shape = (rows_at_once(value), value.shape[1])
        spec = f"{slot.offset}, {shape}, {(shape[1], 1)}, {value.dtype}"
        self.bound.append(f"{name} = at(arena['{slot.device}'], {spec})")
        self.namespace["at"] = at
        self.made.add(variable(product))
        return name

    def _operand(self, name: str, memory: dict[str, str], given: list[str]) -> None:
        if name in self.stable:
            memory[name] = name
        elif name not in given:
            given.append(name)

    def _scratch_buffers(self, index: int) -> None:
        for number, dtype in enumerate(self.plan.scratch.get(index, [])):
            self.scratch[dtype] = max(self.scratch.get(dtype, 0), number + 1)

    def _batch(self, nodes: list[fx.Node]) -> None:
        over = [n for n in nodes if isinstance(n.args[0], fx.Node) and self._name(n.args[0]) == self._name(n)]
        text = self._foreach(over) if len(over) > 2 else None
        for node in nodes:
            if text is None or node not in over:
                self._single(node, self.body)
        if text is not None:
            self._say(self.body, text, over[0])

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
