"""Islands that are killed, frozen or damaged, at any moment: the others go on, and whoever comes is one of them."""

from __future__ import annotations

import io
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.islands.test_library import Net, adamw, batch
from tests.workers import HANG_S, run_workers
from thinwire.collectives import ElasticPeers, exchange, faults, headers, host_meeting
from thinwire.collectives.elastic import BEGUN
from thinwire.collectives.faults import parse
from thinwire.errors import ConfigError, CorruptMessageError, PeerLostError, ThinwireError
from thinwire.islands.recovery import COMMITTED, RECEIVED, UNSURE, IslandStatus, counting
from thinwire.methods.outer.exchange import COMMIT, OPERATION

TIMEOUT_S = 8.0
ISLANDS = 3
# So long a step takes at least: faults come while others train.
STEP_S = 0.1
# Steps after the last change, in which all islands train.
CALM_STEPS = 30
NUM_AT_ONCE = 5


@dataclass(frozen=True)
class Story:
    """What befalls three islands of `size` ranks. again: those that are lost with it and started again, in order."""

    method: Any
    options: dict[str, Any]
    size: int
    told: list[str]
    again: list[int]

    @property
    def names(self) -> list[str]:
        """Of the faults, as they are announced."""
        return [str(parse(text)) for text in self.told]

    @property
    def starts(self) -> list[int]:
        """The island of every start, the first three and those that come later."""
        return [*range(ISLANDS), *self.again]

    def before(self, start: int) -> int | None:
        """The start of the same island that this one takes the place of."""
        return max((n for n in range(start) if self.starts[n] == self.starts[start]), default=None)

    @property
    def may_die(self) -> tuple[int, ...]:
        replaced = [n for start in range(len(self.starts)) if (n := self.before(start)) is not None]
        return tuple(n * self.size + rank for n in replaced for rank in range(self.size))


DILOCO = thinwire.DiLoCo, {"sync_every": 5, "outer_lr": 0.4}
STREAMING = thinwire.StreamingDiLoCo, {"sync_every": 10, "num_fragments": 2, "overlap_steps": 2, "outer_lr": 0.4}
SPARSE = thinwire.SparseLoCo, {
    "sync_every": 5, "codec": "topk25%/64:(sign/16:bf16+twice)", "num_fragments": 2, "overlap_steps": 1, "mix": 0.5,
}  # fmt: skip
# {killed, frozen, damaged} x {in an inner step, while another joins, in the middle of an exchange} for each method.
# Island 1 has its second fault when it is back; an island of one rank sends nothing in an inner step.
KILLED = [
    "kill island=1 step=12", "kill island=0 operation=join", "kill island=1 operation=outer step=13",
    "corrupt island=2 operation=outer step=30",
]  # fmt: skip
# Not the one who hands the state to a newcomer, but the newcomer.
KILLED_AS_IT_JOINS = [text.replace("island=0 operation=join", "island=1 operation=join") for text in KILLED]
FROZEN = [
    "freeze island=1 step=12 seconds=9", "freeze island=0 operation=join seconds=9",
    "freeze island=1 operation=outer step=13 seconds=9", "corrupt island=2 operation=join",
    "corrupt island=2 operation=outer_commit step=30",
]  # fmt: skip
# One that keeps its training thread only: its heartbeats go on.
STALLED = ["delay island=1 step=12 seconds=10"]
# The longest first.
STORIES = {
    # The second rank waits for the first no longer than for any message, but where that is with other islands.
    "sdp4bit inside, frozen": Story(
        *DILOCO, 2,
        ["freeze island=1 rank=1 step=12 seconds=9", "freeze island=1 rank=0 operation=join seconds=9",
         "freeze island=1 rank=0 operation=outer step=13 seconds=9", "corrupt island=0 rank=0 operation=join",
         "corrupt island=0 rank=0 operation=outer step=30", "corrupt island=2 rank=1 operation=gradients step=40"],
        [1, 2],
    ),
    "diloco, frozen": Story(*DILOCO, 1, FROZEN, []),
    "streaming, frozen": Story(*STREAMING, 1, FROZEN, []),
    "sdp4bit inside, killed": Story(
        *DILOCO, 2,
        ["kill island=1 rank=1 step=12", "kill island=0 rank=0 operation=join",
         "kill island=1 rank=0 operation=outer step=13"],
        [1, 0, 1],
    ),
    "diloco, killed": Story(*DILOCO, 1, KILLED, [1, 0, 1]),
    "streaming, killed": Story(*STREAMING, 1, KILLED_AS_IT_JOINS, [1, 1, 1]),
    "diloco, stalled": Story(*DILOCO, 1, STALLED, []),
    "sparse, killed": Story(*SPARSE, 1, ["kill island=1 step=12", "corrupt island=2 operation=outer step=30"], [1]),
}  # fmt: skip


