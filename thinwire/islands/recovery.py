"""What islands do when some are lost or join: agree on the exchanges that count, send the state to newcomers, catch up.

Everything here runs on the islands' first ranks. No island ever applies a sum of which another survivor has only a
part. An exchange counts if any island knew that all members had all of its messages; otherwise it is repeated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thinwire.codecs import derive_seed
from thinwire.collectives import Membership
from thinwire.collectives.faults import say
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError, CorruptMessageError, PeerLostError
from thinwire.islands.exchanges import Exchanges
from thinwire.methods.outer.exchange import Header, Sync
from thinwire.state.replicas import digest

OPERATION = "join"
# A part of the state travels at a time, so that exchanges find room in between.
CHUNK_BYTES = 1 << 18
MAX_CHUNKS = 2000
SAY_EVERY_S = 2.0
# Of an exchange that is not applied yet: nothing is sure, all messages are here, or all members hold them.
UNSURE, RECEIVED, COMMITTED = 0, 1, 2


@dataclass(frozen=True)
class Change:
    """A change of membership, as one island saw it.

    how: what became of exchanges under way, or what the island received.

    cost_s: seconds that it stood still, from the moment it began to wait for the exchange that failed. jump: the step
    at which an island continues after it has caught up; 0: no jump.
    """

    membership: Membership
    cost_s: float
    how: str
    jump: int = 0


@dataclass(frozen=True)
class IslandStatus:
    """What an island reports to the others when they have met again; lists are by fragment.

    Attributes:
        options: a hash of the model and the options.
        sent_through: the step after which exchanges were last started.
        ending: see Exchanges.
        applied: number of exchanges so far.
        pending: the step after which an exchange was sent that is not applied yet; 0: none.
        status: of the pending exchange.
    """

    options: int
    sent_through: int
    ending: int
    applied: list[int]
    pending: list[int]
    status: list[int]

    def packed(self) -> Tensor:
        return torch.tensor([self.options, self.sent_through, self.ending, *self.applied, *self.pending, *self.status])

    @classmethod
    def unpacked(cls, numbers: list[int]) -> IslandStatus:
        options, sent_through, ending, *rest = numbers
        size = len(rest) // 3
        return cls(options, sent_through, ending, *(rest[i * size : (i + 1) * size] for i in range(3)))


def join(exchanges: Exchanges) -> Change:
    """Catch up with islands that have begun before, and that this one has just met; see renew."""
    return renew(exchanges, time.monotonic(), has_met=True)


def renew(exchanges: Exchanges, start: float, has_met: bool = False) -> Change:
    """Meet the islands that are left and those that wait, and continue with them. An island that was out catches up.

    start: when this island stopped training, on time.monotonic's clock. Raises ThinwireError if that is impossible,
    PeerLostError if no other island can be met.
    """
    peers = exchanges.peers
    while True:
        if not has_met:
            peers.renew()
        try:
            words = exchange_words(exchanges)
            how, jump = (settle(exchanges, words), 0) if peers.has_state else catch_up(exchanges, words)
        except (PeerLostError, CorruptMessageError) as error:
            say(f"thinwire: island {peers.island}: {error}; the islands meet once more")
            has_met = False
            continue
        is_ending = any(word.ending for word in words.values())
        exchanges.catching_up = set() if is_ending else set(peers.membership.joined)
        return Change(peers.membership, time.monotonic() - start, how, jump)


def exchange_words(exchanges: Exchanges) -> dict[int, IslandStatus]:
    """The statuses of the members that have the state, by island."""
    peers, numbers = exchanges.peers, range(len(exchanges.fragments))
    pending = {flight.fragment: flight.sync for flight in exchanges.flights if flight.sync and not flight.is_applied}
    status = dict.fromkeys(numbers, UNSURE)
    for number, sync in pending.items():
        status[number] = COMMITTED if sync.is_committed else RECEIVED if sync.received is not None else UNSURE
    mine = IslandStatus(
        options_digest(exchanges),
        exchanges.sent_through,
        exchanges.ending,
        [outer.number for outer in exchanges.outer],
        [pending[number].step if number in pending else 0 for number in numbers],
        list(status.values()),
    )
    told = exchanges.result_of(peers.comm.all_gather_exact(mine.packed()))
    return {
        island: IslandStatus.unpacked(numbers)
        for island, numbers in zip(peers.members, told.tolist(), strict=True)
        if island not in peers.membership.joined
    }


def options_digest(exchanges: Exchanges) -> int:
    """A hash of the model and the options, which must be equal on all islands."""
    return int(digest([exchanges.options.encode()]).view(torch.int64)[0])


def counting(words: Mapping[int, IslandStatus]) -> list[int]:
    """For each fragment, the number of exchanges that count, from the statuses of islands that have the state.

    Islands differ by at most one: none sends the next exchange before it has applied this one.
    """
    counts = []
    for number in range(len(next(iter(words.values())).applied)):
        fewest = min(word.applied[number] for word in words.values())
        is_sure = any(word.applied[number] > fewest or word.status[number] == COMMITTED for word in words.values())
        counts.append(fewest + is_sure)
    return counts


def settle(exchanges: Exchanges, words: Mapping[int, IslandStatus]) -> str:
    """Apply the exchanges that count, send the state to newcomers, and repeat the exchanges that do not count."""
    peers = exchanges.peers
    for number, count in enumerate(counting(words)):
        if exchanges.outer[number].number < count:
            exchanges.apply(exchanges.pending(number))
    again = [flight for flight in exchanges.flights if not flight.is_applied]
    if peers.membership.joined:
        donor, *_ = words
        state = exchanges.outer_state() if donor == peers.island else None
        submit_hand_over(exchanges, donor, state)
    for flight in again:
        flight.submit(peers)
    return f"{len(again)} exchange(s) sent once more" if again else "nothing had to be sent once more"


def catch_up(exchanges: Exchanges, words: Mapping[int, IslandStatus]) -> tuple[str, int]:
    """Receive the present state while the others train on, listen to their exchanges, and apply those to it.

    Ends right after an exchange, or with the run if the others end. Returns what was done, and the step at which the
    others continue.
    """
    peers, start = exchanges.peers, time.monotonic()
    (donor, told), *_ = words.items()
    if told.options != options_digest(exchanges):
        raise ConfigError(
            f"island {peers.island} trains another model, on other data or by other options than island {donor}: "
            "start it with the same"
        )
    counts = counting(words)
    state = exchanges.outer_state()
    arriving = submit_hand_over(exchanges, donor, state)[peers.island]
    followed = []
    is_ending = any(word.ending for word in words.values())
    step = told.sent_through
    for step, numbers in exchanges_after(exchanges, told, counts, is_ending=is_ending):
        syncs = [listen(exchanges, number, step) for number in numbers]
        for number, sync in zip(numbers, syncs, strict=True):
            exchanges.wait_for(sync)
            followed.append((number, sync))
        if any(header.wishes_renewal for sync in syncs for header in sync.headers()):
            raise PeerLostError(f"island {peers.island}: others come or go before it has caught up")
        if arriving.done() and not is_ending:
            break
    peers.comm.wait(arriving)
    exchanges.take_over(state, counts)
    for number, sync in followed:
        exchanges.apply_sync(number, sync, peers.members)
    peers.has_state = True
    exchanges.ending = max(told.ending, is_ending)
    took_s = time.monotonic() - start
    return (
        f"{state.nbytes / 1e6:.3f} MB from island {donor}, {len(followed)} exchange(s) followed, {took_s:.1f} s",
        step,
    )


def exchanges_after(
    exchanges: Exchanges, told: IslandStatus, counts: list[int], *, is_ending: bool
) -> Iterator[tuple[int, list[int]]]:
    """Yield after which step the others exchange which fragments, from the first exchange that does not count yet.

    If the run ends, a newcomer only listens to these exchanges; it takes part in the rest.
    """
    again: dict[int, list[int]] = {}
    for number, step in enumerate(told.pending):
        if step and told.applied[number] == counts[number]:
            again.setdefault(step, []).append(number)
    yield from sorted(again.items())
    if is_ending:
        return
    for step in itertools.count(told.sent_through + 1):
        if numbers := exchanges.schedule.due(step):
            yield step, numbers


def listen(exchanges: Exchanges, number: int, step: int) -> Sync:
    """Take part in an exchange with weight zero."""
    fragment, peers = exchanges.fragments[number], exchanges.peers
    sync = Sync(
        Header(0, 0, number, 0.0), exchanges.method.codec, fragment.numel, step,
        derive_seed(exchanges.seed, peers.island), delta=fragment.zeros(),
    )  # fmt: skip
    sync.submit(peers)
    return sync


def submit_hand_over(exchanges: Exchanges, donor: int, state: Tensor | None) -> dict[int, Future]:
    """Start to send the donor's state to each newcomer. Every member submits all of these jobs. Futures by island."""
    peers = exchanges.peers
    source = peers.members.index(donor)
    return {
        island: peers.comm.submit(partial(hand_over, state=state, donor=source, joiner=peers.members.index(island)))
        for island in peers.membership.joined
    }


