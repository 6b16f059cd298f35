"""Closed forms of a pipeline's step: its time according to Pipette, and a schedule's idle time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from thinwire.cost.network import Network


def pipette_s(
    num_stages: int, num_micro_batches: int, compute_s: float, trip_s: float, exchange_s: float = 0.0
) -> float:
    """Seconds of a 1F1B step: (m/p) (T_pp + p C) + (p - 1) C + T_dp; for m < p: T_pp + p C + (m - 1) C + T_dp.

    Each group of p micro-batches makes a trip through all stages and back, which 1F1B does not hide. m/p is not rounded
    down, as it is in the released code, which leaves the last group out. For equal stages the simulated step is longer
    by 2 (p - 2) messages, which this form ignores.

    Args:
        compute_s: C, forward and backward of one micro-batch on the slowest stage.
        trip_s: T_pp, of all messages of a micro-batch, there and back; see `trip_s`.
        exchange_s: T_dp, of the replicas' messages.

    Source: "Pipette" (DATE 2024), section IV.
    """
    p, m = num_stages, num_micro_batches
    if m < p:
        return trip_s + p * compute_s + (m - 1) * compute_s + exchange_s
    return m / p * (trip_s + p * compute_s) + (p - 1) * compute_s + exchange_s


def amp_s(num_stages: int, num_micro_batches: int, compute_s: float, trip_s: float, exchange_s: float = 0.0) -> float:
    """Seconds of a 1F1B step by the older form (m - 1) C + T_pp + p C + T_dp, which counts the messages' trip once.

    Args: see `pipette_s`. Source: "AMP" (NeurIPS 2022), as "Pipette" (DATE 2024) cites it.
    """
    p, m = num_stages, num_micro_batches
    return (m - 1) * compute_s + trip_s + p * compute_s + exchange_s


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
