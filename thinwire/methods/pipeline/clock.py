"""A clock on which ranks choose what they do next, for orders that are fitted to costs and links."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.cost import Clock, Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.costs import Costs
from thinwire.methods.pipeline.plan import BACKWARD, WEIGHT, Action, Beside, PlanMessage, Routes, target_of

# An action, and when it begins and ends, in seconds.
ActionSpan = tuple[Action, float, float]
# What a free rank does now, if anything.
NextAction = Callable[[int, "PipelineClock"], Action | None]


@dataclass
class PipelineClock:
    """A step of a pipeline as events: actions that end, messages that arrive. Other arguments: see Plan.

    network: of the plan's ranks; None: messages take no time. Raises ConfigError for costs or a network that don't fit.
    """

    home: Sequence[int]
    paths: Sequence[Sequence[int]]
    num_ranks: int
    costs: Costs
    network: Network | None = None
    barriers: int = 0
    bridges: Sequence[tuple[int, int]] = ()
    done: set[Action | PlanMessage | Beside] = field(default_factory=set)

    def __post_init__(self) -> None:
        check_sizes(self.home, self.num_ranks, self.costs, self.network)
        self.routes = Routes(self.paths, self.home, self.barriers, self.bridges)
        self.events: Clock[Any] = Clock(self.network or Network.even(self.num_ranks))
        self.free = set(range(self.num_ranks))
        self._begun_s = [0.0] * self.num_ranks
        self._spans: list[list[ActionSpan]] = [[] for _ in range(self.num_ranks)]
        # Tied weights on their way to the rank that borrows them, and its backwards that are still to come.
        ends = self.home[0], self.home[-1]
        self._lent = Beside("weight", *ends) if self.costs.tied_bytes and ends[0] != ends[1] else None
        self._left = sum(self.home[chunk] == ends[1] for path in self.paths for chunk in path)

    def can_start(self, action: Action) -> bool:
        """Whether everything that an action needs is on its rank."""
        lent = self._lent
        if lent is not None and self.home[action.chunk] == lent.target and lent not in self.done:
            return False
        return all(need in self.done for need in self.routes.needs(action))

    def run(self, choose: NextAction) -> list[list[ActionSpan]]:
        """Let each free rank run the action that `choose` returns, until nothing is left. Return what each rank did."""
        for source, target, num_bytes in self.costs.copies:
            self.events.send((source, target), num_bytes, Beside("copy", source, target))
        while True:
            for rank in sorted(self.free):
                action = choose(rank, self)
                if action is not None:
                    self._start(rank, action)
            if self.events.next_s() == math.inf:
                return self._spans
            arrived, ended = self.events.advance()
            self.done.update(arrived)
            for rank, action in sorted(ended):
                self._end(rank, action)
            # What takes no time to travel is there at once.
            self.done.update(self.events.landed())

    def _start(self, rank: int, action: Action) -> None:
        self.free.discard(rank)
        self._begun_s[rank] = self.events.now_s
        self.events.work(rank, self.costs.seconds(action), (rank, action))

    def _end(self, rank: int, action: Action) -> None:
        self.free.add(rank)
        self.done.add(action)
        self._spans[rank].append((action, self._begun_s[rank], self.events.now_s))
        for given in self.routes.gives(action):
            if (target := target_of(given, self.home)) == rank:
                self.done.add(given)
            else:
                self.events.send((rank, target), self.costs.num_bytes(action, given), given)
        if self._lent is not None:
            self._exchange_tied(rank, action, self._lent)

    def _exchange_tied(self, rank: int, action: Action, lent: Beside) -> None:
        """Send the tied weights behind their owner's first action, and their gradients behind the last backward."""
        if rank == lent.source and len(self._spans[rank]) == 1:
            self.events.send((rank, lent.target), self.costs.tied_bytes, lent)
        elif rank == lent.target and action.kind in (BACKWARD, WEIGHT):
            self._left -= 1
            if not self._left:
                back = Beside("gradient", rank, lent.source)
                self.events.send((rank, lent.source), self.costs.tied_bytes, back)


def check_sizes(home: Sequence[int], num_ranks: int, costs: Costs, network: Network | None) -> None:
    """Raise ConfigError for costs or a network of another size than a plan's."""
    if len(costs.forward_s) != len(home):
        raise ConfigError(f"costs of {len(costs.forward_s)} chunks for a plan of {len(home)}")
    if network is not None and len(network.nodes) != num_ranks:
        raise ConfigError(f"a network of {len(network.nodes)} ranks for a plan of {num_ranks}")
