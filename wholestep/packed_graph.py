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
from types import NoneType
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from wholestep.fake_layouts import strict_fake_mode
from wholestep.ir import NodeInfo, StepGraph, set_info
from wholestep.sizes import plain
from wholestep.torch_compat import FakeTensor, FakeTensorMode, lazy_graph_module, no_modes

# What is pickled; subclasses of these and all other types are kept by reference.
PLAIN = {NoneType, bool, int, float, complex, str, tuple, list, dict, slice, immutable_list, immutable_dict, torch.Size}


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
            record = node.meta.get("info")
            packer.dump((node.op, node.name, node.target, node.args, node.kwargs, _plain_record(record), meta))
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
        graph, nodes, mode = fx.Graph(), list[fx.Node](), strict_fake_mode()
        file = io.BytesIO(zlib.decompress(self._text))
        loader = _Loader(file, self._kept, nodes)
        while file.tell() < len(file.getbuffer()):
            op, name, target, args, kwargs, record, meta = loader.load()
            if not sized and self.signature.sizes is not None:
                args, kwargs = plain((args, kwargs))
                record = record and (plain(record[0]), *record[1:])
            node = graph.create_node(op, target, args, kwargs, name)
            node.meta.update(meta)
            if record is not None:
                value, *others = record
                set_info(node, NodeInfo(_fakes(value, mode), *others))
            nodes.append(node)
        return graph


class _Packer(pickle.Pickler):
    """Nodes go by their position from the end of what was kept, other objects by their place there."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.kept, self.places = kept, dict[Any, int]()
        self.nodes: dict[fx.Node, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        kind = type(value)
        if kind in PLAIN:
            return None
        if kind is fx.Node:
            return -1 - self.nodes[value]
        key = (kind, str(value)) if kind in (torch.dtype, torch.device) else id(value)
        if key not in self.places:
            self.places[key] = len(self.kept)
            self.kept.append(value)
        return self.places[key]


class _Loader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any], nodes: list[fx.Node]) -> None:
        super().__init__(file)
        self.kept, self.nodes = kept, nodes

    def persistent_load(self, place: int) -> Any:
        return self.kept[place] if place >= 0 else self.nodes[-1 - place]


class _Layout:
    """Stands for a fake tensor."""


def _plain_record(record: Any) -> tuple[Any, ...] | None:
    if not isinstance(record, NodeInfo):
        return None
    place = record.phase, record.seq, record.where, record.module, record.placement
    return (_plain(record.value), *place, record.part, record.recomputed)


def _plain(value: Any) -> Any:
    """A value with each fake tensor's layout in its place, where that is all there is to it."""
    if type(value) is FakeTensor and value.layout is torch.strided and not value.is_conj() and not value.is_neg():
        return (_Layout, value.size(), value.stride(), value.dtype, value.device)
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _fakes(value: Any, mode: FakeTensorMode) -> Any:
    if type(value) not in (tuple, list):
        return value
    if value and value[0] is _Layout:
        _, size, stride, dtype, device = value
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)
    return type(value)(_fakes(item, mode) for item in value)
