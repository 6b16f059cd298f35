"""Islands that are killed, frozen or damaged, at any moment: the others go on, and whoever comes is one of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import thinwire
from tests.data_parallel.islands.test_library import Net, adamw, batch
from tests.workers import run_workers
from thinwire.collectives import ElasticPeers, faults, host_meeting
from thinwire.data_parallel.islands.library import Islands
from thinwire.errors import ThinwireError

TIMEOUT_S = 4.0
ISLANDS = 3
# A step takes that long at least, so that faults come while others train.
STEP_S = 0.02
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "diloco": (thinwire.DiLoCo, {"sync_every": 5, "outer_lr": 0.4}),
    "streaming": (
        thinwire.StreamingDiLoCo,
        {"sync_every": 10, "num_fragments": 2, "overlap_steps": 2, "outer_lr": 0.4},
    ),
}


def live(rank: int, world_size: int, meet: str, method: str, told: list[str], stay: int) -> dict[str, Any]:
    """Train as an island until `stay` steps and every island is there; what was seen on the way.

    Ranks from ISLANDS on are islands that were killed and come back, when somebody is missing.
    """
    comes_back = rank >= ISLANDS
    island = next(fault.island for fault in map(faults.parse, told) if fault.kind == "kill") if comes_back else rank
    if comes_back:
        time.sleep(2 * TIMEOUT_S)
    else:
        faults.arm(map(faults.parse, told), rank=rank, island=island, announce=lambda message: None)
    make, options = METHODS[method]
    model = Net(seed=rank)
    optimizer = adamw(model)
    peers = ElasticPeers(
        meet, island, timeout_s=TIMEOUT_S, max_islands=ISLANDS, min_islands=1 if comes_back else ISLANDS
    )  # fmt: skip
    hashes: dict[int, list[int]] = {}
    losses = []
    with make(model, optimizer, **options, peers=peers, announce=False) as islands:
        while islands.loop.steps < stay:
            faults.at_step(islands.loop.steps + 1)
            start = time.monotonic()
            loss = model(batch(ISLANDS * islands.loop.steps + island))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            for outer in islands.loop.outer:
                hashes.setdefault(outer.number, []).append(outer.fingerprint)
            time.sleep(max(0.0, STEP_S - (time.monotonic() - start)))
    seen = [(change.membership.generation, change.membership.members, change.membership.joined,
             change.membership.lost, round(change.cost_s, 1), change.how) for change in islands.loop.changes]  # fmt: skip
    return {
        "changes": seen,
        "first": sum(losses[:5]),
        "last": sum(losses[-5:]),
        "hashes": [outer.fingerprint for outer in islands.loop.outer],
        "steps": islands.loop.steps,
        "took": len(losses),
    }
