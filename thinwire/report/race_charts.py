"""The plots of a race: loss over time and tokens, difference of losses, parts of a step's time, bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.report.charts import Figure, or_zero, running_mean, thin_out
from thinwire.report.frontier import frontier_figure, race_outcomes
from thinwire.report.page import figure, legend, text
from thinwire.report.run import mean_losses, number, read_run
from thinwire.report.svg import Chart, Point, around
from thinwire.report.units import bytes_text, seconds_text, sum_text

NUM_COLOURS = 8
BAR_WIDTH, BAR_HEIGHT = 1000, 10
Curve = tuple[str, str, list[Point]]


def race_figures(values: Mapping[str, Any], out: Path) -> Iterator[str]:
    """All plots that the race has data for, as HTML."""
    curves = loss_curves(values, out)
    timed = list(over_time(curves, values))
    if timed:
        longest = max(points[-1][0] for _, _, points in timed)
        unit, size = next((unit, size) for unit, size, least in TIME_UNITS if longest >= least)
        scaled = [(name, style, [(x / size, y) for x, y in points]) for name, style, points in timed]
        item = loss_figure(f"Loss over {unit}", unit, scaled, values["smooth"])
        item.notes.append("Time: the typical timed step, times the steps, without the start-up.")
        yield figure(item)
    if curves:
        yield figure(loss_figure("Loss over tokens", "tokens", curves, values["smooth"]))
    if (difference := difference_figure(values, out)) is not None:
        yield figure(difference)
    if outcomes := race_outcomes(values, out):
        styles = {row["name"]: style_of(position) for position, row in enumerate(values["contestants"])}
        yield figure(frontier_figure(outcomes, styles))
    yield time_bars(values)
    yield bytes_bars(values)


TIME_UNITS = (("hours", 3600.0, 3 * 3600.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, 0.0))


def style_of(position: int) -> str:
    """Style of a contestant: a colour, with dashes once all colours are used."""
    return f"c{position % NUM_COLOURS}" + (" dashed" if position >= NUM_COLOURS else "")


def loss_curves(values: Mapping[str, Any], out: Path) -> list[Curve]:
    """(name, style, [(tokens, loss)]) of each contestant, smoothed, the mean over its seeds."""
    found = smooth_losses(values, out)
    styles = {row["name"]: style_of(position) for position, row in enumerate(values["contestants"])}
    return [(name, styles[name], mean_over_seeds([*seeds.values()])) for name, seeds in found.items()]


def smooth_losses(values: Mapping[str, Any], out: Path) -> dict[str, dict[int, list[Point]]]:
    """[(tokens, loss)] of each contestant and seed, smoothed. Contestants without losses are left out."""
    found = {}
    for row in values["contestants"]:
        runs = {seed["seed"]: run_losses(out / seed["run_dir"]) for seed in row["seeds"] if seed["num_steps"]}
        if runs and all(runs.values()):
            found[row["name"]] = {seed: smooth(run, values) for seed, run in runs.items()}
    return found


def smooth(run: Mapping[int, float], values: Mapping[str, Any]) -> list[Point]:
    points = [(step * values["tokens_per_step"], loss) for step, loss in run.items()]
    return running_mean(points, min(values["smooth"], len(points)))


def mean_over_seeds(seeds: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of the curves at the points that all of them have."""
    return [(x, fmean(ys)) for x, ys in together(seeds)]


def together(curves: Sequence[Sequence[Point]]) -> Iterator[tuple[float, list[float]]]:
    """Yield (x, the y of each curve) for each x that all curves have."""
    columns = [dict(curve) for curve in curves]
    for x in sorted(set.intersection(*map(set, columns))):
        yield x, [column[x] for column in columns]


def run_losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step; empty if the run has no metrics."""
    if not (run_dir / "metrics.jsonl").is_file():
        return {}
    return mean_losses(read_run(run_dir))


def over_time(curves: Sequence[Curve], values: Mapping[str, Any]) -> Iterator[Curve]:
    """The curves over seconds instead of tokens, by each contestant's own median step."""
    step_s = {row["name"]: row["mean"]["step_s"] for row in values["contestants"]}
    for name, style, points in curves:
        if step_s[name]:
            yield name, style, [(x / values["tokens_per_step"] * step_s[name], y) for x, y in points]


def loss_figure(title: str, x_label: str, curves: Sequence[Curve], window: int) -> Figure:
    """A plot of all contestants' lines, each with its name at its end."""
    x_high = max(points[-1][0] for _, _, points in curves)
    losses = around(y for _, _, points in curves for _, y in points)
    names = [name for name, _, _ in curves]
    chart = Chart(title, (0.0, x_high or 1.0), losses, x_label, "training loss (nats per token)", names=names)
    draw(chart, curves)
    return Figure(title, [], chart.svg(), [f"Mean of the {window} steps around each."])


def draw(chart: Chart, curves: Sequence[Curve]) -> None:
    """Draw the lines, and their names at the right."""
    for _, style, points in curves:
        chart.line(thin_out(points), style)
    ends = [(name, style, [point for point in points if math.isfinite(point[1])]) for name, style, points in curves]
    chart.end_labels([(name, style, points[-1]) for name, style, points in ends if points])


