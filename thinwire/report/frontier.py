"""The frontier of held-out loss and sent bytes, and which methods are worse in both.

Of a race, and of recorded runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from thinwire.errors import counted
from thinwire.report.charts import Figure
from thinwire.report.run import number, read_run
from thinwire.report.svg import Chart, alone, around
from thinwire.report.units import bytes_text

FINISHED = "finished"
# What benchmarks/frontier.py has measured.
RECORDED = Path(__file__).with_name("frontier.json")
LEAST_STEPS = 1000
# In a plot of more points, only those that nobody beats have names.
MOST_NAMES = 12


@dataclass(frozen=True)
class Outcome:
    """Final loss of a method and the bytes that it sent.

    Args:
        name: name of the method or contestant.
        sent_bytes: bytes sent by one rank in the whole run.
        loss: held-out loss, nats per token, the mean over seeds.
        error: standard error of the loss over seeds; 0 with one seed.
        by_seed: the loss of each seed, where outcomes have different seeds.
    """

    name: str
    sent_bytes: float
    loss: float
    error: float = 0.0
    by_seed: Mapping[str, float] = field(default_factory=dict)


def beaten(outcomes: Sequence[Outcome]) -> set[str]:
    """Names of outcomes for which another one has no more bytes and no higher loss, and is better in one of the two.

    Losses are compared over the seeds that both have.
    """
    return {own.name for own in outcomes if any(beats(other, own) for other in outcomes)}


def beats(other: Outcome, own: Outcome) -> bool:
    """Whether `other` has no more bytes and no higher loss, and is better in one of the two."""
    theirs, ours = other.loss, own.loss
    if both := other.by_seed.keys() & own.by_seed.keys():
        theirs, ours = (fmean(one.by_seed[seed] for seed in both) for one in (other, own))
    is_same = (other.sent_bytes, theirs) == (own.sent_bytes, ours)
    return not is_same and other.sent_bytes <= own.sent_bytes and theirs <= ours


def recorded_outcomes(rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """The outcomes of recorded runs, the exact one first.

    Their losses are those of the exact run's mean and the gap to it, which is paired by seed.
    """
    exact = rows[0]["loss"]
    return [
        Outcome(row["method"], row["sent_bytes"], exact * (1 + row["gap"]), exact * row["gap_error"], row["losses"])
        for row in rows
    ]


def race_outcomes(values: Mapping[str, Any], out: Path) -> list[Outcome]:
    """Outcomes of the contestants that finished; empty if fewer than two have sent bytes and a held-out loss.

    Bytes are the payload of all steps by the runs' own metrics. If a contestant has no such metrics, the kernel's bytes
    of a typical step, times the steps, are used for all.
    """
    rows = [row for row in values["contestants"] if row["status"] == FINISHED and row["mean"]["heldout_loss"]]
    payloads = {row["name"]: [payload(out / seed["run_dir"]) for seed in row["seeds"]] for row in rows}
    by_metrics = all(math.isfinite(sent) and sent > 0 for seeds in payloads.values() for sent in seeds)
    found = []
    for row in rows:
        kernel = number(row["mean"]["kernel_sent_bytes_per_step"]) * values["steps"]
        sent = fmean(payloads[row["name"]]) if by_metrics else kernel
        losses = [number(seed["figures"]["heldout_loss"]) for seed in row["seeds"]]
        error = stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
        if sent > 0:
            found.append(Outcome(row["name"], sent, fmean(losses), error))
    return found if len(found) > 1 else []


def payload(run_dir: Path) -> float:
    """Bytes that rank 0 sent in all steps of a run, and for the mean of islands at its end.

    NaN if the run did not count them.
    """
    if not (run_dir / "metrics.jsonl").is_file():
        return math.nan
    run = read_run(run_dir)
    sent = sum(number(row.get("sent_bytes")) for row in run.steps) if run.steps else math.nan
    return sent + number(run.summary.get("last_exchange_bytes", 0))


def frontier_figure(
    outcomes: Sequence[Outcome], styles: Mapping[str, str], axis: str = "held-out loss (nats per token)"
) -> Figure:
    """A plot with a point and an error bar for each outcome. Outcomes beaten in both loss and bytes are grey."""
    grey = beaten(outcomes)
    sent = [outcome.sent_bytes for outcome in outcomes]
    ends = (loss for one in outcomes for loss in (one.loss - one.error, one.loss + one.error))
    chart = Chart(
        "held-out loss over bytes", (min(sent) / 1.5, max(sent) * 1.5), around(ends),
        "bytes that one rank sent in all steps", axis,
        names=[one.name for one in outcomes], log_x=True,
    )  # fmt: skip
    named = []
    for outcome in sorted(outcomes, key=lambda one: one.name not in grey):
        style = "beaten" if outcome.name in grey else styles[outcome.name]
        point = outcome.sent_bytes, outcome.loss
        if outcome.error:
            chart.error_bar(point, outcome.error, style)
        chart.dot(point, style, text=f"{outcome.name}: {outcome.loss:.4f}, {bytes_text(outcome.sent_bytes)} sent")
        if len(outcomes) <= MOST_NAMES or outcome.name not in grey:
            named.append((outcome.name, style, point))
    chart.end_labels(named)
    notes = ["Every point is a whole run: further down, a lower loss; further left, fewer bytes, by ratios."]
    notes += ["Grey: another contestant sent no more and has no higher loss."] if grey else []
    notes += ["Lines: one standard error over the seeds."] if any(one.error for one in outcomes) else []
    return Figure("Loss over bytes", [], chart.svg(), notes)


def frontier_svg(outcomes: Sequence[Outcome]) -> str:
    """The plot of `recorded_outcomes` as a picture of its own."""
    best = [one.name for one in outcomes if one.name not in beaten(outcomes)]
    styles = {name: f"c{number % 8}" for number, name in enumerate(best)}
    return alone(frontier_figure(outcomes, styles, "held-out loss: the exact mean, and the gap to it").svg)


def recommended(rate: float, model: str = "", recorded: Path = RECORDED) -> tuple[str, str]:
    """The recorded method that comes near the exact run's loss soonest on links of `rate` bit/s; and what was measured.

    Of methods that have not been measured nothing is known, and it says how many there are. The method is written as
    for `thinwire compare --strategies`.

    Uses `long_runs`, since shorter ones don't show an order of methods. Not known without such runs.
    """
    if not (rows := long_runs(model, recorded)):
        found = json.loads(recorded.read_text()) if recorded.is_file() else []
        sizes = {f"{row['model']}, {row['steps']:,} steps" for row in found} or {"no runs"}
        return "not known", f"recorded: {'; '.join(sorted(sizes))}; which is best shows from {LEAST_STEPS:,} steps on"
    used = rows[0]["model"]
    # The exact run itself comes near its loss. One that others beat in bytes and loss may still be the soonest.
    soonest = min(rows, key=lambda row: math.inf if (minutes := minutes_near(row, rate)) is None else minutes)
    spread = f" ± {soonest['gap_error']:.2%}" if soonest["seeds"] > 1 else ""
    size = f"the model {used}, {soonest['steps']:,} steps, {counted(soonest['seeds'], 'seed')}, --lr {soonest['lr']:g}"
    other = f"; no run of the model {model}" if model not in ("", used) else ""
    is_all = len(rows) == soonest["methods"]
    among = f"of all {len(rows)} methods, " if is_all else f"of {len(rows)} of {soonest['methods']} methods, "
    reached = f"soonest within 1% of the exact loss at {rate / 1e6:g} Mbit/s: {soonest['gap']:+.2%}{spread}"
    return soonest["text"], f"{among}{reached}; {size}{other}"


def minutes_near(row: Mapping[str, Any], rate: float) -> float | None:
    """Minutes of computing, then sending at `rate` bit/s, until a recorded method is near the exact run's loss.

    None: it does not come near in all its runs. Computing is processor time, which is that of an idle core.
    """
    if (near := row["near"]) is None:
        return None
    return float(near["compute_s"] + 8 * near["sent_bytes"] / rate) / 60


def best_rates(model: str, recorded: Path = RECORDED) -> tuple[str, dict[str, float]]:
    """The best learning rate of each of `long_runs`, as for `thinwire compare --strategies`, and the runs' size."""
    rows = long_runs(model, recorded)
    size = f"the model {rows[0]['model']}, {rows[0]['steps']:,} steps" if rows else ""
    return size, {row["text"]: row["lr"] for row in rows}


def long_runs(model: str, recorded: Path) -> list[dict[str, Any]]:
    """The recorded methods in runs of at least LEAST_STEPS steps, of `model`, or of the first model that has any."""
    found = json.loads(recorded.read_text()) if recorded.is_file() else []
    found = [row for row in found if row["steps"] >= LEAST_STEPS]
    return [row for row in found if row["model"] == model] or [
        row for row in found if row["model"] == found[0]["model"]
    ]


def frontier_sentence(outcomes: Sequence[Outcome]) -> str:
    """The contestants that no other beats in both loss and bytes, fewest bytes first.

    Empty if fewer than three compete.
    """
    if len(outcomes) < 3:
        return ""
    best = sorted((one for one in outcomes if one.name not in beaten(outcomes)), key=lambda one: one.sent_bytes)
    names = ", ".join(f"{one.name} (loss {one.loss:.4f})" for one in best)
    return f"The lowest held-out loss for its bytes, from the fewest bytes on: {names}."
