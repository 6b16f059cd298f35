"""Islands that come and go: torchrun's rendezvous decides who is present, one generation after another."""

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
from thinwire._compat.elastic import Rendezvous
from thinwire.collectives.communicator import Communicator
from thinwire.collectives.exchange import GRACE_S, Members
from thinwire.collectives.faults import say
from thinwire.collectives.meter import Meter
from thinwire.errors import ConfigError, PeerLostError, ThinwireError

# A busy machine may take this long to answer at all, even if its messages are fast later.
CONNECT_S = 15.0
# Every island looks at the meeting once a second, or this many times per timeout if that is more often.
LOOK_EVERY_S = 1.0
LOOKS_IN_A_TIMEOUT = 20
# Islands that waited for the last round must have looked before the next is complete, even on a busy machine.
LAST_CALL_IN_LOOKS = 2
LAST_CALL_S = 1.0
POLL_S = 0.1
DEFAULT_TIMEOUT_S = 60.0
MAX_ISLANDS = 64
# An island that is alive may be in the middle of a long step.
PATIENCE_S = 1800.0
NUM_ATTEMPTS = 5
# A key in the meeting's store, set once that generation is complete.
GENERATION = "thinwire/generation/{}"
BEGUN = GENERATION.format(1)
# A key in the store of a forming generation, by rank in it.
MEMBER = "thinwire/member/{}"
# The latest step whose exchange a member of that generation waits for.
AWAITED = "thinwire/awaited/{}"


@dataclass(frozen=True)
class Membership:
    """The islands present from some moment on, and the cost of the change.

    Args:
        members: numbers of the islands, ascending.
        joined: members that lack the state of the previous generation; empty in the first one.
        lost: islands that had the state and are gone, or came back without it.
        cost_s: seconds that this island waited for the change.
    """

    generation: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    lost: tuple[int, ...]
    cost_s: float


def host_meeting(port: int = 0) -> dist.TCPStore:
    """Host the store in which islands meet. It lives as long as the returned object, whose `port` is its port.

    Run it in a process that does not train, such as a launcher. If it dies, the islands present go on without it until
    one of them is lost or another joins. port 0 takes a free port. Raises ConfigError for a port that can't be had.
    """
    try:
        return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigError(f"port {port} can't host the meeting of the islands: {first_line(error)}") from None