def hand_over(link: Link, state: Tensor | None, donor: int, joiner: int) -> Rounds[None]:
    """Copy `state` bit for bit from one rank into the `state` of another, chunk by chunk.

    A chunk that arrives damaged is sent again. The other ranks do nothing.
    """
    if link.rank not in (donor, joiner):
        return
    assert state is not None
    message = state.view(torch.uint8)
    progress = HandOverProgress(link, message.numel(), donor, joiner)
    for chunk in message.split(max(CHUNK_BYTES, -(-message.numel() // MAX_CHUNKS))):
        is_there = False
        while not is_there:
            is_there = yield from hand_over_chunk(link, chunk, donor, joiner)
        progress.add(chunk.numel())


def hand_over_chunk(link: Link, chunk: Tensor, donor: int, joiner: int) -> Rounds[bool]:
    """Send one chunk and its answer: whether it arrived undamaged."""
    is_donor = link.rank == donor
    round_ = link.exchange(OPERATION, "inter", {} if is_donor else {donor: chunk})
    if is_donor:
        round_.send(joiner, chunk)
    answer = torch.ones(1, dtype=torch.uint8)
    try:
        yield from round_.finish()
    except CorruptMessageError:
        answer.zero_()
    round_ = link.exchange(OPERATION, "inter", {joiner: answer} if is_donor else {})
    if not is_donor:
        round_.send(donor, answer)
    yield from round_.finish()
    return bool(answer)


class HandOverProgress:
    """Reports from time to time how much of a newcomer's state has arrived."""

    def __init__(self, link: Link, num_bytes: int, donor: int, joiner: int) -> None:
        self._what = f"thinwire: state from {link.wire.name(donor)} to {link.wire.name(joiner)}"
        self._num_bytes, self._done_bytes = num_bytes, 0
        self._start = self._said = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        now = time.monotonic()
        if now - self._said > SAY_EVERY_S or self._done_bytes == self._num_bytes:
            self._said = now
            done, whole = self._done_bytes / 1e6, self._num_bytes / 1e6
            say(f"{self._what}: {done:.3f} of {whole:.3f} MB after {now - self._start:.1f} s")
