"""Islands that are killed, frozen or damaged, at any moment: the others go on, and whoever comes is one of them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import thinwire
from tests.data_parallel.islands.test_library import Net, adamw, batch
from tests.workers import run_workers
from thinwire.collectives import ElasticPeers, faults, host_meeting
from thinwire.collectives.faults import parse

TIMEOUT_S = 4.0
ISLANDS = 3
# So long a step takes at least: faults come while others train.
STEP_S = 0.02
# Steps after the last change, in which all islands train.
CALM_STEPS = 30
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "diloco": (thinwire.DiLoCo, {"sync_every": 5, "outer_lr": 0.4}),
    "streaming": (
        thinwire.StreamingDiLoCo,
        {"sync_every": 10, "num_fragments": 2, "overlap_steps": 2, "outer_lr": 0.4},
    ),
}


def meet(where: str, rank: int, told: list[str]) -> ElasticPeers:
    """The peers of the island of this rank; ranks from ISLANDS on are the killed ones, started again."""
    host, _, port = where.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=80))
    killed = [fault for fault in map(parse, told) if fault.kind == "kill"]
    if rank < ISLANDS:
        faults.arm(map(parse, told), rank=rank, island=rank, announce=lambda text: store.set(text.split(": ")[-1], ""))
        return ElasticPeers(where, rank, timeout_s=TIMEOUT_S, max_islands=ISLANDS, min_islands=ISLANDS)
    fault = killed[rank - ISLANDS]
    assert fault.island is not None
    store.wait([str(fault)])
    time.sleep(0.5)
    return ElasticPeers(where, fault.island, timeout_s=TIMEOUT_S, max_islands=ISLANDS)


def live(rank: int, world_size: int, where: str, method: str, told: list[str], num_changes: int) -> dict[str, Any]:
    """Train as an island until so many changes have come and all islands have trained for a while since."""
    make, options = METHODS[method]
    model = Net()
    optimizer, losses, calm, due = adamw(model), [], 0, time.monotonic() + 75
    with make(model, optimizer, **options, peers=meet(where, rank, told), announce=False) as islands:
        loop = islands.loop
        while not loop.stop_agreed:
            assert loop.peers is not None and time.monotonic() < due, loop.changes
            is_calm = loop.peers.generation > num_changes and len(loop.peers.members) == ISLANDS
            calm = calm + 1 if is_calm else 0
            loop.wishes_stop = calm >= CALM_STEPS
            faults.at_step(loop.steps + 1)
            start = time.monotonic()
            loss = model(batch(ISLANDS * loop.steps + loop.peers.island))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            time.sleep(max(0.0, STEP_S - (time.monotonic() - start)))
    return {
        "island": loop.peers.island,
        "changes": [(one.membership.members, one.membership.joined, one.membership.lost) for one in loop.changes],
        "costs": [(round(one.cost_s, 1), one.how) for one in loop.changes],
        "losses": losses,
        "hashes": [(outer.number, outer.fingerprint) for outer in loop.outer],
        "steps": loop.steps,
        "unfired": list(map(str, faults.disarm())),
    }


def run_faults(method: str, told: list[str], num_changes: int) -> dict[int, dict[str, Any]]:
    """What the islands that were there at the end have seen, by island; all of them agree and have learnt."""
    meeting = host_meeting()
    killed = [fault.island for fault in map(parse, told) if fault.kind == "kill"]
    results = run_workers(
        live, ISLANDS + len(killed), f"127.0.0.1:{meeting.port}", method, told, num_changes,
        may_die=tuple(number for number in killed if number is not None), timeout_s=85,
    )  # fmt: skip
    ended = {result["island"]: result for result in results if result is not None}
    assert sorted(ended) == list(range(ISLANDS))
    first = ended[0]
    for result in ended.values():
        assert (result["hashes"], result["steps"]) == (first["hashes"], first["steps"])
        assert sum(result["losses"][-5:]) < 0.5 * 5 * 3.4, "ln 29 is 3.4"
        assert result["unfired"] == [] and len(result["costs"]) <= num_changes + 2
    return ended
