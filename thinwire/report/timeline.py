"""The plot of a pipeline's step: what each stage did, and what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.report.charts import Figure
from thinwire.report.run import RunFiles, number
from thinwire.report.svg import Chart, around
from thinwire.report.units import seconds_text

# By the first letter of an event's name: what it is, and its style.
KINDS = {
    "F": ("forward", "c0"), "B": ("backward", "c1"), "I": ("gradient of the input", "c1"),
    "W": ("gradients of the weights", "c4"), "R": ("forward again", "c7"),
}  # fmt: skip
OTHER = ("embedding and head", "c2")
# Events from which on a page does without words under the pointer.
MANY = 2000
# Where the rows of one stage lie, from its number down.
ROWS = {"predicted": (0.04, 0.42), "measured": (-0.42, -0.04)}
MARGIN, STAGE_HEIGHT = 74, 54


def timeline_figures(run: RunFiles) -> Iterator[Figure]:
    """The stages' forwards and backwards over the seconds of one step, if the run has them."""
    if events := [event for event in run.timeline if event.get("tid") in ROWS]:
        yield timeline_figure(events)


def timeline_figure(events: Sequence[Mapping[str, Any]]) -> Figure:
    """What was predicted, above what was measured, for each stage. events: in Chrome's trace format."""
    num_stages = 1 + int(max(number(event["pid"]) for event in events))
    ends = {name: _end_s(events, name) for name in ROWS}
    chart = Chart(
        "what each stage does", around(ends.values(), zero=True), (-0.5, num_stages - 0.5), "seconds of the step",
        "stage", height=MARGIN + STAGE_HEIGHT * num_stages, whole_y=True,
    )  # fmt: skip
    seen: dict[str, str] = {}
    for event in events:
        words, style = KINDS.get(str(event.get("name"))[:1], OTHER)
        seen[style] = f"{seen[style]}, {words}" if words not in seen.get(style, words) else words
        number_of = str(event.get("name"))[1:]
        shade = " faint" if number_of.isdecimal() and int(number_of) % 2 else ""
        chart.bar(*_place(event), style + shade, _words(event, words) if len(events) < MANY else "")
    legend = [(style, words) for style, words in sorted(seen.items())]
    return Figure("A step of the pipeline", legend, chart.svg(), [_note(ends)])


def _place(event: Mapping[str, Any]) -> tuple[float, float, float, float]:
    start, stage = number(event["ts"]) / 1e6, number(event["pid"])
    low, high = ROWS[event["tid"]]
    return start, start + number(event["dur"]) / 1e6, stage + low, stage + high


def _words(event: Mapping[str, Any], words: str) -> str:
    start, end, *_ = _place(event)
    return (
        f"stage {number(event['pid']):.0f}, micro-batch {str(event.get('name'))[1:]}: {words}, {event['tid']}, from "
        f"{seconds_text(start)} to {seconds_text(end)}"
    )


def _end_s(events: Sequence[Mapping[str, Any]], name: str) -> float:
    return max((_place(event)[1] for event in events if event["tid"] == name), default=0.0)


def _note(ends: Mapping[str, float]) -> str:
    found = f"simulated {seconds_text(ends['predicted'])}, measured {seconds_text(ends['measured'])}"
    return (
        "Of each stage the upper row is a simulation with the seconds that its passes took in the step before, which "
        f"is no prediction of a plan; the lower row is the first step after it: {found}. Each stage "
        "counts from its own start of the step. Odd micro-batches are paler. timeline.json holds the same for "
        "ui.perfetto.dev."
    )
