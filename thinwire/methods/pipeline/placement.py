"""SkipPipe: which node takes which stage, so that neighbouring stages and the replicas of a stage are near each other.

Source: "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous Networks" (2025),
section 4; the genetic search is that of "Decentralized Training of Foundation Models in Heterogeneous Environments"
(NeurIPS 2022), section 3.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from thinwire.cost import Network
from thinwire.errors import ConfigError

# Placements that are kept, and how many more are tried.
POPULATION, TRIALS = 200, 8000
# Of a new placement, how many pairs of nodes change places at most.
MOST_SWAPS = 3
# The order of more stages than these takes too long to find.
MOST_STAGES = 12
Nodes = frozenset[int]


@dataclass(frozen=True)
class NodePlacement:
    """The stage of each node, and what it costs in seconds.

    Attributes:
        stages: as Ground takes them.
        links_s: of a micro-batch's way through all stages, forward and back.
        replicas_s: of the slowest exchange between the nodes of one stage, for each micro-batch.
    """

    stages: tuple[int, ...]
    links_s: float
    replicas_s: float

    @property
    def cost_s(self) -> float:
        """What the search makes small."""
        return self.links_s + self.replicas_s


def place_nodes(
    network: Network, sizes: Sequence[int], message_bytes: float, replica_bytes: float, num_micro_batches: int, *,
    trials: int = TRIALS, seed: int = 0,
) -> NodePlacement:  # fmt: skip
    """The best placement that a genetic search finds; the same seed gives the same.

    Args:
        network: of the nodes.
        sizes: number of nodes of each stage. The stages behind the first come in the order that costs least.
        message_bytes: of a hidden state, and of its gradient.
        replica_bytes: that a node of a stage sends to its replicas in a step. Their link counts with the weight
            replica_bytes / (message_bytes * num_micro_batches).

    Raises ConfigError for sizes that don't add up to the nodes, and for more than 12 stages.
    """
    num = len(network.nodes)
    if min(sizes, default=0) < 1 or sum(sizes) != num:
        raise ConfigError(f"stages of {', '.join(map(str, sizes))} nodes: each at least 1, and together {num}")
    if len(sizes) > MOST_STAGES:
        raise ConfigError(f"{len(sizes)} stages: their order is found for at most {MOST_STAGES}")
    draws = random.Random(seed)
    pricing = _Pricing(network, message_bytes, replica_bytes / (message_bytes * num_micro_batches))
    labels = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    known: dict[tuple[int, ...], NodePlacement] = {}

    def priced(found: Sequence[int]) -> NodePlacement:
        if (key := tuple(found)) not in known:
            known[key] = pricing.of(key, len(sizes))
        return known[key]

    kept = [priced(labels), *(priced(draws.sample(labels, num)) for _ in range(POPULATION - 1))]
    for _ in range(trials):
        one, other = draws.sample(kept, 2)
        child = priced(_swapped(_crossed(one.stages, other.stages, draws), draws))
        worst = max(range(len(kept)), key=lambda at: kept[at].cost_s)
        if child.cost_s < kept[worst].cost_s and child not in kept:
            kept[worst] = child
    return min(kept, key=lambda each: each.cost_s)


def _crossed(one: Sequence[int], other: Sequence[int], draws: random.Random) -> list[int]:
    """Nodes stay where both parents have them; the others take the rooms that the first has left, in any order."""
    left = [a for a, b in zip(one, other, strict=True) if a != b]
    draws.shuffle(left)
    return [a if a == b else left.pop() for a, b in zip(one, other, strict=True)]


def _swapped(stages: list[int], draws: random.Random) -> list[int]:
    for _ in range(draws.randint(0, MOST_SWAPS)):
        a, b = draws.choices(range(len(stages)), k=2)
        stages[a], stages[b] = stages[b], stages[a]
    return stages


@dataclass
class _Pricing:
    """Costs of placements. weight: of a link between replicas, beside one between stages."""

    network: Network
    message_bytes: float
    weight: float
    _links: dict[frozenset[Nodes], float] = field(default_factory=dict)

    def of(self, found: Sequence[int], num_stages: int) -> NodePlacement:
        """The placement with these groups of nodes, the first as stage 0, the others in the best order."""
        groups = [frozenset(node for node, at in enumerate(found) if at == stage) for stage in range(num_stages)]
        links_s, order = self._way(groups)
        stages = [0] * len(found)
        for stage, group in enumerate(order):
            for node in groups[group]:
                stages[node] = stage
        replicas = (self.there_and_back_s(a, b) for group in groups for a, b in combinations(sorted(group), 2))
        return NodePlacement(tuple(stages), links_s, self.weight * max(replicas, default=0.0))

    def there_and_back_s(self, a: int, b: int) -> float:
        """Seconds of a hidden state from one node to another, and of its gradient back."""
        ways = ((a, b), (b, a))
        return sum(self.network.delays_s[x][y] + self.message_bytes / self.network.rates[x][y] for x, y in ways)

    def _way(self, groups: Sequence[Nodes]) -> tuple[float, tuple[int, ...]]:
        """The seconds and the order of the shortest way through all groups from the first on, by dynamic programming.

        Source: Held and Karp, "A dynamic programming approach to sequencing problems" (1962).
        """
        # By the groups that were visited, and the last of them.
        best: dict[tuple[frozenset[int], int], tuple[float, tuple[int, ...]]] = {(frozenset([0]), 0): (0.0, (0,))}
        for _ in range(len(groups) - 1):
            longer: dict[tuple[frozenset[int], int], tuple[float, tuple[int, ...]]] = {}
            for (visited, last), (seconds, order) in best.items():
                for group in range(1, len(groups)):
                    if group not in visited:
                        way = seconds + self._link(groups[last], groups[group]), (*order, group)
                        place = visited | {group}, group
                        longer[place] = min(longer.get(place, way), way)
            best = longer
        return min(best.values())

    def _link(self, one: Nodes, other: Nodes) -> float:
        """The slowest link of the best pairing of two groups, in which each node of the smaller one has a partner."""
        key = frozenset([one, other])
        if key not in self._links:
            few, many = sorted((one, other), key=len)
            seconds = {a: {b: self.there_and_back_s(a, b) for b in many} for a in few}
            limits = sorted({each for row in seconds.values() for each in row.values()})
            low, high = 0, len(limits) - 1
            while low < high:
                middle = (low + high) // 2
                allowed = {a: [b for b, each in row.items() if each <= limits[middle]] for a, row in seconds.items()}
                low, high = (low, middle) if _can_pair(allowed) else (middle + 1, high)
            self._links[key] = limits[low]
        return self._links[key]


def _can_pair(allowed: Mapping[int, Sequence[int]]) -> bool:
    """Whether all keys can have different partners, by augmenting paths."""
    partner_of: dict[int, int] = {}

    def pair(node: int, tried: set[int]) -> bool:
        for other in allowed[node]:
            if other not in tried:
                tried.add(other)
                if other not in partner_of or pair(partner_of[other], tried):
                    partner_of[other] = node
                    return True
        return False

    return all(pair(node, set()) for node in allowed)
