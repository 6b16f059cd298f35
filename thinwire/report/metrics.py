"""The numbers of every step, one JSON line each, in RUN_DIR/metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step.

    Attributes:
        loss: mean over all ranks and micro-batches.
        tokens: since the run's first step, over all ranks.
        exposed_comm_s: seconds that rank 0 waited for communication.
        compute_s: step_s minus that and exposed_disk_s.
        sent_bytes, received_bytes: payload of rank 0 in this step.
        codec_s: seconds in which its communication thread packed and unpacked.
        forward_s: seconds of its forward passes, waiting included.
        sent_weight_bytes: the part of sent_bytes that carried weights.
        damaged_messages: messages to rank 0 in this step with a wrong checksum, which were sent again.
        peak_allocated_bytes: peak memory of tensors on rank 0's GPU up to this step; 0 on the CPU.
        pipeline_s: in a pipeline, seconds from the first to the last of rank 0's forwards and backwards.
        bubble: the share of them in which it computed nothing.
        predicted_pipeline_s, predicted_bubble: as simulated; 0 before the simulation.
        disk_read_bytes, disk_written_bytes: between rank 0's memory and its disk.
        disk_s: seconds in which the disk was busy.
        exposed_disk_s: seconds that rank 0 waited for it.
        dropped_rows: in a mixture of experts, the share of the rows of all ranks and layers that a capacity dropped.
        needed_capacity: the smallest capacity factor that would have dropped none.
        experts_s: seconds of rank 0's layers of experts that lie on several ranks, forward and backward.
        predicted_experts_s: as simulated; 0 without a simulation.
        teacher_loss: the difference from a teacher's experts times its weight, which the gradient has and the loss has
            not, mean over all ranks and micro-batches; 0 without a teacher.
    """

    step: int
    loss: float
    tokens: int
    step_s: float
    compute_s: float
    exposed_comm_s: float
    sent_bytes: int
    received_bytes: int
    lr: float
    grad_norm: float
    codec_s: float = 0.0
    forward_s: float = 0.0
    sent_weight_bytes: int = 0
    peak_allocated_bytes: int = 0
    damaged_messages: int = 0
    pipeline_s: float = 0.0
    bubble: float = 0.0
    predicted_pipeline_s: float = 0.0
    predicted_bubble: float = 0.0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    disk_s: float = 0.0
    exposed_disk_s: float = 0.0
    dropped_rows: float = 0.0
    needed_capacity: float = 0.0
    experts_s: float = 0.0
    predicted_experts_s: float = 0.0
    teacher_loss: float = 0.0

    @classmethod
    def agreed(cls, *, step: int, loss: float, tokens: int, lr: float, grad_norm: float) -> StepMetrics:
        """The figures that every rank knows of a step. What rank 0 measures is NaN."""
        measured: dict[str, Any] = {item.name: math.nan for item in fields(cls)}
        return cls(**measured | {"step": step, "loss": loss, "tokens": tokens, "lr": lr, "grad_norm": grad_norm})

    @property
    def is_measured(self) -> bool:
        """Whether rank 0 saw the end of the step; see `agreed`."""
        return math.isfinite(self.step_s)


@dataclass(frozen=True)
class MembershipEvent:
    """A change of the islands, or stages, that train together; a line of its own between those of the steps.

    Attributes:
        after_step: the last step before the change.
        members, lost, joined: numbers of islands or stages.
        cost_s: seconds that this island waited, or rank 0 of a pipeline; see WAITED.
        how: what was done in that time.
        noun: island or stage.
    """

    event: str = field(default="membership", kw_only=True)
    after_step: int
    generation: int
    members: list[int]
    lost: list[int]
    joined: list[int]
    cost_s: float
    how: str = ""
    noun: str = "island"


