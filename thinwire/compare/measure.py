"""Figures of a race: turns its legs and the metrics of its runs into one row per contestant."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from thinwire.compare.commands import Files
from thinwire.compare.contestants import Contestant
from thinwire.compare.plan import RacePlan
from thinwire.compare.record import Leg, RaceRecord, SeedEntry
from thinwire.errors import ConfigError
from thinwire.lab import LabSpec
from thinwire.options import has_islands
from thinwire.report.machine import machine, versions
from thinwire.report.run import RunFiles, mean_losses, number, read_run
from thinwire.report.verdict import FINISHED
from thinwire.table import Row as EffectRow

FAILED, UNFINISHED = "failed", "unfinished"
REFERENCE = "ddp-bf16"
# Rank 0's bytes to and from its disk.
DISK_BYTES = ("disk_read_bytes", "disk_written_bytes")
TARGET_REFERENCES = ("zero", "ddp")
AVERAGES: dict[str, Callable[[Iterable[float]], float]] = {"mean": fmean, "median": median}


@dataclass(frozen=True)
class Figures:
    """The compared figures of a run; None: not known. Bytes are those that a rank sends in a step.

    Args:
        step_s, exposed_comm_s, codec_s: of rank 0, medians over the timed steps; means in a race with islands.
        exposed_disk_s: in which rank 0 waited for its disk; None: nothing lies on one.
        compute_s: step_s minus exposed_comm_s and exposed_disk_s.
        sent_bytes_per_step: payload of rank 0. A mean over the timed steps of each start, then the median of the
            starts; their mean in a race with islands.
        kernel_sent_bytes_per_step: all bytes on a node's link divided by its ranks, averaged in the same way; the mean
            over the nodes, and the worst node.
        disk_bytes_per_step: that rank 0 reads from its disk and writes to it; None: nothing lies on one.
        bound_s: max(compute alone, bytes / rate).
        unhidden_s: time that must be added to it, see `least_time`.
        minutes_to_target: step_s times the steps until the smoothed training loss reaches the target.
    """

    step_s: float | None = None
    tokens_per_s: float | None = None
    compute_s: float | None = None
    exposed_comm_s: float | None = None
    exposed_disk_s: float | None = None
    codec_s: float | None = None
    kernel_sent_bytes_per_step: float | None = None
    kernel_sent_bytes_per_step_worst_node: float | None = None
    sent_bytes_per_step: float | None = None
    train_loss: float | None = None
    heldout_loss: float | None = None
    minutes_to_target: float | None = None
    peak_rss_bytes: float | None = None
    disk_bytes_per_step: float | None = None
    bound_s: float | None = None
    unhidden_s: float | None = None
    step_over_bound: float | None = None


@dataclass(frozen=True)
class SeedResult:
    """One run. target_step: the first step that reaches the target; None: not reached, or no target."""

    seed: int
    run_dir: str
    num_steps: int
    num_timed_steps: int
    target_loss: float | None
    target_step: int | None
    figures: Figures


@dataclass(frozen=True)
class RaceRow:
    """One contestant: means over its seeds, and each divided by the reference's.

    spread: the lowest and the highest of each figure over the seeds; for times, over the rounds of all seeds. None if
    there is only one value.
    """

    name: str
    strategy: str
    options: dict[str, Any]
    command: str
    status: str
    reason: str
    is_whole: bool
    mean: Figures
    ratio: dict[str, float | None]
    seeds: list[SeedResult]
    spread: dict[str, tuple[float, float] | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The current result of a race.

    Args:
        reference: the row that ratios are taken to.
        compute_alone_s: seconds of a step without exchange.
        measured_at: date and time, in ISO 8601.
    """

    command: str
    measured_at: str
    stopped: str
    lab: str
    steps: int
    tokens_per_step: int
    smooth: int
    average: str
    reference: str | None
    reference_why: str
    compute_alone_s: float | None
    compute_alone_failed: str
    machine: dict[str, Any]
    versions: dict[str, str]
    effects: list[EffectRow]
    settings: dict[str, Any]
    contestants: list[RaceRow] = field(default_factory=list)

    def row(self, name: str) -> RaceRow:
        """The row of a contestant. Raises KeyError."""
        return {row.name: row for row in self.contestants}[name]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(plan: RacePlan, record: RaceRecord) -> Result:
    """Figures of all finished legs."""
    alone = median(alone.step_s for alone in record.alone) if record.alone else None
    forward = median(alone.forward_s for alone in record.alone) if record.alone else 0.0
    runs = {
        (contestant.name, seed): _read(Files.of(plan.out, contestant.name, seed).run_dir)
        for contestant in plan.contestants
        for seed in plan.seeds
    }
    statuses = {contestant.name: status_of(plan, record, contestant) for contestant in plan.contestants}
    finished = [name for name, status in statuses.items() if status == FINISHED]
    targets = {seed: target_loss(plan, finished, runs, seed) for seed in plan.seeds}
    rows = []
    for contestant in plan.contestants:
        seeds = []
        for seed in plan.seeds:
            entry, run = record.entry(contestant.name, seed), runs[contestant.name, seed]
            seeds.append(seed_result(plan, entry, run, targets[seed], alone, forward))
        entries = [(record.entry(contestant.name, seed), runs[contestant.name, seed]) for seed in plan.seeds]
        rows.append(
            RaceRow(
                contestant.name, contestant.strategy, dict(contestant.options), contestant.command,
                statuses[contestant.name], record.failure(contestant.name), contestant.is_whole,
                mean_of(plan.tokens_per_step, [seed.figures for seed in seeds]), {}, seeds,
                spread_of(plan.tokens_per_step, AVERAGES[average_of(plan)], seeds, entries),
            )
        )  # fmt: skip
    reference, why = reference_of(rows)
    against = next((row.mean for row in rows if row.name == reference), Figures())
    for row in rows:
        row.ratio.update(ratios(row.mean, against))
    return Result(
        command=record.command, measured_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        stopped=record.stopped, lab=str(plan.lab), steps=plan.train.steps,
        tokens_per_step=plan.tokens_per_step, smooth=plan.smooth, average=average_of(plan),
        reference=reference, reference_why=why,
        compute_alone_s=alone, compute_alone_failed=record.alone_failed, machine=machine(), versions=versions(),
        effects=list(plan.rows), settings=record.settings, contestants=rows,
    )  # fmt: skip


