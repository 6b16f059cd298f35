"""Messages between two ranks, outside of collectives. Receivers know the messages of a step and post receives early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import faults, headers, staging
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.exchange import Members, Wire
from thinwire.collectives.groups import give_back, own_members
from thinwire.collectives.meter import Meter
from thinwire.collectives.patience import patience
from thinwire.collectives.topology import Topology
from thinwire.errors import ConfigError

DIRECTIONS = ("forward", "backward")
# A tag holds, from its lowest bit, the direction, the hop, the micro-batch and whether the step is odd.
HOP_BITS, MICRO_BATCH_BITS = 10, 17


class Label(NamedTuple):
    """Identifies a message of a step.

    Args:
        direction: one of DIRECTIONS.
        hop: number of the border on the micro-batch's path.
    """

    direction: str
    micro_batch: int
    hop: int


@dataclass(frozen=True)
class Expected:
    """A message to come: the rank that sends it, and its largest size in bytes.

    is_own: it is for this rank alone, where ranks beside it take others; see hosts/pipeline/shared.py.
    """

    label: Label
    peer: int
    num_bytes: int
    is_own: bool = False


@dataclass
class _Posted:
    expected: Expected
    buffer: Tensor
    work: dist.Work


class Mailbox:
    """Messages between this rank and others of its group, over a process group of its own.

    gloo moves no byte of a message before its receiver has posted a receive. A mailbox therefore posts receives for the
    next `window` messages of a step, in the order of need, each into its own buffer. Sending does not wait. Messages
    are identified by their labels; consecutive steps have different tags, so one rank may be a step ahead. Only one
    thread may use a mailbox.

    Args:
        group: see Communicator.
        topology: nodes of the group.
        timeout_s: how long `take` and `finish` wait for one message.
        checked: send a header with label, size and checksum ahead of each message. The message itself then moves only
            when it is taken.
        meter: counts messages as operation "pipeline_forward" or "pipeline_backward", and the time that `take` and
            `finish` wait as exposed_s.
        operation: stands for "pipeline" in these names.

    Raises ConfigError for a window below 1, PeerLostError with the name of a missing rank. After any error the mailbox
    can't be used.
    """

    def __init__(
        self, group: dist.ProcessGroup | Sequence[int] | DeviceMesh | Members | None, topology: Topology, *,
        timeout_s: float = DEFAULT_TIMEOUT_S, checked: bool = False, meter: Meter | None = None, window: int = 8,
        operation: str = "pipeline",
    ) -> None:  # fmt: skip
        if window < 1:
            raise ConfigError(f"window {window}: a mailbox asks for at least 1 message ahead")
        self._wire = Wire(own_members(group, timeout_s), timeout_s, checked, meter)
        self.topology = topology
        self.window = window
        self.operation = operation
        self._step = 0
        self._coming: deque[Expected] = deque()
        self._posted: dict[Label, _Posted] = {}
        self._sent: deque[tuple[Label, int, dist.Work, Tensor]] = deque()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._wire.rank

    @property
    def meter(self) -> Meter:
        return self._wire.meter

    def share_bytes(self, num_bytes: int) -> int:
        """How many bytes this rank sends of a message of `num_bytes`."""
        return num_bytes

    def send_own(self, peer: int, label: Label, message: Tensor) -> None:
        """`send` a message that `is_own`."""
        self.send(peer, label, message)

    def begin(self, expected: Sequence[Expected]) -> None:
        """Begin a step in which these messages will be taken in this order."""
        assert not self._posted and not self._coming and not self._sent, "the step before has not finished"
        self._step += 1
        self._coming.extend(expected)
        while self._coming and len(self._posted) < self.window:
            self._post()

    def send(self, peer: int, label: Label, message: Tensor, num_bytes: int | None = None) -> None:
        """Start to send a flat uint8 tensor, or its first num_bytes. It must not change until `finish`."""
        message = message.cpu() if staging.must_stage(message) else message
        length = message.numel() if num_bytes is None else num_bytes
        header = self._header(label, message.numel(), message[:length]) if self._wire.checked else None
        self._count(label, peer, length, 0)
        changed: Tensor | None = message
        if faults.are_armed():
            changed = faults.on_message(self._operation(label), message)
        while self._sent and self._sent[0][2].is_completed():
            self._sent.popleft()
        if changed is None:
            return
        for part in [changed[:length]] if header is None else [header, changed[:length]]:
            self._sent.append((label, peer, self._isend(peer, label, part), part))

    def take(self, label: Label, length: Callable[[Tensor], int] = Tensor.numel) -> Tensor:
        """Wait for a message that this step expects. Return its bytes.

        length: the number of valid bytes in a full buffer. Raises PeerLostError, MismatchError and CorruptMessageError.
        """
        posted = self._posted.pop(label)
        peer, landing = posted.expected.peer, posted.buffer
        self._wait(label, peer, posted.work)
        if self._wire.checked:
            landing = self._checked(posted, length)
        if self._coming:
            self._post()
        self._count(label, peer, 0, length(landing))
        return landing

    def finish(self) -> None:
        """End the step: wait until all sent messages have arrived."""
        while self._sent:
            label, peer, work, _ = self._sent.popleft()
            self._wait(label, peer, work)

    def close(self) -> None:
        """Leave the process group to its next user. Call it between steps."""
        give_back(self._wire.members)

    def break_off(self) -> None:
        """Close all connections after a loss, so that peers who wait for a message get an error at once."""
        self._wire.abandon()

    def _post(self) -> None:
        """Post the receive of the next message, or of its header."""
        expected = self._coming.popleft()
        buffer = headers.room() if self._wire.checked else staging.allocate(expected.num_bytes, staging.CPU)
        work = self._irecv(expected.peer, expected.label, buffer)
        self._posted[expected.label] = _Posted(expected, buffer, work)

    def _checked(self, posted: _Posted, length: Callable[[Tensor], int]) -> Tensor:
        """The payload that follows a header."""
        expected, wire = posted.expected, self._wire
        names = wire.name(expected.peer), wire.name(wire.rank)
        headers.check(self._header(expected.label, expected.num_bytes, headers.NOTHING), posted.buffer, *names[::-1])
        landing = staging.allocate(expected.num_bytes, staging.CPU)
        self._wait(expected.label, expected.peer, self._irecv(expected.peer, expected.label, landing))
        headers.check_payload(landing[: length(landing)], posted.buffer, *names, wire.global_ranks[expected.peer])
        return landing

    def _header(self, label: Label, num_bytes: int, payload: Tensor) -> Tensor:
        name = f"{self._operation(label)} {label.micro_batch} at hop {label.hop}"
        return headers.header(self._step, num_bytes, name, payload)

    def _count(self, label: Label, peer: int, sent_bytes: int, received_bytes: int) -> None:
        node = self.topology.node
        level = "intra" if node(peer) == node(self.rank) else "inter"
        self.meter.count(self._operation(label), level, sent_bytes, received_bytes)

    def _isend(self, peer: int, label: Label, part: Tensor) -> dist.Work:
        try:
            return self._wire.group.send([part], peer, self._tag(label))
        except RuntimeError as error:
            raise self._lost(label, peer, error) from None

    def _irecv(self, peer: int, label: Label, buffer: Tensor) -> dist.Work:
        try:
            return self._wire.group.recv([buffer], peer, self._tag(label))
        except RuntimeError as error:
            raise self._lost(label, peer, error) from None

    def _wait(self, label: Label, peer: int, work: dist.Work) -> None:
        with self.meter.timed("exposed_s", self._operation(label)):
            try:
                with patience().wait(self._wire, peer, f"{self._operation(label)} {label.micro_batch}"):
                    work.wait(timedelta(seconds=self._wire.timeout_s))
            except RuntimeError as error:
                raise self._lost(label, peer, error) from None

    def _lost(self, label: Label, peer: int, error: Exception) -> Exception:
        return self._wire.lost(self._operation(label), label.micro_batch, peer, error)

    def _tag(self, label: Label) -> int:
        assert label.hop < 1 << HOP_BITS and label.micro_batch < 1 << MICRO_BATCH_BITS
        tag = (self._step % 2) << MICRO_BATCH_BITS | label.micro_batch
        return (tag << HOP_BITS | label.hop) << 1 | DIRECTIONS.index(label.direction)

    def _operation(self, label: Label) -> str:
        return f"{self.operation}_{label.direction}"
