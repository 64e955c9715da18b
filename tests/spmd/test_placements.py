"""Meshes, placements, and every change from one placement to another against a naive one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce

import pytest
import torch
from torch import fx

import wholestep as ws
from wholestep import comm
from wholestep.comm.ops.functional_collectives import piece
from wholestep.errors import PlanError
from wholestep.ir import NodeInfo, set_info
from wholestep.spmd.expand.redistribute import RULES, redistribute, rule_of
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, local_shape, normal
from wholestep.testing import run_ranks
from wholestep.torch_compat import FakeTensorMode

R = ws.Replicate()
OPS = ("sum", "avg", "product", "max", "min")

# Oracle: the whole tensor from what all ranks hold, and what each holds from the whole ---------------------------

_FOLDS = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}


def whole_of(parts: dict[tuple[int, ...], torch.Tensor], placements: Sequence[Placement]) -> torch.Tensor:
    """Joins what ranks hold, by place in the mesh; the last axis first, as it split last."""
    if not placements:
        return parts[()]
    *outer, last = placements
    lines: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for place in sorted(parts):
        lines.setdefault(place[:-1], []).append(parts[place])
    joined = {}
    for place, line in lines.items():
        if isinstance(last, ws.Shard):
            joined[place] = torch.cat(line, last.dim)
        elif isinstance(last, ws.Partial):
            total = reduce(_FOLDS[last.op], line)
            joined[place] = total / len(line) if last.op == "avg" else total
        else:
            assert all(torch.equal(line[0], other) for other in line), "replicas differ"
            joined[place] = line[0]
    return whole_of(joined, outer)


def parts_of(
    whole: torch.Tensor, placements: Sequence[Placement], sizes: Sequence[int], seed: int
) -> dict[tuple[int, ...], torch.Tensor]:
    """What each place of a mesh holds of a tensor of small integers, exactly."""
    generator = torch.Generator().manual_seed(seed)
    parts = {(): whole}
    for placement, size in zip(placements, sizes, strict=True):
        new = {}
        for place, part in parts.items():
            if isinstance(placement, ws.Shard):
                pieces = list(part.chunk(size, placement.dim)) if part.shape[placement.dim] else []
                pieces += [part.narrow(placement.dim, 0, 0)] * (size - len(pieces))
            elif isinstance(placement, ws.Partial):
                pieces = _addends(part, placement.op, size, generator)
            else:
                pieces = [part] * size
            new.update({(*place, r): piece for r, piece in enumerate(pieces)})
        parts = new
    return parts


def _addends(part: torch.Tensor, op: str, size: int, generator: torch.Generator) -> list[torch.Tensor]:
    noise = [torch.randint(1, 9, part.shape, generator=generator).double() for _ in range(size - 1)]
    if op == "sum":
        return [*noise, part - sum(noise)]
    if op == "avg":
        return [*noise, part * size - sum(noise)]
    if op == "product":  # powers of two divide exactly
        noise = [2.0**n for n in noise]
        return [*noise, part / math.prod(noise)] if noise else [part]
    sign = 1 if op == "min" else -1
    return [*(part + sign * n for n in noise), part]


def redistributed(cases: list[tuple], sizes: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """In every rank: the results of all changes, by graphs of this rank's own."""
    mesh = ws.init_device_mesh("cpu", sizes)
    lines = [mesh.axis_group(axis) for axis in range(mesh.ndim)]
    found = []
    for shape, src, dst in cases:
        whole = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).double()
        mine = parts_of(whole, src, sizes, seed)[mesh.coordinates]
        found.append(graph_of(mine, shape, src, dst, lines)(mine))
    return found


def graph_of(local, shape, src, dst, lines) -> fx.GraphModule:
    graph = fx.Graph()
    node = set_info(graph.placeholder("x"), NodeInfo(FakeTensorMode().from_tensor(local)))
    for old, new, line in zip(src, dst, lines, strict=True):
        node = redistribute(graph, node, shape, old, new, line, NodeInfo(None))
    graph.output(node)
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def check(cases: list[tuple], sizes: tuple[int, ...], seed: int = 0) -> None:
    found = run_ranks(redistributed, math.prod(sizes), "thread", (cases, sizes, seed))
    places = list(itertools.product(*map(range, sizes)))
    for number, (shape, src, dst) in enumerate(cases):
        whole = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).double()
        parts = {place: found[rank][number] for rank, place in enumerate(places)}
        for place, part in parts.items():
            lines = [AxisGroup("", size, at) for size, at in zip(sizes, place, strict=True)]
            assert part.shape == local_shape(shape, dst, lines), (shape, src, dst, place)
        rounds = any(isinstance(item, ws.Partial) and item.op == "avg" for item in src)  # each rank divides, as in DDP
        wanted = {"rtol": 1e-14 if rounds else 0, "atol": 1e-14 if rounds else 0}
        torch.testing.assert_close(whole_of(parts, dst), whole, **wanted, msg=f"{shape, src, dst}")


