"""One start of a command in the emulated network, watched to its end."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any, TextIO

from thinwire.compare.record import Leg
from thinwire.compare.watch import LegWatch, MetricsTail
from thinwire.lab import Job, LabNetwork, start
from thinwire.run.signals import STOPPING

POLL_S = 0.02
# A training that is asked to stop finishes its step in the slow network, then saves.
STOP_GRACE_S = 120.0
KILL_GRACE_S = 5.0
NUM_LAST_LINES = 20
LONGEST_REASON = 300


@dataclass(frozen=True)
class LegStart:
    """A command to run on every rank.

    Args:
        stop: last step of this leg.
        last_step: last step of the previous leg.
        settled_after: number of first steps of the run that are not timed.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    output: Path
    metrics: Path
    turn: int
    last_step: int
    stop: int
    timeout_s: float
    timed_steps: int | None = None
    settled_after: int = 0


class StopWish(AbstractContextManager["StopWish"]):
    """Inside the `with` block, the first SIGINT or SIGTERM is noted; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signum = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        self._before = {signum: signal.signal(signum, self._note) for signum in STOPPING}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name if self.signum else ""

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum:
            raise KeyboardInterrupt
        self.signum = signum


# Warnings by torch, mostly about host names.
TORCH_WARNING = re.compile(r"\s*(\[rank\d+\]:)?\[W\d{4} ")


class OutputTail:
    """Writes the ranks' output to a file, and keeps the last lines, which may show why a rank failed."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._last: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=NUM_LAST_LINES))

    def line(self, rank: int, text: str) -> None:
        self._file.write(f"[{rank}] {text}\n")
        if text.strip() and not TORCH_WARNING.match(text):
            self._last[rank].append(text.strip())

    def reason(self, rank: int) -> str:
        """The last line of a rank's output, or its own error message if there is one."""
        lines = self._last[rank]
        errors = [line for line in lines if line.startswith("thinwire:")]
        last = (errors or list(lines) or ["it printed nothing"])[-1]
        return shorten(
            last.removeprefix("thinwire: ").removeprefix(f"rank {rank}: "), LONGEST_REASON, placeholder=" ..."
        )


def run_leg(
    network: LabNetwork, begin: LegStart, wish: StopWish, on_step: Callable[[dict[str, Any]], None]
) -> tuple[Leg, str]:
    """Run to the end of the leg, or until a stop is asked for. Return the leg, and why it failed; empty if it did not.

    Afterwards the links have their rates again, and no process that was started is left.
    """
    network.shape(True)
    watch = LegWatch(network, MetricsTail(begin.metrics), begin.turn, begin.timed_steps, begin.settled_after)
    with begin.output.open("a") as file:
        output = OutputTail(file)
        file.write(f"round {begin.turn}: {' '.join(begin.command)}\n")
        job = start(network, begin.command, env=begin.env, on_line=output.line)
        try:
            failed = _watch(job, watch, begin, wish, on_step)
        finally:
            if job.poll() is None:
                job.stop(signal.SIGKILL, KILL_GRACE_S)
    network.shape(True)
    watch.look()
    if not failed and not wish.signum:
        failed = _why_failed(job, output, watch.leg, begin)
        watch.leg.is_complete = not failed
    return watch.leg, failed


def _watch(
    job: Job, watch: LegWatch, begin: LegStart, wish: StopWish, on_step: Callable[[dict[str, Any]], None]
) -> str:
    """Wait until the job has ended, or end it. Return the reason of a failure, or an empty text."""
    due = time.monotonic() + begin.timeout_s
    while job.poll() is None:
        if watch.look():
            due = time.monotonic() + begin.timeout_s
            on_step(watch.last_row)
        if wish.signum:
            job.stop(wish.signum, STOP_GRACE_S)
        elif time.monotonic() > due:
            job.stop(signal.SIGTERM, KILL_GRACE_S)
            after = f"after step {watch.leg.last_step}" if watch.leg.last_step else "at all"
            return f"no step {after} within {begin.timeout_s:g} s"
        time.sleep(POLL_S)
    return ""


def _why_failed(job: Job, output: OutputTail, leg: Leg, begin: LegStart) -> str:
    if job.failed is not None:
        rank, code = job.failed
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"rank {rank} {how}: {output.reason(rank)}"
    reached = max(leg.last_step, begin.last_step)
    if not reached:
        return f"it wrote no step to {os.path.relpath(begin.metrics)}"
    if reached < begin.stop:
        return f"it ended after step {reached} of {begin.stop}"
    return ""


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The summary.json of a run; empty if it is missing or can't be read."""
    try:
        values = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