def average_of(plan: RacePlan) -> str:
    """Name of the average: the median, or the mean if islands race, since a median ignores their few exchanges."""
    return "mean" if any(has_islands(one.strategy) for one in plan.contestants) else "median"


def status_of(plan: RacePlan, record: RaceRecord, contestant: Contestant) -> str:
    if record.failure(contestant.name):
        return FAILED
    is_done = all(record.entry(contestant.name, seed).has_done(len(plan.stops)) for seed in plan.seeds)
    return FINISHED if is_done else UNFINISHED


def reference_of(rows: Sequence[RaceRow]) -> tuple[str | None, str]:
    """The row that ratios are taken to, and the reason if it is not ddp-bf16."""
    statuses = {row.name: row.status for row in rows}
    finished = [name for name, status in statuses.items() if status == FINISHED]
    if REFERENCE in finished:
        return REFERENCE, ""
    why = f"{REFERENCE} {statuses[REFERENCE]}" if REFERENCE in statuses else f"{REFERENCE} is not in the race"
    return next(iter(finished), None), why.replace(UNFINISHED, "has not finished")


def seed_result(
    plan: RacePlan, entry: SeedEntry, run: RunFiles, target: float | None, alone: float | None, forward: float
) -> SeedResult:
    """The figures of one run."""
    timed = {step for leg in entry.legs if leg.last_timed for step in range(leg.first_timed, leg.last_timed + 1)}
    rows = [row for row in run.steps if row["step"] in timed]
    average = AVERAGES[average_of(plan)]
    typical = times_of(rows, average)
    step_s, losses = typical["step_s"], smoothed([*mean_losses(run).values()], plan.smooth)
    reached = None if target is None else first_at_most(losses, target, plan.smooth)
    sent, received = (per_step(entry.legs, f"kernel_{way}_bytes", average) for way in ("sent", "received"))
    bound = least_time(plan.lab, sent, received, alone)
    least = least_time(plan.lab, sent, received, alone, forward, weights_share(rows))
    return SeedResult(
        entry.seed, os.path.relpath(run.path, plan.out), entry.last_step, entry.num_timed, target, reached,
        Figures(
            **typical,
            tokens_per_s=plan.tokens_per_step / step_s if step_s else None,
            kernel_sent_bytes_per_step=fmean(sent) / plan.lab.local_size if sent else None,
            kernel_sent_bytes_per_step_worst_node=max(sent) / plan.lab.local_size if sent else None,
            sent_bytes_per_step=bytes_per_step(entry.legs, run, ("sent_bytes",), average),
            disk_bytes_per_step=bytes_per_step(entry.legs, run, DISK_BYTES, average) or None,
            train_loss=_known(losses[-1]) if losses else None,
            heldout_loss=_known(number(run.summary.get("heldout_loss"))),
            minutes_to_target=reached * step_s / 60 if reached and step_s else None,
            peak_rss_bytes=entry.peak_rss_bytes,
            bound_s=bound,
            unhidden_s=least - bound if least and bound else None,
            step_over_bound=step_s / least if step_s and least else None,
        ),
    )  # fmt: skip


