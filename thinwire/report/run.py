"""Reads a run directory, in whatever state the run was left."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class RunFiles:
    """The files of one run directory. In a young or killed run, files may be missing, cut off or full of NaN.

    Args:
        steps: rows of metrics.jsonl by step; if a step occurs twice, its last row.
        summary: summary.json, empty if the run did not get that far.
        config: config.toml as text.
        plan: plan.json, empty if the run follows none.
        timeline: events of timeline.json; empty without a pipeline.
        ways: lines of metrics.jsonl on other ways of rows to experts, the last one of each change.
        traffic: its lines on bytes by message, one for each start of the run, up to its last checkpoint.
        memberships: its lines on islands or stages that were lost or joined.
        is_behind: summary.json is older than the last step, as after a resume that was killed.
        changed: when the last of these files was written; None if there is none.
    """

    path: Path
    steps: list[dict[str, Any]]
    summary: dict[str, Any]
    config: str
    is_behind: bool = False
    changed: datetime | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    ways: list[dict[str, Any]] = field(default_factory=list)
    memberships: list[dict[str, Any]] = field(default_factory=list)
    traffic: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def uncompressed_of(self) -> str:
        """Of what the bytes of a step in fp32 are, such as whole models; empty: of the run itself."""
        return str(self.summary.get("uncompressed_of") or "")

    @property
    def broken_off(self) -> int | None:
        """The last step of a run that has not come to its summary: it was killed, or goes on; None: it has."""
        last = int(number(self.steps[-1]["step"])) if self.steps else 0
        # Ranks at their own pace may have recorded more steps than the summary counts.
        went_on = self.is_behind and last > number(self.summary.get("steps", last))
        return last if went_on or not self.summary else None

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of every step that has the key. Values that are not numbers become NaN."""
        return [(number(row["step"]), number(row[key])) for row in self.steps if key in row]

    def typical(self, key: str) -> float:
        """The median of a key's finite values over the steps since the last resume; NaN if there are none.

        The first step, which warms up, is left out if there are more.
        """
        finite = [(step, value) for step, value in self.series(key) if math.isfinite(value)]
        before = number(self.summary.get("resumed_after", 0))
        values = [value for step, value in finite if step > before] or [value for _, value in finite]
        return median(values[1:] or values) if values else math.nan

    @property
    def is_typical(self) -> bool:
        """Whether there are several steps since the last resume: a first one may send gradients alone."""
        before = number(self.summary.get("resumed_after", 0))
        return sum(number(row["step"]) > before for row in self.steps) != 1

    def typical_text(self, key: str, unit: Callable[[float], str]) -> str:
        """The median in words, with the steps that it leaves out; unit: writes the value."""
        before = number(self.summary.get("resumed_after", 0))
        is_resumed = any(number(row["step"]) <= before for row in self.steps)
        return f"median {unit(self.typical(key))}" + (f" after step {before:.0f}" if is_resumed else "")

    def last(self, key: str) -> float:
        """The last finite value of a key; NaN if there is none."""
        values = [value for _, value in self.series(key) if math.isfinite(value)]
        return values[-1] if values else math.nan


def number(value: Any) -> float:
    """The value as a float; NaN for anything that isn't a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def read_run(run_dir: Path) -> RunFiles:
    """Read a run's metrics, summary and config. Raises ConfigError if there is no run at all."""
    metrics, summary, config = (run_dir / name for name in ("metrics.jsonl", "summary.json", "config.toml"))
    if not any(path.is_file() for path in (metrics, summary, config)):
        raise ConfigError(f"{str(run_dir)!r} holds no run: none of {metrics.name}, {summary.name}, {config.name}")
    lines = [_object(line) for line in _text(metrics).splitlines()]
    changed = max(path.stat().st_mtime for path in (metrics, summary, config) if path.is_file())
    return RunFiles(
        path=run_dir,
        steps=_rows(_text(metrics)),
        summary=_object(_text(summary)),
        config=_text(config),
        is_behind=metrics.is_file() and summary.is_file() and summary.stat().st_mtime < metrics.stat().st_mtime,
        changed=datetime.fromtimestamp(changed).astimezone(),
        plan=_object(_text(run_dir / "plan.json")),
        ways=[*{line.get("after_step"): line for line in lines if line.get("event") == "way"}.values()],
        traffic=[*{line.get("first_step"): line for line in lines if line.get("event") == "traffic"}.values()],
        memberships=[line for line in lines if line.get("event") == "membership"],
        timeline=_events(_text(run_dir / "timeline.json")),
    )


def mean_losses(run: RunFiles) -> dict[int, float]:
    """The training loss of each step; islands know their own, and it is the mean over those that took the step."""
    others = [_rows(_text(folder / "metrics.jsonl")) for folder in sorted(run.path.glob("island-*"))]
    found: dict[int, list[float]] = {int(row["step"]): [number(row.get("loss"))] for row in run.steps}
    for row in (row for rows in others for row in rows if row["step"] in found):
        found[int(row["step"])].append(number(row.get("loss")))
    return {step: fmean(losses) for step, losses in found.items()}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _object(text: str) -> dict[str, Any]:
    """A JSON object; empty if the text is cut off or is something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _events(text: str) -> list[dict[str, Any]]:
    """The events of a timeline with a place and times that are numbers."""
    found = _object(text).get("traceEvents")
    events = [event for event in found if isinstance(event, dict)] if isinstance(found, list) else []
    numbers = ("pid", "ts", "dur")
    return [event for event in events if all(math.isfinite(number(event.get(key))) for key in numbers)]


def _rows(text: str) -> list[dict[str, Any]]:
    by_step: dict[float, dict[str, Any]] = {}
    for line in text.splitlines():
        row = _object(line)
        if math.isfinite(step := number(row.get("step"))):
            by_step[step] = row
    return [by_step[step] for step in sorted(by_step)]
