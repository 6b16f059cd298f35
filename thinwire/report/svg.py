"""Line and bar charts as inline SVG. The page's style sheet sets the colours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from thinwire.report.units import short

Point = tuple[float, float]

# Narrow enough that the text stays readable on the screen of a phone.
WIDTH, HEIGHT = 520, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 16, 30, 44
LETTER_WIDTH, LINE_HEIGHT, LONGEST_LABEL = 7.5, 16, 22


@dataclass(frozen=True)
class Scale:
    """A linear scale from data (low to high) to pixels (start to end); `whole`: ticks at integers only, if any."""

    low: float
    high: float
    start: float
    end: float
    whole: bool = False

    def place(self, value: float) -> float:
        """Pixels of a value. Values outside the scale are drawn on its border."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values inside the scale."""
        step = nice_step((self.high - self.low) / count)
        if self.whole and self.high - self.low >= 1:
            step = max(1.0, math.ceil(step))
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def labels(self, count: int) -> list[tuple[float, str]]:
        """About `count` ticks and their texts, which share a unit."""
        ticks = self.ticks(count)
        step = ticks[1] - ticks[0] if len(ticks) > 1 else self.high - self.low
        return [(value, tick_label(value, step, max(map(abs, ticks)))) for value in ticks]


class LogScale(Scale):
    """A logarithmic scale of values above 0."""

    def place(self, value: float) -> float:
        """Pixels of a value. Values outside the scale are drawn on its border."""
        share = math.log(min(max(value, self.low), self.high) / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the scale: powers of ten, and if there is room, 2 and 5 or 3 times them."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for nice in ((1, 2, 5), (1, 3), (1,)):
            found = [n * 10.0**p for p in powers for n in nice if self.low <= n * 10.0**p <= self.high]
            if len(found) <= count:
                break
        return found

    def labels(self, count: int) -> list[tuple[float, str]]:
        """About `count` ticks and their texts, each with a unit of its own."""
        return [(value, short(value)) for value in self.ticks(count)]


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that isn't below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * (1 - 1e-9))


def tick_label(value: float, step: float, largest: float) -> str:
    """A tick's value with the decimals that its step needs, and k, M or G to match the axis's largest tick."""
    for size, letter, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if largest >= least:
            return f"{value / size:.{_decimals(step / size)}f}{letter}" if value else "0"
    if 0 < largest < 1e-3:
        power = math.floor(math.log10(largest) + 1e-9)
        return f"{value / 10.0**power:.{_decimals(step / 10.0**power)}f}e{power}" if value else "0"
    return f"{value:.{_decimals(step)}f}"


def _decimals(step: float) -> int:
    exact = (digits for digits in range(7) if abs(step - round(step, digits)) < 1e-6 * step)
    return next(exact, 6)


def around(values: Iterable[float], zero: bool = False) -> tuple[float, float]:
    """Bounds of an axis: the finite values with a margin; from zero if asked."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0, max(high, 0.0) + room) if zero else (low - room, high + room)


class Chart:
    """One plot that collects SVG marks. Coordinates are data values; styles are classes of the style sheet.

    Args:
        names: names of the lines for `end_labels`, which get room at the right.
        height: height of the picture in pixels.
        log_x: whether the x axis is logarithmic.
        whole_y: whether the y axis has ticks at integers only.
    """

    def __init__(
        self, label: str, x: tuple[float, float], y: tuple[float, float], x_label: str, y_label: str,
        *, names: Sequence[str] = (), height: float = HEIGHT, log_x: bool = False, whole_y: bool = False,
    ) -> None:  # fmt: skip
        widest = max((len(_cut(name)) for name in names), default=0)
        self._right = WIDTH - RIGHT - (LETTER_WIDTH * widest + 14 if widest else 0)
        self._height, self._foot = height, height - BOTTOM
        self.x = LogScale(*x, LEFT, self._right) if log_x else Scale(*x, LEFT, self._right, whole=True)
        self.y = Scale(*y, self._foot, TOP, whole=whole_y)
        self._label = label
        self._marks = [*self._grid(), *self._titles(x_label, y_label)]

    def line(self, points: Sequence[Point], style: str) -> None:
        """Draw a line with a gap at every value that isn't finite. A lone point becomes a dot."""
        for piece in _finite_pieces(points):
            if len(piece) == 1:
                self.dot(piece[0], style, radius=2.5)
                continue
            path = "L".join(f"{self.x.place(x):.1f} {self.y.place(y):.1f}" for x, y in piece)
            self._marks.append(f'<path class="line {style}" d="M{path}"/>')

    def dot(self, point: Point, style: str, radius: float = 5, text: str = "") -> None:
        """Draw a dot that shows `text` under the pointer."""
        x, y = self.x.place(point[0]), self.y.place(point[1])
        end = f"><title>{escape(text)}</title></circle>" if text else "/>"
        self._marks.append(f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"{end}')

    def error_bar(self, point: Point, error: float, style: str) -> None:
        """A vertical line from y - error to y + error."""
        x, (low, high) = self.x.place(point[0]), (self.y.place(point[1] + sign * error) for sign in (-1, 1))
        self._marks.append(f'<path class="line {style}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')

    def bar(self, left: float, right: float, bottom: float, top: float, style: str, text: str = "") -> None:
        """Draw a rectangle that shows `text` under the pointer; nothing if its height is not above zero, or NaN."""
        if not top > bottom:
            return
        x, y = self.x.place(left), self.y.place(top)
        width, height = self.x.place(right) - x, self.y.place(bottom) - y
        size = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
        end = f"><title>{escape(text)}</title></rect>" if text else "/>"
        self._marks.append(f'<rect class="bar {style}" {size}{end}')

    def rule(self, y: float, style: str) -> None:
        """A horizontal line across the plot."""
        at = f"{self.y.place(y):.1f}"
        self._marks.append(f'<path class="line {style}" d="M{LEFT} {at}H{self._right:.1f}"/>')

    def area(self, low: Sequence[Point], high: Sequence[Point], style: str) -> None:
        """Fill the area between two lines whose points are all finite."""
        edge = "L".join(f"{self.x.place(x):.1f} {self.y.place(y):.1f}" for x, y in [*low, *reversed(high)])
        self._marks.append(f'<path class="area {style}" d="M{edge}Z"/>')

    def end_labels(self, ends: Sequence[tuple[str, str, Point]]) -> None:
        """Draw the names of lines right of the plot, each joined to its line. ends: (name, style, last point)."""
        ends = sorted(ends, key=lambda end: self.y.place(end[2][1]))
        places = spread_out([self.y.place(y) for _, _, (_, y) in ends], LINE_HEIGHT, TOP, self._foot)
        for (name, style, (x, y)), place in zip(ends, places, strict=True):
            lead = f"M{self.x.place(x):.1f} {self.y.place(y):.1f}L{self._right:.1f} {place:.1f}h6"
            self._marks.append(f'<path class="lead {style}" d="{lead}"/>')
            at = f'x="{self._right + 10:.1f}" y="{place + 4:.1f}"'
            self._marks.append(f'<text class="name {style}" {at}>{escape(_cut(name))}</text>')

    def cross(self, x: float, style: str) -> None:
        """Draw a mark at the bottom of the plot, for a value that can't be drawn."""
        self._marks.append(f'<path class="line {style}" d="M{self.x.place(x):.1f} {self._foot}v-9"/>')

    def hover(self, left: float, right: float, text: str) -> None:
        """An invisible column that shows `text` under the pointer."""
        x = self.x.place(left)
        size = f'width="{self.x.place(right) - x:.2f}" height="{self._foot - TOP}"'
        self._marks.append(f'<rect class="hover" x="{x:.2f}" y="{TOP}" {size}><title>{escape(text)}</title></rect>')

    def svg(self) -> str:
        """The finished picture."""
        head = f'<svg viewBox="0 0 {WIDTH} {self._height}" role="img" aria-label="{escape(self._label)}">'
        return "\n".join([head, *self._marks, "</svg>"])

    def _grid(self) -> Iterable[str]:
        foot = self._foot
        for value, text in self.y.labels(6):
            y = self.y.place(value)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{self._right:.1f}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        yield f'<path class="axis" d="M{LEFT} {foot}H{self._right:.1f}"/>'
        for value, text in self.x.labels(6):
            x = self.x.place(value)
            yield f'<path class="axis" d="M{x:.1f} {foot}v4"/>'
            yield f'<text x="{x:.1f}" y="{foot + 18}" text-anchor="middle">{text}</text>'

    def _titles(self, x_label: str, y_label: str) -> Iterable[str]:
        centre = (LEFT + self._right) / 2
        yield f'<text x="{centre:.1f}" y="{self._height - 8}" text-anchor="middle">{escape(x_label)}</text>'
        yield f'<text x="8" y="14">{escape(y_label)}</text>'


def alone(svg: str) -> str:
    """The picture as a file of its own, with the page's style sheet."""
    style = files("thinwire.report").joinpath("style.css").read_text(encoding="utf-8")
    head, rest = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}\n'


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Rising places near the rising `wanted` ones, at least `gap` apart (less if they do not fit), from low to high."""
    if len(wanted) > 1:
        gap = min(gap, (high - low) / (len(wanted) - 1))
    places: list[float] = []
    for value in wanted:
        places.append(max(value, low, places[-1] + gap if places else low))
    ceiling = high
    for position in reversed(range(len(places))):
        places[position] = min(places[position], ceiling)
        ceiling = places[position] - gap
    return places


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"


def _finite_pieces(points: Sequence[Point]) -> list[list[Point]]:
    pieces: list[list[Point]] = [[]]
    for point in points:
        if all(math.isfinite(value) for value in point):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