def times_of(rows: Sequence[Mapping[str, Any]], average: Callable[[Iterable[float]], float]) -> dict[str, float | None]:
    """Seconds of a typical step. Computing is the step minus waiting, so that they add up to the step."""
    found = {name: _average(rows, name, average) for name in ("step_s", "exposed_comm_s", "codec_s")}
    # A run without a disk says 0, one by another program nothing.
    found["exposed_disk_s"] = _average(rows, "exposed_disk_s", average) or None
    step_s, exposed, disk_s = found["step_s"], found["exposed_comm_s"], found["exposed_disk_s"] or 0.0
    return found | {"compute_s": None if step_s is None or exposed is None else step_s - exposed - disk_s}


def spread_of(
    tokens_per_step: int,
    average: Callable[[Iterable[float]], float],
    seeds: Sequence[SeedResult],
    entries: Sequence[tuple[SeedEntry, RunFiles]],
) -> dict[str, tuple[float, float] | None]:
    """The lowest and the highest of each figure: see `RaceRow`."""
    found = {item.name: _ends(getattr(seed.figures, item.name) for seed in seeds) for item in fields(Figures)}
    rounds = [
        times_of([row for row in run.steps if leg.first_timed <= row["step"] <= leg.last_timed], average)
        for entry, run in entries
        for leg in entry.legs
        if leg.last_timed
    ]
    found |= {name: _ends(times[name] for times in rounds) for name in rounds[0]} if rounds else {}
    found["tokens_per_s"] = None
    if ends := found["step_s"]:
        found["tokens_per_s"] = tokens_per_step / ends[1], tokens_per_step / ends[0]
    return found


def per_step(legs: Sequence[Leg], name: str, average: Callable[[Iterable[float]], float] = median) -> list[float]:
    """Bytes of each node in a step: the average over the legs of their means; empty if nothing was counted."""
    counted = [[total / leg.kernel_steps for total in getattr(leg, name)] for leg in legs if leg.kernel_steps]
    return [average(node) for node in zip(*counted, strict=True)]


def bytes_per_step(
    legs: Sequence[Leg], run: RunFiles, names: Sequence[str], average: Callable[[Iterable[float]], float] = median
) -> float | None:
    """Bytes under these names by rank 0's meters, averaged like the kernel's; None if the run did not count them."""
    counted = [
        [
            sum(number(row.get(name)) for name in names)
            for row in run.steps
            if leg.first_timed <= row["step"] <= leg.last_timed
        ]
        for leg in legs
    ]
    means = [fmean(values) for values in counted if values]
    return _known(average(means)) if means else None


