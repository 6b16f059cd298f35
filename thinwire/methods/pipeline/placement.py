"""Decides which node holds which stage, by a genetic search, as in DT-FM and SkipPipe.

Source: Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments" (NeurIPS 2022),
section 3.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

from thinwire.cost import Network

Group = tuple[int, ...]
POPULATION, TRIALS, FRESH = 40, 2000, 0.1


def placed(
    network: Network, sizes: Sequence[int], message_bytes: float, replica_bytes: float, factor: float, seed: int = 0
) -> tuple[int, ...]:
    """The stage of each node: sizes[0] nodes have stage 0, and the other stages the other sizes, in any order.

    Minimises the time of a micro-batch's way around all stages, plus factor times the slowest all-reduce inside a
    stage. Between two stages every node is matched with one of the other, and the slowest pair counts; the way is the
    shortest tour from stage 0 back to it.

    Args:
        message_bytes: of a hidden state.
        replica_bytes: that a replica of a stage sends to another.
        factor: weight of the all-reduce, which happens once in a step of several micro-batches.
    """
    costs = _Placement(network, message_bytes, replica_bytes, factor)
    draws = random.Random(seed)

    def drawn() -> tuple[Group, ...]:
        nodes = draws.sample(range(len(network.nodes)), len(network.nodes))
        return tuple(tuple(sorted(nodes.pop() for _ in range(size))) for size in sizes)

    population = sorted({drawn() for _ in range(POPULATION)}, key=costs.total)
    for _ in range(TRIALS):
        # The best of three is the parent of a child in which one or two pairs of nodes have changed places.
        parent = min(draws.choices(population, k=3), key=costs.total)
        child = list(drawn() if draws.random() < FRESH else parent)
        for _ in range(draws.choice((1, 1, 2)) if len(sizes) > 1 else 0):
            a, b = draws.sample(range(len(sizes)), 2)
            one, two = draws.choice(child[a]), draws.choice(child[b])
            child[a] = tuple(sorted({*child[a], two} - {one}))
            child[b] = tuple(sorted({*child[b], one} - {two}))
        made = tuple(child)
        if made not in population and costs.total(made) < costs.total(population[-1]):
            population = sorted([*population[:-1], made], key=costs.total)
    stages = {node: stage for stage, group in enumerate(costs.tour(population[0])[1]) for node in group}
    return tuple(stages[node] for node in range(len(network.nodes)))


@dataclass
class _Placement:
    """The cost of a grouping of nodes, in seconds."""

    network: Network
    message_bytes: float
    replica_bytes: float
    factor: float
    _between: dict[tuple[Group, Group], float] = field(default_factory=dict)
    _totals: dict[tuple[Group, ...], float] = field(default_factory=dict)

    def total(self, groups: tuple[Group, ...]) -> float:
        """Seconds of the tour, plus those of the slowest all-reduce times its weight."""
        if groups not in self._totals:
            slowest = max(self.inside(group) for group in groups)
            self._totals[groups] = self.tour(groups)[0] + self.factor * slowest
        return self._totals[groups]

    def inside(self, group: Group) -> float:
        """Seconds between the slowest pair of a stage's replicas."""
        return max((self._link_s(a, b, self.replica_bytes) for a in group for b in group if a != b), default=0.0)

    def between(self, one: Group, two: Group) -> float:
        """The slowest pair of the best matching of the smaller stage's nodes with some of the larger's."""
        small, large = sorted((one, two), key=lambda group: (len(group), group))
        if (small, large) not in self._between:
            self._between[small, large] = min(
                max(self._link_s(a, b, self.message_bytes) for a, b in zip(small, chosen, strict=True))
                for chosen in permutations(large, len(small))
            )
        return self._between[small, large]

    def tour(self, groups: tuple[Group, ...]) -> tuple[float, tuple[Group, ...]]:
        """The shortest way from the first group through all others and back, by dynamic programming."""
        first, others = groups[0], groups[1:]
        # By the groups that were visited and the last of them.
        best: dict[tuple[frozenset[int], int], tuple[float, tuple[Group, ...]]] = {
            (frozenset([i]), i): (self.between(first, group), (first, group)) for i, group in enumerate(others)
        }
        for _ in others[1:]:
            longer: dict[tuple[frozenset[int], int], tuple[float, tuple[Group, ...]]] = {}
            for (seen, last), (cost, way) in best.items():
                for i in set(range(len(others))) - seen:
                    found = (cost + self.between(others[last], others[i]), (*way, others[i]))
                    key = (seen | {i}, i)
                    longer[key] = min(longer.get(key, found), found)
            best = longer
        ways = [(cost + self.between(way[-1], first), way) for cost, way in best.values()]
        return min(ways, default=(0.0, groups))

    def _link_s(self, a: int, b: int, num_bytes: float) -> float:
        """Seconds of a message between two nodes, in the slower direction."""
        network = self.network
        return max(network.delays_s[x][y] + num_bytes / network.rates[x][y] for x, y in ((a, b), (b, a)))
