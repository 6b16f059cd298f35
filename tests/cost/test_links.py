"""Lines of links, fitted to seconds with noise."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.cost.links import Line


def test_a_line_is_found_through_two_percent_of_noise() -> None:
    amounts = np.tile(np.arange(1, 25) * 2.0**18, 4)
    for seed in range(20):
        noise = 1 + 0.02 * np.random.default_rng(seed).standard_normal(len(amounts))
        found = Line.fitted(list(amounts), list((0.3 + 2e-7 * amounts) * noise))
        assert found.alpha_s == pytest.approx(0.3, rel=0.1) and found.beta_s == pytest.approx(2e-7, rel=0.02)


def test_a_line_through_points_on_it_is_exact_and_starts_above_zero() -> None:
    found = Line.fitted([1, 1e6, 2e6], [0.002 + 1e-8 * n for n in (1, 1e6, 2e6)])
    assert found.alpha_s == pytest.approx(0.002) and found.beta_s == pytest.approx(1e-8)
    # Seconds that grow faster than the amount would begin below 0.
    steep = Line.fitted([1.0, 2.0], [1.0, 3.0])
    assert steep.alpha_s == 0.0 and steep.beta_s == pytest.approx(15 / 13)
