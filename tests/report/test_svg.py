from __future__ import annotations

import math
from itertools import pairwise

import pytest

from thinwire.report.svg import Scale, around, spread_out, tick_label
from thinwire.report.units import bytes_text, percent_text, seconds_text, short


@pytest.mark.parametrize("low,high", [(0, 1), (0, 614_400), (-3, 7), (1.5, 5.6), (0, 1e-9), (2, 2.0001)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = Scale(low, high, 0, 100).ticks()
    room = 1e-6 * (high - low)
    assert 2 <= len(ticks) <= 7
    assert all(low - room <= tick <= high + room for tick in ticks)
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert any(mantissa == pytest.approx(nice) for nice in (1, 2, 2.5, 5))


def test_whole_ticks() -> None:
    assert Scale(0.5, 3.5, 0, 100, whole=True).ticks() == [1, 2, 3]


def test_place_maps_the_ends_and_clamps() -> None:
    axis = Scale(10, 20, 100, 0)
    assert [axis.place(value) for value in (10, 15, 20, 99)] == [100, 50, 0, 0]


@pytest.mark.parametrize(
    "value,step,largest,text",
    [
        (0.25, 0.25, 1.0, "0.25"),
        (2, 1, 3, "2"),
        (2000, 1000, 5000, "2000"),
        (200_000, 200_000, 600_000, "200k"),
        (500_000, 500_000, 2_500_000, "0.5M"),
        (0, 1e6, 4e6, "0"),
        (3e-4, 1e-4, 3e-4, "3e-4"),
        (2.5e-6, 5e-7, 4.5e-6, "2.5e-6"),
    ],
)
def test_tick_labels(value: float, step: float, largest: float, text: str) -> None:
    assert tick_label(value, step, largest) == text


def test_bounds_hold_the_finite_values() -> None:
    low, high = around([math.nan, 3.0, 5.0, math.inf])
    assert low < 3.0 and 5.0 < high < 6.0
    assert around([4.0], zero=True)[0] == 0.0
    low, high = around([])
    assert low < high


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 999, 1500, 9.1e6, math.nan)] == [
        "0 B",
        "999 B",
        "1.50 kB",
        "9.10 MB",
        "?",
    ]
    assert [seconds_text(s) for s in (0.0123, 3.82, 185.0)] == ["12.3 ms", "3.82 s", "3 min 05 s"]
    assert [short(n) for n in (6290.2, 614_400, 2.05e7)] == ["6290", "614k", "20.5M"]
    assert percent_text(0.167) == "17 %"


@pytest.mark.parametrize(
    "wanted", [[], [5.0], [5.0, 5.0, 5.0], [0.0, 99.0, 100.0], [98.0] * 4, [1.0, 50.0, 51.0, 52.0]]
)
def test_labels_are_spread_out_inside_the_plot(wanted: list[float]) -> None:
    places = spread_out(wanted, 10.0, 0.0, 100.0)
    assert len(places) == len(wanted) and all(0.0 <= place <= 100.0 for place in places)
    assert all(after - before >= 10.0 - 1e-9 for before, after in pairwise(places))
    assert spread_out([10.0, 40.0], 10.0, 0.0, 100.0) == [10.0, 40.0], "what is apart stays"
    crowded = spread_out([0.0] * 21, 10.0, 0.0, 100.0)
    assert [after - before for before, after in pairwise(crowded)] == pytest.approx([5.0] * 20)
