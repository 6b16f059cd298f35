"""Simulates a plan: when each rank does what, from the costs of layers and the rates of links."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.cost import Clock as Events, Cores, Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.plan import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECOMPUTE,
    SCORE,
    SPREAD_KINDS,
    TRAIN,
    WEIGHT,
    Action,
    Bridged,
    Plan,
    PlanMessage,
    Routes,
    Shared,
    Visit,
)


@dataclass(frozen=True)
class SpreadCosts:
    """The cost of one micro-batch on each rank, if embedding and head are spread over all ranks.

    seconds: by kind of action; 0 if missing. sizes: bytes of a message, by kind of Shared. kept: bytes kept from S to
    T.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    kept: float = 0.0


@dataclass(frozen=True)
class Costs:
    """The costs of one micro-batch, for each chunk.

    Attributes:
        forward_s, input_s, weight_s: seconds of a forward and of the two halves of its backward. A whole backward takes
            both halves, a recomputation as long as a forward.
        forward_bytes, backward_bytes: of the message with a chunk's output, and of that with the output's gradient.
        kept_bytes: activations that a backward needs.
        input_bytes: bytes kept for a visit that is recomputed.
        spread: of embedding and head, if a plan spreads them.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    forward_bytes: tuple[float, ...]
    backward_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    input_bytes: tuple[float, ...]
    spread: SpreadCosts = field(default=SpreadCosts(), kw_only=True)

    @classmethod
    def even(
        cls, num_chunks: int, forward_s: float = 1.0, *, input_s: float | None = None, weight_s: float | None = None,
        forward_bytes: float = 0.0, backward_bytes: float | None = None, kept_bytes: float = 1.0,
        input_bytes: float = 0.0,
    ) -> Costs:  # fmt: skip
        """Equal chunks; each half of a backward takes as long as the forward unless stated."""
        each = (
            forward_s, forward_s if input_s is None else input_s, forward_s if weight_s is None else weight_s,
            forward_bytes, forward_bytes if backward_bytes is None else backward_bytes, kept_bytes, input_bytes,
        )  # fmt: skip
        return cls(*((value,) * num_chunks for value in each))

    def seconds(self, action: Action) -> float:
        """Seconds of an action."""
        if action.kind in SPREAD_KINDS:
            return self.spread.seconds.get(action.kind, 0.0)
        if action.kind == BACKWARD:
            return self.input_s[action.chunk] + self.weight_s[action.chunk]
        return {FORWARD: self.forward_s, RECOMPUTE: self.forward_s, INPUT: self.input_s, WEIGHT: self.weight_s}[
            action.kind
        ][action.chunk]


@dataclass(frozen=True)
class PipelineTimeline:
    """The simulated times of a plan.

    spans: for each rank (action, start, end) in seconds. link_bytes: by (from, to), in one step. peak_bytes: for each
    rank, the most activations that it holds at once. messages: (from, to, what, sent, arrived).
    """

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    link_bytes: dict[tuple[int, int], float]
    peak_bytes: tuple[float, ...]
    messages: tuple[tuple[int, int, PlanMessage, float, float], ...] = ()

    @property
    def makespan_s(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return max((span[-1][2] for span in self.spans if span), default=0.0)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank computes nothing."""
        return tuple(self.makespan_s - sum(end - start for _, start, end in span) for span in self.spans)

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank, in order."""
        return tuple(tuple(action for action, _, _ in span) for span in self.spans)


def trace(spans: Sequence[Sequence[tuple[Action, float, float]]], name: str) -> list[dict[str, Any]]:
    """The times of all ranks in Chrome's trace format, which Perfetto reads too; one process per rank.

    spans: see PipelineTimeline. name: of the row in each rank's process.
    """
    return [
        {
            "name": f"{action.kind}{action.micro_batch}", "cat": action.kind, "ph": "X", "pid": rank, "tid": name,
            "ts": 1e6 * begin, "dur": 1e6 * (end - begin), "args": {"chunk": action.chunk},
        }
        for rank, own in enumerate(spans)
        for action, begin, end in own
    ]  # fmt: skip


# What a free rank does now, if anything.
NextAction = Callable[[int, "PipelineClock"], Action | None]


def simulate(plan: Plan, costs: Costs, network: Network | None = None, cores: Cores | None = None) -> PipelineTimeline:
    """The timeline of a plan that passes `check`: each rank runs its next action as soon as its input has arrived.

    A message is sent when its action ends, and travels while ranks compute.

    Args:
        network: of the plan's ranks; None: messages take no time.
        cores: shared by the ranks; None: each has its own.

    Raises ConfigError for costs or a network of another size.
    """
    places = [0] * plan.num_ranks

    def next_of_order(rank: int, clock: PipelineClock) -> Action | None:
        if places[rank] == len(plan.orders[rank]):
            return None
        action = plan.orders[rank][places[rank]]
        if not clock.can_start(action):
            return None
        places[rank] += 1
        return action

    clock = PipelineClock(plan.home, plan.paths, plan.num_ranks, costs, network, cores, plan.barriers, plan.bridges)
    return clock.run(next_of_order, _recomputed(plan))


def _recomputed(plan: Plan) -> set[Visit]:
    return {action.visit for order in plan.orders for action in order if action.kind == RECOMPUTE}


@dataclass
class _Memory:
    held: float = 0.0
    peak: float = 0.0

    def add(self, num_bytes: float) -> None:
        self.held += num_bytes
        self.peak = max(self.peak, self.held)


@dataclass
class PipelineClock:
    """A step of a pipeline as events: actions that end, messages that arrive."""

    home: Sequence[int]
    paths: Sequence[Sequence[int]]
    num_ranks: int
    costs: Costs
    network: Network | None = None
    cores: Cores | None = None
    barriers: int = 0
    bridges: Sequence[tuple[int, int]] = ()
    done: set[Action | PlanMessage] = field(default_factory=set)

    def __post_init__(self) -> None:
        if len(self.costs.forward_s) != len(self.home):
            raise ConfigError(f"costs of {len(self.costs.forward_s)} chunks for a plan of {len(self.home)}")
        if self.network is not None and len(self.network.nodes) != self.num_ranks:
            raise ConfigError(f"a network of {len(self.network.nodes)} ranks for a plan of {self.num_ranks}")
        self.routes = Routes(self.paths, self.home, self.barriers, self.bridges)
        self.events: Events[Any] = Events(self.network or Network.even(self.num_ranks), self.cores)
        self.free = set(range(self.num_ranks))
        self.memory = [_Memory() for _ in range(self.num_ranks)]
        self._begun_s = [0.0] * self.num_ranks
        self._spans: list[list[tuple[Action, float, float]]] = [[] for _ in range(self.num_ranks)]
        self._link_bytes: dict[tuple[int, int], float] = {}
        self._sent: dict[PlanMessage, tuple[int, int, float]] = {}
        self._messages: list[tuple[int, int, PlanMessage, float, float]] = []

    def can_start(self, action: Action) -> bool:
        """Whether everything that an action needs is on its rank."""
        return all(need in self.done for need in self.routes.needs(action))

    def run(self, choose: NextAction, recomputed: set[Visit]) -> PipelineTimeline:
        """Let each free rank run the action that `choose` returns, until nothing is left."""
        while True:
            for rank in sorted(self.free):
                action = choose(rank, self)
                if action is not None:
                    self._start(rank, action, recomputed)
            if self.events.next_s() == math.inf:
                break
            arrived, ended = self.events.advance()
            self._arrive(arrived)
            for rank, action in sorted(ended):
                self._end(rank, action, recomputed)
            # What takes no time to travel is there at once.
            self._arrive(self.events.landed())
        peaks = tuple(memory.peak for memory in self.memory)
        return PipelineTimeline(tuple(map(tuple, self._spans)), self._link_bytes, peaks, tuple(self._messages))

    def _arrive(self, arrived: Sequence[PlanMessage]) -> None:
        self.done.update(arrived)
        for what in arrived:
            source, target, sent_s = self._sent[what]
            self._messages.append((source, target, what, sent_s, self.events.now_s))

    def _start(self, rank: int, action: Action, recomputed: set[Visit]) -> None:
        self.free.discard(rank)
        if action.kind in (FORWARD, RECOMPUTE):
            self.memory[rank].add(self._held_bytes(action, recomputed))
        elif action.kind == SCORE:
            self.memory[rank].add(self.costs.spread.kept)
        self._begun_s[rank] = self.events.now_s
        self.events.work(rank, self.costs.seconds(action), (rank, action))

    def _held_bytes(self, action: Action, recomputed: set[Visit]) -> float:
        costs, chunk = self.costs, action.chunk
        if action.kind == RECOMPUTE:
            return costs.kept_bytes[chunk] - costs.input_bytes[chunk]
        return costs.input_bytes[chunk] if action.visit in recomputed else costs.kept_bytes[chunk]

    def _end(self, rank: int, action: Action, recomputed: set[Visit]) -> None:
        self.free.add(rank)
        self.done.add(action)
        self._spans[rank].append((action, self._begun_s[rank], self.events.now_s))
        if action.kind in (BACKWARD, WEIGHT):
            self.memory[rank].add(-self.costs.kept_bytes[action.chunk])
        elif action.kind == TRAIN:
            self.memory[rank].add(-self.costs.spread.kept)
        for given in self.routes.gives(action):
            self._give(rank, action, given)

    def _give(self, rank: int, action: Action, given: PlanMessage) -> None:
        if isinstance(given, Bridged):
            target = self.home[given.ends[1]]
        else:
            target = given.target if isinstance(given, Shared) else self.home[given.chunk]
        if target == rank:
            self.done.add(given)
            return
        if isinstance(given, Shared):
            num_bytes = self.costs.spread.sizes.get(given.kind, 0.0)
        elif isinstance(given, Bridged):
            # As large as the hidden state behind its source.
            of_kind = self.costs.forward_bytes if given.kind == "forward" else self.costs.backward_bytes
            num_bytes = of_kind[given.source]
        else:
            sizes = self.costs.forward_bytes if given.kind == "forward" else self.costs.backward_bytes
            # Both messages of a border are of the size of the output that crosses it.
            num_bytes = sizes[action.chunk if given.kind == "forward" else given.chunk]
        self._link_bytes[rank, target] = self._link_bytes.get((rank, target), 0.0) + num_bytes
        self._sent[given] = rank, target, self.events.now_s
        self.events.send((rank, target), num_bytes, given)
