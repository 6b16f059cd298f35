"""Gradients in the idle time of layers."""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest
from scipy.optimize import differential_evolution

from tests.cost.fsmoe import excess_s, partition
from thinwire.cost.links import Line

LINE = Line(0.01, 1e-8)


def drawn(seed: int) -> tuple[list[float], list[float]]:
    """Bytes before each of some layers and after the last, and idle seconds, some of them below the latency."""
    draw = random.Random(seed)
    num = draw.randint(1, 5)
    produced = [draw.choice([0.0, draw.uniform(0, 4e6)]) for _ in range(num)]
    return [*produced, draw.choice([0.0, 1e6])], [draw.choice([0.0, draw.uniform(0, 0.05)]) for _ in range(num)]


@pytest.mark.parametrize("seed", range(200))
def test_every_byte_travels_once_and_none_before_it_is_there(seed: int) -> None:
    produced, idle_s = drawn(seed)
    sent = partition(produced, idle_s, LINE)
    assert len(sent) == len(produced) and min(sent) >= 0 and sum(sent) == pytest.approx(sum(produced), abs=1e-3)
    assert all(a <= b + 1e-3 for a, b in zip(accumulate(sent), accumulate(produced), strict=True))
    # Without idle time there is one message, in a layer or at the end.
    assert sum(num > 0 for num in partition(produced, [0.0] * len(idle_s), LINE)) == bool(sum(produced))


def searched_s(produced: list[float], idle_s: list[float], seed: int) -> float:
    """The fewest seconds that differential evolution finds, as published."""
    upto = list(accumulate(produced))

    def sent_by(shares: np.ndarray) -> list[float]:
        found, done = [], 0.0
        for share, there in zip(shares, upto, strict=False):
            # A search hardly finds the exact ends.
            share = 0.0 if share < 0.02 else 1.0 if share > 0.98 else share
            found.append(share * (there - done))
            done += found[-1]
        return [*found, upto[-1] - done]

    found = differential_evolution(
        lambda shares: excess_s(sent_by(shares), idle_s, LINE), [(0, 1)] * len(idle_s), seed=seed, maxiter=40, popsize=8
    )
    return float(found.fun)


def test_the_exact_allocation_is_never_worse_than_a_search() -> None:
    num_near = 0
    for seed in range(24):
        produced, idle_s = drawn(1000 + seed)
        searched, own = searched_s(produced, idle_s, seed), excess_s(partition(produced, idle_s, LINE), idle_s, LINE)
        assert own <= searched + 1e-9
        num_near += searched < own + 2e-3
    # It is no bound that nothing reaches.
    assert num_near >= 16


def test_bytes_of_an_idle_time() -> None:
    assert LINE.room(0.03) == pytest.approx(2e6) and LINE.room(0.005) == 0.0
    assert partition([3e6, 0.0, 0.0], [0.03, 0.03], LINE) == pytest.approx([2e6, 1e6, 0.0])
    # The second layer has no room: the rest makes the first one longer, which saves the latency of another message.
    assert partition([3e6, 0.0, 0.0], [0.03, 0.0], LINE) == pytest.approx([3e6, 0.0, 0.0])
    assert partition([3e6, 0.0, 1.0], [0.03, 0.0], LINE) == pytest.approx([2e6, 0.0, 1e6 + 1])
