"""Names, sizes and ranks of a mesh."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.hosts.ranks import along
from thinwire.layout.mesh import AXES


def check_mesh(mesh: object) -> None:
    """Raise ConfigError for what is no DeviceMesh."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"parallelize got {mesh!r} as its mesh: must be a DeviceMesh; nearest: torch.distributed.init_device_mesh("
            "'cpu', (2,), mesh_dim_names=('data',))"
        )


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's dimensions; empty if it has none."""
    return tuple(mesh.mesh_dim_names or ())


def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """The number of ranks along each named axis of a mesh."""
    return dict(zip(names_of(mesh), mesh.mesh.shape, strict=False))


def shape_of(mesh: DeviceMesh) -> str:
    """The mesh as text, such as data=2,tensor=2."""
    return ",".join(f"{name}={size}" for name, size in zip(names_of(mesh), mesh.mesh.shape, strict=True))


def places_of(mesh: DeviceMesh) -> Tensor:
    """The ranks of a mesh, or of its first island, by the axes pipeline, data and tensor."""
    names = names_of(mesh)
    ranks = mesh.mesh.permute([names.index(name) for name in AXES if name in names])
    return ranks[0] if "island" in names else ranks


def stride_of(mesh: DeviceMesh, axis: str) -> int:
    """Distance in a flat mesh between neighbours on an axis: the number of ranks of the axes inside it."""
    names = names_of(mesh)
    return math.prod(mesh.mesh.shape[names.index(axis) + 1 :])


def holders_of(mesh: DeviceMesh, axis: str) -> list[int]:
    """The ranks of a mesh that have this rank's coordinate on one of its axes."""
    place = mesh.get_coordinate()
    assert place is not None
    dim = names_of(mesh).index(axis)
    return mesh.mesh.select(dim, place[dim]).flatten().tolist()


def node_inside(mesh: DeviceMesh, inside: DeviceMesh, local_size: int | None) -> int | None:
    """Ranks per node inside an island, computed from `local_size`, which counts ranks of the whole mesh."""
    if local_size is None or inside.size() == mesh.size():
        return local_size
    ranks = mesh.mesh.flatten().tolist()
    members = [ranks.index(rank) for rank in inside.mesh.flatten().tolist()]
    return along(Topology.stated(len(ranks), local_size), members)
