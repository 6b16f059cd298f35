"""Messages on links that share ports, and when each of them arrives."""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from thinwire.cost.network import Network, Pair

T = TypeVar("T")
# Sets of sending pairs whose rates are remembered.
MOST_KNOWN = 256
# Shares, and times since the last change, that differ by less are taken as the same: no rate is measured better.
EQUAL = 1.01
# The part of a bucket that is worth passing at once.
LEAST = 1e-3
# As arrays, since the types of numpy's functions are not always known to take plain numbers.
NOTHING, ONE = np.zeros(()), np.ones(())


class Ways(NamedTuple):
    """The pairs of a network by number, in the order of `Network.pairs`.

    rates: of each pair, fp64 [pairs]. up, down: numbers of the ports that it uses, int [pairs]; the last port, whose
    rate is infinite, stands for none. port_rates: fp64 [ports + 1].
    """

    rates: np.ndarray
    up: np.ndarray
    down: np.ndarray
    port_rates: np.ndarray

    @classmethod
    def of(cls, network: Network) -> Ways:
        """The pairs of a network."""
        fastest = network.port_rates()
        ports, none = {port: number for number, port in enumerate(fastest)}, len(fastest)
        ends = [[ports[port] for port in network.ports(pair)] or [none, none] for pair in network.pairs]
        up, down = np.array(ends, dtype=int).reshape(-1, 2).T
        rates = np.array([network.rates[source][target] for source, target in network.pairs])
        return cls(rates, up, down, np.array([*fastest.values(), math.inf]))


def fair_rates(ways: Ways, sending: np.ndarray) -> np.ndarray:
    """Bytes per second of each pair: the max-min fair shares of the ports, at most the pair's own rate.

    By progressive filling: the smallest share of a port, or rate of a pair, settles all pairs that it limits at once.

    sending: of each pair, whether it sends, bool [pairs]; the others' rates are 0.
    """
    found, left, unsettled = np.zeros(len(ways.rates)), ways.port_rates.copy(), np.flatnonzero(sending)
    while len(unsettled):
        up, down = ways.up[unsettled], ways.down[unsettled]
        users = np.bincount(up, minlength=len(left)) + np.bincount(down, minlength=len(left))
        shares = left / np.maximum(users, ONE)
        offers = np.minimum(ways.rates[unsettled], np.minimum(shares[up], shares[down]))
        least = float(offers.min())
        is_settled = offers <= least * EQUAL
        found[unsettled[is_settled]] = least
        if least < math.inf:
            used = np.concatenate([up[is_settled], down[is_settled]])
            left -= least * np.bincount(used, minlength=len(left))
        unsettled = unsettled[~is_settled]
    return found