class Seat:
    """Where a process of a story sits: of which start of which island, and what it is told of others."""

    def __init__(self, where: str, rank: int, story: Story) -> None:
        self.story, self.where = story, where
        self.start, self.rank = divmod(rank, story.size)
        self.island, self.is_first = story.starts[self.start], self.rank == 0
        host, _, port = where.rpartition(":")
        self.store = dist.TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=HANG_S)
        )  # fmt: skip
        ranks = range(self.start * story.size, (self.start + 1) * story.size)
        self.group = dist.new_group(list(ranks), use_local_synchronization=True) if story.size > 1 else None
        if (before := story.before(self.start)) is not None:
            self.store.wait([f"gone/{before}"])
            time.sleep(0.5)
        left = [name for name in story.names if not self.store.check([name])]
        faults.arm(map(parse, left), rank=self.rank, island=self.island, announce=self.note)

    def note(self, text: str) -> None:
        """A fault fires here."""
        fault = text.split(": ")[-1]
        self.store.set(fault, "")
        if fault.startswith("kill") and self.is_first:
            self.gone()

    def gone(self) -> None:
        """The island has ended, and may be started again."""
        self.store.set(f"gone/{self.start}", "")

    def meet(self) -> ElasticPeers | None:
        """The other islands, for the first rank."""
        known = ISLANDS if self.start < ISLANDS else 1
        if not self.is_first:
            return None
        return ElasticPeers(self.where, self.island, timeout_s=TIMEOUT_S, max_islands=ISLANDS, min_islands=known)

    def shard(self, model: Net, optimizer: torch.optim.Optimizer) -> tuple[Net, Any]:
        """Under sdp4bit inside the island, where it has several ranks."""
        if self.group is None:
            return model, optimizer
        return thinwire.zero(
            model, optimizer, thinwire.SDP4Bit(), group=self.group, timeout_s=TIMEOUT_S, checked=True, announce=False
        )


def live(rank: int, world_size: int, where: str, story: Story) -> dict[str, Any] | None:
    """Train until all faults have come and all islands have trained for a while since; None if this one is lost."""
    seat = Seat(where, rank, story)
    try:
        return train(seat)
    except (PeerLostError, CorruptMessageError):
        if rank not in story.may_die:
            raise
        seat.gone()
        return None


def num_ports() -> int:
    """On which this process listens; none on systems without /proc."""
    listening, found = set(), 0
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            rows = map(str.split, Path(f"/proc/self/net/{table}").read_text().splitlines()[1:])
            listening |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(FileNotFoundError):
            found += str(entry.readlink()) in listening
    return found


