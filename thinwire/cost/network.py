"""The links between ranks: their rates and delays, and the ports that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from thinwire.errors import ConfigError

Pair = tuple[int, int]
Port = tuple[str, int]


@dataclass(frozen=True)
class Network:
    """The rates between ranks, in bytes per second, and the delay of a byte.

    The ranks of a node share one uplink and one downlink, as fast as the fastest pair that uses it. Links are full
    duplex: sending does not slow receiving. Ranks of one node reach each other without them.

    Attributes:
        nodes: the node of each rank.
        rates, delays_s: [from][to], of one message alone; the diagonal is not read.
        burst_s: rates are limited by token buckets, which hold this many seconds of the rate: after that much rest, the
            first rate * burst_s bytes pass at once. Cloud networks, routers and the lab limit rates in this way.

    Raises ConfigError for a rate that is not above 0, a negative delay or burst, and a table of another size.
    """

    nodes: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]
    delays_s: tuple[tuple[float, ...], ...]
    burst_s: float = 0.0

    def __post_init__(self) -> None:
        num_ranks = len(self.nodes)
        for name, table in (("rates", self.rates), ("delays_s", self.delays_s)):
            if len(table) != num_ranks or any(len(row) != num_ranks for row in table):
                raise ConfigError(f"{name} of a network of {num_ranks} ranks must be {num_ranks} rows of {num_ranks}")
        for source, target in self.pairs:
            if not self.rates[source][target] > 0:
                raise ConfigError(f"rate {self.rates[source][target]:g} from {source} to {target}: must be above 0")
            if not self.delays_s[source][target] >= 0:
                raise ConfigError(f"delay {self.delays_s[source][target]:g} s from {source} to {target}: at least 0")
        if not self.burst_s >= 0:
            raise ConfigError(f"burst_s {self.burst_s:g}: at least 0")

    @cached_property
    def pairs(self) -> list[Pair]:
        """All (from, to) of two different ranks."""
        ranks = range(len(self.nodes))
        return [(source, target) for source in ranks for target in ranks if source != target]

    @classmethod
    def even(
        cls, num_ranks: int, rate: float = math.inf, delay_s: float = 0.0, *, local_size: int = 1,
        local_rate: float = math.inf, burst_s: float = 0.0,
    ) -> Network:  # fmt: skip
        """Nodes of local_size ranks at equal distances. Inside a node nothing is delayed."""
        nodes = tuple(rank // local_size for rank in range(num_ranks))
        rates = tuple(tuple(local_rate if a == b else rate for b in nodes) for a in nodes)
        return cls(nodes, rates, tuple(tuple(0.0 if a == b else delay_s for b in nodes) for a in nodes), burst_s)

    def ports(self, pair: Pair) -> list[Port]:
        """The ports that a message shares with others: its sender's uplink, its receiver's downlink.

        None inside a node.
        """
        source, target = (self.nodes[rank] for rank in pair)
        return [("up", source), ("down", target)] if source != target else []

    def port_rates(self) -> dict[Port, float]:
        """Bytes per second of each port."""
        fastest: dict[Port, float] = {}
        for source, target in self.pairs:
            for port in self.ports((source, target)):
                fastest[port] = max(fastest.get(port, 0.0), self.rates[source][target])
        return fastest

    def busiest_s(self, sent: Mapping[Pair, float]) -> float:
        """Seconds of the messages on the link, or at the port, where these take longest, by rates alone.

        sent: bytes by (from, to).
        """
        rates, ports = self.port_rates(), dict[Port, float]()
        for pair, num_bytes in sent.items():
            for port in self.ports(pair):
                ports[port] = ports.get(port, 0.0) + num_bytes
        on_links = [num_bytes / self.rates[a][b] for (a, b), num_bytes in sent.items()]
        return max([*on_links, *(num_bytes / rates[port] for port, num_bytes in ports.items())], default=0.0)
