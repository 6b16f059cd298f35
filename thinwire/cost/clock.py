"""One clock for everything that is simulated: work on cores that ranks share, and messages on links that they share."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from thinwire.cost.cores import Cores
from thinwire.cost.network import Network, Pair
from thinwire.cost.traffic import Traffic

T = TypeVar("T")


@dataclass(eq=False)
class _Work(Generic[T]):
    what: T
    threads: float
    left_s: float
    since_s: float
    end_s: float = math.inf


@dataclass
class _Host(Generic[T]):
    """A machine's cores. slowdown: of everything that runs there now."""

    running: list[_Work[T]] = field(default_factory=list)
    slowdown: float = 1.0


class Clock(Generic[T]):
    """Work and messages under way. Time never goes back.

    cores: None: every rank has cores of its own.
    """

    def __init__(self, network: Network, cores: Cores | None = None) -> None:
        ranks = range(len(network.nodes))
        self.cores = cores or Cores(tuple(ranks), (math.inf,) * len(ranks))
        self.now_s = 0.0
        self._traffic: Traffic[T] = Traffic(network)
        self._hosts = [_Host[T]() for _ in self.cores.num]
        self._ends: list[tuple[float, int, _Work[T]]] = []
        self._numbers = itertools.count()

    def work(self, rank: int, seconds: float, what: T, threads: float = 1.0) -> None:
        """Begin work that takes `seconds` of this rank's threads if nothing else runs on its machine.

        threads: 0: it takes no core, and no other work makes it longer.
        """
        number, work = self.cores.hosts[rank], _Work(what, threads, seconds, self.now_s)
        if not threads:
            self._expect(work, 1.0)
            return
        host = self._hosts[number]
        host.running.append(work)
        self._change(number)
        if work.end_s == math.inf:
            self._expect(work, host.slowdown)

    def send(self, pair: Pair, num_bytes: float, what: T) -> None:
        """Queue a message."""
        self._traffic.send(pair, num_bytes, what)

    def next_s(self) -> float:
        """When the next event happens; infinity if nothing is under way."""
        while self._ends and self._ends[0][0] != self._ends[0][2].end_s:
            # It was expected anew since.
            heapq.heappop(self._ends)
        return min(self._ends[0][0] if self._ends else math.inf, self._traffic.next_s())

    def advance(self) -> tuple[list[T], list[T]]:
        """Advance to the next event. Return the messages that have arrived by then, and the work that has ended."""
        self.now_s = self.next_s()
        arrived, ended = self._traffic.advance(self.now_s), list[_Work[T]]()
        while self._ends and self._ends[0][0] <= self.now_s:
            end_s, _, work = heapq.heappop(self._ends)
            if end_s == work.end_s and work not in ended:
                ended.append(work)
        for number, host in enumerate(self._hosts):
            if any(work in ended for work in host.running):
                host.running = [work for work in host.running if work not in ended]
                self._change(number)
        return arrived, [work.what for work in ended]

    def landed(self) -> list[T]:
        """The messages sent since that take no time to travel."""
        return self._traffic.advance(self.now_s)

    def _change(self, number: int) -> None:
        """Compute the ends of a machine's work again if its speed has changed."""
        host = self._hosts[number]
        slowdown = self.cores.slowdown(number, sum(work.threads for work in host.running))
        if slowdown == host.slowdown:
            return
        for work in host.running:
            if work.end_s < math.inf:
                work.left_s -= (self.now_s - work.since_s) / host.slowdown
                work.since_s = self.now_s
            self._expect(work, slowdown)
        host.slowdown = slowdown

    def _expect(self, work: _Work[T], slowdown: float) -> None:
        work.end_s = self.now_s + max(0.0, work.left_s) * slowdown
        heapq.heappush(self._ends, (work.end_s, next(self._numbers), work))
