"""Counts communication: payload bytes and seconds, per operation and per level."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, fields

SECONDS = ("encode_s", "send_s", "wait_s", "decode_s", "exposed_s")


@dataclass(frozen=True)
class OpReading:
    """One operation on one level: number of calls, this rank's payload bytes, and seconds.

    under_way_s: seconds in which a message of it was under way to or from this rank, waiting for the peer included.
    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    under_way_s: float = 0.0

    def __add__(self, other: OpReading) -> OpReading:
        return OpReading(
            self.calls + other.calls,
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.under_way_s + other.under_way_s,
        )

    def __neg__(self) -> OpReading:
        return OpReading(-self.calls, -self.sent_bytes, -self.received_bytes, -self.under_way_s)


@dataclass(frozen=True)
class MeterReading:
    """Totals since the start. The difference of two readings is the traffic between them.

    encode_s, send_s, wait_s, decode_s: seconds of the communication thread spent packing, sending, waiting for peers'
    messages, and unpacking. exposed_s: seconds the training thread stood still waiting for the communication thread.
    operations: {(operation, level): OpReading}, level "intra" or "inter". num_damaged: messages that came with another
    checksum than they were sent with.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    encode_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0
    exposed_s: float = 0.0
    num_damaged: int = 0
    operations: dict[tuple[str, str], OpReading] = field(default_factory=dict)

    def sent_by(self, operation: str) -> int:
        """Payload bytes sent by one operation, on all levels."""
        return sum(reading.sent_bytes for (name, _), reading in self.operations.items() if name == operation)

    def __add__(self, other: MeterReading) -> MeterReading:
        operations = {
            key: self.operations.get(key, OpReading()) + other.operations.get(key, OpReading())
            for key in self.operations | other.operations
        }
        numbers = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "operations"
        }
        return MeterReading(**numbers, operations=operations)

    def __neg__(self) -> MeterReading:
        numbers = {f.name: -getattr(self, f.name) for f in fields(self) if f.name != "operations"}
        return MeterReading(**numbers, operations={key: -reading for key, reading in self.operations.items()})

    def __sub__(self, other: MeterReading) -> MeterReading:
        return self + -other


@dataclass(frozen=True)
class TimeSpan:
    """A span of time of one job: its kind, the job, start and end on time.perf_counter's clock."""

    kind: str
    job: str
    start_s: float
    end_s: float


class TimedBlock:
    """Context that counts its seconds; see Meter.timed. One is made for every message: it is no generator."""

    __slots__ = "job", "kind", "meter", "start_s"

    def __init__(self, meter: Meter, kind: str, job: str) -> None:
        self.meter, self.kind, self.job, self.start_s = meter, kind, job, 0.0

    def __enter__(self) -> None:
        self.start_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.meter.add(self.kind, self.job, self.start_s, time.perf_counter())


class Meter:
    """Adds up bytes and seconds. The communication thread writes it; any thread may read it.

    spans: the timeline, recorded if it is a list; None (the default) records none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(SECONDS, 0.0)
        self._operations: dict[tuple[str, str], OpReading] = {}
        self._ended_s: dict[tuple[str, str], float] = {}
        self._num_damaged = 0
        self.spans: list[TimeSpan] | None = None

    def timed(self, kind: str, job: str = "") -> TimedBlock:
        """Add the block's wall-clock seconds to `kind`, one of SECONDS. job: name of the job."""
        return TimedBlock(self, kind, job)

    def add(self, kind: str, job: str, start_s: float, end_s: float) -> None:
        """Add a span of time to `kind`. A kind that is not in SECONDS goes only to the timeline."""
        with self._lock:
            if kind in self._seconds:
                self._seconds[kind] += end_s - start_s
            if self.spans is not None:
                self.spans.append(TimeSpan(kind, job, start_s, end_s))

    def count(
        self, operation: str, level: str, sent_bytes: int, received_bytes: int, begun_s: float | None = None
    ) -> None:
        """Add one call's payload, and its seconds until now, without those that overlap with the call before.

        begun_s: on time.perf_counter's clock; None: its seconds are not known.
        """
        key = operation, level
        with self._lock:
            alone_s = 0.0
            if begun_s is not None:
                now = time.perf_counter()
                alone_s = now - max(begun_s, self._ended_s.get(key, begun_s))
                self._ended_s[key] = now
            call = OpReading(1, sent_bytes, received_bytes, alone_s)
            self._operations[key] = self._operations.get(key, OpReading()) + call

    def count_damaged(self) -> None:
        """Add one message that was damaged on its way."""
        with self._lock:
            self._num_damaged += 1

    def snapshot(self) -> MeterReading:
        """The totals so far, as a value that does not change later."""
        with self._lock:
            operations = dict(self._operations)
            seconds, num_damaged = dict(self._seconds), self._num_damaged
        return MeterReading(
            sent_bytes=sum(reading.sent_bytes for reading in operations.values()),
            received_bytes=sum(reading.received_bytes for reading in operations.values()),
            num_damaged=num_damaged,
            operations=operations,
            **seconds,
        )
