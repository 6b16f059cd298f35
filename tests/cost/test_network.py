"""Messages on shared ports, by hand."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from thinwire.cost import Network, Traffic, traffic as module
from thinwire.cost.network import Pair
from thinwire.cost.traffic import Ways, fair_rates
from thinwire.errors import ConfigError


def arrivals(network: Network, sends: list[tuple[float, tuple[int, int], float]]) -> dict[int, float]:
    """When the i-th of (time, pair, bytes) arrives."""
    traffic: Traffic[int] = Traffic(network)
    found: dict[int, float] = {}
    waiting = sorted(range(len(sends)), key=lambda i: sends[i][0])
    while waiting or traffic.next_s() < math.inf:
        now = min(traffic.next_s(), sends[waiting[0]][0] if waiting else math.inf)
        found |= dict.fromkeys(traffic.advance(now), now)
        while waiting and sends[waiting[0]][0] <= now:
            _, pair, num_bytes = sends[waiting[0]]
            traffic.send(pair, num_bytes, waiting.pop(0))
    return found


def test_one_message_takes_its_bytes_over_the_rate_and_the_delay() -> None:
    assert arrivals(Network.even(2, rate=10.0, delay_s=0.5), [(1.0, (0, 1), 20.0)]) == {0: 3.5}


def test_messages_of_one_pair_follow_each_other_and_their_delays_overlap() -> None:
    network = Network.even(2, rate=10.0, delay_s=1.0)
    assert arrivals(network, [(0.0, (0, 1), 10.0), (0.0, (0, 1), 10.0)]) == {0: 2.0, 1: 3.0}


def test_links_are_full_duplex() -> None:
    assert arrivals(Network.even(2, rate=10.0), [(0.0, (0, 1), 10.0), (0.0, (1, 0), 10.0)]) == {0: 1.0, 1: 1.0}


def test_ranks_of_a_node_share_its_uplink_and_its_downlink() -> None:
    network = Network.even(4, rate=10.0, local_size=2)
    assert arrivals(network, [(0.0, (0, 2), 10.0), (0.0, (1, 3), 10.0)]) == {0: 2.0, 1: 2.0}
    # Inside a node nothing is shared with what leaves it.
    assert arrivals(network, [(0.0, (0, 2), 10.0), (0.0, (0, 1), 1e9)]) == {0: 1.0, 1: 0.0}


def test_what_a_slow_pair_leaves_of_a_port_goes_to_the_others() -> None:
    rates = ((0.0, 10.0, 2.0), (10.0, 0.0, 10.0), (10.0, 10.0, 0.0))
    network = Network((0, 1, 2), rates, ((0.0,) * 3,) * 3)
    # 2 of the uplink's 10 go to the slow pair, 8 to the other.
    assert arrivals(network, [(0.0, (0, 2), 2.0), (0.0, (0, 1), 8.0)]) == {0: 1.0, 1: 1.0}


def test_a_share_grows_when_another_message_has_left() -> None:
    found = arrivals(Network.even(3, rate=10.0), [(0.0, (0, 1), 5.0), (0.0, (0, 2), 10.0)])
    assert found == {0: 1.0, 1: 1.5}


def test_a_link_that_has_rested_lets_its_bucket_pass_at_once() -> None:
    network = Network.even(2, rate=10.0, burst_s=0.5)
    # 5 bytes at once, the rest at 10 a second; the second follows an empty bucket, the fourth one half full.
    sends = [(0.0, (0, 1), 15.0), (1.0, (0, 1), 10.0), (3.0, (0, 1), 5.0), (3.25, (0, 1), 5.0)]
    assert arrivals(network, sends) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 3.5}


def test_ranks_that_share_a_port_share_its_bucket() -> None:
    network = Network.even(4, rate=10.0, local_size=2, burst_s=0.5)
    found = arrivals(network, [(0.0, (0, 2), 5.0), (0.0, (1, 3), 5.0), (0.0, (2, 3), 1e9)])
    assert found == {2: 0.0, 0: 0.0, 1: 0.5}
    # A pair that is slower than its ports has a bucket of its own, which its ports' do not fill.
    rates = ((0.0, 10.0, 2.0), (10.0, 0.0, 10.0), (10.0, 10.0, 0.0))
    slow = Network((0, 1, 2), rates, ((0.0,) * 3,) * 3, burst_s=0.5)
    assert arrivals(slow, [(0.0, (0, 2), 5.0), (1.0, (0, 1), 5.0)]) == {0: 2.0, 1: 1.0}


@pytest.mark.parametrize(
    ("rate", "delay_s", "message"), [(0.0, 0.0, "must be above 0"), (1.0, -1.0, "at least 0"), (math.nan, 0.0, "above")]
)
def test_impossible_networks_are_refused(rate: float, delay_s: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Network.even(2, rate=rate, delay_s=delay_s)
    with pytest.raises(ConfigError, match="burst_s -1: at least 0"):
        Network.even(2, rate=1.0, burst_s=-1.0)
    with pytest.raises(ConfigError, match="2 rows of 2"):
        Network((0, 1), ((0.0, 1.0),), ((0.0, 0.0),) * 2)


def one_by_one(network: Network, pairs: list[Pair]) -> dict[Pair, float]:
    """Max-min fair rates by their definition: the pair that gets least gets it, then the next."""
    left, rates, unsettled = network.port_rates(), dict[Pair, float](), list(pairs)
    while unsettled:
        users = Counter(port for pair in unsettled for port in network.ports(pair))
        offers = {
            pair: min([network.rates[pair[0]][pair[1]], *(left[port] / users[port] for port in network.ports(pair))])
            for pair in unsettled
        }
        pair = min(unsettled, key=offers.__getitem__)
        unsettled.remove(pair)
        rates[pair] = offers[pair]
        for port in network.ports(pair):
            left[port] -= rates[pair]
    return rates


def uneven(num_ranks: int, local_size: int, seed: int) -> Network:
    rng, ranks = random.Random(seed), range(num_ranks)
    rates = tuple(tuple(rng.choice([rng.uniform(1, 10), 5.0]) for _ in ranks) for _ in ranks)
    return Network(tuple(rank // local_size for rank in ranks), rates, ((0.0,) * num_ranks,) * num_ranks)


@pytest.mark.parametrize("seed", range(8))
def test_shares_are_max_min_fair(seed: int) -> None:
    network = uneven(8, 1 + seed % 2, seed)
    pairs = random.Random(seed).sample(network.pairs, 8 * (1 + seed % 7))
    found = fair_rates(Ways.of(network), np.array([pair in pairs for pair in network.pairs]))
    of_pair = dict(zip(network.pairs, found.tolist(), strict=True))
    # Shares that are as good as equal are taken as the smallest of them.
    expected = one_by_one(network, pairs)
    assert {pair: of_pair[pair] for pair in pairs} == pytest.approx(expected, rel=0.02)
    assert sum(map(bool, of_pair.values())) == len(pairs)


def test_what_leaves_at_once_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 16 ranks send as much to all others; the messages of a port that limits them leave together."""
    num, calls = 16, [0]

    def counted(*given: Any) -> np.ndarray:
        calls[0] += 1
        return fair_rates(*given)

    monkeypatch.setattr(module, "fair_rates", counted)
    for network, most in ((Network.even(num, 10.0), 2), (uneven(num, 1, 0), 4 * num)):
        calls[0] = 0
        found = arrivals(network, [(0.0, pair, 10.0) for pair in network.pairs])
        assert len(found) == num * (num - 1) and calls[0] <= most, calls
