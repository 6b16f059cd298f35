"""Reports of rank 0: the metrics file, the trackers, the progress table, and the summary at the end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from statistics import fmean, median
from typing import Any

from thinwire.cost.machine import starved
from thinwire.data import printable
from thinwire.errors import UnsavedError
from thinwire.flags import LAB
from thinwire.options import has_islands
from thinwire.report import write_report
from thinwire.report.machine import versions
from thinwire.report.metrics import (
    OF_MESSAGES,
    TRIED,
    WAITED,
    MembershipEvent,
    MetricsWriter,
    RunEvent,
    StepMetrics,
    TrafficEvent,
    WayEvent,
    medians,
)
from thinwire.report.progress import Progress
from thinwire.report.trackers import open_trackers
from thinwire.report.units import bytes_text, seconds_text
from thinwire.run.config import TrainConfig
from thinwire.run.run_dir import RunDir
from thinwire.table import Row
from thinwire.training.planned import core_share_of

# Of summary.json: what belongs to the layout that took the steps.
OF_A_STEP = (*OF_MESSAGES, "uncompressed_bytes_per_step", "uncompressed_of")
# Of what the bytes in fp32 are, where ranks send more than gradients and weights.
WHOLE_MODELS = "whole models that average gradients"


class Reporter:
    """Writes and prints what happens in a run; only on rank 0. `config` is the resolved configuration."""

    def __init__(
        self, config: TrainConfig, *, first_step: int, world_size: int, uncompressed_bytes: float, rows: Sequence[Row]
    ) -> None:
        self.config = config
        self.world_size = world_size
        self.uncompressed_bytes = uncompressed_bytes
        self.first_step = first_step
        self.last_bytes = 0
        self.rows = list(rows)
        self.tokens_per_step = config.tokens_per_step or 0
        self.run_dir = RunDir(config.run_dir)
        self.metrics = MetricsWriter(self.run_dir.metrics, first_step)
        self.has_stages = config.mesh_shape.pipeline > 1
        self.shares_work = config.mesh_shape.shares_work
        sender = "rank 0" if self.has_stages else ""
        self.progress = Progress(config.steps, self.tokens_per_step, uncompressed_bytes, sender, whole=self.shares_work)
        self.trackers = open_trackers(config.track, self.run_dir.path, asdict(config), self.progress.warn)
        self._is_full = False
        self.progress.start_table(self.rows)

    def step(self, record: StepMetrics) -> None:
        """Record one step everywhere; the metrics file first."""
        self._write(record)
        self.progress.step(record)
        self.trackers.log(record.step, {k: v for k, v in asdict(record).items() if k != "step"})

    def complete(self, row: StepMetrics) -> None:
        """Record a step that all ranks have taken, unless it is recorded: the loss of a rank broke its end off.

        row: what all ranks know of it.
        """
        if not self.metrics.records or self.metrics.records[-1].step < row.step:
            self._write(row)
            known = {name: value for name, value in asdict(row).items() if not math.isnan(value) and name != "step"}
            self.trackers.log(row.step, known)
            self.progress.say(f"step {row.step} was broken off when all had taken it: loss {row.loss:.4f}")

    def membership(self, event: MembershipEvent) -> None:
        """Record and print a change of the islands, or stages, that train together."""
        self._write(event)
        noun = event.noun
        changes = [f"{noun} {number} is lost" for number in event.lost]
        changes += [f"{noun} {number} joins" for number in event.joined]
        members = ", ".join(map(str, event.members))
        self.progress.say(
            f"generation {event.generation}: {'; '.join(changes) or 'as before'}; {noun}s {members} go on after step "
            f"{event.after_step}; {WAITED[noun].format(f'{event.cost_s:.1f} s')} ({event.how})"
        )

    def way(self, event: WayEvent, *, is_news: bool = True) -> None:
        """Record a way of rows to experts. Print it, unless it is only tried, or the start-up table has it."""
        self._write(event)
        if is_news and event.why != TRIED:
            seconds = f" ({seconds_text(event.measured_s)} a layer)" if event.measured_s else ""
            self.progress.say(f"rows to experts after step {event.after_step}: {event.way}: {event.why}{seconds}")

    def traffic(self, event: TrafficEvent) -> None:
        """Record the messages of a step, which no summary will have if the run is killed, or resumes later."""
        self._write(event)

    def timeline(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write what the stages of a pipeline did in one step, in Chrome's trace format."""
        try:
            self.run_dir.timeline.write_text(json.dumps({"traceEvents": events}) + "\n")
        except OSError as error:
            self.progress.warn(f"{self.run_dir.timeline} can't be written: {error.strerror}")

    def last_exchange(self, sent_bytes: int, seconds: float) -> None:
        """Record and print the cost of the islands' last exchange, after the last step."""
        self.last_bytes = sent_bytes
        self.progress.say(
            f"at the end: the mean of the islands' weights, {sent_bytes / 1e6:.3f} MB sent for it in {seconds:.1f} s"
        )

    def finish(
        self, *, step: int, skipped_steps: int, heldout_loss: float | None, stopped: str, sample: str, parameters: int,
        peak_rss_bytes: int, unsaved: str = "", device: str = "cpu", dtype: str = "fp32", peak_allocated_bytes: int = 0,
        sent_bytes: int = 0, messages: TrafficEvent | None = None, expert_rows: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        """Write summary.json and report.html, and print where they are.

        Raises UnsavedError if they can't be written, or if `unsaved` says why there is no final checkpoint.
        """
        self.close()
        # Islands exchange in few of their steps.
        average = fmean if has_islands(self.config.strategy) else median
        records = [record for record in self.metrics.records if record.is_measured]
        # Steps before a resume may have used another layout or strategy.
        own = [record for record in records if record.step > self.first_step]
        # A first step may send gradients alone, which is no measure of a step.
        self._num_own, own = len(own), own or records
        self._is_typical = len(own) > 1
        typical = medians(own, "step_s", "exposed_comm_s", "sent_bytes", "pipeline_s", average=average)
        summary = {
            "heldout_loss": heldout_loss if heldout_loss is None or math.isfinite(heldout_loss) else None,
            "tokens": step * self.tokens_per_step,
            "step_s": typical["step_s"],
            "tokens_per_s": self.tokens_per_step / typical["step_s"] if typical["step_s"] else 0.0,
            "exposed_comm_s": typical["exposed_comm_s"],
            "pipeline_s": typical["pipeline_s"],
            "predicted_pipeline_s": records[-1].predicted_pipeline_s if records else 0.0,
            "sent_bytes_per_step": typical["sent_bytes"],
            "sent_bytes": sent_bytes,
            **self._messages(messages),
            "expert_rows": expert_rows,
            "last_exchange_bytes": self.last_bytes,
            "uncompressed_bytes_per_step": self.uncompressed_bytes,
            "uncompressed_of": WHOLE_MODELS if self.shares_work else "",
            "strategy": self.config.strategy,
            "world_size": self.world_size,
            "lab": os.environ.get(LAB, ""),
            "parameters": parameters,
            "device": device,
            "dtype": dtype,
            "peak_rss_bytes": peak_rss_bytes,
            "peak_allocated_bytes": peak_allocated_bytes,
            "versions": versions(),
            "steps": step,
            "resumed_after": self.first_step,
            "skipped_steps": skipped_steps,
            "stopped": stopped,
            "effects": self.rows,
            "sample": sample,
        }
        if not self._num_own:
            summary |= self._figures_before()
        self._say_summary(summary)
        problems = [unsaved] if unsaved else []
        try:
            self.run_dir.summary.write_text(json.dumps(summary, indent=2) + "\n")
            self.progress.say(f"report: {write_report(self.run_dir.path)}")
        except OSError as error:
            what = f"{self.run_dir.path} can't be written: {error.strerror}"
            problems.append(f"{what}; the run is over, and without a summary")
        if problems:
            raise UnsavedError("; ".join(problems))

    def _messages(self, last: TrafficEvent | None) -> dict[str, dict[str, float]]:
        """Messages of a step, on average over the steps of all parts of the run that sent any. last: of this part."""
        events = [each for each in (*self.metrics.events, last) if isinstance(each, TrafficEvent) and each.sent_by]
        parts = {each.first_step: each for each in events}.values()
        steps = sum(each.after_step - each.first_step for each in parts)
        found: dict[str, dict[str, float]] = {kind: {} for kind in OF_MESSAGES}
        for part, kind in product(parts, OF_MESSAGES):
            share = (part.after_step - part.first_step) / max(1, steps)
            for name, value in getattr(part, kind).items():
                found[kind][name] = found[kind].get(name, 0.0) + value * share
        return found

    def _figures_before(self) -> dict[str, Any]:
        """What was written of the steps before a resume that has taken none: no step of this layout is known."""
        try:
            found = json.loads(self.run_dir.summary.read_text())
        except (OSError, ValueError):
            return {}
        return {name: found[name] for name in OF_A_STEP if name in found}

    def _write(self, record: StepMetrics | RunEvent) -> None:
        """Write to the metrics file. A full disk does not stop training: the line is tried again with the next one."""
        try:
            self.metrics.write(record)
            self._is_full = False
        except OSError as error:
            if not self._is_full:
                what = f"{self.run_dir.metrics} can't be written: {error.strerror}"
                self.progress.warn(f"{what}; training goes on, and its lines are kept until they can be")
            self._is_full = True

    def _say_summary(self, summary: dict[str, Any]) -> None:
        say = self.progress.say
        if summary["sample"]:
            say(f"\n--- the model goes on from {self.config.prompt!r} ---\n{printable(summary['sample'])}\n---")
        sent, plain = summary["sent_bytes_per_step"], summary["uncompressed_bytes_per_step"]
        if not self._num_own and self.first_step:
            say("no step was left to take: in summary.json, seconds and bytes of a step are those of the steps before")
        elif sent and plain:
            times = max(plain / sent, sent / plain)
            ratio = f"{times:.1f} times {'fewer' if sent < plain else 'as many'}" if times >= 1.05 else "as many"
            by = "by rank 0 " if self.has_stages else ""
            beside = (
                ", without those of the tensor axis, which torch sends" if self.config.mesh_shape.tensor > 1 else ""
            )
            instead = f"{WHOLE_MODELS} in " if self.shares_work else "in "
            step = "in a mean step" if has_islands(self.config.strategy) else "in a median step"
            step = step if self._is_typical else "in a step"
            beside = f"{ratio} bytes{beside}" if self._is_typical else f"one step is no measure of the ratio{beside}"
            say(f"sent {by}{step}: {bytes_text(sent)}, {instead}fp32 {bytes_text(plain)}: {beside}")
        if self.config.plan and summary["step_s"]:
            self._say_plan(summary["step_s"])
        if predicted := summary["predicted_pipeline_s"]:
            found = summary["pipeline_s"]
            say(
                f"a step through the pipeline took {found:.3g} s, simulated with its own passes {predicted:.3g} s: "
                f"{abs(found / predicted - 1):.0%} {'more' if found > predicted else 'less'}; the whole step took "
                f"{summary['step_s']:.3g} s"
            )
        if summary["skipped_steps"]:
            self.progress.warn(f"{summary['skipped_steps']} steps were skipped: their gradients were not finite")
        loss = summary["heldout_loss"]
        say(f"held-out loss: {loss:.4f}" if loss is not None else "held-out loss: not measured")
        if summary["stopped"] != "finished":
            say(f"stopped by {summary['stopped']} after step {summary['steps']}; go on with --resume")

    def _say_plan(self, step_s: float) -> None:
        """Say what the run's plan predicted of a step; nothing if its file has been spoilt."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            plan = json.loads(self.run_dir.plan.read_text())
            predicted = float(plan["predicted"]["step_s"])
            differs = f"{abs(step_s / predicted - 1):.0%} {'more' if step_s > predicted else 'less'}"
            told = f"the plan predicted {predicted:.3g} s a step, and it took {step_s:.3g} s in the median: {differs}"
            told += f" ({busy})" if (busy := starved(core_share_of(plan))) else ""
            self.progress.say(f"{told}; part by part in the report")

    def close(self) -> None:
        """Close files and trackers; the records stay."""
        self.progress.close()
        self.trackers.close()
        try:
            self.metrics.close()
        except OSError as error:
            self.progress.warn(f"{self.run_dir.metrics} lacks the last lines: {error.strerror}")
