"""Tells which links between ranks are down, before a process group waits for them."""

from __future__ import annotations

import os

import torch.distributed as dist

from thinwire.calibration.reach import Pairs, links_down
from thinwire.errors import ThinwireError
from thinwire.launch.agent import LOOPBACK
from thinwire.launch.machine import interface_towards


def broken_links(store: dist.Store, rank: int, world_size: int) -> tuple[Pairs, list[str]]:
    """Pairs of ranks that can't connect, and a line about each. A collective; all ranks get the same result."""
    found = interface_towards(os.environ["MASTER_ADDR"])
    down = links_down(store, rank, world_size, found[1] if found else LOOPBACK)
    return down, [f"the link between ranks {a} and {b} is down: no connection is made" for a, b in down]


def require_links(store: dist.Store, rank: int, world_size: int, asked: str) -> None:
    """Raise ThinwireError on all ranks if two of them can't connect. asked: the option that needs it. A collective."""
    _, lines = broken_links(store, rank, world_size)
    if lines:
        raise ThinwireError(
            f"{asked}: {'; '.join(lines)}. Training connects all ranks: mend the link, or leave out one of its nodes"
        )
