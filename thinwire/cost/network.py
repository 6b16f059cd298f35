"""Messages on links that share ports, and when each of them arrives."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from thinwire.errors import ConfigError

T = TypeVar("T")
Pair = tuple[int, int]
Port = tuple[str, int]
# Sets of sending pairs whose rates are remembered.
MOST_KNOWN = 256
# Shares, and times, that differ by less are the same: they differ by rounding.
EQUAL = 1 + 1e-9


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

    @property
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


@dataclass
class _Message(Generic[T]):
    what: T
    left_bytes: float


@dataclass
class Traffic(Generic[T]):
    """Messages under way in a network.

    The messages of one pair of ranks follow each other. Those of different pairs share ports max-min fairly, as
    connections do: the slowest share is as large as possible, then the next. Time never goes back.
    """

    network: Network
    now_s: float = 0.0
    _queues: dict[Pair, deque[_Message[T]]] = field(default_factory=dict)
    _landing: list[tuple[float, int, T]] = field(default_factory=list)
    _num_sent: int = 0

    def __post_init__(self) -> None:
        self._port_rates = self.network.port_rates()
        self._buckets = _Buckets(self.network, self._port_rates)
        # Until a message is queued or has left, rates stay as they are since `_since_s`: nothing is counted till then.
        self._since_s, self._departure_s, self._rates = self.now_s, math.inf, dict[Pair, float]()
        self._is_new = False
        self._rates_of: dict[tuple[Pair, ...], dict[Pair, float]] = {}

    def send(self, pair: Pair, num_bytes: float, what: T) -> None:
        """Queue a message now."""
        self._progress(self.now_s)
        self._queues.setdefault(pair, deque()).append(_Message(what, num_bytes))
        self._is_new = True

    def next_s(self) -> float:
        """When the next change happens if nothing more is sent; infinity if nothing is under way."""
        return min(self._departure(), self._landing[0][0] if self._landing else math.inf)

    def advance(self, to_s: float) -> list[T]:
        """Advance to a time. Return the messages that have arrived by then, in order of arrival."""
        while (departure_s := self._departure()) <= to_s and self._queues:
            self._depart(departure_s)
        self.now_s = max(self.now_s, to_s)
        landed = []
        while self._landing and self._landing[0][0] <= to_s:
            landed.append(heapq.heappop(self._landing)[2])
        return landed

    def _depart(self, departure_s: float) -> None:
        """Let all messages leave whose last byte is sent by now: those of equal shares end together."""
        by_s = self._since_s + (departure_s - self._since_s) * EQUAL
        ended = [pair for pair in self._queues if self._end_s(pair) <= by_s]
        self._progress(departure_s)
        for pair in sorted(ended):
            message = self._queues[pair].popleft()
            if not self._queues[pair]:
                del self._queues[pair]
            arrival_s = departure_s + self.network.delays_s[pair[0]][pair[1]]
            heapq.heappush(self._landing, (arrival_s, self._num_sent, message.what))
            self._num_sent += 1
        self._is_new = True

    def _progress(self, to_s: float) -> None:
        """Count what has been sent until now."""
        seconds = to_s - self._since_s
        if seconds > 0:
            for pair, rate in self._rates.items():
                head = self._queues[pair][0]
                head.left_bytes = 0.0 if rate == math.inf else head.left_bytes - rate * seconds
            self._buckets.fill(seconds, self._rates)
            self._since_s = to_s
        self.now_s = max(self.now_s, to_s)

    def _end_s(self, pair: Pair) -> float:
        return self._since_s + max(0.0, self._queues[pair][0].left_bytes) / self._rates[pair]

    def _departure(self) -> float:
        """When the next message has left its sender; infinity without one."""
        if self._is_new:
            self._is_new = False
            # The first message of each pair uses the buckets on its way.
            for pair, queue in self._queues.items():
                queue[0].left_bytes -= self._buckets.take(pair, queue[0].left_bytes)
            pairs = tuple(self._queues)
            if pairs not in self._rates_of:
                if len(self._rates_of) >= MOST_KNOWN:
                    self._rates_of.clear()
                self._rates_of[pairs] = fair_rates(self.network, self._port_rates, pairs)
            self._rates = self._rates_of[pairs]
            self._departure_s = min(map(self._end_s, pairs), default=math.inf)
        return self._departure_s


class _Buckets:
    """The token buckets of a network, full at first: one for each port, and one for each pair that uses ports."""

    def __init__(self, network: Network, port_rates: dict[Port, float]) -> None:
        crossing = {pair: ports for pair in network.pairs if (ports := network.ports(pair))} if network.burst_s else {}
        self.on_the_way: dict[Pair, list[Port | Pair]] = {pair: [pair, *ports] for pair, ports in crossing.items()}
        self.rates: dict[Port | Pair, float] = dict(port_rates.items())
        self.rates |= {(source, target): network.rates[source][target] for source, target in crossing}
        self.size_s = network.burst_s
        self.left_s = dict.fromkeys(self.rates, self.size_s)

    def take(self, pair: Pair, num_bytes: float) -> float:
        """How many of these bytes pass at once."""
        buckets = self.on_the_way.get(pair, [])
        if not buckets:
            return 0.0
        taken = min(max(0.0, num_bytes), *(self.left_s[each] * self.rates[each] for each in buckets))
        for each in buckets:
            self.left_s[each] -= taken / self.rates[each]
        return taken

    def fill(self, seconds: float, sending: dict[Pair, float]) -> None:
        """Let time pass while pairs send at these rates; the unused part of a rate fills its bucket."""
        if seconds <= 0 or not self.size_s:
            return
        used: Counter[Port | Pair] = Counter()
        for pair, rate in sending.items():
            used.update(dict.fromkeys(self.on_the_way.get(pair, []), rate))
        for each, rate in self.rates.items():
            unused = max(0.0, 1.0 - used[each] / rate) if rate < math.inf else 1.0
            self.left_s[each] = min(self.size_s, self.left_s[each] + seconds * unused)


def fair_rates(network: Network, port_rates: dict[Port, float], pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Bytes per second of each sending pair: the max-min fair shares of the ports, at most the pair's own rate.

    By progressive filling: the smallest share of a port, or rate of a pair, settles all pairs that it limits at once.
    """
    left, ports = dict(port_rates), {pair: network.ports(pair) for pair in pairs}
    using: dict[Port, set[Pair]] = defaultdict(set)
    for pair, own in ports.items():
        for port in own:
            using[port].add(pair)
    # The last is the slowest.
    slowest = sorted(pairs, key=lambda pair: -network.rates[pair[0]][pair[1]])
    found: dict[Pair, float] = {}
    while slowest:
        if slowest[-1] in found:
            slowest.pop()
            continue
        source, target = slowest[-1]
        shares = {port: left[port] / len(users) for port, users in using.items() if users}
        least = min([*shares.values(), network.rates[source][target]])
        settled = {pair for port, share in shares.items() if share <= least * EQUAL for pair in using[port]}
        while slowest and network.rates[slowest[-1][0]][slowest[-1][1]] <= least:
            settled.add(slowest.pop())
        for each in settled - found.keys():
            found[each] = least
            for port in ports[each]:
                using[port].discard(each)
                left[port] -= 0.0 if least == math.inf else least
    return {pair: found[pair] for pair in pairs}
