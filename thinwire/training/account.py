"""What a rank's steps send, move and wait for: the metrics of a step, and the sums of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.cost.links import Line, Links
from thinwire.hosts.pipeline.plans import Prediction
from thinwire.models.capacity import RowLoad
from thinwire.report.metrics import OF_MESSAGES, StepMetrics
from thinwire.tiers import TierReading
from thinwire.training.engine import Engine
from thinwire.training.reporter import Reporter


class StepAccount:
    """Reads the meters of a rank before and after each step. first_step: number of steps taken before the first one."""

    def __init__(self, engine: Engine, first_step: int) -> None:
        self.engine, self.optimizer, self.first_step = engine, engine.optimizer, first_step
        self._moved = self.moved_so_far()
        self._prediction: Prediction | None = None
        self._expert_rows: torch.Tensor | None = None
        self.open()

    def open(self) -> None:
        """What was sent until now, as for measuring the links, belongs to no step."""
        self._sent = self._first_sent = self.optimizer.meter.snapshot()

    def begin(self) -> None:
        """A step begins."""
        self._start, self._before = time.perf_counter(), self.optimizer.meter.snapshot()

    def note_sent(self) -> None:
        """What has been sent until now belongs to the step; what is sent later, to the next one."""
        self._sent_now = self.optimizer.meter.snapshot()

    def end(self) -> None:
        """The step ends."""
        self._spent = self.optimizer.meter.snapshot() - self._before
        self._sent_in_step, self._sent = self._sent_now - self._sent, self._sent_now
        before, self._moved = self._moved, self.moved_so_far()
        self._moved_in_step = self._moved - before
        self._step_s = time.perf_counter() - self._start

    def metrics(self, step: int, reporter: Reporter | None, rows: RowLoad, **known: float) -> StepMetrics:
        """Those of the step that has ended. known: what no meter has."""
        spent, sent, moved, step_s = self._spent, self._sent_in_step, self._moved_in_step, self._step_s
        return StepMetrics(
            step=step, loss=self.optimizer.mean_loss, tokens=step * self.engine.batch.tokens_per_step, step_s=step_s,
            compute_s=step_s - spent.exposed_s - moved.wait_s, exposed_comm_s=spent.exposed_s,
            sent_bytes=sent.sent_bytes, received_bytes=sent.received_bytes, codec_s=spent.encode_s + spent.decode_s,
            sent_weight_bytes=sent.sent_by("weights"), peak_allocated_bytes=self.engine.device.peak_bytes(),
            damaged_messages=sent.num_damaged, **self._of_pipeline(reporter), disk_read_bytes=moved.read_bytes,
            disk_written_bytes=moved.written_bytes, disk_s=moved.read_s + moved.write_s, exposed_disk_s=moved.wait_s,
            dropped_rows=rows.dropped_share, needed_capacity=rows.needed, **known,
        )  # fmt: skip

    def count_rows(self, load: RowLoad) -> None:
        """Add a step's rows of each expert to those of the run."""
        if load.counts is not None:
            counts = load.counts.sum(0)
            self._expert_rows = counts if self._expert_rows is None else self._expert_rows + counts

    def last_exchange_bytes(self) -> int:
        """Bytes sent since the last step."""
        now = self.optimizer.meter.snapshot()
        sent, self._sent = now - self._sent, now
        return sent.sent_bytes

    def messages(
        self, step: int, links: Links | None = None, simulated: Mapping[tuple[str, str], float] | None = None
    ) -> dict[str, dict[str, float]]:
        """The bytes that this rank has sent in a step, and their seconds, on average, by operation and level.

        The predicted seconds are the simulated ones. Those of all other messages are what the links take for them, one
        after the other.

        Args:
            links: as measured; None: nothing is predicted. simulated: seconds of all steps.
        """
        steps, simulated = max(1, step - self.first_step), simulated or {}
        found: dict[str, dict[str, float]] = {name: {} for name in OF_MESSAGES}
        for (name, level), each in sorted((self._sent - self._first_sent).operations.items()):
            if not each.sent_bytes:
                continue
            key, line = f"{name}, {level}", Line() if links is None else links.line(name, level)
            alone_s = each.calls * line.alpha_s + each.sent_bytes * line.beta_s
            predicted_s = simulated.get((name, level), alone_s)
            for kind, value in zip(OF_MESSAGES, (each.sent_bytes, each.under_way_s, predicted_s), strict=True):
                if value:
                    found[kind][key] = value / steps
        return found

    @property
    def expert_rows(self) -> list[Any]:
        """The rows of each expert in all steps; empty without experts."""
        return [] if self._expert_rows is None else self._expert_rows.long().tolist()

    def moved_so_far(self) -> TierReading:
        """Bytes moved to and from this rank's disk so far."""
        return TierReading() if self.optimizer.tiers is None else self.optimizer.tiers.snapshot()

    def _of_pipeline(self, reporter: Reporter | None) -> dict[str, float]:
        """The metrics of a pipeline's last step. A new prediction is also printed."""
        pipeline = self.engine.stage.pipeline
        if pipeline is None:
            return {}
        found = {"pipeline_s": pipeline.step_s, "bubble": 1 - pipeline.busy_s / max(pipeline.step_s, 1e-9)}
        plans, prediction = pipeline.plans, self._prediction
        if prediction is not None:
            found |= {"predicted_pipeline_s": prediction.step_s, "predicted_bubble": prediction.bubbles[0]}
        if plans.prediction is not prediction and reporter is not None:
            why = f"a link has drifted, {plans.why_planned}; " if plans.why_planned else ""
            reporter.progress.say(
                f"{why}the pipeline from now on, simulated with the times of the step before: {plans.prediction}"
            )
        # Of the steps that follow.
        self._prediction = plans.prediction
        if pipeline.trace and reporter is not None:
            reporter.timeline(pipeline.trace)
        # Of one step alone.
        pipeline.trace = pipeline.trace and []
        return found
