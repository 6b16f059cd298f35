"""Which node takes which stage: the best of all placements of few nodes, and what can't be placed."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, permutations, product

import pytest

from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.placement import place_nodes

MESSAGE_BYTES, STEP_BYTES, NUM = 1e6, 3e7, 6


def drawn(num: int, seed: int) -> Network:
    draws = random.Random(seed)
    rates, delays = ([[1.0] * num for _ in range(num)] for _ in range(2))
    for a, b in permutations(range(num), 2):
        rates[a][b], delays[a][b] = 10 ** draws.uniform(6, 8), 10 ** draws.uniform(-3, -1)
    return Network(tuple(range(num)), tuple(map(tuple, rates)), tuple(map(tuple, delays)))


def cost_of(network: Network, stages: tuple[int, ...]) -> float:
    """Without matchings and dynamic programming: all pairings of neighbouring stages, of a placement as it is."""

    def pair_s(a: int, b: int) -> float:
        return sum(network.delays_s[x][y] + MESSAGE_BYTES / network.rates[x][y] for x, y in ((a, b), (b, a)))

    groups = [[node for node, at in enumerate(stages) if at == stage] for stage in range(max(stages) + 1)]
    links_s = 0.0
    for pair in pairwise(groups):
        few, many = sorted(pair, key=len)
        chosen = permutations(many, len(few))
        links_s += min(max(pair_s(a, b) for a, b in zip(few, each, strict=True)) for each in chosen)
    replicas = (pair_s(a, b) for group in groups for a, b in combinations(group, 2))
    return links_s + STEP_BYTES / (MESSAGE_BYTES * NUM) * max(replicas, default=0.0)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 2, 2), (3, 2, 1)])
def test_a_placement_is_the_cheapest_of_all(sizes: tuple[int, ...]) -> None:
    num = sum(sizes)
    network = drawn(num, seed=num)
    found = place_nodes(network, sizes, MESSAGE_BYTES, STEP_BYTES, NUM, trials=400)
    assert found.cost_s == pytest.approx(cost_of(network, found.stages))
    counts = [found.stages.count(stage) for stage in range(len(sizes))]
    assert counts[0] == sizes[0] and sorted(counts) == sorted(sizes)
    others = [
        stages
        for stages in product(range(len(sizes)), repeat=num)
        if stages.count(0) == sizes[0] and sorted(map(stages.count, range(len(sizes)))) == sorted(sizes)
    ]
    assert found.cost_s == pytest.approx(min(cost_of(network, stages) for stages in others))
    assert found == place_nodes(network, sizes, MESSAGE_BYTES, STEP_BYTES, NUM, trials=400)


def test_what_can_not_be_placed_is_refused() -> None:
    with pytest.raises(ConfigError, match="stages of 2, 1 nodes: each at least 1, and together 4"):
        place_nodes(drawn(4, 0), (2, 1), 1.0, 1.0, 1)
    with pytest.raises(ConfigError, match="13 stages: their order is found for at most 12"):
        place_nodes(Network.even(13, rate=1.0), (1,) * 13, 1.0, 1.0, 1)