def weights_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Share of the payload that brings weights to the next forward. The rest is gradients, sent in the backward."""
    sent = sum(number(row.get("sent_bytes")) for row in rows)
    weights = sum(number(row.get("sent_weight_bytes", 0)) for row in rows)
    return weights / sent if sent > 0 and math.isfinite(weights) else 0.0


def least_time(
    lab: LabSpec,
    sent: Sequence[float],
    received: Sequence[float],
    alone: float | None,
    forward: float = 0.0,
    weights: float = 0.0,
) -> float | None:
    """The least seconds that a step can take; None if computation was not measured.

    max(compute, link), where link is the busiest link's bytes over its rate. If `forward` (seconds of computation
    alone) and `weights` (the share of the bytes that bring weights) are given:
    max(forward, weights link) + max(compute - forward, (1 - weights) link),
    because gradients exist only after the last weight has arrived, and new weights only after the last gradient.
    """
    if alone is None or not sent:
        return None
    rates = [lab.bits_per_second(node) for node in range(lab.nodes)]
    link = max([0.0, *(8 * max(pair) / rate for *pair, rate in zip(sent, received, rates, strict=True) if rate)])
    if not forward:
        return max(alone, link)
    return max(forward, weights * link) + max(alone - forward, (1 - weights) * link)


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """The mean over each step and those before it, at most `window` in all; NaN where one of them is not finite."""
    return [fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]


def first_at_most(losses: Sequence[float], target: float, window: int) -> int | None:
    """The first step, counted from 1, whose full window has a mean of at most `target`."""
    return next((step for step, loss in enumerate(losses, 1) if step >= window and loss <= target), None)


def target_loss(
    plan: RacePlan, finished: Sequence[str], runs: dict[tuple[str, int], RunFiles], seed: int
) -> float | None:
    """The stated target. With auto: the final smoothed loss of zero, else of ddp, else of the first that finished.

    That loss is rounded up to hundredths, so that rounding errors do not decide which contestant reaches it.
    """
    if plan.target != "auto":
        return None if plan.target is None else float(plan.target)
    chosen = next((name for name in (*TARGET_REFERENCES, *finished) if name in finished), None)
    if chosen is None:
        return None
    last = smoothed([*mean_losses(runs[chosen, seed]).values()], plan.smooth)[-1]
    return math.ceil(100 * last) / 100 if math.isfinite(last) else None


def mean_of(tokens_per_step: int, figures: Sequence[Figures]) -> Figures:
    """The mean of each figure over seeds; None if a seed lacks it. tokens/s are those of the mean step."""
    columns = {item.name: [getattr(one, item.name) for one in figures] for item in fields(Figures)}
    mean = Figures(**{name: None if None in values else fmean(values) for name, values in columns.items()})
    return replace(mean, tokens_per_s=tokens_per_step / mean.step_s if mean.step_s else None)


def ratios(figures: Figures, reference: Figures) -> dict[str, float | None]:
    """Each figure divided by the reference's; None if one of them is not known or the reference's is 0."""
    pairs = {item.name: (getattr(figures, item.name), getattr(reference, item.name)) for item in fields(Figures)}
    return {name: mine / theirs if mine is not None and theirs else None for name, (mine, theirs) in pairs.items()}


def _read(run_dir: Path) -> RunFiles:
    """Read the files of a run that exist so far."""
    try:
        return read_run(run_dir)
    except ConfigError:
        return RunFiles(run_dir, [], {}, "")


def _ends(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if len(known) > 1 else None


def _average(rows: Sequence[Mapping[str, Any]], name: str, average: Callable[[Iterable[float]], float]) -> float | None:
    values = [value for value in (number(row.get(name)) for row in rows) if math.isfinite(value)]
    return average(values) if values else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
