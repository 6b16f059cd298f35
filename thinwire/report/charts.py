"""The plots of a run: loss, bytes, time, and the learning rate with the gradient norm."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from thinwire.report.run import RunFiles, number
from thinwire.report.svg import Chart, Point, around
from thinwire.report.units import bytes_text, seconds_text

MAX_BARS = 150
MIN_STEPS_ACROSS = 12
MAX_POINTS = 1200
HALF_HEIGHT = 158


@dataclass(frozen=True)
class Figure:
    """A plot with its title and notes. legend: (style of the swatch, text)."""

    title: str
    legend: list[tuple[str, str]]
    svg: str
    notes: list[str]


@dataclass(frozen=True)
class Bin:
    """Consecutive steps drawn as one bar from left to right. Values are means over the bin's finite ones."""

    rows: Sequence[dict[str, Any]]

    @property
    def left(self) -> float:
        return number(self.rows[0]["step"]) - 0.5

    @property
    def right(self) -> float:
        return number(self.rows[-1]["step"]) + 0.5

    @property
    def name(self) -> str:
        first, last = self.rows[0]["step"], self.rows[-1]["step"]
        return f"step {first}" if first == last else f"steps {first} to {last}, means"

    def mean(self, key: str) -> float:
        return _mean([number(row.get(key)) for row in self.rows])


def figures(run: RunFiles) -> list[Figure]:
    """All plots that the run has data for."""
    if not run.steps:
        return []
    found = [loss_figure(run), bytes_figure(run), time_figure(run)]
    if run.last("predicted_pipeline_s") > 0:
        found.append(beside_figure(run, "pipeline_s", "in the pipeline"))
    if any(seconds > 0 for _, seconds in run.series("predicted_experts_s")):
        found.append(beside_figure(run, "experts_s", "in layers of experts"))
    if run.last("needed_capacity") > 0:
        found.append(experts_figure(run))
    if layers := run.summary.get("expert_rows"):
        found.append(load_figure(layers))
    return [*found, optimizer_figure(run)] if any({"lr", "grad_norm"} <= row.keys() for row in run.steps) else found


def loss_figure(run: RunFiles) -> Figure:
    """Training loss over tokens, its running mean, and the held-out loss at the end."""
    key, x_label = ("tokens", "tokens") if any("tokens" in row for row in run.steps) else ("step", "step")
    raw = [(number(row.get(key)), number(row.get("loss"))) for row in run.steps]
    window = len(raw) // 40
    smooth = running_mean(raw, window) if window > 1 else []
    heldout = (number(run.summary.get("tokens", raw[-1][0])), number(run.summary.get("heldout_loss")))
    if key == "step":
        heldout = (raw[-1][0], heldout[1])
    has_heldout = all(map(math.isfinite, heldout))

    known = [*raw, heldout] if has_heldout else raw
    x_high = max((x for x, _ in known if math.isfinite(x)), default=1.0)
    chart = Chart(
        "loss over tokens",
        (0.0, 1.02 * x_high or 1.0),
        around(y for _, y in known),
        x_label,
        "loss (nats per token)",
    )
    chart.line(thin_out(raw), "train faint" if smooth else "train")
    legend = [("train faint", "training, each step")] if smooth else [("train", "training")]
    if smooth:
        chart.line(thin_out(smooth), "train")
        legend.append(("train", f"training, mean of {window // 2 * 2 + 1} steps"))
    if has_heldout:
        chart.dot(heldout, "heldout")
        legend.append(("heldout", f"held-out at the end: {heldout[1]:.4f}"))

    broken = [x for x, y in raw if not math.isfinite(y) and math.isfinite(x)]
    for x in broken:
        chart.cross(x, "bad")
    notes = [f"The loss was not finite in {len(broken)} of {len(raw)} steps (red marks)."] if broken else []
    return Figure("Loss", legend, chart.svg(), notes)


