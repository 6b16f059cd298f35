"""Seconds of each collective on each level of the links: alpha + beta n."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.cost.cores import Cores
from thinwire.cost.machine import Machine
from thinwire.cost.network import Network

# The collectives that are measured on each level, and the levels, as the meter calls these.
OPERATIONS = ALL_TO_ALL, GATHER, SCATTER, REDUCE = "all_to_all", "all_gather", "reduce_scatter", "all_reduce"
LEVELS = INTRA, INTER = "intra", "inter"


@dataclass(frozen=True)
class Line:
    """alpha_s + beta_s n: seconds in which a rank sends n bytes, or does n floating-point operations."""

    alpha_s: float = 0.0
    beta_s: float = 0.0

    def seconds(self, amount: float) -> float:
        """Seconds of an amount; 0 for an amount of 0."""
        return self.alpha_s + self.beta_s * amount if amount else 0.0

    def room(self, seconds: float) -> float:
        """The amount that passes in some seconds: the inverse; 0 where they are shorter than alpha_s."""
        return max(0.0, seconds - self.alpha_s) / self.beta_s if self.beta_s else float("inf")

    @classmethod
    def fitted(cls, amounts: Sequence[float], seconds: Sequence[float]) -> Line:
        """The line of the least squares of relative errors, sum_i ((alpha + beta n_i) / t_i - 1)^2; alpha >= 0.

        Args:
            amounts: n_i, two different ones at least. seconds: t_i, above 0.
        """
        weights = [1 / each for each in seconds]
        slopes = [weight * amount for weight, amount in zip(weights, amounts, strict=True)]
        squares, both, steep = (
            sum(a * b for a, b in zip(*pair, strict=True))
            for pair in ((weights, weights), (weights, slopes), (slopes, slopes))
        )
        alpha_s = (steep * sum(weights) - both * sum(slopes)) / (squares * steep - both**2)
        if alpha_s < 0:
            return cls(0.0, sum(slopes) / steep)
        return cls(alpha_s, (sum(slopes) - alpha_s * both) / steep)


@dataclass(frozen=True)
class Links:
    """The links of nodes that are all alike, while all ranks use them at once.

    lines: by (operation, level); n counts the bytes that a rank sends to all others of the level together. Levels
    without two ranks are missing. product: line of the experts' grouped products; n counts one rank's floating-point
    operations. message_s: what one more small all-to-all of all ranks adds while others are under way, which is what it
    costs the processors.
    Source: Pan et al., "FSMoE" (ASPLOS 2025), section 4.
    """

    lines: Mapping[tuple[str, str], Line]
    product: Line = Line()
    message_s: float = 0.0

    @classmethod
    def stated(cls, rate: float, local_rate: float, delay_s: float, local_size: int = 1) -> Links:
        """Links of these bytes per second: of a node's port, which local_size ranks share, and of a rank inside.

        delay_s: between nodes. Products take no time.
        """
        lines = {INTER: Line(delay_s, local_size / rate), INTRA: Line(0.0, 1 / local_rate)}
        return cls({(operation, level): line for operation in OPERATIONS for level, line in lines.items()})

    def seconds(self, sent: Mapping[tuple[str, str], float]) -> float:
        """Seconds of the messages that a rank sends, by (operation, level), each operation once and one at a time."""
        return sum(self.line(*key).seconds(num_bytes) for key, num_bytes in sent.items())

    def line(self, operation: str, level: str) -> Line:
        """The line of an operation; 0 seconds on a level that has none.

        An operation with another name than those of OPERATIONS takes as long as the one whose word it has, or an
        all-to-all.
        """
        kind = next((each for each in OPERATIONS if each.split("_")[1] in operation), ALL_TO_ALL)
        return self.lines.get((kind, level), Line())

    def machine(self, nodes: Sequence[int]) -> Machine:
        """A machine of ranks on these nodes, for the simulator: all-to-alls take as long as on these links."""
        ranks = range(len(nodes))
        sharing = [nodes.count(node) for node in nodes]
        inter, intra = (self.lines.get((ALL_TO_ALL, level), Line()) for level in (INTER, INTRA))

        def rate(a: int, b: int) -> float:
            if nodes[a] != nodes[b]:
                # A node's ranks send at once.
                return sharing[a] / inter.beta_s if inter.beta_s else math.inf
            return 1 / intra.beta_s / max(1, sharing[a] - 1) if intra.beta_s else math.inf

        rates = tuple(tuple(rate(a, b) for b in ranks) for a in ranks)
        delays = tuple(tuple((inter if nodes[a] != nodes[b] else intra).alpha_s for b in ranks) for a in ranks)
        cores = Cores(tuple(ranks), (math.inf,) * len(nodes))
        return Machine(tuple(map(str, nodes)), Network(tuple(nodes), rates, delays), cores, {})
