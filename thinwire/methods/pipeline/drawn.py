"""A step of a pipeline as a graph: actions, packing and messages of all its ranks, and what replicas exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.collectives import Topology
from thinwire.collectives.communicator import NUM_SLOTS
from thinwire.cost import Drawing, Message, StepGraph, Work
from thinwire.cost.graph import CARRY, SECONDS
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.costs import Costs
from thinwire.methods.pipeline.plan import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECOMPUTE,
    SCORE,
    TRAIN,
    WEIGHT,
    Action,
    Beside,
    Plan,
    PlanMessage,
    Shared,
    direction_of,
    target_of,
)
from thinwire.methods.schedule import FORWARD as AT_START, DrawnExchanges, PlannedExchanges

# Of a mailbox's messages in the meter, before their direction.
OPERATION = "pipeline"
NAMES = {
    FORWARD: "forward", BACKWARD: "backward", INPUT: "backward of inputs", WEIGHT: "backward of weights",
    RECOMPUTE: "forward again", SCORE: "scores", TRAIN: "head",
}  # fmt: skip
NOTHING = PlannedExchanges((), ())


@dataclass(frozen=True)
class Joined:
    """What the replicas of each stage exchange, and all ranks at the end of a step.

    Attributes:
        each: by stage. They may be sent before the first forward, after the last backward, or at the end.
        grid: of the replicas of one stage.
        words: among all ranks of several stages, once the gradients are there and before the update.
        everyone: the grid of all ranks.
    """

    each: tuple[PlannedExchanges, ...] = ()
    grid: Topology = field(default_factory=lambda: Topology(1, 1))
    words: PlannedExchanges = NOTHING
    everyone: Topology = field(default_factory=lambda: Topology(1, 1))


@dataclass(frozen=True)
class PipelineStep:
    """A step of equal pipelines. The ranks of a stage are neighbours in the graph.

    pipeline: the first one.
    """

    graph: StepGraph
    pipeline: DrawnPlan


def draw_step(
    plan: Plan, costs: Costs, nodes: Sequence[int], codecs: Mapping[str, str] | None = None,
    joined: Joined | None = None,
) -> PipelineStep:  # fmt: skip
    """The graph of a step in which every pipeline follows the same plan.

    Each rank does its actions in order, and waits for what each of them needs. Replicas of a stage exchange gradients
    as soon as their own last backwards have ended, while other stages still compute.

    Args:
        plan: passes `check`.
        costs: of chunks on a usual rank, without packing.
        nodes: of each rank, stage by stage, of each stage all replicas.
        codecs: by "forward" and "backward", those whose packing takes time.
        joined: what the replicas exchange; None: nothing.
    """
    num, joined = len(nodes) // plan.num_ranks, joined or Joined()
    drawing = Drawing(len(nodes), NUM_SLOTS)
    groups = [range(first, first + num) for first in range(0, len(nodes), num)]
    # Without anything to exchange there is no entry for a stage.
    pairs = zip(joined.each, groups, strict=bool(joined.each))
    around = [DrawnExchanges(drawing, each, joined.grid, own) for each, own in pairs]
    first: list[tuple[int, ...]] = [() for _ in nodes]
    for stage in around:
        for unit in range(len(stage.found.shares)):
            for rank, own in zip(stage.ranks, stage.begin(AT_START, unit), strict=True):
                first[rank] += own
    pipelines = [
        DrawnPlan(drawing, plan, costs, ranks, nodes, codecs, [first[rank] for rank in ranks])
        for ranks in zip(*groups, strict=True)
    ]
    for number, stage in enumerate(around):
        stage.last = [each.ends[number] for each in pipelines]
        for unit in reversed(range(len(stage.found.shares))):
            stage.send(unit)
        stage.join()
    if joined.words.each:
        everyone = DrawnExchanges(drawing, joined.words, joined.everyone, range(len(nodes)))
        everyone.last = [last for stage in around for last in stage.last]
        everyone.end()
        for stage in around:
            stage.last = [everyone.last[rank] for rank in stage.ranks]
    for stage in around:
        stage.end()
    return PipelineStep(drawing.done(), pipelines[0])


@dataclass(frozen=True)
class _There:
    """What an action may need. after: the tasks after which its rank has it. codec: empty: nothing is unpacked."""

    after: tuple[int, ...] = ()
    num_bytes: float = 0.0
    codec: str = ""


class DrawnPlan:
    """The tasks of one pipeline in a drawing.

    Args:
        ranks: of the drawing, by stage.
        nodes: of all ranks of the drawing.
        first: for each stage the tasks before its first action; None: none.
        carries: whether the network's thread takes bytes from and to the sockets.

    Attributes:
        ends: for each stage the tasks after which its forwards and backwards are over, and gradients of tied weights
            are there.
        actions: for each stage the tasks of its actions, in order.
        sent: the messages by task: from stage, to stage, what, bytes.

    Other arguments: see `draw_step`.
    """

    def __init__(
        self, drawing: Drawing, plan: Plan, costs: Costs, ranks: Sequence[int], nodes: Sequence[int],
        codecs: Mapping[str, str] | None = None, first: Sequence[tuple[int, ...]] | None = None, *,
        carries: bool = True,
    ) -> None:  # fmt: skip
        self.drawing, self.plan, self.costs, self.ranks, self.nodes = drawing, plan, costs, ranks, nodes
        self.codecs, self._carries = codecs or {}, carries
        self._last: list[tuple[int, ...]] = list(first or [()] * len(ranks))
        self.actions: list[list[int]] = [[] for _ in ranks]
        self.sent: dict[int, tuple[int, int, PlanMessage | Beside, float]] = {}
        self._there: dict[Action | PlanMessage | Beside, _There] = {}
        ends = plan.home[0], plan.home[-1]
        # Tied weights, which the last chunk's rank borrows.
        self._lent = Beside("weight", *ends) if costs.tied_bytes and ends[0] != ends[1] else None
        for source, target, num_bytes in costs.copies:
            self._send(source, target, num_bytes, Beside("copy", source, target), ())
        self._draw()
        self.ends = list(self._last)
        if self._lent is not None:
            back = Beside("gradient", self._lent.target, self._lent.source)
            self.ends[back.target] += self._send(*back[1:], costs.tied_bytes, back, self._last[back.source])

    def link_bytes(self, times: float = 1.0) -> dict[tuple[int, int], float]:
        """Bytes by (from stage, to stage). times: how often those of micro-batches count."""
        found: dict[tuple[int, int], float] = {}
        for source, target, what, num_bytes in self.sent.values():
            more = num_bytes if isinstance(what, Beside) else num_bytes * times
            found[source, target] = found.get((source, target), 0.0) + more
        return found

    def _draw(self) -> None:
        """Draw all actions, each after what it needs."""
        orders = self.plan.orders
        while waiting := [stage for stage, order in enumerate(orders) if len(self.actions[stage]) < len(order)]:
            before = sum(map(len, self.actions))
            for stage in waiting:
                while len(own := self.actions[stage]) < len(orders[stage]) and self._do(stage, orders[stage][len(own)]):
                    pass
            if sum(map(len, self.actions)) == before:
                stuck = ", ".join(f"{orders[stage][len(self.actions[stage])]} on rank {stage}" for stage in waiting)
                raise ConfigError(f"a plan whose actions wait for each other for ever: {stuck}")

    def _do(self, stage: int, action: Action) -> bool:
        """Draw an action, with the unpacking before it and the sending after it. Return False if it lacks something."""
        is_first, lent = not self.actions[stage], self._lent
        needs: list[Action | PlanMessage | Beside] = [*self.plan.routes.needs(action)]
        if is_first and lent is not None and stage == lent.target:
            needs.insert(0, lent)
        if any(need not in self._there for need in needs):
            return False
        for need in needs:
            there = self._there[need]
            self._last[stage] += there.after
            if there.codec:
                self._work(stage, Work(f"decode {there.codec}", there.num_bytes))
        self._work(stage, Work(SECONDS, self.costs.seconds(action), f"{NAMES.get(action.kind, action.kind)} {action}"))
        self.actions[stage] += self._last[stage]
        self._there[action] = _There()
        packed = set[str]()
        for given in self.plan.routes.gives(action):
            self._give(stage, action, given, packed)
        if is_first and lent is not None and stage == lent.source:
            self._there[lent] = _There(self._send(*lent[1:], self.costs.tied_bytes, lent, self._last[stage]))
        return True

    def _give(self, stage: int, action: Action, given: PlanMessage, packed: set[str]) -> None:
        """Draw a message. packed: kinds of the action's packets that went to another rank before."""
        target, num_bytes = target_of(given, self.plan.home), self.costs.num_bytes(action, given)
        if target == stage:
            self._there[given] = _There()
            return
        codec = "" if given.kind == "scores" else self.codecs.get(direction_of(given), "")
        if codec and given.kind not in packed:
            self._work(stage, Work(f"encode {codec}", num_bytes))
        if isinstance(given, Shared) and given.kind != "gradient":
            # The same packet goes to all ranks.
            packed.add(given.kind)
        self._there[given] = _There(self._send(stage, target, num_bytes, given, self._last[stage]), num_bytes, codec)

    def _work(self, stage: int, work: Work) -> None:
        self._last[stage] = self.drawing.task(self.ranks[stage], work, self._last[stage])

    def _send(
        self, source: int, target: int, num_bytes: float, what: PlanMessage | Beside, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Draw a message between stages. Return the tasks after which it is there."""
        here, there = self.ranks[source], self.ranks[target]
        level = "intra" if self.nodes[here] == self.nodes[there] else "inter"
        if isinstance(what, Beside):
            direction, name = "backward" if what.kind == "gradient" else "forward", str(what)
        else:
            direction, name = direction_of(what), f"{what.kind} of micro-batch {what.micro_batch}"
        message = Message(there, num_bytes, f"{OPERATION}_{direction}", level, name)
        sent = self.drawing.task(here, message, after)
        self.sent[sent[0]] = source, target, what, num_bytes
        # Sent and received, as in a collective.
        return self.drawing.task(there, Work(CARRY, 2 * num_bytes), sent) if self._carries else sent