def train(seat: Seat) -> dict[str, Any]:
    model, story = Net(), seat.story
    losses, calm, due = [], 0, time.monotonic() + HANG_S
    model, optimizer = seat.shard(model, adamw(model))
    before = num_ports()
    peers = seat.meet()
    with story.method(model, optimizer, **story.options, peers=peers, announce=False) as islands:
        loop = islands.loop
        while not loop.exchanges.stop_agreed:
            assert time.monotonic() < due, loop.changes
            # An island that is gone stops the others before they have taken so many steps.
            is_calm = peers is not None and len(peers.members) == ISLANDS and seat.store.check(story.names)
            calm = calm + 1 if is_calm else 0
            loop.wishes_stop = calm >= CALM_STEPS
            faults.at_step(loop.steps + 1)
            start = time.monotonic()
            loss = model(batch((ISLANDS * loop.steps + seat.island) * story.size + seat.rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            time.sleep(max(0.0, STEP_S - (time.monotonic() - start)))
    # The last generation's, and one that an error refers to; what all of them left would be more.
    assert num_ports() <= before + 2, loop.changes
    return {
        "island": seat.island,
        "is_first": seat.is_first,
        "changes": [(one.membership.members, one.membership.joined, one.membership.lost) for one in loop.changes],
        # Of those who had the state all along, and lost somebody.
        "costs_s": [
            one.cost_s for one in loop.changes if one.membership.lost and seat.island not in one.membership.joined
        ],
        "losses": losses,
        "hashes": [(outer.number, outer.fingerprint) for outer in loop.exchanges.outer],
        "weights": {name: param.detach().clone() for name, param in model.named_parameters()},
        "steps": loop.steps,
    }


def test_the_others_go_on_and_who_comes_back_is_one_of_them() -> None:
    """Several stories at once, since their islands mostly wait."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        ended = dict(zip(STORIES, pool.map(run_story, STORIES.values()), strict=True))
    for story, islands in ended.items():
        changes = [change for result in islands for change in result["changes"]]
        assert changes[-1][0] == (0, 1, 2), (story, changes)
        assert any(1 in joined for _, joined, _ in changes) and any(1 in lost for _, _, lost in changes), story


def run_story(story: Story) -> list[dict[str, Any]]:
    """What the islands' first ranks have seen that were there at the end; all of them agree and have learnt."""
    meeting = host_meeting()
    results = run_workers(
        live,
        len(story.starts) * story.size,
        f"127.0.0.1:{meeting.port}",
        story,
        may_die=story.may_die,
    )
    ended = [result for result in results if result is not None]
    assert sorted(result["island"] for result in ended) == sorted([*range(ISLANDS)] * story.size)
    assert meeting.check(story.names)
    firsts = [result for result in ended if result["is_first"]]
    for result in ended:
        assert result["steps"] == ended[0]["steps"]
        assert all(torch.equal(value, ended[0]["weights"][name]) for name, value in result["weights"].items())
        assert sum(result["losses"][-5:]) < 0.5 * 5 * 3.4, "ln 29 is 3.4"
    for result in firsts:
        assert result["hashes"] == firsts[0]["hashes"] and result["changes"]
    assert any(result["costs_s"] for result in firsts)
    return firsts


@pytest.mark.parametrize(
    ("applied", "status", "count"),
    [((3, 3), (UNSURE, RECEIVED), 3), ((3, 3), (RECEIVED, RECEIVED), 3), ((3, 3), (UNSURE, COMMITTED), 4),
     ((3, 4), (UNSURE, UNSURE), 4)],
)  # fmt: skip
def test_an_exchange_counts_where_anyone_knows_that_all_have_it(
    applied: tuple[int, int], status: tuple[int, int], count: int
) -> None:
    words = {
        island: IslandStatus(0, 10, 0, [7, applied[island]], [0, 10], [UNSURE, status[island]]) for island in range(2)
    }
    assert counting(words) == [7, count]


# Each island's weights before the exchange.
WEIGHTS = (0.0, 1.0, 5.0)


class NeverSent:
    """Takes the place of a message that the sender takes for sent."""

    def wait(self) -> None:
        return


def dies_in_an_exchange(rank: int, world_size: int, where: str, silent_in: str) -> tuple[float, tuple[int, ...]]:
    """Island 2 leaves out what it has announced to island 1, and dies when island 0 lacks nothing; weights after it.

    silent_in: OPERATION, so that it dies before its word, or COMMIT, so that island 0 has its word.
    """
    host, _, port = where.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    send = exchange.Exchange._isend

    def send_all_but_one(self: exchange.Exchange, peer: int, message: torch.Tensor) -> Any:
        is_announcement = message.numel() == headers.room().numel()
        if rank == 0 and self.operation == COMMIT:
            store.set("holds all packets", "")
        if rank == 2 and self.operation == COMMIT != silent_in:
            store.wait(["holds all packets"])
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2 and self.operation == silent_in and peer == 1 and not is_announcement:
            return NeverSent()
        return send(self, peer, message)

    exchange.Exchange._isend = send_all_but_one  # type: ignore[method-assign]
    peers = ElasticPeers(where, rank, timeout_s=TIMEOUT_S, max_islands=3, min_islands=3)
    model = torch.nn.Linear(64, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with thinwire.LocalSGD(model, optimizer, sync_every=2, peers=peers, announce=False) as islands:
        torch.nn.init.constant_(model.weight, WEIGHTS[rank])
        for _ in range(2):
            optimizer.step()
        weight = float(model.weight.detach().mean())
        if rank == 0:
            store.set("has applied", "")
        if rank == 2:
            store.wait(["has applied"])
            os.kill(os.getpid(), signal.SIGKILL)
        # Its next packet wishes to meet the others, which then has happened before that is sent once more.
        while len(peers.members) == 3 and not peers.changed():
            time.sleep(0.05)
        for _ in range(2):
            optimizer.step()
    (change,) = islands.loop.changes
    return weight, change.membership.members


def test_an_exchange_that_one_survivor_has_a_part_of_counts_for_all_or_for_none() -> None:
    def run(silent_in: str) -> list[Any]:
        meeting = host_meeting()
        where = f"127.0.0.1:{meeting.port}"
        return run_workers(dies_in_an_exchange, 3, where, silent_in, may_die=(2,))

    with ThreadPoolExecutor(2) as pool:
        without_a_packet, without_a_word = pool.map(run, (OPERATION, COMMIT))
    assert without_a_packet == [(sum(WEIGHTS[:2]) / 2, (0, 1))] * 2 + [None]
    assert without_a_word == [(sum(WEIGHTS) / 3, (0, 1))] * 2 + [None]


def slow_but_alive(rank: int, world_size: int, where: str) -> list[tuple[int, ...]]:
    """Island 1 comes to the exchange later than a stall may last, but takes its steps."""
    peers = ElasticPeers(where, rank, timeout_s=4.0, max_islands=2, min_islands=2)
    model = Net()
    optimizer = adamw(model)
    with thinwire.DiLoCo(model, optimizer, sync_every=7, peers=peers, announce=False) as islands:
        for step in range(7):
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.45 * rank)
    return [change.membership.lost + change.membership.joined for change in islands.loop.changes]


def test_a_slow_island_is_waited_for_as_long_as_it_takes_steps() -> None:
    meeting = host_meeting()
    for changes in run_workers(slow_but_alive, 2, f"127.0.0.1:{meeting.port}"):
        assert not any(changes), changes


def end_while_another_joins(rank: int, world_size: int, where: str, method: Any, options: Any, last: int) -> Any:
    """Island 1 comes before step 10, after which the others take no further exchange that it could listen to."""
    peers = ElasticPeers(where, rank, timeout_s=TIMEOUT_S, max_islands=3, min_islands=1 if rank == 1 else 2)
    model = Net()
    optimizer = adamw(model)
    with method(model, optimizer, **options, peers=peers, announce=False) as islands:
        while islands.steps < last:
            if islands.steps == 9:
                await_change(peers)
            model(batch(3 * islands.steps + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        islands.finish()
        # What a run asks of all islands at its end.
        count = islands.loop.sum_over_islands([1.0])
    return islands.steps, count, [outer.fingerprint for outer in islands.loop.exchanges.outer]


def await_change(peers: ElasticPeers) -> None:
    due = time.monotonic() + HANG_S
    while not peers.changed():
        assert time.monotonic() < due
        time.sleep(0.05)


def join_late(rank: int, world_size: int, where: str, *story: Any) -> Any:
    if rank == 1:
        host, _, port = where.rpartition(":")
        dist.TCPStore(host, int(port), is_master=False).wait([BEGUN], timedelta(seconds=HANG_S))
    return end_while_another_joins(rank, world_size, where, *story)


@pytest.mark.parametrize(
    ("method", "last"),
    [(DILOCO, 10), (DILOCO, 12), (STREAMING, 12)],
    ids=["nothing-follows", "a-last-exchange-follows", "streaming"],
)
def test_who_joins_as_the_others_end_ends_with_them(method: Any, last: int) -> None:
    meeting = host_meeting()
    results = run_workers(join_late, 3, f"127.0.0.1:{meeting.port}", *method, last)
    assert results == [(last, [3.0], results[0][2])] * 3


def damage_again_and_again(rank: int, world_size: int, where: str) -> str:
    """Every message that island 1 sends to island 0 comes damaged."""
    told = ["corrupt island=1 operation=outer step=5"] * 2
    faults.arm(map(parse, told), rank=rank, island=rank, announce=lambda text: None)
    peers = ElasticPeers(where, rank, timeout_s=TIMEOUT_S, max_islands=2, min_islands=2)
    model = Net()
    optimizer = adamw(model)
    said = io.StringIO()
    try:
        with (
            redirect_stderr(said),
            thinwire.DiLoCo(model, optimizer, sync_every=5, peers=peers, announce=False) as islands,
        ):
            for step in range(10):
                faults.at_step(step + 1)
                model(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except ThinwireError as error:
        return str(error)
    (change,) = islands.loop.changes
    assert change.membership.members == (0,) and change.membership.lost == (1,)
    return said.getvalue()


def test_whoever_sends_nothing_but_damage_is_lost() -> None:
    meeting = host_meeting()
    first, second = run_workers(damage_again_and_again, 2, f"127.0.0.1:{meeting.port}", may_die=(1,))
    # Not of the second time, after which nothing is asked for.
    (line,) = [line for line in first.splitlines() if "damaged" in line and "once more" in line]
    assert line.startswith("thinwire: island 0: a message was damaged on its way: outer/"), line
    assert "from island 1 to island 0" in line and line.endswith("outer 1 is asked for once more")
    assert second is None or "island 1 is lost: outer 1 came damaged from it, twice" in second


def one_too_many_and_one_too_late(rank: int, world_size: int, where: str) -> Any:
    """Two islands, then one more of the second's number; then the first goes on without the second, and ends."""
    host, _, port = where.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    if rank == 2:
        store.wait(["met"])
        with pytest.raises(ConfigError, match="island 1 is there already"):
            ElasticPeers(where, 1, timeout_s=3.0, max_islands=3)
        return None
    peers = ElasticPeers(where, rank, timeout_s=3.0, max_islands=3, min_islands=2)
    store.set("met", "")
    while not peers.changed():
        time.sleep(0.1)
    peers.renew()
    members = peers.members
    if rank == 0:
        peers.renew()
        assert peers.members == (0,), "it goes on without one that does not come"
        peers.close()
        store.set("ended", "")
        return members
    store.wait(["ended"])
    with pytest.raises(ThinwireError, match="no island is left that has the state of the others"):
        peers.renew()
    return members


def test_a_number_is_there_once_and_an_old_state_does_not_go_on() -> None:
    meeting = host_meeting()
    found = run_workers(
        one_too_many_and_one_too_late, 3, f"127.0.0.1:{meeting.port}", may_die=(2,)
    )  # fmt: skip
    assert found == [(0, 1), (0, 1), None]


def first_rank_fails(rank: int, world_size: int) -> str:
    """The first rank of an island can't go on with others, of which the second knows nothing."""

    def fail(*told: Any) -> None:
        raise ThinwireError("it can't reach the others")

    model = Net()
    wrapped, optimizer = thinwire.zero(model, adamw(model), thinwire.SDP4Bit(), announce=False)
    with pytest.raises(ThinwireError) as caught:
        with thinwire.LocalSGD(wrapped, optimizer, sync_every=2, announce=False) as islands:
            islands.loop._await = fail
            for step in range(2):
                wrapped(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return str(caught.value)


def test_an_island_fails_with_its_first_rank() -> None:
    assert run_workers(first_rank_fails, 2) == ["it can't reach the others", "the first rank of this island has failed"]


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
    first, _ = run_workers(one_of_a_world_dies, 2, may_die=(1,))
    assert "rank 1 is missing: outer" in first