class ElasticPeers:
    """The islands present, one process of each, and a communicator over them that is renewed when they change.

    Ranks of the communicator are the members in ascending order. Its messages have checksums, and its meter goes on
    over all generations. It belongs to no default group. Islands agree on the members through torch's dynamic
    rendezvous: heartbeats in a store, written by compare-and-set. The machines' clocks must therefore agree to within
    half of timeout_s.

    An island that joins lacks the others' state until it sets `has_state`. Until then it counts as joined in every
    generation. Raises ThinwireError if the meeting can't be reached, or if no island with the state is left.

    Args:
        meet: HOST:PORT of host_meeting.
        island: number of this island; no other island may have it.
        timeout_s: how long a message may take. An island counts as dead if it is silent for half of it, or if it takes
            no step for half of it while others wait for it.
        max_islands: the most islands that take part at once.
        min_islands: islands that the first generation waits for, at most PATIENCE_S seconds.
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
        # Whether this island has the state that the members of its generation share; one that joins lacks it at first.
        self.has_state = True
        self._meter = Meter()
        self._comm: Communicator | None = None
        # Held by the watcher and by renewals, which use the same rendezvous.
        self._lock = threading.Lock()
        self._has_changed = threading.Event()
        self._is_short = threading.Event()
        self._is_closed = threading.Event()
        # When others began to wait for this island, at the meeting or for its part of an exchange.
        self._awaited_since = math.inf
        # The last step whose parts this island has sent, the time of that, and the step whose exchange it waits for.
        self._reached, self._moved_at, self._awaits = 0, time.monotonic(), 0
        self._store = self._connect()
        self._rendezvous = Rendezvous(
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
        """Seconds that islands at a meeting wait for further ones after the first has come."""
        return max(LAST_CALL_S, LAST_CALL_IN_LOOKS * self.look_every_s)

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the islands present, ascending; equal on all."""
        return self.membership.members

    @property
    def generation(self) -> int:
        """Counts the changes of membership, from 1; equal on all."""
        return self.membership.generation

    @property
    def comm(self) -> Communicator:
        """Communicator over the members, in their order; a new one after every renewal."""
        assert self._comm is not None, "these peers are closed"
        return self._comm

    def changed(self) -> bool:
        """Whether an island waits to join, is known to be lost, or has begun a renewal. Sends nothing."""
        return self._has_changed.is_set()

    def lost(self) -> bool:
        """Whether a member is known to be lost, or this island counts as lost for the others. Sends nothing."""
        return self._is_short.is_set()

    def reached(self, step: int) -> None:
        """Note that this island has taken that step and sent its parts of the exchange after it. Sends nothing."""
        self._reached, self._moved_at = max(self._reached, step), time.monotonic()

    @contextmanager
    def awaiting(self, step: int) -> Iterator[None]:
        """Context in which this island waits for the exchange after that step. Sends nothing."""
        self._awaits = step
        try:
            yield
        finally:
            self._awaits, self._moved_at = 0, time.monotonic()

    def renew(self) -> None:
        """Replace the communicator by one over the islands that are alive or wait to join. A collective over them.

        Messages on their way are lost. Raises ThinwireError if the meeting is gone, PeerLostError if no generation
        could be formed.
        """
        start = time.monotonic()
        if self._comm is not None:
            # This waits for gloo's threads, and the watcher must go on meanwhile.
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
        """Wait for submitted jobs, then leave. The others notice at once."""
        self._is_closed.set()
        self._watcher.join()
        if self._comm is not None:
            self._comm.close()
            self._comm.abort()
            self._comm = None
        self._leave()

    def abandon(self) -> None:
        """Leave at once: this island has failed, and the others need not find that out by a timeout."""
        self._is_closed.set()
        self._watcher.join()
        self._leave()

    def _leave(self) -> None:
        with suppress(RendezvousError):
            self._rendezvous.leave()

    def _next_generation(self) -> tuple[Any, dist.Store, Membership]:
        """The next generation's process group, its own store, and its membership."""
        attempts, due = 0, time.monotonic() + 2 * self.timeout_s
        while attempts < NUM_ATTEMPTS:
            try:
                store, rank, size = self._rendezvous.meet()
                if self._is_early(size):
                    continue
                change = self._introduce(store, rank, size)
                if change is None and time.monotonic() < due:
                    # An island that has the state may only be frozen, and may come back.
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
                # An island died meanwhile: the next generation forms without it.
                say(f"thinwire: island {self.island}: a generation did not come about: {first_line(error)}")
                attempts += 1
        raise PeerLostError(f"island {self.island}: no generation came about in {NUM_ATTEMPTS} attempts")

    def _introduce(self, store: dist.Store, rank: int, size: int) -> Membership | None:
        """Exchange numbers and previous generations with the other members. Return the resulting membership.

        None if no member has the state that other islands have gone on to.
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
        """Every member's description of itself. Raises RuntimeError if a member is lost before it has written one."""
        keys = [MEMBER.format(rank) for rank in range(size)]
        due = time.monotonic() + self.timeout_s + 2 * self.last_call_s
        # Poll instead of waiting for the keys: torch prints a warning on the terminal whenever a wait times out.
        while not store.check(keys):
            is_in, num_present, *_ = self._rendezvous.look()
            if not is_in or num_present < size or time.monotonic() > due:
                raise RuntimeError("an island that had come to it is gone")
            time.sleep(POLL_S)
        return [json.loads(told) for told in store.multi_get(keys)]

    def _connect_all(self, store: dist.Store, rank: int, size: int) -> Any:
        """Connect to all members. Raises RuntimeError if one no longer answers."""
        if size == 1:
            return None
        group = dist.ProcessGroupGloo(
            dist.PrefixStore("thinwire/gloo", store), rank, size, timedelta(seconds=self.dead_after_s)
        )
        _compat.set_timeout(group, self.timeout_s)
        return group

    def _watch(self) -> None:
        """Watch for changes outside the training thread, and leave if this island holds up the others."""
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
        """Publish the step whose exchange this island waits for. Return the latest step that any member waits for."""
        key, mine = AWAITED.format(self.generation), self._awaits
        latest = self._store.add(key, 0)
        if mine > latest:
            self._store.set(key, str(mine))
        return max(mine, latest)

    def _await_others(self) -> None:
        """Wait until min_islands have come to the meeting, or PATIENCE_S has passed."""
        if self._store.add(f"thinwire/came/{self.island}", 1) == 1:
            self._store.add("thinwire/came", 1)
        while self._store.add("thinwire/came", 0) < self._min_islands and time.monotonic() < self._patient_until:
            time.sleep(0.2)

    def _is_early(self, size: int) -> bool:
        """Whether `size` islands are too few for the first generation because one came late; equal on all of them."""
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
    """First line of an error's message, without torch's C++ stack."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
