"""One message pattern under every collective: post all receives, send, then take each peer's message in turn."""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.collectives import faults, headers, staging
from thinwire.collectives.meter import Meter
from thinwire.collectives.patience import patience
from thinwire.collectives.rounds import Rounds
from thinwire.errors import CorruptMessageError, PeerLostError

GRACE_S = 2.0
# Most rounds of one job: an all_reduce over two levels needs four, and a job may have many parts.
ROUNDS_OF_A_PART = 8
MAX_ROUNDS = 1024 * ROUNDS_OF_A_PART
# A tag that no message has; messages have lower tags.
NEVER_SENT = 1 << 30


@dataclass(frozen=True)
class Members:
    """The ranks that share a wire, and their names.

    Args:
        group: their process group, which nothing else uses; None for a group of one.
        names: the ranks' names, in order.
        rank: this process's position in `names`.
        noun: what a name stands for, in messages.
        store: where ranks report which rank they miss; None: the default group's store.
        grace_s: how long to wait for the other ranks' reports.
    """

    group: Any
    names: list[int]
    rank: int
    noun: str = "rank"
    store: dist.Store | None = None
    grace_s: float = GRACE_S


class Wire:
    """A process group of its own. One thread posts all its messages, and every failure is traced to a rank.

    Ranks here are positions in the group. With `checked`, a header with the number of the job, the payload bytes, the
    operation and a checksum goes ahead of each message. Ranks that disagree then stop with both sides' values instead
    of hanging or adding up wrong sums, and damaged messages are noticed.
    """

    def __init__(self, members: Members, timeout_s: float, checked: bool, meter: Meter | None = None) -> None:
        self.members = members
        self.global_ranks = members.names
        # The position of each rank of this wire in the process group.
        self.positions: Sequence[int] = range(len(members.names))
        self.rank = members.rank
        self.timeout_s = timeout_s
        self.checked = checked
        self.meter = meter or Meter()

    @property
    def group(self) -> Any:
        return self.members.group

    def store(self) -> dist.Store:
        """Where ranks report whom they miss."""
        return self.members.store or _compat.default_store()

    def name(self, rank: int) -> str:
        """Name of a rank of this wire, for messages."""
        return f"{self.members.noun} {self.global_ranks[rank]}"

    def break_off(self) -> None:
        """Close all connections, so that all who wait for a message get an error, here and on the peers."""
        for peer in range(len(self.global_ranks)):
            # gloo can't take a message back, but an operation that runs out of time closes what it belongs to.
            if peer != self.rank:
                with suppress(RuntimeError):
                    never = self.group.recv([torch.empty(1, dtype=torch.uint8)], self.positions[peer], NEVER_SENT)
                    never.wait(timedelta(milliseconds=1))

    def abandon(self) -> None:
        """Break off after a loss whose cause is known: errors that follow are not traced to a rank."""
        self.members = replace(self.members, grace_s=0.0)
        if self.group is not None:
            self.break_off()

    def subgroup(self, members: Sequence[int]) -> Wire:
        """The same wire restricted to some of its ranks, this one included. A rank is its position in `members`."""
        part = copy.copy(self)
        part.global_ranks = [self.global_ranks[rank] for rank in members]
        part.positions = [self.positions[rank] for rank in members]
        part.rank = list(members).index(self.rank)
        return part

    def lost(self, operation: str, number: int, peer: int, error: Exception) -> PeerLostError:
        """The error that names the rank that is really missing: the silent peer, or the rank that this peer lost."""
        blame = {"rank": self.global_ranks[peer], "operation": operation, "sequence": number}
        # A store hosted by the lost process can hang, so it is asked from a thread that may be left behind.
        asker = threading.Thread(target=self._follow_blame, args=(blame,), daemon=True)
        asker.start()
        asker.join(self.members.grace_s + 1.0)
        # Without the place in gloo's source.
        said = re.sub(r"^\[\S+\.(cc|h):\d+\] ", "", str(error).strip())
        cause = said.splitlines()[0][:160] if said else type(error).__name__
        return PeerLostError(
            f"{self.members.noun} {blame['rank']} is missing: {blame['operation']} (message {blame['sequence']}) on "
            f"{self.name(self.rank)} did not get its part within the timeout of {self.timeout_s:g} s "
            f"or lost the connection [{cause}]"
        )

    def _follow_blame(self, blame: dict[str, int | str]) -> None:
        """Report which rank this one misses. If that rank has reported another one, return the last of this chain."""
        store = self.store()
        key = "thinwire/lost/{}".format
        me = self.global_ranks[self.rank]
        try:
            store.set(key(me), json.dumps(blame))
            seen = {me}
            deadline = time.monotonic() + self.members.grace_s
            while time.monotonic() < deadline:
                accused = blame["rank"]
                if accused not in seen and store.check([key(accused)]):
                    seen.add(int(accused))
                    theirs = json.loads(store.get(key(accused)))
                    if theirs["rank"] not in seen:
                        blame["rank"] = theirs["rank"]
                        continue
                time.sleep(0.05)
        except (RuntimeError, ValueError):
            return


class Pending(NamedTuple):
    """A message on its way; `wait` blocks until it has arrived, or raises PeerLostError."""

    exchange: Exchange
    peer: int
    work: dist.Work
    kind: str

    def wait(self) -> None:
        own, start = self.exchange, time.perf_counter()
        try:
            with patience().wait(own.wire, self.peer, own.label):
                self.work.wait(timedelta(seconds=own.wire.timeout_s))
        except RuntimeError as error:
            raise own.wire.lost(own.operation, own.number, self.peer, error) from None
        finally:
            own.wire.meter.add(self.kind, own.label, start, time.perf_counter())


