"""Process groups that have one user each, and one thread that posts on each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire import _compat
from thinwire.collectives.exchange import Members
from thinwire.errors import ConfigError

# Groups that are free, by world and ranks. torch reuses a destroyed group's name and with it the addresses that
# its members left in the store, so a group is kept and used again instead.
_idle_groups: dict[tuple[object, tuple[int, ...]], list[dist.ProcessGroup]] = {}
# The numbers of the next groups of the same ranks.
_made_groups: dict[tuple[object, tuple[int, ...]], Iterator[int]] = {}


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
    if ranks == list(range(dist.get_world_size())):
        return Members(dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo"), ranks, rank)
    # Ranks may be in different numbers of groups, but all of these have made equally many groups with each other.
    number = next(_made_groups.setdefault((dist.group.WORLD, tuple(ranks)), itertools.count()))
    name = f"thinwire {number} of {'-'.join(map(str, ranks))}"
    return Members(_compat.named_group(name, ranks, timeout_s), ranks, rank)


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


def forget_groups() -> None:
    """Drop the free groups, before their world is destroyed."""
    _idle_groups.clear()
    _made_groups.clear()