def bytes_figure(run: RunFiles) -> Figure:
    """Payload bytes that rank 0 sent in each step, against what fp32 without compression would send."""
    bins = bins_of(run.steps)
    plain = number(run.summary.get("uncompressed_bytes_per_step"))
    tops = [plain, *(bin.mean("sent_bytes") for bin in bins)]
    unit, size = next(
        ((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if any(top >= size for top in tops)),
        ("bytes", 1.0),
    )
    chart = Chart(
        "bytes sent per step",
        across(bins),
        around((top / size for top in tops), zero=True),
        "step",
        f"{unit} sent per step",
    )
    for bin in bins:
        sent = bin.mean("sent_bytes")
        chart.bar(bin.left, bin.right, 0, sent / size, "sent")
        chart.hover(bin.left, bin.right, f"{bin.name}: {bytes_text(sent)} sent")
    legend = [("sent", f"sent: {run.typical_text('sent_bytes', bytes_text)}")]
    notes = ["Payload that rank 0 sent."]
    if math.isfinite(plain):
        chart.rule(plain / size, "plain")
        legend.append(("plain", f"{run.uncompressed_of or 'uncompressed'} (fp32): {bytes_text(plain)}"))
        if run.is_typical and run.typical("sent_bytes") > 0:
            what = run.uncompressed_of or "gradients and weights"
            notes.append(f"{what.capitalize()} in fp32: {plain / run.typical('sent_bytes'):.2f} times a median step.")
    return Figure("Bytes on the wire", legend, chart.svg(), notes)


def time_figure(run: RunFiles) -> Figure:
    """Seconds per step, stacked: computing, waiting for communication, and everything else."""
    bins = bins_of(run.steps)
    totals = [number(row.get("step_s")) for row in run.steps]
    top, note = time_scale([bin.mean("step_s") for bin in bins], totals)
    predicted = number(run.plan.get("predicted", {}).get("step_s"))
    highest = max(top, predicted) if math.isfinite(predicted) else top
    chart = Chart("time per step", across(bins), around([highest], zero=True), "step", "seconds per step")
    drawn: set[str] = set()
    for bin in bins:
        compute, waiting, total = (or_zero(bin.mean(key)) for key in ("compute_s", "exposed_comm_s", "step_s"))
        parts = (("compute", compute), ("waiting", waiting), ("other", max(0.0, total - compute - waiting)))
        foot = 0.0
        for style, seconds in parts:
            chart.bar(bin.left, bin.right, foot, foot + seconds, style)
            drawn |= {style} if seconds > 0.01 * total else set()
            foot += seconds
        words = ", ".join(f"{style} {seconds_text(seconds)}" for style, seconds in parts)
        chart.hover(bin.left, bin.right, f"{bin.name}: {seconds_text(total)} ({words})")
    legend = [
        ("compute", f"computing: {run.typical_text('compute_s', seconds_text)}"),
        ("waiting", f"waiting for communication: {run.typical_text('exposed_comm_s', seconds_text)}"),
    ]
    if "other" in drawn:
        legend.append(("other", "other"))
    if math.isfinite(predicted):
        chart.rule(predicted, "heldout")
        legend.append(("heldout", f"the plan's prediction: {seconds_text(predicted)}"))
    return Figure("Time per step", legend, chart.svg(), [note] if note else [])


def beside_figure(run: RunFiles, key: str, where: str) -> Figure:
    """Measured seconds of a step, beside the simulated ones. where: in which part of the step."""
    bins = bins_of(run.steps)
    measured = [(number(row["step"]), number(row.get(key))) for row in run.steps]
    predicted = [(x, y if y > 0 else math.nan) for x, y in run.series(f"predicted_{key}")]
    top, note = time_scale([bin.mean(key) for bin in bins], [y for _, y in measured])
    highest = max([top, *(y for _, y in predicted if math.isfinite(y))])
    chart = Chart(f"seconds {where}", across(bins), around([highest], zero=True), "step", "seconds per step")
    for bin in bins:
        seconds = bin.mean(key)
        chart.bar(bin.left, bin.right, 0, min(seconds, highest), "compute")
        expected = _mean([y for row in bin.rows if (y := number(row.get(f"predicted_{key}"))) > 0])
        words = f"{seconds_text(seconds)} measured"
        words += f", {seconds_text(expected)} predicted" if math.isfinite(expected) else ""
        chart.hover(bin.left, bin.right, f"{bin.name}: {words}")
    chart.line(thin_out(predicted), "heldout")
    typical = run.typical_text(key, seconds_text)
    if not run.typical(key) > 0:
        # The run has gone on without such a part.
        typical = f"median {seconds_text(median([y for _, y in measured if y > 0]))}, none at the end"
    last = [y for _, y in predicted if math.isfinite(y)][-1]
    legend = [("compute", f"measured: {typical}"), ("heldout", f"predicted: {seconds_text(last)}")]
    notes = [note] if note else []
    if key == "pipeline_s":
        idle, expected = run.typical("bubble"), run.last("predicted_bubble")
        notes.insert(0, f"Rank 0 computed nothing for {idle:.0%} of it; {expected:.0%} were predicted.")
    return Figure(f"Seconds {where}", legend, chart.svg(), notes)


def load_figure(layers: Sequence[Sequence[float]]) -> Figure:
    """Rows that each expert was sent, in relation to an even router: the mean over layers, and the extremes.

    layers: rows by layer and expert.
    """
    shares = [[number(rows) * len(layer) / max(1.0, sum(layer)) for rows in layer] for layer in layers]
    experts = list(zip(*shares, strict=True))
    chart = Chart("rows by expert", (-0.5, len(experts) - 0.5), around([1.0, *map(max, experts)], zero=True), "expert",
        "times an even share",
    )  # fmt: skip
    for expert, of_layers in enumerate(experts):
        left, right = expert - 0.4, expert + 0.4
        chart.bar(left, right, 0, fmean(of_layers), "sent")
        shown = ", ".join(f"{share:.2f}" for share in of_layers)
        chart.hover(left, right, f"expert {expert}: {shown} of an even share, by layer")
    chart.rule(1.0, "plain")
    busiest = max(max(of_layers) for of_layers in experts)
    legend = [("sent", "mean over layers"), ("plain", "an even router")]
    return Figure(
        "Rows by expert", legend, chart.svg(), [f"The busiest expert of a layer had {busiest:.2f} of a share."]
    )


def experts_figure(run: RunFiles) -> Figure:
    """Of a mixture of experts, what a capacity dropped and which one would have dropped nothing."""
    series, notes = [("needed_capacity", "factor needed", "rate")], ["A capacity of the factor needed drops no row."]
    dropped, stated = [y for _, y in run.series("dropped_rows")], None
    with suppress(tomllib.TOMLDecodeError):
        tables = tomllib.loads(run.config)
        stated = tables.get("moe", {}).get("capacity_factor") or tables.get("experts", {}).get("capacity")
    if stated or any(dropped):
        series.insert(0, ("dropped_rows", "part of rows dropped", "norm"))
        notes.insert(0, f"The capacity dropped {_mean(dropped):.2%} of the rows of all ranks and layers.")
    return Figure("Rows of experts", [], over_steps(run, series), notes)


def optimizer_figure(run: RunFiles) -> Figure:
    """The learning rate and the norm of the gradient before clipping, one above the other, over the steps."""
    notes = ["The norm is that of the mean gradient of all ranks, before it is clipped."]
    pictures = over_steps(run, (("lr", "learning rate", "rate"), ("grad_norm", "gradient norm", "norm")))
    return Figure("Learning rate and gradient norm", [], pictures, notes)


def over_steps(run: RunFiles, series: Sequence[tuple[str, str, str]]) -> str:
    """Small charts, one above the other, of (key of a step, its words, style)."""
    pictures = []
    for key, y_label, style in series:
        points = run.series(key)
        steps = (run.steps[0]["step"] - 0.5, max(run.steps[-1]["step"] + 0.5, run.steps[0]["step"] + MIN_STEPS_ACROSS))
        chart = Chart(y_label, steps, around((y for _, y in points), zero=True), "step", y_label, height=HALF_HEIGHT)
        chart.line(thin_out(points), style)
        for x in (x for x, y in points if not math.isfinite(y)):
            chart.cross(x, "bad")
        pictures.append(chart.svg())
    return "".join(pictures)


def time_scale(bars: Sequence[float], totals: Sequence[float]) -> tuple[float, str]:
    """The height of the time axis, chosen so that a few slow steps do not flatten the others, and a note about them."""
    finite = sorted(value for value in bars if math.isfinite(value))
    if not finite:
        return 1.0, ""
    usual = finite[int(0.9 * (len(finite) - 1))]
    if len(finite) < 8 or finite[-1] <= 2 * usual:
        return finite[-1], ""
    top = 1.4 * usual
    num_cut = sum(value > top for value in bars)
    longest = max(value for value in totals if math.isfinite(value))
    bars_text = "1 bar is" if num_cut == 1 else f"{num_cut} bars are"
    return top, f"{bars_text} cut off at {seconds_text(top)}; the longest step took {seconds_text(longest)}."


def bins_of(rows: Sequence[dict[str, Any]]) -> list[Bin]:
    """Group rows into at most MAX_BARS runs of consecutive rows, equally long except for the last."""
    size = math.ceil(len(rows) / MAX_BARS)
    return [Bin(rows[start : start + size]) for start in range(0, len(rows), size)]


def across(bins: Sequence[Bin]) -> tuple[float, float]:
    """Bounds of the step axis, wider than a handful of steps."""
    return bins[0].left, max(bins[-1].right, bins[0].left + MIN_STEPS_ACROSS)


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """(x, mean of the finite y among about `window` points around it); NaN where none of them is finite."""
    half = window // 2
    values = [y for _, y in points]
    return [(x, _mean(values[max(0, i - half) : i + half + 1])) for i, (x, _) in enumerate(points)]


def thin_out(points: Sequence[Point]) -> list[Point]:
    """Reduce to about MAX_POINTS points: the lowest and the highest of each stretch, so no spike is lost."""
    size = math.ceil(2 * len(points) / MAX_POINTS)
    if size <= 2:
        return list(points)
    return [point for start in range(0, len(points), size) for point in _extremes(points[start : start + size])]


def _extremes(points: Sequence[Point]) -> Iterator[Point]:
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) < len(points):
        yield (points[0][0], math.nan)
    if finite:
        yield from sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def or_zero(value: float) -> float:
    """The value; 0 for one that is not finite."""
    return value if math.isfinite(value) else 0.0
