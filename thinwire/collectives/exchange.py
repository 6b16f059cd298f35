"""One message pattern under every collective: post all receives, send, then take each peer's message in turn."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.collectives.meter import Meter
from thinwire.errors import MismatchError, PeerLostError

HEADER = struct.Struct("<qq48s")
GRACE_S = 2.0
# Rounds of one job: an all_reduce over two levels needs four, and a job may be made of many parts.
ROUNDS_OF_A_PART = 8
MAX_ROUNDS = 1024 * ROUNDS_OF_A_PART
T = TypeVar("T")


class Wire:
    """A process group of its own, whose messages are posted by one thread only, with every failure traced to a rank.

    Ranks here are positions in the group. `checked` puts (number of the job, payload bytes, operation) in front of each
    message, so that ranks which disagree stop with both sides' values instead of a hang or wrong sums.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: list[int], timeout_s: float, checked: bool) -> None:
        self.group = group
        self.global_ranks = ranks
        self.rank = ranks.index(dist.get_rank()) if group is not None else 0
        self.timeout_s = timeout_s
        self.checked = checked
        self.meter = Meter()

    def lost(self, operation: str, number: int, peer: int, error: Exception) -> PeerLostError:
        """Name the rank that is really missing: the silent peer, or the one that peer itself lost."""
        blame = {"rank": self.global_ranks[peer], "operation": operation, "sequence": number}
        # A store hosted by the lost process can hang, so it is asked from a thread that may be left behind.
        asker = threading.Thread(target=self._follow_blame, args=(blame,), daemon=True)
        asker.start()
        asker.join(GRACE_S + 1.0)
        cause = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        return PeerLostError(
            f"rank {blame['rank']} is missing: {blame['operation']} (message {blame['sequence']}) on rank "
            f"{self.global_ranks[self.rank]} did not get its part within the timeout of {self.timeout_s:g} s "
            f"or lost the connection [{cause}]"
        )

    def _follow_blame(self, blame: dict[str, int | str]) -> None:
        """Post whom this rank misses; while the accused has posted an accusation too, believe that one instead."""
        store = _compat.default_store()
        key = "thinwire/lost/{}".format
        me = self.global_ranks[self.rank]
        try:
            store.set(key(me), json.dumps(blame))
            seen = {me}
            deadline = time.monotonic() + GRACE_S
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


@dataclass(frozen=True)
class Pending:
    """A message on its way; `wait` blocks until it has arrived, or raises PeerLostError."""

    exchange: Exchange
    peer: int
    work: dist.Work
    kind: str

    def wait(self) -> None:
        own = self.exchange
        with own.wire.meter.timed(self.kind, own.label):
            try:
                self.work.wait(timedelta(seconds=own.wire.timeout_s))
            except RuntimeError as error:
                raise own.wire.lost(own.operation, own.number, self.peer, error) from None


class Arrival(Protocol):
    """Something on its way that a job needs before it can go on."""

    def wait(self) -> None:
        """Block until it is there; raises what keeps it from coming."""
        ...


# A job that is under way: it gives up the thread until all that it needs has arrived, and ends with its result. Once a
# round, not once a message: on busy cores it takes milliseconds until the thread runs again.
Rounds = Generator[Sequence[Arrival], None, T]


class Exchange:
    """One round of messages of the job `number`: send to some peers, receive from others, finish.

    receives: the buffer that each peer's message goes into; a message may be shorter. length: how many bytes of a
    filled buffer came, where that is not all of it. All messages carry the tag (number, round), so several jobs may be
    under way at once, and ranks need not agree which of them is ahead.
    """

    def __init__(
        self, wire: Wire, number: int, round_: int, operation: str, level: str, receives: Mapping[int, Tensor],
        length: Callable[[Tensor], int] = Tensor.numel,
    ) -> None:  # fmt: skip
        assert round_ < MAX_ROUNDS
        self.wire, self.number, self.operation, self.level = wire, number, operation, level
        self.label = f"{operation} {number}"
        self._tag = (number * MAX_ROUNDS + round_) % (1 << 30)
        self._buffers = dict(receives)
        self._sends: list[Pending] = []
        self._sent_headers: list[Pending] = []
        self._length = length
        self._sent_bytes = 0
        # A checked message is asked for when its header has been read.
        self._receives = [] if wire.checked else self._post(self._buffers)

    def send(self, peer: int, message: Tensor) -> None:
        """Start sending a uint8 tensor, cut to its length; it must stay unchanged until the round has finished."""
        if self.wire.checked:
            self._sent_headers.append(self._isend(peer, self._header(message.numel())))
        num_bytes = self._length(message)
        self._sends.append(self._isend(peer, message[:num_bytes]))
        self._sent_bytes += num_bytes

    def finish(self) -> Rounds[None]:
        """Wait for all messages, sent and received, and count their bytes."""
        if self.wire.checked:
            yield from self._check_headers()
            self._receives = self._post(self._buffers)
        yield [*self._receives, *self._sends]
        received = sum(map(self._length, self._buffers.values()))
        self.wire.meter.count(self.operation, self.level, self._sent_bytes, received)

    def _post(self, buffers: Mapping[int, Tensor]) -> list[Pending]:
        return [Pending(self, peer, self._irecv(peer, buffer), "wait_s") for peer, buffer in buffers.items()]

    def _isend(self, peer: int, message: Tensor) -> Pending:
        try:
            work = dist.isend(message, group=self.wire.group, tag=self._tag, group_dst=peer)
        except RuntimeError as error:
            raise self.wire.lost(self.operation, self.number, peer, error) from None
        assert work is not None
        return Pending(self, peer, work, "send_s")

    def _irecv(self, peer: int, buffer: Tensor) -> dist.Work:
        try:
            work = dist.irecv(buffer, group=self.wire.group, tag=self._tag, group_src=peer)
        except RuntimeError as error:
            raise self.wire.lost(self.operation, self.number, peer, error) from None
        assert work is not None
        return work

    def _header(self, num_bytes: int) -> Tensor:
        name = f"{self.operation}/{self.level}".encode()[:48]
        return torch.frombuffer(bytearray(HEADER.pack(self.number, num_bytes, name)), dtype=torch.uint8)

    def _check_headers(self) -> Rounds[None]:
        """Raise MismatchError unless every peer is about to send what this rank expects of it."""
        theirs = {peer: torch.empty(HEADER.size, dtype=torch.uint8) for peer in self._buffers}
        # The own ones too: a rank that stops here must not take its half of the story along.
        yield [*self._post(theirs), *self._sent_headers]
        for peer, header in theirs.items():
            mine, wire = self._header(self._buffers[peer].numel()), self.wire
            if not torch.equal(mine, header):
                raise MismatchError(
                    f"ranks disagree: rank {wire.global_ranks[wire.rank]} expects {_describe(mine)}, "
                    f"rank {wire.global_ranks[peer]} sends {_describe(header)}"
                )


def _describe(header: Tensor) -> str:
    number, num_bytes, name = HEADER.unpack(bytes(header.numpy()))
    return f"message {number} of {name.rstrip(bytes(1)).decode()} with {num_bytes} bytes"
