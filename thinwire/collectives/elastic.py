"""Islands that come and go: who is present is settled by torchrun's own rendezvous, one generation after another."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError

from thinwire import _compat
from thinwire.collectives.communicator import Communicator
from thinwire.collectives.exchange import GRACE_S, Members
from thinwire.collectives.faults import say
from thinwire.collectives.meter import Meter
from thinwire.errors import ConfigError, PeerLostError, ThinwireError

# A busy machine may need so long to answer at all, however short a message may take later.
CONNECT_S = 15.0
# Everybody looks at the meeting once a second, or so many times in a timeout where that is more often.
LOOK_EVERY_S = 1.0
LOOKS_IN_A_TIMEOUT = 20
# Whoever waited for the last round must have looked before the next is complete, on a busy machine too.
LAST_CALL_IN_LOOKS = 2
LAST_CALL_S = 1.0
POLL_S = 0.1
DEFAULT_TIMEOUT_S = 60.0
MAX_ISLANDS = 64
# An island that is alive may be in the middle of a long step.
PATIENCE_S = 1800.0
NUM_ATTEMPTS = 5
# In the meeting's store, once that generation has come about.
GENERATION = "thinwire/generation/{}"
BEGUN = GENERATION.format(1)
# In the store of a generation that comes about, by rank in it.
MEMBER = "thinwire/member/{}"
# The latest step whose exchange a member of that generation stands still for.
AWAITED = "thinwire/awaited/{}"


@dataclass(frozen=True)
class Membership:
    """Who is present from some moment on, and what that took.

    members: ascending. joined: those of them that lack the state of the generation before; none in the first one.
    lost: who had it and is not there any more, or without it. cost_s: seconds that this island stood still for it.
    """

    generation: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    lost: tuple[int, ...]
    cost_s: float


def host_meeting(port: int = 0) -> dist.TCPStore:
    """The store in which islands meet, for as long as the returned object lives; 0: a free port, its `port`.

    It belongs into a process that does not train, such as a launcher: where it dies, those present go on without it,
    until the first change among them. Raises ConfigError for a port that can't be had.
    """
    try:
        return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigError(f"port {port} can't host the meeting of the islands: {first_line(error)}") from None


class ElasticPeers:
    """The islands present, one process of each, and a communicator over them that is renewed when they change.

    meet: HOST:PORT of host_meeting. island: this one's number, which no other has. timeout_s: how long a message may
    take; an island counts as dead that is silent for half of it, or that takes no step for so long while others wait
    for it. max_islands: no more take part at once. min_islands: the first generation waits for so many, at most
    PATIENCE_S seconds.

    The communicator's ranks are the members in ascending order, its messages have checksums, and its meter goes on over
    all generations. It belongs to no default group. Membership is agreed through torch's dynamic rendezvous: heartbeats
    in a store, written by compare-and-set, so machines' clocks must agree to within half of timeout_s.

    Who joins lacks the others' state until it has set `has_state`; as long as it has not, it joins again in every
    generation. Raises ThinwireError where the meeting can't be reached, or nobody is left who has the state.
    """

    def __init__(
        self, meet: str, island: int, *, timeout_s: float = DEFAULT_TIMEOUT_S, max_islands: int = MAX_ISLANDS,
        min_islands: int = 1,
    ) -> None:  # fmt: skip
        if not 0 <= island < max_islands or min_islands > max_islands:
            raise ConfigError(
                f"island {island} of at least {min_islands}: at most {max_islands} take part, numbered from 0"
            )
        self.meet, self.island, self.timeout_s = meet, island, timeout_s
        self.membership = Membership(0, (), (), (), 0.0)
        # Whether this island has what the members of its generation share; who joins lacks it for a while.
        self.has_state = True
        self._meter = Meter()
        self._comm: Communicator | None = None
        # Looks for changes and renewals use the same rendezvous, one at a time.
        self._lock = threading.Lock()
        self._has_changed = threading.Event()
        self._is_short = threading.Event()
        self._is_closed = threading.Event()
        # Since when others wait for this island, at the meeting or for its part of an exchange.
        self._awaited_since = math.inf
        # Through which step this island has sent its parts, when that was, and for which step's exchange it waits.
        self._reached, self._moved_at, self._awaits = 0, time.monotonic(), 0
        self._store = self._connect()
        self._rendezvous = _compat.Rendezvous(
            self._connect(), self._store, name=f"island-{island:06d}", max_nodes=max_islands,
            dead_after_s=self.dead_after_s, last_call_s=self.last_call_s, look_every_s=self.look_every_s,
            patience_s=PATIENCE_S,
        )  # fmt: skip
        self._min_islands, self._patient_until = min_islands, time.monotonic() + PATIENCE_S
        self._await_others()
        self.renew()
        self._watcher = threading.Thread(target=self._watch, name="thinwire-membership", daemon=True)
        self._watcher.start()

    @property
    def dead_after_s(self) -> float:
        """Seconds of silence after which an island counts as dead."""
        return self.timeout_s / 2

    @property
    def look_every_s(self) -> float:
        """Seconds between two looks at the meeting."""
        return min(LOOK_EVERY_S, self.timeout_s / LOOKS_IN_A_TIMEOUT)

    @property
    def last_call_s(self) -> float:
        """Seconds for which those who meet wait for others, once the first has come."""
        return max(LAST_CALL_S, LAST_CALL_IN_LOOKS * self.look_every_s)

    @property
    def members(self) -> tuple[int, ...]:
        """Islands present, ascending; equal on all."""
        return self.membership.members

    @property
    def generation(self) -> int:
        """Counts the changes of membership, from 1; equal on all."""
        return self.membership.generation

    @property
    def comm(self) -> Communicator:
        """Over the members, in their order; a new one after every renewal."""
        assert self._comm is not None, "these peers are closed"
        return self._comm

    def changed(self) -> bool:
        """Whether somebody waits to join, is known to be lost, or renews already; costs nothing."""
        return self._has_changed.is_set()

    def lost(self) -> bool:
        """Whether a member is known to be gone, or this island is for the others; costs nothing."""
        return self._is_short.is_set()

    def reached(self, step: int) -> None:
        """This island has taken that step, and sent its parts of what is exchanged after it; costs nothing."""
        self._reached, self._moved_at = max(self._reached, step), time.monotonic()

    @contextmanager
    def awaiting(self, step: int) -> Iterator[None]:
        """Inside, this island stands still for what is exchanged after that step; costs nothing."""
        self._awaits = step
        try:
            yield
        finally:
            self._awaits, self._moved_at = 0, time.monotonic()

    def renew(self) -> None:
        """Give up the communicator, and make the next one over those who are alive or wait; a collective of them.

        Messages under way are lost. Raises ThinwireError where the meeting is gone, PeerLostError where no generation
        comes about.
        """
        start = time.monotonic()
        if self._comm is not None:
            # It waits for threads of gloo; the watcher must go on looking meanwhile.
            self._comm.abort()
        with self._lock:
            group, store, change = self._next_generation()
            names = Members(
                group, list(change.members), change.members.index(self.island), "island", store,
                min(GRACE_S, self.timeout_s / 4),
            )  # fmt: skip
            self._comm = Communicator(
                names, local_size=1, timeout_s=self.timeout_s, checked=True, meter=self._meter
            )  # fmt: skip
            self.membership = replace(change, cost_s=time.monotonic() - start)
            self.has_state = self.island not in change.joined
            self._has_changed.clear()
            self._is_short.clear()
            self._awaited_since, self._moved_at = math.inf, time.monotonic()

    def close(self) -> None:
        """Wait for what was submitted, and leave; the others notice at once."""
        self._is_closed.set()
        self._watcher.join()
        if self._comm is not None:
            self._comm.close()
            self._comm.abort()
            self._comm = None
        self._leave()

    def abandon(self) -> None:
        """Leave at once, whatever is under way: this island has failed, and the others need not find that out."""
        self._is_closed.set()
        self._watcher.join()
        self._leave()

    def _leave(self) -> None:
        with suppress(RendezvousError):
            self._rendezvous.leave()

    def _next_generation(self) -> tuple[Any, dist.Store, Membership]:
        """The process group of the next generation, the store of its own, and who is in it."""
        attempts, due = 0, time.monotonic() + 2 * self.timeout_s
        while attempts < NUM_ATTEMPTS:
            try:
                store, rank, size = self._rendezvous.meet()
                if self._is_early(size):
                    continue
                change = self._introduce(store, rank, size)
                if change is None and time.monotonic() < due:
                    # Whoever has the state may be frozen, and come back.
                    time.sleep(self.look_every_s)
                    continue
                if change is None:
                    raise ThinwireError(
                        f"island {self.island}: no island is left that has the state of the others: they have "
                        "finished, or all must be started again"
                    )
                group = self._connect_all(store, rank, size)
                self._store.set(GENERATION.format(change.generation), "")
                return group, store, change
            except RendezvousError as error:
                raise ThinwireError(self._unreachable(error.__cause__ or error)) from None
            except RuntimeError as error:
                # Somebody died meanwhile: the next one comes about without him.
                say(f"thinwire: island {self.island}: a generation did not come about: {first_line(error)}")
                attempts += 1
        raise PeerLostError(f"island {self.island}: no generation came about in {NUM_ATTEMPTS} attempts")

    def _introduce(self, store: dist.Store, rank: int, size: int) -> Membership | None:
        """Tell the others of this generation who this is and what it was in before; who is there, from what all say.

        None where none of them has the state that others have gone on to.
        """
        mine = {
            "island": self.island, "generation": self.generation if self.has_state else 0, "members": self.members,
            "clock": time.time(),
        }  # fmt: skip
        store.set(MEMBER.format(rank), json.dumps(mine))
        told = self._gather_all(store, size)
        members = tuple(one["island"] for one in told)
        if len(set(members)) < size:
            others = [one for number, one in enumerate(told) if one["island"] == self.island and number != rank]
            if any(one["generation"] >= mine["generation"] for one in others):
                raise ConfigError(f"island {self.island} is there already: {members}; give each a number of its own")
            raise RuntimeError(f"an island is there twice: {members}")
        skew_s = max(abs(one["clock"] - mine["clock"]) for one in told)
        if skew_s > self.dead_after_s / 2 + 2 * self.last_call_s:
            say(
                f"thinwire: island {self.island}: the machines' clocks differ by {skew_s:.0f} s; one that is "
                f"{self.dead_after_s:g} s behind counts as dead: set them right"
            )
        last = max(one["generation"] for one in told)
        if self._store.check([GENERATION.format(last + 1)]):
            return None
        survivors = {one["island"] for one in told if one["generation"] == last}
        before = {island for one in told if one["generation"] == last for island in one["members"]}
        joined = tuple(island for island in members if island not in survivors)
        return Membership(last + 1, members, joined, tuple(sorted(before - survivors)), 0.0)

    def _gather_all(self, store: dist.Store, size: int) -> list[dict[str, Any]]:
        """What every member tells of itself; raises RuntimeError where one is gone before it has."""
        keys = [MEMBER.format(rank) for rank in range(size)]
        due = time.monotonic() + self.timeout_s + 2 * self.last_call_s
        # Not by waiting for the keys: torch writes a warning on the terminal whenever that runs out of time.
        while not store.check(keys):
            is_in, num_present, *_ = self._rendezvous.look()
            if not is_in or num_present < size or time.monotonic() > due:
                raise RuntimeError("an island that had come to it is gone")
            time.sleep(POLL_S)
        return [json.loads(told) for told in store.multi_get(keys)]

    def _connect_all(self, store: dist.Store, rank: int, size: int) -> Any:
        """Connections to all members, who are there now; raises RuntimeError where one does not answer any more."""
        if size == 1:
            return None
        group = dist.ProcessGroupGloo(
            dist.PrefixStore("thinwire/gloo", store), rank, size, timedelta(seconds=self.dead_after_s)
        )
        _compat.set_timeout(group, self.timeout_s)
        return group

    def _watch(self) -> None:
        """Look for changes, away from the training thread, and leave where that keeps the others from going on."""
        while not self._is_closed.wait(self.look_every_s):
            with self._lock:
                try:
                    is_in, num_present, num_waiting, num_meeting = self._rendezvous.look()
                    awaited = self._note_awaited()
                except (RendezvousError, RuntimeError) as error:
                    say(f"thinwire: {self._unreachable(error.__cause__ or error)}; those present go on without it")
                    self._rendezvous.fall_silent()
                    return
                if not is_in or num_present < len(self.members):
                    self._is_short.set()
                if self._is_short.is_set() or num_waiting:
                    self._has_changed.set()
                is_awaited = num_meeting > 0 or (awaited > self._reached and not self._awaits)
                if not (is_in and is_awaited):
                    self._awaited_since = math.inf
                elif self._awaited_since == math.inf:
                    self._awaited_since = time.monotonic()
                elif time.monotonic() > max(self._awaited_since, self._moved_at) + self.dead_after_s:
                    say(
                        f"thinwire: island {self.island}: the others wait, and it has taken no step for "
                        f"{self.dead_after_s:g} s: they go on without it; steps that are so long need a larger timeout"
                    )
                    self._leave()

    def _note_awaited(self) -> int:
        """Tell the members for which step's exchange this island waits; the latest that any of them waits for."""
        key, mine = AWAITED.format(self.generation), self._awaits
        latest = self._store.add(key, 0)
        if mine > latest:
            self._store.set(key, str(mine))
        return max(mine, latest)

    def _await_others(self) -> None:
        """Return when min_islands have come to the meeting since it began, or patience has run out."""
        if self._store.add(f"thinwire/came/{self.island}", 1) == 1:
            self._store.add("thinwire/came", 1)
        while self._store.add("thinwire/came", 0) < self._min_islands and time.monotonic() < self._patient_until:
            time.sleep(0.2)

    def _is_early(self, size: int) -> bool:
        """Whether so many are too few for the first generation, as one that came is slow; equal on all of them."""
        is_patient = time.monotonic() < self._patient_until
        return size < self._min_islands and is_patient and not self._store.check([BEGUN])

    def _connect(self) -> dist.TCPStore:
        host, _, port = self.meet.rpartition(":")
        patience = timedelta(seconds=max(self.timeout_s, CONNECT_S))
        try:
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience)
        except (RuntimeError, ValueError) as error:
            raise ThinwireError(self._unreachable(error)) from None
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return store

    def _unreachable(self, error: BaseException) -> str:
        return f"island {self.island} can't reach the meeting of the islands at {self.meet}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """What an error says, without torch's C++ stack."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