class Traffic(Generic[T]):
    """Messages under way in a network.

    The messages of one pair of ranks follow each other. Those of different pairs share ports max-min fairly, as
    connections do: the slowest share is as large as possible, then the next. Time never goes back.
    """

    def __init__(self, network: Network) -> None:
        self.network, self.now_s = network, 0.0
        self._ways = Ways.of(network)
        self._buckets = _Buckets(self._ways, network.burst_s)
        self._numbers = {pair: number for number, pair in enumerate(network.pairs)}
        self._queues: list[deque[tuple[float, T]]] = [deque() for _ in self._numbers]
        self._landing: list[tuple[float, int, T]] = []
        self._num_sent = 0
        # Of the first message of each pair: bytes that are left, and the rate; of pairs that send nothing 0.
        self._left, self._rates = np.zeros(len(self._numbers)), np.zeros(len(self._numbers))
        self._sending = np.zeros(len(self._numbers), dtype=bool)
        # Until a message is queued or has left, rates stay as they are since `_since_s`: nothing is counted till then.
        self._since_s, self._departure_s, self._is_new = 0.0, math.inf, False
        self._ends_s = np.zeros(0)
        self._rates_of: dict[bytes, np.ndarray] = {}

    def send(self, pair: Pair, num_bytes: float, what: T) -> None:
        """Queue a message now."""
        self._progress(self.now_s)
        number = self._numbers[pair]
        self._queues[number].append((num_bytes, what))
        if not self._sending[number]:
            self._sending[number], self._left[number] = True, num_bytes
        self._is_new = True

    def next_s(self) -> float:
        """When the next change happens if nothing more is sent; infinity if nothing is under way."""
        return min(self._departure(), self._landing[0][0] if self._landing else math.inf)

    def advance(self, to_s: float) -> list[T]:
        """Advance to a time. Return the messages that have arrived by then, in order of arrival."""
        while (departure_s := self._departure()) <= to_s and departure_s < math.inf:
            self._depart(departure_s)
        self.now_s = max(self.now_s, to_s)
        landed = []
        while self._landing and self._landing[0][0] <= to_s:
            landed.append(heapq.heappop(self._landing)[2])
        return landed

    def _depart(self, departure_s: float) -> None:
        """Let all messages leave whose last byte is sent by now: those of equal shares end together."""
        by_s = self._since_s + (departure_s - self._since_s) * EQUAL
        ended = np.flatnonzero(self._sending)[self._ends_s <= np.array(by_s)]
        self._progress(departure_s)
        for number in ended.tolist():
            queue, (source, target) = self._queues[number], self.network.pairs[number]
            arrival_s = departure_s + self.network.delays_s[source][target]
            heapq.heappush(self._landing, (arrival_s, self._num_sent, queue.popleft()[1]))
            self._num_sent += 1
            self._sending[number], self._left[number] = bool(queue), queue[0][0] if queue else 0.0
        self._is_new = True

    def _progress(self, to_s: float) -> None:
        """Count what has been sent until now."""
        seconds = to_s - self._since_s
        if seconds > 0:
            if self._sending.any():
                self._left -= self._rates * seconds
            self._buckets.fill(seconds, self._rates)
            self._since_s = to_s
        self.now_s = max(self.now_s, to_s)

    def _departure(self) -> float:
        """When the next message has left its sender; infinity without one."""
        if self._is_new:
            self._is_new = False
            self._buckets.take(self._left, self._sending)
            self._rates = self._fair()
            own = self._sending
            self._ends_s = self._since_s + np.maximum(self._left[own], NOTHING) / self._rates[own]
            self._departure_s = float(self._ends_s.min()) if own.any() else math.inf
        return self._departure_s

    def _fair(self) -> np.ndarray:
        """The rates of all pairs; 0 of those that send nothing."""
        key = self._sending.tobytes()
        if key not in self._rates_of:
            if len(self._rates_of) >= MOST_KNOWN:
                self._rates_of.clear()
            self._rates_of[key] = fair_rates(self._ways, self._sending)
        return self._rates_of[key]


class _Buckets:
    """The token buckets of a network, full at first: one for each port, and one for each pair that uses ports."""

    def __init__(self, ways: Ways, size_s: float) -> None:
        self.pairs = np.flatnonzero(ways.up < len(ways.port_rates) - 1)
        # By pair that uses ports: its own bucket, its sender's uplink, its receiver's downlink.
        own = len(ways.port_rates) + np.arange(len(self.pairs))
        self.on_the_way = np.stack([own, ways.up[self.pairs], ways.down[self.pairs]], 1)
        self.rates, self.size_s = np.concatenate([ways.port_rates, ways.rates[self.pairs]]), size_s
        self.left_s = np.full(len(self.rates), size_s)

    def take(self, left: np.ndarray, sending: np.ndarray) -> None:
        """Let the first messages of the pairs that send pass at once as far as the buckets on their way allow.

        left: bytes of these messages, which become fewer.
        """
        if not self.size_s:
            return
        # Less waits until there is more.
        held = self.left_s > LEAST * self.size_s
        own = sending[self.pairs] & (left[self.pairs] > 0) & held[self.on_the_way].all(1)
        for at in np.flatnonzero(own).tolist():
            number, buckets = self.pairs[at], self.on_the_way[at].tolist()
            taken = min(left[number], *(self.left_s[each] * self.rates[each] for each in buckets))
            left[number] -= taken
            for each in buckets:
                self.left_s[each] -= taken / self.rates[each]

    def fill(self, seconds: float, sending: np.ndarray) -> None:
        """Let time pass while pairs send at these rates; the unused part of a rate fills its bucket."""
        if self.size_s:
            rates = np.repeat(sending[self.pairs], 3)
            used = np.bincount(self.on_the_way.ravel(), rates, len(self.rates))
            unused = (1 - used / self.rates).clip(0)
            self.left_s = (self.left_s + seconds * unused).clip(max=self.size_s)
