"""FedFix's weights, and what they make of unequal speed, in a simulation with a clock of its own."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.methods.islands.fedfix import FedFix

JOB_S = (1.0, 0.8, 0.6, 0.4, 0.2)
EQUAL = [0.2] * 5


def weights_at(interval: float, importance: Sequence[float]) -> list[float]:
    """Of islands whose jobs always take JOB_S; 0.6 / 0.2 is above 3 in floating point."""
    job_ticks = [math.ceil(tau / interval - 1e-9) for tau in JOB_S]
    return FedFix().weights_of(importance, job_ticks, 1, [1] * 5)


def test_weights_are_the_published_ones() -> None:
    assert weights_at(0.25, [1.0] * 5) == [4, 4, 3, 2, 1]
    assert weights_at(0.5, [1.0] * 5) == [2, 2, 2, 1, 1]
    assert weights_at(1.0, [1.0] * 5) == FedFix(weighting="importance").weights_of([1.0] * 5, [7] * 5, 1, [1] * 5)
    assert FedFix(max_ticks=3).weights_of([1.0] * 2, [2, 9], 9, [1, 1]) == [2, 3]
    counted = [8, 4, 1, 1, 1], 8, [0, 1, 2, 8, 9]
    assert FedFix(weighting="estimated").weights_of(EQUAL, *counted) == pytest.approx([1.6, 1.6, 0.8, 0.2, 0.2])
    most = FedFix(weighting="estimated", max_ticks=5)
    assert most.weights_of(EQUAL, *counted) == pytest.approx([1.0, 1.0, 0.8, 0.2, 0.2])
    assert FedFix(importance=(1.0, 3.0)).importance_of(2) == [0.25, 0.75]


class Simulation:
    """Five clients, f_i = 0.5 |x - (i, -i)|^2, one step of lr 0.02 a job; the best x is (2, -2)."""

    def __init__(self, end: float = 4000.0, dead_from: float = math.inf) -> None:
        self.x, self.end, self.dead_from = 0.0, end, dead_from
        self.sent = [0.0] * 5
        self.values: list[float] = []
        self.counts = [0] * 5

    def aggregate(self, clients: Sequence[int], weights: Sequence[float]) -> None:
        self.x += sum(weights[i] * 0.02 * (i - self.sent[i]) for i in clients)
        for i in clients:
            self.sent[i] = self.x
            self.counts[i] += 1
        self.values.append(self.x)

    def arrivals(self, restart: Callable[[int, float], float]) -> Any:
        """(time, client) in order; client 3 may die."""
        queue = [(tau, i) for i, tau in enumerate(JOB_S)]
        heapq.heapify(queue)
        while queue and queue[0][0] < self.end + 1e-9:
            now, i = heapq.heappop(queue)
            if i != 3 or now < self.dead_from:
                yield now, i
                heapq.heappush(queue, (restart(i, now), i))

    def every_arrival(self, weights: Sequence[float]) -> Simulation:
        for _, i in self.arrivals(lambda i, now: now + JOB_S[i]):
            self.aggregate([i], weights)
        return self

    def every_interval(self, interval: float, weights: Sequence[float]) -> Simulation:
        def next_tick(now: float) -> int:
            return math.ceil(now / interval - 1e-9)

        waiting: dict[int, list[int]] = {}
        for now, i in self.arrivals(lambda i, now: next_tick(now) * interval + JOB_S[i]):
            tick = next_tick(now)
            for earlier in range(len(self.values) + 1, tick):
                self.aggregate(sorted(waiting.pop(earlier, [])), weights)
            waiting.setdefault(tick, []).append(i)
        return self

    def every_few(self, count: int, weights: Sequence[float]) -> Simulation:
        """FedBuff: clients wait for the aggregation that they take part in."""
        queue = [(tau, i) for i, tau in enumerate(JOB_S)]
        now = 0.0
        while now < self.end:
            first = sorted(queue)[:count]
            now = first[-1][0]
            if any(i == 3 and at >= self.dead_from for at, i in first):
                queue = [(at, i) for at, i in queue if i != 3]
                continue
            self.aggregate(sorted(i for _, i in first), weights)
            queue = [(now + JOB_S[i], i) if (at, i) in first else (at, i) for at, i in queue]
        return self

    @property
    def mean(self) -> float:
        half = self.values[len(self.values) // 2 :]
        return sum(half) / len(half)

    @property
    def deviation(self) -> float:
        return float(torch.tensor(self.values[len(self.values) // 2 :], dtype=torch.float64).std())


def test_the_fixed_points_are_the_published_ones() -> None:
    by_time = Simulation().every_arrival([1.0] * 5)
    assert by_time.mean == pytest.approx(2.810, abs=1e-3)
    for interval, mean, biased in ((0.25, 2.007, 2.752), (0.5, 2.004, 2.430), (1.0, 2.000, 2.000)):
        fixed = Simulation().every_interval(interval, weights_at(interval, EQUAL))
        assert fixed.mean == pytest.approx(mean, abs=2e-3)
        assert Simulation().every_interval(interval, EQUAL).mean == pytest.approx(biased, abs=2e-3)
        assert len(fixed.values) == pytest.approx(4000 / interval, abs=2)
    assert len(by_time.values) == pytest.approx(45_664, rel=1e-3)


def test_buffers_with_equal_weights_are_biased() -> None:
    assert Simulation().every_few(2, [0.5] * 5).mean == pytest.approx(2.646, abs=5e-3)


def test_each_counts_its_importance_in_a_long_window() -> None:
    """sum over aggregations of d_i 1(i in S) / aggregations = p_i, which is all that being unbiased asks for."""
    p = FedFix(importance=(1, 2, 3, 4, 5)).importance_of(5)
    for interval in (0.25, 0.5, 0.7):
        run = Simulation().every_interval(interval, weights := weights_at(interval, p))
        counted = [weight * count / len(run.values) for weight, count in zip(weights, run.counts, strict=True)]
        assert counted == pytest.approx(p, rel=0.01)
    # Ticks of jobs whose lengths vary: exact after every job.
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    assert sum(FedFix().weights_of([0.3], [length], 9, [1])[0] for length in lengths) == pytest.approx(
        0.3 * sum(lengths)
    )


def test_a_dead_client_does_not_stop_the_others() -> None:
    """Its f is then missing: the mean of 0, 1, 2 and 4."""
    run = Simulation(dead_from=1000).every_interval(0.5, weights_at(0.5, EQUAL))
    assert run.mean == pytest.approx(7 / 4, abs=0.02)
    assert len(Simulation(dead_from=1000).every_few(2, [0.5] * 5).values) > 8000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval_s": 0.0}, "interval_s 0"),
        ({"local_steps": 0}, "local_steps 0"),
        ({"weighting": "tick"}, "did you mean 'ticks'"),
        ({"outer_lr": 0.0}, "outer_lr 0"),
        ({"max_ticks": 0}, "max_ticks 0"),
        ({"weighting": "importance", "max_ticks": 4}, "max_ticks 4: no effect"),
        ({"codec": "int5"}, "nearest is 4"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FedFix(**options)
