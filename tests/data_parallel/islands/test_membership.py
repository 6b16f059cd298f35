"""Islands that are killed, frozen or damaged, at any moment: the others go on, and whoever comes is one of them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import thinwire
from tests.data_parallel.islands.test_library import Net, adamw, batch
from tests.workers import run_workers
from thinwire.collectives import ElasticPeers, faults, host_meeting
from thinwire.collectives.faults import parse
from thinwire.errors import PeerLostError, ThinwireError

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


def meet(where: str, rank: int, told: list[str]) -> tuple[ElasticPeers, dist.Store]:
    """The peers of the island of this rank, and where faults that have fired are noted.

    Ranks from ISLANDS on are the killed islands, started again.
    """
    host, _, port = where.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=80))
    killed = [fault for fault in map(parse, told) if fault.kind == "kill"]
    if rank < ISLANDS:
        faults.arm(map(parse, told), rank=rank, island=rank, announce=lambda text: store.set(text.split(": ")[-1], ""))
        return ElasticPeers(where, rank, timeout_s=TIMEOUT_S, max_islands=ISLANDS, min_islands=ISLANDS), store
    fault = killed[rank - ISLANDS]
    assert fault.island is not None
    store.wait([str(fault)])
    time.sleep(0.5)
    return ElasticPeers(where, fault.island, timeout_s=TIMEOUT_S, max_islands=ISLANDS), store


def live(rank: int, world_size: int, where: str, method: str, told: list[str]) -> dict[str, Any]:
    """Train as an island until all faults have come and all islands have trained for a while since."""
    make, options = METHODS[method]
    model = Net()
    optimizer, losses, calm, due = adamw(model), [], 0, time.monotonic() + 75
    peers, store = meet(where, rank, told)
    fired = [str(parse(text)) for text in told]
    with make(model, optimizer, **options, peers=peers, announce=False) as islands:
        loop = islands.loop
        while not loop.stop_agreed:
            assert time.monotonic() < due, loop.changes
            # An island that is gone stops the others before they have taken so many steps.
            is_calm = len(peers.members) == ISLANDS and store.check(fired)
            calm = calm + 1 if is_calm else 0
            loop.wishes_stop = calm >= CALM_STEPS
            faults.at_step(loop.steps + 1)
            start = time.monotonic()
            loss = model(batch(ISLANDS * loop.steps + peers.island))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            time.sleep(max(0.0, STEP_S - (time.monotonic() - start)))
    return {
        "island": peers.island,
        "changes": [(one.membership.members, one.membership.joined, one.membership.lost) for one in loop.changes],
        "costs": [(round(one.cost_s, 1), one.how) for one in loop.changes],
        "losses": losses,
        "hashes": [(outer.number, outer.fingerprint) for outer in loop.outer],
        "steps": loop.steps,
        "unfired": list(map(str, faults.disarm())),
    }


# Killed, frozen and damaged: inside an inner step, in the middle of an exchange, while another joins.
STORIES = {
    "diloco": (
        "diloco",
        ["kill island=1 step=12", "freeze island=0 operation=join seconds=6",
         "corrupt island=2 operation=outer step=30"],
    ),
    "streaming": (
        "streaming",
        ["kill island=1 operation=outer step=12", "kill island=0 operation=join",
         "corrupt island=2 operation=outer_commit step=30"],
    ),
    "frozen": (
        "streaming",
        ["freeze island=1 step=12 seconds=6", "corrupt island=0 operation=join",
         "freeze island=2 operation=outer step=30 seconds=6"],
    ),
}  # fmt: skip


def test_the_others_go_on_and_who_comes_back_is_one_of_them() -> None:
    """All stories at once, since their islands mostly wait."""
    with ThreadPoolExecutor() as pool:
        ended = dict(zip(STORIES, pool.map(lambda story: run_faults(*story), STORIES.values()), strict=True))
    for story, islands in ended.items():
        changes = [change for result in islands.values() for change in result["changes"]]
        assert changes[-1][0] == (0, 1, 2), (story, changes)
        assert any(1 in joined for _, joined, _ in changes) and any(1 in lost for _, _, lost in changes), story


def damage_again_and_again(rank: int, world_size: int, where: str) -> str:
    """Every message that island 1 sends to island 0 comes damaged."""
    told = ["corrupt island=1 operation=outer step=5"] * 2
    faults.arm(map(parse, told), rank=rank, island=rank, announce=lambda text: None)
    peers = ElasticPeers(where, rank, timeout_s=TIMEOUT_S, max_islands=2, min_islands=2)
    model = Net()
    optimizer = adamw(model)
    try:
        with thinwire.DiLoCo(model, optimizer, sync_every=5, peers=peers, announce=False) as islands:
            for step in range(10):
                faults.at_step(step + 1)
                model(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except ThinwireError as error:
        return str(error)
    (change,) = islands.loop.changes
    assert change.membership.members == (0,) and change.membership.lost == (1,)
    return "went on alone"


def test_whoever_sends_nothing_but_damage_is_lost() -> None:
    meeting = host_meeting()
    first, second = run_workers(damage_again_and_again, 2, f"127.0.0.1:{meeting.port}", may_die=(1,), timeout_s=60)
    assert first == "went on alone"
    assert second is None or "island 1 is lost: outer 1 came damaged from it, twice" in second


def one_of_a_world_dies(rank: int, world_size: int) -> str:
    """Islands that are ranks of one process group, which nobody can leave."""
    faults.arm([parse("kill rank=1 step=8")], rank=rank, announce=lambda text: None)
    model = Net()
    optimizer = adamw(model)
    with pytest.raises(PeerLostError) as caught:
        with thinwire.DiLoCo(model, optimizer, sync_every=5, timeout_s=TIMEOUT_S, announce=False):
            for step in range(20):
                faults.at_step(step + 1)
                model(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return str(caught.value)


def test_ranks_of_a_world_stop_with_a_name() -> None:
    first, _ = run_workers(one_of_a_world_dies, 2, may_die=(1,), timeout_s=60)
    assert "rank 1 is missing: outer" in first


def run_faults(method: str, told: list[str]) -> dict[int, dict[str, Any]]:
    """What the islands that were there at the end have seen, by island; all of them agree and have learnt."""
    meeting = host_meeting()
    killed = [fault.island for fault in map(parse, told) if fault.kind == "kill"]
    results = run_workers(
        live, ISLANDS + len(killed), f"127.0.0.1:{meeting.port}", method, told,
        may_die=tuple(number for number in killed if number is not None), timeout_s=85,
    )  # fmt: skip
    ended = {result["island"]: result for result in results if result is not None}
    assert sorted(ended) == list(range(ISLANDS))
    first = ended[0]
    for result in ended.values():
        assert (result["hashes"], result["steps"]) == (first["hashes"], first["steps"])
        assert sum(result["losses"][-5:]) < 0.5 * 5 * 3.4, "ln 29 is 3.4"
        assert result["unfired"] == [] and result["changes"]
    return ended
