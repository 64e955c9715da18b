"""Groups along the axes of a mesh of one to three dimensions."""

import numpy
import pytest
import torch

import wholestep as ws
from wholestep import comm
from wholestep.errors import PlanError
from wholestep.testing import run_ranks

NAMES = ("pipe", "data", "tensor")


def along_every_axis(shape):
    """This rank's groups, by axis: their members, and the sum of the ranks along them."""
    mesh = ws.init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)])
    found = {}
    for number, name in enumerate(mesh.mesh_dim_names):
        group = mesh.get_group(name)
        assert mesh.get_group(number) is mesh[name].get_group() is group
        assert mesh.size(name) == group.size() == shape[number]
        x = torch.tensor([comm.get_rank()])
        comm.all_reduce(x, group=group)
        seen = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        comm.all_gather(seen, torch.tensor([comm.get_rank()]), group=group)
        assert [int(one) for one in seen] == comm.get_process_group_ranks(group)
        found[name] = comm.get_process_group_ranks(group), int(x)
    assert mesh.get_coordinate() == [mesh.get_local_rank(name) for name in mesh.mesh_dim_names]
    with pytest.raises(PlanError, match="the mesh has no axis 'nope'"):
        mesh.get_group("nope")
    return mesh.get_coordinate(), found


@pytest.mark.parametrize(("shape", "transport"), [
    ((4,), "thread"), ((2, 3), "thread"), ((2, 2, 2), "thread"), ((3, 1, 2), "thread"), ((2, 2, 4), "thread"),
    ((2, 2), "shm"),
])  # fmt: skip
def test_groups_of_a_mesh(shape, transport):
    places = numpy.arange(numpy.prod(shape)).reshape(shape)
    for rank, (coordinate, found) in enumerate(run_ranks(along_every_axis, places.size, transport, (shape,))):
        assert places[tuple(coordinate)] == rank
        for axis, (members, total) in enumerate(found.values()):
            line = list(coordinate)
            line[axis] = slice(None)
            assert members == places[tuple(line)].tolist()
            assert total == sum(members)
