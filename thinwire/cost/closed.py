"""Closed forms of a pipeline's step: its time according to Pipette, and a schedule's idle time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from thinwire.cost.network import Network


def pipette_s(compute_s: Sequence[float], num_micro_batches: int, trip_s: float, exchange_s: float = 0.0) -> float:
    """Seconds of a 1F1B step: T_pp + sum C_i + (p - 1) C + (m - p)/p max(p C, T_pp + sum C_i) + T_dp.

    The first p micro-batches make a trip through all stages and back, and so does each further group of p, which 1F1B
    does not hide; a stage that is slow enough hides it. C is the largest C_i. For equal stages this is the published
    (m/p) (T_pp + p C) + (p - 1) C + T_dp, with m/p not rounded down, as it is in the released code, which leaves the
    last group out; the simulated step is longer by 2 (p - 2) messages, which the form ignores. For m < p it is
    T_pp + sum C_i + (m - 1) C + T_dp.

    Args:
        compute_s: C_i, forward and backward of one micro-batch on each of the p stages.
        num_micro_batches: m.
        trip_s: T_pp, of all messages of a micro-batch, there and back; see `trip_s`.
        exchange_s: T_dp, of the replicas' messages.

    Source: "Pipette" (DATE 2024), section IV; unequal stages are ours.
    """
    p, m, slowest_s, whole_s = len(compute_s), num_micro_batches, max(compute_s), sum(compute_s)
    first_s = trip_s + whole_s + (min(m, p) - 1) * slowest_s
    return first_s + max(0, m - p) / p * max(p * slowest_s, trip_s + whole_s) + exchange_s


def amp_s(compute_s: Sequence[float], num_micro_batches: int, trip_s: float, exchange_s: float = 0.0) -> float:
    """Seconds of a 1F1B step by the older form (m - 1) C + T_pp + sum C_i + T_dp, which counts the messages' trip once.

    Args: see `pipette_s`. Source: "AMP" (NeurIPS 2022), as "Pipette" (DATE 2024) cites it.
    """
    return (num_micro_batches - 1) * max(compute_s) + trip_s + sum(compute_s) + exchange_s


def trip_s(ranks: Sequence[int], network: Network, forward_bytes: float, backward_bytes: float) -> float:
    """T_pp: seconds of a micro-batch's messages from stage to stage and back, delays included.

    ranks: of the stages, in order.
    """
    total = 0.0
    for here, there in itertools.pairwise(ranks):
        total += forward_bytes / network.rates[here][there] + network.delays_s[here][there]
        total += backward_bytes / network.rates[there][here] + network.delays_s[there][here]
    return total


def ring_s(ranks: Sequence[int], network: Network, num_bytes: float) -> float:
    """T_dp: 2 (n - 1) / n of the bytes over the slowest link of a ring, plus one delay for each turn."""
    n = len(ranks)
    if n < 2:
        return 0.0
    rates, delays_s = network.rates, network.delays_s
    links = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    rate, delay_s = min([rates[a][b] for a, b in links]), max([delays_s[a][b] for a, b in links])
    return 2 * (n - 1) * (num_bytes / n / rate + delay_s)


def bubble(num_stages: int, num_micro_batches: int, chunks: int = 1) -> float:
    """Idle time over computing time, (p - 1) / (v m), of a schedule with v chunks of layers on each stage.

    Source: Narayanan et al. (SC 2021), section 2.2.
    """
    return (num_stages - 1) / (chunks * num_micro_batches)
