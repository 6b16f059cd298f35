"""One message pattern under every collective: post all receives, send, then take each peer's message in turn."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.collectives.meter import Meter
from thinwire.errors import MismatchError, PeerLostError

HEADER = struct.Struct("<qq48s")
GRACE_S = 2.0


class Wire:
    """A process group of its own, used by one thread only, with every failure traced to a rank.

    Ranks here are positions in the group. `checked` puts (sequence number, payload bytes, operation) in front of each
    message, so that ranks which disagree stop with both sides' values instead of a hang or wrong sums.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: list[int], timeout_s: float, checked: bool) -> None:
        self.group = group
        self.global_ranks = ranks
        self.rank = ranks.index(dist.get_rank()) if group is not None else 0
        self.timeout_s = timeout_s
        self.checked = checked
        self.meter = Meter()
        self.sequence = 0

    def exchange(self, operation: str, level: str, receives: Mapping[int, Tensor]) -> Exchange:
        """Open one round of messages; `receives` maps each peer to the buffer its message goes into."""
        self.sequence += 1
        return Exchange(self, operation, level, receives)

    def lost(self, operation: str, peer: int, error: Exception) -> PeerLostError:
        """Name the rank that is really missing: the silent peer, or the one that peer itself lost."""
        blame = {"rank": self.global_ranks[peer], "operation": operation, "sequence": self.sequence}
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


class Exchange:
    """One round: a context manager whose exit waits for the sends; never leaves a buffer half in use on success."""

    def __init__(self, wire: Wire, operation: str, level: str, receives: Mapping[int, Tensor]) -> None:
        self._wire = wire
        self._operation = operation
        self._level = level
        self._buffers = dict(receives)
        self._sends: list[tuple[int, dist.Work, Tensor]] = []
        self._sent_bytes = 0
        self._sequence = wire.sequence
        self._pending: dict[int, dist.Work] = {}
        if not wire.checked:
            for peer, buffer in self._buffers.items():
                self._pending[peer] = self._irecv(peer, buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        with self._wire.meter.timed("send_s"):
            for peer, work, _ in self._sends:
                self._wait(peer, work)
        received = sum(buffer.numel() for buffer in self._buffers.values())
        self._wire.meter.count(self._operation, self._level, self._sent_bytes, received)

    def send(self, peer: int, message: Tensor) -> None:
        """Start sending a uint8 tensor, which must stay unchanged until the round ends."""
        with self._wire.meter.timed("send_s"):
            if self._wire.checked:
                self._isend(peer, self._header(message.numel()))
            self._isend(peer, message)
        self._sent_bytes += message.numel()

    def receive(self, peer: int) -> Tensor:
        """Wait for the peer's message and return its buffer."""
        buffer = self._buffers[peer]
        with self._wire.meter.timed("wait_s"):
            if self._wire.checked:
                self._check_header(peer, buffer.numel())
                self._pending[peer] = self._irecv(peer, buffer)
            self._wait(peer, self._pending.pop(peer))
        return buffer

    def receive_all(self) -> None:
        for peer in self._buffers:
            self.receive(peer)

    def _isend(self, peer: int, message: Tensor) -> None:
        try:
            work = dist.isend(message, group=self._wire.group, group_dst=peer)
        except RuntimeError as error:
            raise self._wire.lost(self._operation, peer, error) from None
        assert work is not None
        self._sends.append((peer, work, message))

    def _irecv(self, peer: int, buffer: Tensor) -> dist.Work:
        try:
            work = dist.irecv(buffer, group=self._wire.group, group_src=peer)
        except RuntimeError as error:
            raise self._wire.lost(self._operation, peer, error) from None
        assert work is not None
        return work

    def _wait(self, peer: int, work: dist.Work) -> None:
        try:
            work.wait(timedelta(seconds=self._wire.timeout_s))
        except RuntimeError as error:
            raise self._wire.lost(self._operation, peer, error) from None

    def _header(self, num_bytes: int) -> Tensor:
        name = f"{self._operation}/{self._level}".encode()[:48]
        return torch.frombuffer(bytearray(HEADER.pack(self._sequence, num_bytes, name)), dtype=torch.uint8)

    def _check_header(self, peer: int, num_bytes: int) -> None:
        mine = self._header(num_bytes)
        theirs = torch.empty_like(mine)
        self._wait(peer, self._irecv(peer, theirs))
        if torch.equal(mine, theirs):
            return
        wire = self._wire
        raise MismatchError(
            f"ranks disagree: rank {wire.global_ranks[wire.rank]} expects {_describe(mine)}, "
            f"rank {wire.global_ranks[peer]} sends {_describe(theirs)}"
        )


def _describe(header: Tensor) -> str:
    sequence, num_bytes, name = HEADER.unpack(bytes(header.numpy()))
    return f"message {sequence} of {name.rstrip(bytes(1)).decode()} with {num_bytes} bytes"
