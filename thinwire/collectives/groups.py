"""Process groups that have one user each, and one thread that posts on each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives.exchange import Members
from thinwire.errors import ConfigError

# Groups that are free, by world and ranks. torch reuses a destroyed group's name and with it the addresses that
# its members left in the store, so a group is kept and used again instead.
_idle_groups: dict[tuple[object, tuple[int, ...]], list[dist.ProcessGroup]] = {}


def own_members(group: dist.ProcessGroup | Sequence[int] | DeviceMesh | Members | None, timeout_s: float) -> Members:
    """A new process group over the same ranks, for one user only; no group for a single rank."""
    if isinstance(group, Members):
        return group
    ranks = joined_ranks(group)
    if len(ranks) == 1:
        return Members(None, ranks, 0)
    rank = ranks.index(dist.get_rank())
    idle = _idle_groups.get((dist.group.WORLD, tuple(ranks)))
    if idle:
        return Members(idle.pop(0), ranks, rank)
    # torch names a group of some ranks by the number of groups its maker is in, and hangs if ranks differ in it.
    local = len(ranks) < dist.get_world_size()
    own = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=local)
    return Members(own, ranks, rank)


def joined_ranks(group: dist.ProcessGroup | Sequence[int] | DeviceMesh | None) -> list[int]:
    """The global ranks of a group that this rank joins; [0] without a process group. Raises ConfigError."""
    if not dist.is_initialized():
        asked = int(os.environ.get("WORLD_SIZE", "1"))
        if group is not None or asked > 1:
            raise ConfigError(
                f"torch.distributed is not initialised but WORLD_SIZE is {asked}: "
                "call torch.distributed.init_process_group('gloo') first"
            )
        return [0]
    ranks = ranks_of(group)
    if dist.get_rank() not in ranks:
        raise ConfigError(f"rank {dist.get_rank()} is not in the group of ranks {ranks} it was asked to join")
    return ranks


def ranks_of(group: dist.ProcessGroup | Sequence[int] | DeviceMesh | None) -> list[int]:
    """The global ranks of a group; None is the world. Raises ConfigError for a mesh of several dimensions."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = ", ".join(repr(name) for name in group.mesh_dim_names or ())
            raise ConfigError(f"a DeviceMesh of {group.ndim} dimensions is no group: give one of them, mesh[{names}]")
        group = group.get_group()
    if isinstance(group, Sequence):
        return list(group)
    return dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))


def give_back(members: Members) -> None:
    """Return a group from `own_members`, on which nothing failed, for the next user among these ranks."""
    if members.group is not None and dist.is_initialized():
        _idle_groups.setdefault((dist.group.WORLD, tuple(members.names)), []).append(members.group)


def reserve(group: dist.ProcessGroup | Sequence[int] | DeviceMesh | None, number: int, timeout_s: float) -> None:
    """Open `number` groups over these ranks in advance, for use when ranks may be in different numbers of groups.

    A collective over the ranks.
    """
    for members in [own_members(group, timeout_s) for _ in range(number)]:
        give_back(members)


def forget_groups() -> None:
    """Drop the free groups, before their world is destroyed."""
    _idle_groups.clear()
