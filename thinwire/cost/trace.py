"""Spans of time in a simulated step: for Perfetto, and for a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SENDING = "sending"
# Spans of one lane that are closer than this part of the step are one in a picture.
NEAR = 0.002


@dataclass(frozen=True)
class TraceSpan:
    """Work or a message of a rank, in seconds. target: the receiver of a message; None for work."""

    rank: int
    lane: str
    name: str
    begin: float
    end: float
    target: int | None = None
    num_bytes: float = 0.0


def trace_events(spans: Iterable[TraceSpan]) -> list[dict[str, Any]]:
    """Events in Chrome's trace format, which Perfetto reads too; one process per rank, one thread per lane."""
    found: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}
    for span in spans:
        lane = (span.rank, span.lane if span.target is None else f"to {span.target}")
        if lane not in threads:
            threads[lane] = len(threads)
            for kind, name in (("process_name", f"rank {span.rank}"), ("thread_name", lane[1])):
                found.append({"name": kind, "ph": "M", "pid": span.rank, "tid": threads[lane], "args": {"name": name}})
        found.append({
            "name": span.name, "ph": "X", "pid": span.rank, "tid": threads[lane], "ts": 1e6 * span.begin,
            "dur": 1e6 * (span.end - span.begin), "args": {"bytes": span.num_bytes},
        })  # fmt: skip
    return found


def merged(spans: Iterable[TraceSpan]) -> list[tuple[int, str, str, float, float]]:
    """(rank, lane, name, begin, end), by the first word of the name; near ones of a lane are one."""
    lanes: dict[tuple[int, str], list[TraceSpan]] = defaultdict(list)
    for span in spans:
        lanes[span.rank, SENDING if span.target is not None else span.lane].append(span)
    last = max((span.end for own in lanes.values() for span in own), default=0.0)
    found: list[tuple[int, str, str, float, float]] = []
    for (rank, lane), own in lanes.items():
        joined: list[tuple[int, str, str, float, float]] = []
        for span in sorted(own, key=lambda span: span.begin):
            name = SENDING if lane == SENDING else span.name.split()[0]
            if joined and joined[-1][2] == name and span.begin - joined[-1][4] <= NEAR * last:
                *kept, end = joined[-1]
                joined[-1] = (*kept, max(end, span.end))  # type: ignore[assignment]
            elif span.end > span.begin:
                joined.append((rank, lane, name, span.begin, span.end))
        found += joined
    return found
