"""The lines of a group of calls: a compiled chain, the loop over tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from wholestep.functional import base_name
from wholestep.ir import info
from wholestep.lower.codegen.call_lines import CallWriter
from wholestep.lower.codegen.literals import commas
from wholestep.lower.fusion.blocked_matmuls import is_product, rows_at_once
from wholestep.lower.fusion.chains import chain_step, kernel_of
from wholestep.lower.fusion.fused_updates import cut_lists


class GroupWriter:
    """Writes groups, by way of what writes their calls."""

    def __init__(self, calls: CallWriter) -> None:
        self.calls, self.source, self.plan, self.reuse = calls, calls.source, calls.plan, calls.reuse

    def tile(self, index: int, nodes: list[fx.Node]) -> None:
        """A loop over pieces that stay in the cache, with torch's kernels inside."""
        shape, count = info(nodes[0]).value.shape, info(nodes[0]).value.numel()
        over: dict[str, str] = {}  # variable -> expression for its tiles
        lasts = True
        for node in nodes:
            operands = [o for o in node.all_input_nodes if isinstance(info(o).value, torch.Tensor)]
            for one in [*(o for o in operands if info(o).value.shape == shape), node]:
                name, store = self.source.name(one), self.reuse.store[one]
                if name in over:
                    continue
                if store.in_cache:
                    over[name] = f"pieces(scratch[{info(one).value.dtype}, {store.index}], {count}, tile)"
                else:
                    if one is node:
                        self.calls.destination(node)
                    over[name] = f"tiles({name}, tile)"
                    lasts = lasts and name in self.source.lasting
        tiles = f"zip({commas(over.values())})"
        if lasts:
            tiles = self.source.bind(f"tiles_{index}", f"list({tiles})")
        self.source.in_tile = {name: f"{name}_t" for name in over}
        with self.source.loop([*self.source.in_tile.values()], tiles, f"{count:,} elements by tiles", not lasts):
            for node in nodes:
                self.calls.write(node)
        self.source.in_tile = {}

    def chain(self, index: int, nodes: list[fx.Node]) -> None:
        """One call of a compiled kernel; the operators that it runs follow as comments."""
        memory: dict[str, None] = {}  # names, in order
        rows, words = [], []
        product = next((node for node in nodes if is_product(node)), None)
        by_rows = product is not None and self.reuse.store[product].kind == "rows"
        if product is not None and not by_rows:
            self.calls.write(product)
        for node in nodes:
            if node is product:
                continue
            step = chain_step(node)
            assert step is not None
            number = None if step.number is None else self.source.operand(node, step.number)
            if not self.reuse.store[node].in_cache:
                self.calls.destination(node)
            operands = [self.source.name(o) for o in step.operands]
            memory |= {self.source.name(o): None for o in (*step.operands, node) if not self.reuse.store[o].in_cache}
            name = self.source.name(node)
            read = commas(map(repr, operands))
            rows.append(f"({kernel_of(node, step)!r}, {name!r}, ({read},), {number!r})")
            if number is not None:
                memory[number] = None
                operands.append(number)
            words.append(f"#   {name} = {base_name(node.target)}({', '.join(operands)})")  # type: ignore[arg-type]
        given = [name for name in memory if name not in self.source.lasting]
        parts = f", {self.source.name(product)!r}" if product is not None and by_rows else ""
        count = info(nodes[-1]).value.numel()
        text = f"chain({count}, [{commas(rows)}], globals(), [{commas(map(repr, given))}]{parts})"
        run, addresses = self.source.bind(f"chain_{index}", text), [f"{name}.data_ptr()" for name in given]
        if product is not None and by_rows:
            self._by_rows(index, product, commas(["first", "part", *addresses]))
        else:
            self.source.line(f"{run}({commas(addresses)})", nodes[-1])
        for word in words:
            self.source.line(word)

    def update(self, index: int, nodes: list[fx.Node]) -> None:
        """A fused optimizer's call on some rows of a parameter at a time, right after these rows of its gradient."""
        product, call = nodes
        copies = self.calls.copies(call)
        names = [copies.get((name, 0)) or self.source.name(node) for name, node in cut_lists(call)]
        rows = rows_at_once(info(product).value)
        with self._rows(index, product, {name: f"{name}.split({rows})" for name in names}):
            self.calls.write_mutable(call, copies)

    def _by_rows(self, index: int, product: fx.Node, arguments: str) -> None:
        """The loop over a product's rows, some of which at a time the chain reads from the cache."""
        with self._rows(index, product, {}):
            self.source.line(f"chain_{index}({arguments})")

    @contextmanager
    def _rows(self, index: int, product: fx.Node, beside: dict[str, str]) -> Iterator[None]:
        """A loop that computes some rows of a product at a time, for what is written inside.

        Args:
            beside: variable -> expression for its rows, of what is cut as the product is.
        """
        value, slot, left = info(product).value, self.reuse.store[product].slot, self.source.name(product.args[0])  # type: ignore[arg-type]
        assert slot is not None
        name, shape = self.source.name(product), (rows_at_once(value), value.shape[1])
        spec = f"{self.source.place(slot)}, {shape}, {(shape[1], 1)}, {value.dtype}"
        piece = self.source.bind(f"{name}_rows", f"at(arena['{slot.device}'], {spec})")
        self.calls.made.add(name)
        lasts, parts = self.source.lasting.issuperset([left, *beside]), f"by_rows({left}, {piece})"
        variables = ["first", "some", "part"]
        if beside:
            parts = f"zip({commas([parts, *beside.values()])})"
            variables = [f"({', '.join(variables)})", *(f"{one}_t" for one in beside)]
        if lasts:
            parts = self.source.bind(f"parts_{index}", f"list({parts})")
        self.source.in_tile = {left: "some", name: "part"} | {one: f"{one}_t" for one in beside}
        with self.source.loop(variables, parts, frees=not lasts):
            self.calls.write(product)
            yield
        self.source.in_tile = {}
