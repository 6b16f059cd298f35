"""Finds which ranks can connect to each other at all, before a process group connects them."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import torch.distributed as dist

from thinwire.collectives.store_gather import gather

CONNECT_S = 5.0
Pairs = list[tuple[int, int]]


def links_down(store: dist.Store, rank: int, world_size: int, address: str) -> Pairs:
    """Pairs of ranks that can't connect, the lower rank first. A collective; all ranks get the same result.

    A process group connects every rank with every other, so one such pair would prevent it.

    Args:
        store: one that all ranks can reach.
        address: where the other ranks should reach this rank.
    """
    with socket.create_server(("", 0), backlog=world_size) as server:
        told = gather(store, rank, world_size, (address, server.getsockname()[1]), "its address")
        others = [other for other in range(world_size) if other != rank]
        with ThreadPoolExecutor(max_workers=min(32, world_size)) as pool:
            reached = dict(zip(others, pool.map(_connects, [told[other] for other in others]), strict=True))
        lost = gather(store, rank, world_size, [other for other in others if not reached[other]], "whom it reaches")
    return sorted({(min(a, b), max(a, b)) for a, found in enumerate(lost) for b in found})


def all_connected(down: Sequence[tuple[int, int]], nodes: Sequence[int]) -> list[int]:
    """Ranks that can all connect to each other: the node with the most broken links is left out, until none is left.

    nodes: the node of each rank. The node of rank 0 always stays, because rank 0 writes the result. Of two nodes with
    equally many broken links, the first stays.
    """
    kept = set(nodes)
    while left := [pair for pair in down if nodes[pair[0]] in kept and nodes[pair[1]] in kept]:
        lost = Counter(node for pair in left for node in {nodes[rank] for rank in pair} if node != nodes[0])
        if not lost:
            break
        kept.remove(max(lost, key=lambda node: (lost[node], node)))
    return [rank for rank, node in enumerate(nodes) if node in kept]


def all_on_this_machine(world_size: int) -> bool:
    """Whether all ranks are workers of this machine, or meet at a loopback address, which no other machine reaches."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) >= world_size:
        return True
    try:
        return ip_address(socket.gethostbyname(os.environ.get("MASTER_ADDR", ""))).is_loopback
    except (OSError, ValueError):
        return False


def _connects(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, CONNECT_S).close()
    except OSError:
        return False
    return True