@dataclass(frozen=True)
class WayEvent:
    """Another way of rows to experts; a line of its own between those of the steps.

    Attributes:
        after_step: the last step before the change.
        way: what travels, by which route, in how many chunks.
        why: what chose it.
        predicted_s, measured_s: seconds of a layer, forward and backward; 0: unknown.
    """

    event: str = field(default="way", kw_only=True)
    after_step: int
    way: str
    why: str
    predicted_s: float = 0.0
    measured_s: float = 0.0


@dataclass(frozen=True)
class TrafficEvent:
    """What rank 0 had sent by a checkpoint; a resumed run may lie on other ranks.

    Attributes:
        after_step: the last step that counts.
        first_step: the step after which the process was started.
        sent_by: bytes of a step, on average since then, by message and level.
        message_s: seconds of a step in which they were under way, likewise; predicted_message_s: as predicted.
    """

    event: str = field(default="traffic", kw_only=True)
    after_step: int
    first_step: int
    sent_by: dict[str, float]
    message_s: dict[str, float] = field(default_factory=dict)
    predicted_message_s: dict[str, float] = field(default_factory=dict)


# Who waits at a change of membership, and from when, by noun; {} is for the seconds.
WAITED = {
    "island": "this island waited {} from the start of the exchange that broke off",
    "stage": "rank 0 waited {} from when it missed the other",
}
# Of a message and level: bytes, seconds, predicted seconds.
OF_MESSAGES = ("sent_by", "message_s", "predicted_message_s")
# Of a way.
TRIED = "to be tried"
RunEvent = MembershipEvent | WayEvent | TrafficEvent


class MetricsWriter:
    """Appends lines that survive the process. `records` and `events` also hold those of earlier sessions."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Open `path`, keeping the lines up to `last_step`: a resumed run writes the later steps again."""
        self.records = [record for record in read_metrics(path) if record.step <= last_step]
        self.events = [event for event in read_events(path) if event.after_step <= last_step]
        lines: list[StepMetrics | RunEvent] = sorted([*self.records, *self.events], key=_order)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(map(to_line, lines)))
        temporary.replace(path)
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, record: StepMetrics | RunEvent) -> None:
        """Append a line, and those that could not be written before. Raises OSError if the disk refuses them now."""
        if isinstance(record, StepMetrics):
            self.records.append(record)
        else:
            self.events.append(record)
        self._waiting += to_line(record).encode()
        self._flush()

    def close(self) -> None:
        """Close the file. Raises OSError if the disk refuses lines that are left."""
        if not self._file.closed:
            with closing(self._file):
                self._flush()

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def _order(record: StepMetrics | RunEvent) -> tuple[int, bool]:
    return (record.step, False) if isinstance(record, StepMetrics) else (record.after_step, True)


def to_line(record: StepMetrics | RunEvent) -> str:
    """One line of strict JSON, in which a number that is not finite is null."""
    values = asdict(record)
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite) + "\n"


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps of a metrics file. A last line that was cut short is left out, and so are unknown keys."""
    records, known = [], {item.name for item in fields(StepMetrics)}
    for values in _lines(path):
        if "event" not in values:
            numbers: dict[str, Any] = {k: math.nan if v is None else v for k, v in values.items() if k in known}
            records.append(StepMetrics(**numbers))
    return records


def read_events(path: Path) -> list[RunEvent]:
    """What a metrics file has between its steps: changes of membership and of the way of rows, and bytes by message."""
    found: list[RunEvent] = []
    for values in _lines(path):
        for kind in (MembershipEvent, WayEvent, TrafficEvent):
            if values.get("event") == kind.event:
                known = {item.name for item in fields(kind)}
                found.append(kind(**{k: v for k, v in values.items() if k in known}))
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file, up to one that was cut short."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def medians(
    records: list[StepMetrics], *names: str, average: Callable[[Iterable[float]], float] = median
) -> dict[str, float]:
    """The median over the steps of each named number; the first step, which warms up, is left out if there are more.

    average: another average, for runs in which a few steps stand out by design.
    """
    steady = records[1:] or records
    return {name: average([getattr(record, name) for record in steady]) if steady else 0.0 for name in names}