class Exchange:
    """One round of messages of job `number`: send to some peers, receive from others, finish.

    All messages carry the tag (number, round), so several jobs may run at once and ranks need not agree which of them
    is ahead. A message on a CUDA device travels through a copy on the CPU, in memory that `host(name, num_bytes)`
    gives. It is posted when the round is finished, and `finish` queues the copies back on the current stream.

    Args:
        receives: the buffer for each peer's message; a message may be shorter than its buffer.
        length: the number of valid bytes in a filled buffer, if not all of them.
    """

    def __init__(
        self, wire: Wire, number: int, round_: int, operation: str, level: str, receives: Mapping[int, Tensor],
        length: Callable[[Tensor], int], host: Callable[[str, int], Tensor],
    ) -> None:  # fmt: skip
        assert round_ < MAX_ROUNDS
        self.wire, self.number, self.operation, self.level = wire, number, operation, level
        self.label = f"{operation} {number}"
        self._tag = (number * MAX_ROUNDS + round_) % NEVER_SENT
        self._buffers = dict(receives)
        self._host = lambda name, num_bytes: host(f"{name} of round {round_}", num_bytes)
        self._landings = {
            peer: self._host(f"message from {peer}", buffer.numel()) if staging.must_stage(buffer) else buffer
            for peer, buffer in self._buffers.items()
        }
        self._copies: dict[int, Tensor] = {}
        self._departing: list[tuple[int, Tensor]] = []
        self._sends: list[Pending] = []
        self._sent_headers: list[Pending] = []
        # Messages that faults have replaced must live as long.
        self._damaged: list[Tensor] = []
        self._length = length
        self._sent_bytes = 0
        self._begun_s = time.perf_counter()
        # The payload of a checked message is received once its header has been read.
        self._receives = [] if wire.checked else self._post(self._landings)

    def send(self, peer: int, message: Tensor) -> None:
        """Start to send a uint8 tensor, cut to its length. It must not change until the round has finished."""
        if staging.must_stage(message):
            self._departing.append((peer, self._host_copy(message)))
        else:
            self._depart(peer, message)

    def _host_copy(self, message: Tensor) -> Tensor:
        """The message's copy on the CPU, valid once the copy queued here is done. All peers share it."""
        held = self._copies.get(message.data_ptr())
        if held is None:
            held = self._copies[message.data_ptr()] = self._host(f"message {len(self._copies)}", message.numel())
            staging.to_host(message, held)
        return held

    def _depart(self, peer: int, message: Tensor) -> None:
        num_bytes = self._length(message)
        self._sent_bytes += num_bytes
        if not self._sends:
            # What is sent had to be packed first.
            self._begun_s = time.perf_counter()
        header = self._header(message.numel(), message[:num_bytes]) if self.wire.checked else None
        if faults.are_armed():
            changed = faults.on_message(self.operation, message)
            if changed is None:
                return
            message = changed
            self._damaged.append(message)
        if header is not None:
            self._sent_headers.append(self._isend(peer, header))
        self._sends.append(self._isend(peer, message[:num_bytes]))

    def finish(self) -> Rounds[None]:
        """Wait for all messages, sent and received, and count their bytes."""
        if self._departing:
            yield staging.queued()
            for peer, message in self._departing:
                self._depart(peer, message)
        theirs: dict[int, Tensor] = {}
        if self.wire.checked:
            theirs = yield from self._check_headers()
            self._receives = self._post(self._landings)
        yield [*self._receives, *self._sends]
        self._check_payloads(theirs)
        received = sum(map(self._length, self._landings.values()))
        for peer, landing in self._landings.items():
            if landing is not self._buffers[peer]:
                staging.to_device(landing, self._buffers[peer])
        self.wire.meter.count(self.operation, self.level, self._sent_bytes, received, self._begun_s)

    def _post(self, buffers: Mapping[int, Tensor]) -> list[Pending]:
        return [Pending(self, peer, self._irecv(peer, buffer), "wait_s") for peer, buffer in buffers.items()]

    def _isend(self, peer: int, message: Tensor) -> Pending:
        try:
            work = self.wire.group.send([message], self.wire.positions[peer], self._tag)
        except RuntimeError as error:
            raise self.wire.lost(self.operation, self.number, peer, error) from None
        return Pending(self, peer, work, "send_s")

    def _irecv(self, peer: int, buffer: Tensor) -> dist.Work:
        try:
            return self.wire.group.recv([buffer], self.wire.positions[peer], self._tag)
        except RuntimeError as error:
            raise self.wire.lost(self.operation, self.number, peer, error) from None

    def _header(self, num_bytes: int, payload: Tensor) -> Tensor:
        return headers.header(self.number, num_bytes, f"{self.operation}/{self.level}", payload)

    def _check_headers(self) -> Rounds[dict[int, Tensor]]:
        """The received headers. Raises MismatchError unless every peer is about to send what this rank expects."""
        theirs = {peer: headers.room() for peer in self._buffers}
        # This rank's headers must also leave: its peers need them to report both sides of the mismatch.
        yield [*self._post(theirs), *self._sent_headers]
        for peer, header in theirs.items():
            mine = self._header(self._buffers[peer].numel(), headers.NOTHING)
            headers.check(mine, header, self.wire.name(self.wire.rank), self.wire.name(peer))
        return theirs

    def _check_payloads(self, theirs: Mapping[int, Tensor]) -> None:
        """Raise CorruptMessageError if a payload does not match the checksum in its header."""
        for peer, header in theirs.items():
            landing, wire = self._landings[peer], self.wire
            names = wire.name(peer), wire.name(wire.rank)
            try:
                headers.check_payload(landing[: self._length(landing)], header, *names, wire.global_ranks[peer])
            except CorruptMessageError:
                wire.meter.count_damaged()
                raise
