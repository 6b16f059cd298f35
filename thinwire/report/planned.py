"""What a plan predicted beside what its run measured, the links that were planned with, and the simulated step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from thinwire.report.charts import Figure
from thinwire.report.run import RunFiles, number
from thinwire.report.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Scale
from thinwire.report.units import bytes_text, seconds_text

# Height of a rank's lane, of the space between ranks, and of a cell of the heatmap, in pixels.
LANE, GAP, CELL = 9, 7, 40
# Above a heatmap: a line of words and the numbers of columns.
HEAD = TOP + 14
# Of the lanes from top to bottom: the name in plan.json, its words, and the style of its spans.
LANES = (
    ("training", "computing", "compute"),
    ("communication", "packing", "waiting"),
    ("sending", "sending", "heldout"),
)
# More ranks than these have no numbers in their cells.
MOST_TEXTS = 10
STRONGEST = 0.75


def planned_figures(run: RunFiles) -> Iterator[Figure]:
    """The links of a plan, and the timeline of its simulated step, as far as plan.json has them."""
    rates = [[number(value) for value in row] for row in rows_of(run.plan.get("rates"))]
    if len(rates) > 1:
        yield links_figure(rates, rows_of(run.plan.get("delays_s")), rows_of(run.plan.get("link_bytes")))
    if spans := rows_of(run.plan.get("timeline")):
        yield timeline_figure(spans)


def links_figure(
    rates: Sequence[Sequence[float]], delays_s: Sequence[Sequence[Any]], carried: Sequence[Sequence[Any]]
) -> Figure:
    """A cell for each link, darker where it is faster, framed where the plan sends over it.

    rates: bytes per second, [from][to]; NaN where there is no link.
    """
    num = len(rates)
    known = [rate for row in rates for rate in row if rate > 0 and math.isfinite(rate)]
    low, high = min(known, default=1.0), max(known, default=1.0)
    cell = min(CELL, (WIDTH - LEFT - RIGHT) / num)
    height = HEAD + cell * num + 4
    marks = ['<text x="8" y="14">from rank, down; to rank, across</text>']
    for one in range(num):
        centre = cell * (one + 0.5)
        marks.append(f'<text x="{LEFT - 8}" y="{HEAD + centre + 4:.1f}" text-anchor="end">{one}</text>')
        marks.append(f'<text x="{LEFT + centre:.1f}" y="{HEAD - 6}" text-anchor="middle">{one}</text>')
    for source, target in ((a, b) for a in range(num) for b in range(num) if a != b):
        rate, sent = rates[source][target], number(at(carried, source, target))
        share = 1.0 if high == low else math.log(max(low, rate) / low) / math.log(high / low)
        x, y = LEFT + cell * target, HEAD + cell * source
        frame = " used" if sent > 0 else ""
        words = f"{source} to {target}: {rate_text(rate)}, {seconds_text(number(at(delays_s, source, target)))}"
        words += f"; the plan sends {bytes_text(sent)} a step" if math.isfinite(sent) else ""
        marks.append(
            f'<rect class="cell{frame}" x="{x + 1.5:.1f}" y="{y + 1.5:.1f}" width="{cell - 3:.1f}" '
            f'height="{cell - 3:.1f}" fill-opacity="{0.08 + (STRONGEST - 0.08) * share:.2f}">'
            f"<title>{escape(words)}</title></rect>"
        )
        if num <= MOST_TEXTS:
            middle = f'x="{x + cell / 2:.1f}" y="{y + cell / 2 + 4:.1f}" text-anchor="middle"'
            marks.append(f'<text class="inside" {middle}>{8e-6 * rate:.3g}</text>')
    (a, b) = min(((a, b) for a in range(num) for b in range(num) if rates[a][b] == low), default=(0, 0))
    slowest = f"The slowest link, {a} to {b}, carries {rate_text(low)}; the fastest {rate_text(high)}."
    unused = number(at(carried, a, b)) == 0 == number(at(carried, b, a))
    notes = [slowest + (" The plan sends nothing between these two." if unused and carried else "")]
    legend = [("cell", "Mbit/s, measured; darker: faster"), ("used", "the plan sends over it")]
    return Figure("Links of the plan", legend, picture("links", height, marks), notes)


def timeline_figure(spans: Sequence[Sequence[Any]]) -> Figure:
    """The simulated step: for each rank what it computes, packs and sends. spans: as in plan.json."""
    names = [lane for lane, _, _ in LANES]
    shown = [span for span in spans if len(span) == 5 and span[1] in names]
    ranks = sorted({int(number(span[0])) for span in shown})
    last = max((number(span[4]) for span in shown), default=1.0) or 1.0
    height = TOP + len(ranks) * (len(LANES) * LANE + GAP) + BOTTOM
    scale = Scale(0.0, last, LEFT, WIDTH - RIGHT)
    foot = height - BOTTOM
    marks = ['<text x="8" y="14">rank</text>']
    for value, words in scale.labels(6):
        x = scale.place(value)
        marks.append(f'<path class="grid" d="M{x:.1f} {TOP}V{foot}"/>')
        marks.append(f'<text x="{x:.1f}" y="{foot + 18}" text-anchor="middle">{words}</text>')
    marks.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{height - 8}" text-anchor="middle">seconds</text>')
    tops = {rank: TOP + place * (len(LANES) * LANE + GAP) for place, rank in enumerate(ranks)}
    for rank, top in tops.items():
        marks.append(f'<text x="{LEFT - 8}" y="{top + 1.5 * LANE + 4:.1f}" text-anchor="end">{rank}</text>')
    for rank, lane, name, begin, end in shown:
        place, words, style = next((i, words, style) for i, (own, words, style) in enumerate(LANES) if own == lane)
        x, right = scale.place(number(begin)), scale.place(number(end))
        y = tops[int(number(rank))] + place * LANE
        told = f"rank {rank}, {words}: {name}, {seconds_text(number(begin))} to {seconds_text(number(end))}"
        marks.append(
            f'<rect class="bar {style}" x="{x:.2f}" y="{y:.1f}" width="{max(0.3, right - x):.2f}" '
            f'height="{LANE - 1}"><title>{escape(told)}</title></rect>'
        )
    legend = [(style, words) for _, words, style in LANES]
    notes = [f"One step, simulated: {seconds_text(last)}."]
    return Figure("The simulated step", legend, picture("the simulated step", height, marks), notes)


def picture(label: str, height: float, marks: Sequence[str]) -> str:
    """An SVG of these marks."""
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, *marks, "</svg>"])


def rate_text(rate: float) -> str:
    """Bytes per second in words."""
    return f"{8e-6 * rate:.3g} Mbit/s" if math.isfinite(rate) else "?"


def rows_of(value: Any) -> list[list[Any]]:
    """A table of plan.json; empty for anything else."""
    return value if isinstance(value, list) and all(isinstance(row, list) for row in value) else []


def at(table: Sequence[Sequence[Any]], row: int, column: int) -> Any:
    """A cell of a table; None outside of it."""
    return table[row][column] if row < len(table) and column < len(table[row]) else None
