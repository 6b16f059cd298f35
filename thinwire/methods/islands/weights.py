"""How much an island's work counts when islands finish at different times.

A server adds sum_i d_i Delta_i over the islands S that have finished. Island i then counts q_i = E[d_i 1(i in S)] in
each aggregation, and the fixed point minimises sum_i q_i f_i: it is that of sum_i p_i f_i exactly where q_i is
proportional to p_i. So d_i = p_i / P(i in S), up to one factor that all share. Every function gives one number for each
island.

p: `importance`, of sum 1. tau: `job_s`, the seconds of one job.

Source: Fraboni, Vidal, Kameni and Lorenzi, "A General Theory for Federated Optimization with Asynchronous and
Heterogeneous Clients Updates", JMLR 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# A job of 0.6 s takes three ticks of 0.2 s, though in floating point 0.6 / 0.2 is above 3.
SLACK = 1e-9


def normalised(importance: Sequence[float]) -> list[float]:
    """p of sum 1."""
    total = sum(importance)
    return [value / total for value in importance]


def fedavg_weights(importance: Sequence[float]) -> list[float]:
    """d_i = p_i: everybody takes part in every aggregation (synchronous FedAvg)."""
    return list(importance)


def async_weights(importance: Sequence[float], job_s: Sequence[float]) -> list[float]:
    """d_i = (sum_j 1/tau_j) tau_i p_i: an aggregation at every arrival, of that one island."""
    rate = sum(1 / tau for tau in job_s)
    return [rate * tau * p for p, tau in zip(importance, job_s, strict=True)]


def fedfix_weights(importance: Sequence[float], job_s: Sequence[float], interval_s: float) -> list[float]:
    """d_i = ceil(tau_i / dt) p_i: an aggregation every dt seconds, of all who have finished; a job takes that many."""
    return tick_weights(importance, [max(1, math.ceil(tau / interval_s - SLACK)) for tau in job_s])


def tick_weights(importance: Sequence[float], ticks: Sequence[int]) -> list[float]:
    """d_i = (ticks that this very job took) p_i: FedFix's weights, where job times vary or are not known.

    What an island has counted up to the end of a job is p_i times the ticks up to there, whatever its jobs took: no
    estimate and no bias. With constant times it is `fedfix_weights`.
    """
    return [count * p for p, count in zip(importance, ticks, strict=True)]


def frequency_weights(importance: Sequence[float], frequency: Sequence[float]) -> list[float]:
    """d_i = p_i / P(i in S), for any rule by which S comes about, such as FedBuff's: as soon as c have arrived."""
    return [p / share for p, share in zip(importance, frequency, strict=True)]


def estimated_weights(
    importance: Sequence[float], num_aggregations: int, participations: Sequence[int], largest: float = math.inf
) -> list[float]:
    """d_i = p_i n / max(N_i, 1), within [p_i, `largest` p_i]: N_i participations in n aggregations, counted so far."""
    shares = [num_aggregations / max(count, 1) for count in participations]
    return [p * min(max(share, 1.0), largest) for p, share in zip(importance, shares, strict=True)]