def difference_figure(values: Mapping[str, Any], out: Path) -> Figure | None:
    """A plot of each contestant's loss minus the reference's, paired by seed, for lines that overlap elsewhere."""
    reference, found = values["reference"], smooth_losses(values, out)
    others = {name: seeds for name, seeds in found.items() if name != reference}
    if reference not in found or not others:
        return None
    position = {row["name"]: number for number, row in enumerate(values["contestants"])}
    curves, areas = [], []
    for name, seeds in others.items():
        pairs = [(seeds[seed], found[reference][seed]) for seed in seeds if seed in found[reference]]
        differences = [[(x, own - other) for x, (own, other) in together(pair)] for pair in pairs]
        points = [(x, ys) for x, ys in together(differences) if all(map(math.isfinite, ys))] if pairs else []
        style = style_of(position[name])
        curves.append((name, style, [(x, fmean(ys)) for x, ys in points]))
        if len(differences) > 1:
            areas.append((style, [(x, min(ys)) for x, ys in points], [(x, max(ys)) for x, ys in points]))
    curves = [curve for curve in curves if curve[2]]
    if not curves:
        return None
    drawn = [points for _, _, points in curves] + [points for _, *edges in areas for points in edges]
    bounds = around(y for points in [*drawn, [(0.0, 0.0)]] for _, y in points)
    x_high = max(points[-1][0] for points in drawn if points)
    names = [*(name for name, _, _ in curves), reference]
    chart = Chart("difference in loss", (0.0, x_high), bounds, "tokens", "nats per token", names=names)
    for style, low, high in areas:
        chart.area(thin_out(low), thin_out(high), style)
    reference_line = (reference, style_of(position[reference]), [(0.0, 0.0), (x_high, 0.0)])
    draw(chart, [reference_line, *curves])
    notes = [f"Above 0: a higher loss than {reference} on the same tokens. Mean of {values['smooth']} steps."]
    notes += ["Lines are means over the seeds, paired; areas go from the lowest seed to the highest."] if areas else []
    return Figure(f"Loss less that of {reference}", [], chart.svg(), notes)


def bytes_bars(values: Mapping[str, Any]) -> str:
    """Bars of the bytes that a rank sends in a step: counted by the kernel, and below it the payload."""
    legend_of = [("kernel", "on the link, counted by the kernel"), ("meter", "payload, counted by rank 0")]
    bars = []
    for row in _known(values):
        sent, payload = (number(row["mean"][f"{kind}sent_bytes_per_step"]) for kind in ("kernel_", ""))
        words = f"{bytes_text(sent)}, payload {bytes_text(payload)}"
        bars.append((row["name"], [[("kernel", sent)], [("meter", payload)]], words, math.nan))
    return bar_section("Bytes sent per step", legend_of, bars, "")


def time_bars(values: Mapping[str, Any]) -> str:
    """Bars of a step's seconds, computing and waiting, which add up to it, with a mark at the least possible time."""
    bars = []
    for row in _known(values):
        mean = {name: number(value) for name, value in row["mean"].items()}
        compute, waiting, step_s = mean["compute_s"], mean["exposed_comm_s"], mean["step_s"]
        is_split = math.isfinite(compute) and math.isfinite(waiting)
        parts = [("compute", compute), ("waiting", waiting)] if is_split else [("other", step_s)]
        words = sum_text(step_s, compute) if is_split else seconds_text(step_s)
        if is_split and (disk_s := or_zero(mean.get("exposed_disk_s", 0.0))):
            parts.append(("other", disk_s))
            words = f"{sum_text(step_s, compute)}, of which {seconds_text(disk_s)} for the disk"
        bars.append((row["name"], [parts], words, mean["bound_s"] + mean["unhidden_s"]))
    legend_of = [("compute", "computing"), ("waiting", "waiting for communication")]
    if any(row["mean"].get("exposed_disk_s") for row in _known(values)):
        legend_of.append(("other", "waiting for the disk"))
    if any(math.isfinite(least) for *_, least in bars):
        legend_of.append(("least", "the least that computing and the link allow"))
    note = "Packing and unpacking go on at the same time, on the communication thread: they are no part of the sum."
    return bar_section("Where a step's time goes", legend_of, bars, note)


def bar_section(
    title: str, entries: Sequence[tuple[str, str]], bars: Sequence[tuple[str, list, str, float]], note: str
) -> str:
    """Horizontal bars on one scale.

    entries: the legend. bars: (name, bars of stacked (style, value), label, a value to mark or NaN).
    """
    sums = [sum(or_zero(value) for _, value in stack) for _, stacks, _, _ in bars for stack in stacks]
    longest = max([*sums, *(or_zero(mark) for *_, mark in bars)], default=0.0)
    if longest <= 0:
        return ""
    rows = "".join(
        f"<span class=name>{text(name)}</span><div>{''.join(bar(stack, longest, mark) for stack in stacks)}"
        f"<span class=value>{text(words)}</span></div>"
        for name, stacks, words, mark in bars
    )
    caption = f"<p class=note>{text(note)}</p>" if note else ""
    return f"<section><h2>{text(title)}</h2>{legend(entries)}<div class=bars>{rows}</div>{caption}</section>"


def bar(stack: Sequence[tuple[str, float]], longest: float, mark: float = math.nan) -> str:
    """One bar of stacked parts, marked at a value. `longest` has the full width. Empty if no part is known."""
    marks, left = [], 0.0
    for style, value in stack:
        width = BAR_WIDTH * or_zero(value) / longest
        if width > 0:
            marks.append(f'<rect class="bar {style}" x="{left:.1f}" y="0" width="{width:.1f}" height="{BAR_HEIGHT}"/>')
            left += width
    if marks and math.isfinite(mark):
        x = min(BAR_WIDTH * mark / longest, BAR_WIDTH - 4.0)
        marks.append(f'<rect class="bar least" x="{x:.1f}" y="0" width="4" height="{BAR_HEIGHT}"/>')
    head = f'<svg viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
    return f"{head}{''.join(marks)}</svg>" if marks else ""


def _known(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in values["contestants"] if row["mean"]["step_s"] is not None]
