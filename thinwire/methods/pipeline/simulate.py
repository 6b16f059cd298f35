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
    Beside,
    Bridged,
    Plan,
    PlanMessage,
    Routes,
    Shared,
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
        tied_bytes: of the weights that the first chunk's rank owns and the last chunk's rank borrows. They go there
            behind the owner's first action, and nothing starts there without them; their gradients come back behind the
            borrower's last backward, and end the step.
        copies: (from, to, bytes) of messages that travel from the start of a step on, and for which nothing waits.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    forward_bytes: tuple[float, ...]
    backward_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    input_bytes: tuple[float, ...]
    spread: SpreadCosts = field(default=SpreadCosts(), kw_only=True)
    tied_bytes: float = field(default=0.0, kw_only=True)
    copies: tuple[tuple[int, int, float], ...] = field(default=(), kw_only=True)

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
    rank, the most activations that it holds at once. messages: (from, to, what, sent, arrived). tied_s: when the
    gradients of tied weights have arrived; 0 without.
    """

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    link_bytes: dict[tuple[int, int], float]
    peak_bytes: tuple[float, ...]
    messages: tuple[tuple[int, int, PlanMessage | Beside, float, float], ...] = ()
    tied_s: float = 0.0

    @property
    def makespan_s(self) -> float:
        """Seconds from the first action's start to the last one's end, or to the arrival of tied gradients."""
        return max([self.tied_s, *(span[-1][2] for span in self.spans if span)])

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
    return clock.run(next_of_order)


def peak_bytes(orders: Sequence[Sequence[Action]], costs: Costs) -> tuple[float, ...]:
    """For each rank, the most bytes of activations that it holds at once. Its order alone decides, not the times."""
    return tuple(_peak_bytes(order, costs) for order in orders)


def _peak_bytes(order: Sequence[Action], costs: Costs) -> float:
    recomputed = {action.visit for action in order if action.kind == RECOMPUTE}
    held = peak = 0.0
    for action in order:
        chunk = action.chunk
        if action.kind == FORWARD:
            held += costs.input_bytes[chunk] if action.visit in recomputed else costs.kept_bytes[chunk]
        elif action.kind == RECOMPUTE:
            held += costs.kept_bytes[chunk] - costs.input_bytes[chunk]
        elif action.kind == SCORE:
            held += costs.spread.kept
        peak = max(peak, held)
        if action.kind in (BACKWARD, WEIGHT):
            held -= costs.kept_bytes[chunk]
        elif action.kind == TRAIN:
            held -= costs.spread.kept
    return peak


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
    done: set[Action | PlanMessage | Beside] = field(default_factory=set)

    def __post_init__(self) -> None:
        if len(self.costs.forward_s) != len(self.home):
            raise ConfigError(f"costs of {len(self.costs.forward_s)} chunks for a plan of {len(self.home)}")
        if self.network is not None and len(self.network.nodes) != self.num_ranks:
            raise ConfigError(f"a network of {len(self.network.nodes)} ranks for a plan of {self.num_ranks}")
        self.routes = Routes(self.paths, self.home, self.barriers, self.bridges)
        self.events: Events[Any] = Events(self.network or Network.even(self.num_ranks), self.cores)
        self.free = set(range(self.num_ranks))
        self._begun_s = [0.0] * self.num_ranks
        self._spans: list[list[tuple[Action, float, float]]] = [[] for _ in range(self.num_ranks)]
        self._link_bytes: dict[tuple[int, int], float] = {}
        self._sent: dict[PlanMessage | Beside, tuple[int, int, float]] = {}
        self._messages: list[tuple[int, int, PlanMessage | Beside, float, float]] = []
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

    def run(self, choose: NextAction) -> PipelineTimeline:
        """Let each free rank run the action that `choose` returns, until nothing is left."""
        for source, target, num_bytes in self.costs.copies:
            self._send(source, target, num_bytes, Beside("copy", source, target))
        while True:
            for rank in sorted(self.free):
                action = choose(rank, self)
                if action is not None:
                    self._start(rank, action)
            if self.events.next_s() == math.inf:
                break
            arrived, ended = self.events.advance()
            self._arrive(arrived)
            for rank, action in sorted(ended):
                self._end(rank, action)
            # What takes no time to travel is there at once.
            self._arrive(self.events.landed())
        orders = [[action for action, _, _ in span] for span in self._spans]
        beside = ((what, end_s) for _, _, what, _, end_s in self._messages if isinstance(what, Beside))
        tied = (end_s for what, end_s in beside if what.kind == "gradient")
        return PipelineTimeline(
            tuple(map(tuple, self._spans)), self._link_bytes, peak_bytes(orders, self.costs), tuple(self._messages),
            max(tied, default=0.0),
        )  # fmt: skip

    def _arrive(self, arrived: Sequence[PlanMessage | Beside]) -> None:
        self.done.update(arrived)
        for what in arrived:
            source, target, sent_s = self._sent[what]
            self._messages.append((source, target, what, sent_s, self.events.now_s))

    def _start(self, rank: int, action: Action) -> None:
        self.free.discard(rank)
        self._begun_s[rank] = self.events.now_s
        self.events.work(rank, self.costs.seconds(action), (rank, action))

    def _end(self, rank: int, action: Action) -> None:
        self.free.add(rank)
        self.done.add(action)
        self._spans[rank].append((action, self._begun_s[rank], self.events.now_s))
        for given in self.routes.gives(action):
            self._give(rank, action, given)
        if self._lent is not None:
            self._exchange_tied(rank, action, self._lent)

    def _exchange_tied(self, rank: int, action: Action, lent: Beside) -> None:
        """Send the tied weights behind their owner's first action, and their gradients behind the last backward."""
        if rank == lent.source and len(self._spans[rank]) == 1:
            self._send(rank, lent.target, self.costs.tied_bytes, lent)
        elif rank == lent.target and action.kind in (BACKWARD, WEIGHT):
            self._left -= 1
            if not self._left:
                self._send(rank, lent.source, self.costs.tied_bytes, Beside("gradient", rank, lent.source))

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
        self._send(rank, target, num_bytes, given)

    def _send(self, source: int, target: int, num_bytes: float, what: PlanMessage | Beside) -> None:
        self._link_bytes[source, target] = self._link_bytes.get((source, target), 0.0) + num_bytes
        self._sent[what] = source, target, self.events.now_s
        self.events.send((source, target), num_bytes, what)
