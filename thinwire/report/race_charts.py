"""The plots of a race: loss over tokens and over minutes, bytes per step, and where a step's time goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.report.charts import Figure, running_mean, thin_out
from thinwire.report.page import figure, text
from thinwire.report.run import number, read_run
from thinwire.report.svg import Chart, Point, around
from thinwire.report.units import bytes_text, seconds_text

NUM_COLOURS = 8
BAR_WIDTH, BAR_HEIGHT = 1000, 10
Curve = tuple[str, str, list[Point]]


def race_figures(values: Mapping[str, Any], out: Path) -> Iterator[str]:
    """Every plot that the race has data for, as HTML."""
    curves = loss_curves(values, out)
    if curves:
        yield figure(loss_figure("Loss over tokens", "tokens", curves, values["smooth"]))
    timed = list(over_time(curves, values))
    if timed:
        longest = max(points[-1][0] for _, _, points in timed)
        unit, size = next((unit, size) for unit, size, least in TIME_UNITS if longest >= least)
        scaled = [(name, style, [(x / size, y) for x, y in points]) for name, style, points in timed]
        item = loss_figure(f"Loss over {unit}", unit, scaled, values["smooth"])
        item.notes.append("Time is the median timed step times the steps: start-up and untimed steps are not in it.")
        yield figure(item)
    yield bytes_bars(values)
    yield time_bars(values)


TIME_UNITS = (("hours", 3600.0, 3 * 3600.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, 0.0))


def style_of(position: int) -> str:
    """Colour of a contestant; dashed once the colours are used up."""
    return f"c{position % NUM_COLOURS}" + (" dashed" if position >= NUM_COLOURS else "")


def loss_curves(values: Mapping[str, Any], out: Path) -> list[Curve]:
    """(name, style, [(tokens, loss)]) of each contestant, smoothed, the mean over its seeds."""
    curves = []
    for position, row in enumerate(values["contestants"]):
        runs = [run_losses(out / seed["run_dir"]) for seed in row["seeds"] if seed["num_steps"]]
        if not runs or not all(runs):
            continue
        steps = sorted(set.intersection(*map(set, runs)))
        points = [(step * values["tokens_per_step"], fmean(run[step] for run in runs)) for step in steps]
        curves.append((row["name"], style_of(position), running_mean(points, min(values["smooth"], len(points)))))
    return [curve for curve in curves if curve[2]]


def run_losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step; empty where the run left nothing."""
    if not (run_dir / "metrics.jsonl").is_file():
        return {}
    return {int(row["step"]): number(row.get("loss")) for row in read_run(run_dir).steps}


def over_time(curves: Sequence[Curve], values: Mapping[str, Any]) -> Iterator[Curve]:
    """The curves with seconds instead of tokens: each contestant's own median step."""
    step_s = {row["name"]: row["mean"]["step_s"] for row in values["contestants"]}
    for name, style, points in curves:
        if step_s[name]:
            yield name, style, [(x / values["tokens_per_step"] * step_s[name], y) for x, y in points]


def loss_figure(title: str, x_label: str, curves: Sequence[Curve], window: int) -> Figure:
    """Lines of all contestants."""
    x_high = max(points[-1][0] for _, _, points in curves)
    losses = around(y for _, _, points in curves for _, y in points)
    chart = Chart(title, (0.0, 1.02 * x_high or 1.0), losses, x_label, "training loss (nats per token)")
    for _, style, points in curves:
        chart.line(thin_out(points), style)
    legend = [(style, name) for name, style, _ in curves]
    return Figure(title, legend, chart.svg(), [f"Means of about {window} steps around each."])


def bytes_bars(values: Mapping[str, Any]) -> str:
    """Bytes a rank sends in a step: what the kernel counted, and the payload."""
    keys = {"kernel": "kernel_sent_bytes_per_step", "meter": "sent_bytes_per_step"}
    rows = [(row["name"], {style: number(row["mean"][key]) for style, key in keys.items()}) for row in _known(values)]
    legend = [("kernel", "on the link, by the kernel"), ("meter", "payload, by the meter of rank 0")]
    bars = [(name, [[(style, value)] for style, value in parts.items()], _words(parts)) for name, parts in rows]
    return bar_section("Bytes sent per step", legend, bars)


def time_bars(values: Mapping[str, Any]) -> str:
    """A step's seconds: computing and waiting one after the other, packing and unpacking below, which may overlap."""
    legend = [
        ("compute", "computing"),
        ("waiting", "waiting for communication"),
        ("codec", "packing and unpacking, on the communication thread: partly hidden"),
    ]
    bars = []
    for row in _known(values):
        mean = row["mean"]
        parts = {
            "compute": number(mean["compute_s"]),
            "waiting": number(mean["exposed_comm_s"]),
            "codec": number(mean["codec_s"]),
        }
        step = list(parts.items())
        named = {"step": number(mean["step_s"]), **parts}
        words = ", ".join(f"{name} {seconds_text(value)}" for name, value in named.items() if math.isfinite(value))
        bars.append((row["name"], [step[:2], step[2:]], words))
    return bar_section("Where a step's time goes", legend, bars)


def bar_section(title: str, legend: Sequence[tuple[str, str]], bars: Sequence[tuple[str, list, str]]) -> str:
    """Horizontal bars on one scale: (name, bars of stacked (style, value), words)."""
    sums = [sum(_or_zero(value) for _, value in stack) for _, stacks, _ in bars for stack in stacks]
    longest = max(sums, default=0.0)
    if longest <= 0:
        return ""
    swatches = "".join(f'<li><span class="swatch {style}"></span>{text(words)}</li>' for style, words in legend)
    rows = "".join(
        f"<span class=name>{text(name)}</span><div>{''.join(bar(stack, longest) for stack in stacks)}"
        f"<span class=value>{text(words)}</span></div>"
        for name, stacks, words in bars
    )
    return f"<section><h2>{text(title)}</h2><ul class=legend>{swatches}</ul><div class=bars>{rows}</div></section>"


def bar(stack: Sequence[tuple[str, float]], longest: float) -> str:
    """One bar of stacked parts, `longest` being the full width; nothing where no part is known."""
    marks, left = [], 0.0
    for style, value in stack:
        width = BAR_WIDTH * _or_zero(value) / longest
        if width > 0:
            marks.append(f'<rect class="bar {style}" x="{left:.1f}" y="0" width="{width:.1f}" height="{BAR_HEIGHT}"/>')
            left += width
    head = f'<svg viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
    return f"{head}{''.join(marks)}</svg>" if marks else ""


def _known(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in values["contestants"] if row["mean"]["step_s"] is not None]


def _words(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {bytes_text(value)}" for name, value in parts.items() if math.isfinite(value))


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0
