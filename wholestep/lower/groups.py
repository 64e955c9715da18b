"""Writes the lines of a group: the loop over tiles, and one call for many small tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from wholestep.ir import info, is_host
from wholestep.lower.calls import CallWriter
from wholestep.lower.lives import Plan
from wholestep.lower.memory import at, pieces, tiles
from wholestep.lower.ops import aten, base_name, inplace_variant
from wholestep.lower.order import BATCH_OPS
from wholestep.lower.spell import NUMBER_AS_TENSOR


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
