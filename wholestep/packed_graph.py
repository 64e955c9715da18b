"""Packed graphs: a `StepGraph` pickled to some hundred bytes a node, unpacked when somebody looks at it.

Once it is lowered, a program needs its graph no more, and fx nodes with their fake tensors take some 6 KB a call.
Tensors, operators and functions are kept by reference, all else is pickled.
May import: fake_layouts, ir, sizes, torch_compat.
"""

from __future__ import annotations

import io
import operator
import pickle
import weakref
import zlib
from dataclasses import fields
from types import NoneType
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from wholestep.fake_layouts import is_plain, new_fake, strict_fake_mode
from wholestep.ir import NodeInfo, StepGraph, set_info
from wholestep.sizes import has_size, plain
from wholestep.torch_compat import FakeTensor, lazy_graph_module, no_modes

# What is pickled; subclasses of these and all other types are kept by reference.
PLAIN = {NoneType, bool, int, float, complex, str, tuple, list, dict, slice, immutable_list, immutable_dict, torch.Size}
FIELDS = operator.attrgetter(*(field.name for field in fields(NodeInfo)))


class Packed:
    """One graph, pickled and compressed."""

    def __init__(self, step: StepGraph) -> None:
        self.signature, self.stage = step.signature, step.stage
        self._kept: list[Any] = []
        self._constants: dict[str, Any] = {}
        file = io.BytesIO()
        packer = _Packer(file, self._kept)
        for node in step.graph.nodes:
            meta = {key: value for key, value in node.meta.items() if key not in ("info", "val")}
            packer.dump((node.op, node.name, node.target, node.args, node.kwargs, node.meta.get("info"), meta))
            packer.nodes[node] = len(packer.nodes)
            if node.op == "get_attr":
                self._constants[str(node.target)] = operator.attrgetter(str(node.target))(step.gm)
        self._text = zlib.compress(file.getvalue(), 1)
        self._unpacked: weakref.ref[fx.GraphModule] | None = None

    def unpack(self, sized: bool = False) -> StepGraph:
        """The graph again, the same object as long as somebody holds it.

        Args:
            sized: with numbers that know what they are at other sizes, where it had such, instead of plain ones.
        """
        gm = self._unpacked() if self._unpacked is not None and not sized else None
        if gm is None:
            with no_modes():
                gm = lazy_graph_module(self._constants, self._graph(sized))
            self._unpacked = self._unpacked if sized else weakref.ref(gm)
        return StepGraph(gm, self.signature, self.stage)

    def _graph(self, sized: bool) -> fx.Graph:
        graph, file = fx.Graph(), io.BytesIO(zlib.decompress(self._text))
        loader = _Loader(file, self._kept, sized or self.signature.sizes is None)
        while file.tell() < len(file.getbuffer()):
            op, name, target, args, kwargs, record, meta = loader.load()
            node = graph.create_node(op, target, args, kwargs, name)
            node.meta.update(meta)
            if record is not None:
                set_info(node, record)
            loader.nodes.append(node)
        return graph


class _Packer(pickle.Pickler):
    """Nodes go by their position from the end of what was kept, other objects by their place there; records by their
    fields, and fake tensors by their layout, where that is all there is to them."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.kept, self.places = kept, dict[Any, int]()
        self.nodes: dict[fx.Node, int] = {}

    def persistent_id(self, value: Any) -> int | tuple[Any, ...] | None:
        kind = type(value)
        if kind in PLAIN:
            return None
        if kind is fx.Node:
            return -1 - self.nodes[value]
        if kind is NodeInfo:
            return FIELDS(value)  # type: ignore[no-any-return]
        if kind is FakeTensor and is_plain(value):
            return value.size(), value.stride(), value.dtype, value.device
        key = (kind, str(value)) if kind in (torch.dtype, torch.device) else id(value)
        if key not in self.places:
            self.places[key] = len(self.kept)
            self.kept.append(value)
        return self.places[key]


class _Loader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any], sized: bool) -> None:
        super().__init__(file)
        self.kept, self.nodes, self.sized, self.mode = kept, list[fx.Node](), sized, strict_fake_mode()

    def persistent_load(self, place: Any) -> Any:
        if isinstance(place, tuple):
            return new_fake(self.mode, *place) if len(place) == 4 else NodeInfo(*place)
        if place < 0:
            return self.nodes[-1 - place]
        found = self.kept[place]
        return plain(found) if not self.sized and has_size(found) else found