SOME = [R, ws.Shard(0), ws.Shard(1), ws.Shard(-1), *(ws.Partial(op) for op in OPS)]


@pytest.mark.parametrize(("ranks", "shapes"), [(1, [(2, 3)]), (2, [(6, 4)]), (3, [(5, 2, 7), (0, 4)])])
def test_every_pair_of_placements_even_and_uneven(ranks, shapes):
    check([(shape, [a], [b]) for shape in shapes for a in SOME for b in SOME], (ranks,))


def test_the_table_has_every_pair():
    assert set(RULES) == set(itertools.product((ws.Replicate, ws.Shard, ws.Partial), repeat=2))


@pytest.mark.parametrize(
    ("src", "dst", "sent"),
    [
        (R, ws.Shard(0), 0),
        (ws.Shard(0), R, 3 * 1024),
        (ws.Partial(), ws.Shard(1), 3 * 1024),
        (ws.Partial(), R, 2 * 3 * 1024),
        (ws.Shard(0), ws.Shard(1), 3 * 256),
        (ws.Shard(0), ws.Shard(-2), 0),
        (ws.Shard(0), ws.Partial("max"), 3 * 1024),
    ],
)
def test_bytes_that_a_rank_sends(src, dst, sent):
    assert rule_of(normal(src, (32, 32)), normal(dst, (32, 32))).sends(4096, 4) == sent


@pytest.mark.parametrize("length", range(8))
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_pieces_are_those_of_chunk(length, ranks):
    chunks = [list(c) for c in torch.arange(length).chunk(ranks)] if length else []
    chunks += [[]] * (ranks - len(chunks))
    assert [list(range(*piece(length, ranks, rank))) for rank in range(ranks)] == chunks


def test_bad_placements():
    lines = [AxisGroup("", 2, 0)]
    with pytest.raises(PlanError, match=r"Shard\(dim=2\) of a tensor of shape \[3, 4\], which has dimensions 0 to 1"):
        local_shape((3, 4), [ws.Shard(2)], lines)
    with pytest.raises(PlanError, match="has no dimension"):
        local_shape((), [ws.Shard(0)], lines)
    with pytest.raises(PlanError, match="one of sum, avg"):
        ws.Partial("mean")


# Meshes -----------------------------------------------------------------------------------------------------------


def meshes() -> dict:
    cube = ws.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    plane, odd = cube["dp", "tp"], ws.DeviceMesh("cpu", [[6, 1], [3, 4]], mesh_dim_names=("a", "b"))
    lines = [comm.get_process_group_ranks(group) for group in cube.get_all_groups()]
    found = {
        "coordinate": cube.get_coordinate(), "plane": plane.mesh.tolist(), "line": cube["tp"].mesh.tolist(),
        "turned": cube["tp", "pp"].mesh.tolist(), "odd": odd.get_coordinate(), "sizes": (cube.size(), plane.size("dp")),
        "same groups": plane.get_group("tp") is cube.get_group(-1), "inside": plane.get_coordinate(), "lines": lines,
    }  # fmt: skip
    if odd.coordinates is None:
        with pytest.raises(PlanError, match="is not in DeviceMesh"):
            odd.get_group("a")
    else:
        found["column"] = comm.get_process_group_ranks(odd.get_group("a"))
    for wrong in ("cp", 3, ("dp", "dp")):
        with pytest.raises(PlanError):
            cube[wrong]
    with pytest.raises(PlanError, match="each of 0 to 7 at most once"):
        ws.DeviceMesh("cpu", [0, 0])
    return found


def test_a_mesh_of_three_axes_its_lines_and_its_parts():
    found = run_ranks(meshes, 8, "thread")
    for rank, each in enumerate(found):
        p, d, t = place = [rank // 4, rank // 2 % 2, rank % 2]
        assert each["coordinate"] == place and each["sizes"] == (8, 2) and each["inside"] == [d, t]
        firsts = {4: rank - 4 * p, 2: rank - 2 * d, 1: rank - t}
        assert each["lines"] == [[first, first + stride] for stride, first in firsts.items()]
        assert each["plane"] == [[4 * p, 4 * p + 1], [4 * p + 2, 4 * p + 3]]
        assert each["line"] == [rank - t, rank - t + 1] and each["same groups"]
        assert each["turned"] == [[2 * d, 2 * d + 4], [2 * d + 1, 2 * d + 5]]
    assert [each["odd"] for each in found] == [None, [0, 1], None, [1, 0], [1, 1], None, [0, 0], None]
    assert [found[rank]["column"] for rank in (6, 1)] == [[3, 6], [1, 4]]
