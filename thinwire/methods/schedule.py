"""The step of a method as a graph: the messages of its plan, in the order in which its host sends them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from thinwire.collectives import Topology
from thinwire.collectives.communicator import NUM_SLOTS
from thinwire.cost import Drawing, Message, StepGraph, Work
from thinwire.cost.graph import CARRY, ROUND
from thinwire.layout.layers import looked_up

# When an exchange begins: at the start, for the forward of its unit; after the unit's backward, in the last
# micro-batch; before the unit's backward; when all that went before has ended.
FORWARD, BACKWARD, AGAIN, END = "forward", "backward", "again", "end"
# To whom: to all others of the level; to the next in a ring, in 2 (P - 1) turns; to all others, from each node's first.
ALL, RING, FIRST = "all", "ring", "first"


@dataclass(frozen=True)
class Hop:
    """One round of messages: bytes that a rank sends in all, that it packs before, and that it unpacks afterwards."""

    level: str
    num_bytes: float
    to: str = ALL
    packs: Work | None = None
    unpacks: Work | None = None


@dataclass(frozen=True)
class PlannedExchange:
    """A collective of one unit of the model. when: one of FORWARD, BACKWARD, AGAIN, END."""

    operation: str
    when: str
    hops: tuple[Hop, ...]
    unit: int = 0


@dataclass(frozen=True)
class PlannedExchanges:
    """Everything that a method sends in a step.

    Attributes:
        shares: each unit's share of the model's computing, in order of forward.
        ahead: number of units whose FORWARD exchanges begin before they are needed; None: all at once.
        kept_bytes: bytes that the update reads and writes.
    """

    shares: tuple[float, ...]
    each: tuple[PlannedExchange, ...]
    ahead: int | None = None
    kept_bytes: float = 0.0


def plain(sent: Mapping[tuple[str, str], int], when: str, to: str = ALL, unit: int = 0) -> list[PlannedExchange]:
    """One exchange for each operation of a plan: first between nodes, then inside them."""
    hops: dict[str, list[Hop]] = defaultdict(list)
    for (operation, level), num_bytes in sorted(sent.items(), key=lambda item: item[0][1] != "inter"):
        if num_bytes:
            hops[operation].append(Hop(level, num_bytes, to))
    return [PlannedExchange(operation, when, tuple(found), unit) for operation, found in hops.items()]


def shares_of(model: nn.Module, units: Sequence[Iterable[str]]) -> tuple[float, ...]:
    """Each unit's share of computing: its elements, without tables that are only looked up."""
    tables = looked_up(model)
    numels = {name: 0 if name in tables else param.numel() for name, param in model.named_parameters()}
    work = [float(sum(numels.get(name, 0) for name in names)) for names in units]
    total = sum(work)
    return tuple(each / total for each in work) if total else (1.0 / max(1, len(work)),) * len(work)


def draw(found: PlannedExchanges, grid: Topology, micro_batches: int, computes: Work) -> StepGraph:
    """The graph of a step in which all ranks compute and send alike.

    computes: one forward of one micro-batch; a backward is twice as much.
    """
    return _Step(found, grid, micro_batches, computes).graph


class _Step:
    def __init__(self, found: PlannedExchanges, grid: Topology, micro_batches: int, computes: Work) -> None:
        self.found, self.computes = found, computes
        self.drawing = Drawing(grid.world_size, NUM_SLOTS)
        self.around = DrawnExchanges(self.drawing, found, grid, range(grid.world_size))
        num, around = len(found.shares), self.around
        arrived = [around.begin(FORWARD, unit) for unit in range(num)] if found.ahead is None else None
        coming: list[list[tuple[int, ...]]] = []
        for number in range(micro_batches):
            for unit in range(num):
                if arrived is not None:
                    self._compute(unit, 1, arrived[unit] if number == 0 else None)
                    continue
                while number == 0 and len(coming) <= min(unit + (found.ahead or 0), num - 1):
                    coming.append(around.begin(FORWARD, len(coming)))
                self._compute(unit, 1, coming[unit] if number == 0 else None)
            is_last = number == micro_batches - 1
            for unit in reversed(range(num)):
                again = around.begin(AGAIN, unit) if is_last else None
                self._compute(unit, 2, again)
                if is_last:
                    around.send(unit)
        around.end()
        self.graph = self.drawing.done()

    def _compute(self, unit: int, times: int, awaited: Sequence[tuple[int, ...]] | None) -> None:
        amount = times * self.found.shares[unit] * self.computes.amount
        for number, rank in enumerate(self.around.ranks):
            after = self.around.last[number] + (awaited[number] if awaited is not None else ())
            self.around.last[number] = self.drawing.task(rank, Work(self.computes.kind, amount), after)


class DrawnExchanges:
    """The exchanges of some ranks, drawn around what these compute.

    Args:
        grid: of these ranks.
        ranks: of the drawing, by their number in the grid.

    last: for each of the ranks, the tasks after which its training thread goes on.
    """

    def __init__(self, drawing: Drawing, found: PlannedExchanges, grid: Topology, ranks: Sequence[int]) -> None:
        self.drawing, self.found, self.grid, self.ranks = drawing, found, grid, ranks
        self.last: list[tuple[int, ...]] = [() for _ in ranks]
        self._pending: list[tuple[int, ...]] = [() for _ in ranks]
        self._of: dict[tuple[str, int], list[PlannedExchange]] = defaultdict(list)
        for each in found.each:
            self._of[each.when, each.unit].append(each)

    def begin(self, when: str, unit: int) -> list[tuple[int, ...]]:
        """Draw the exchanges of a unit after `last`. Return the tasks for which each rank must wait to have theirs."""
        return self._drawn(self._of[when, unit])

    def send(self, unit: int) -> None:
        """Draw the exchanges after a unit's backward, which the end of the step awaits."""
        for number, ends in enumerate(self.begin(BACKWARD, unit)):
            self._pending[number] += ends

    def end(self) -> None:
        """Draw the exchanges at the end, each when all before it is there, and then the update."""
        for each in (each for each in self.found.each if each.when == END):
            self.join()
            ends = self._drawn([each])
            self.last = [own or last for own, last in zip(ends, self.last, strict=True)]
        self.join()
        if self.found.kept_bytes:
            for number, rank in enumerate(self.ranks):
                self.last[number] = self.drawing.task(rank, Work("copy", self.found.kept_bytes), self.last[number])

    def join(self) -> None:
        """Make the training thread wait for everything that is on its way."""
        self.last = [last + pending for last, pending in zip(self.last, self._pending, strict=True)]
        self._pending = [() for _ in self.ranks]

    def _drawn(self, exchanges: Sequence[PlannedExchange]) -> list[tuple[int, ...]]:
        ends: list[tuple[int, ...]] = [() for _ in self.ranks]
        for each in exchanges:
            jobs = [self.drawing.job(rank, last) for rank, last in zip(self.ranks, self.last, strict=True)]
            for number, own in enumerate(_Collective(self, each, jobs).ends):
                ends[number] += own
        return ends


class _Collective:
    """The tasks of one collective, hop after hop. ends: the tasks for which each rank waits."""

    def __init__(self, around: DrawnExchanges, exchange: PlannedExchange, jobs: Sequence[int]) -> None:
        self.grid, self.drawing, self.ranks = around.grid, around.drawing, around.ranks
        self.exchange, self.jobs = exchange, jobs
        self.ends: list[tuple[int, ...]] = [() for _ in jobs]
        draws: dict[str, Callable[[Hop], None]] = {ALL: self._spread, FIRST: self._spread, RING: self._round}
        for hop in exchange.hops:
            draws[hop.to](hop)

    def _targets(self, hop: Hop, rank: int) -> list[int]:
        grid, node, local = self.grid, self.grid.node(rank), self.grid.local_rank(rank)
        if hop.to == FIRST and local:
            return []
        if hop.level == "inter" and grid.num_nodes > 1:
            return [grid.rank((node + step) % grid.num_nodes, local) for step in range(1, grid.num_nodes)]
        return [grid.rank(node, (local + step) % grid.local_size) for step in range(1, grid.local_size)]

    def _send(self, source: int, target: int, num_bytes: float, level: str, after: tuple[int, ...]) -> tuple[int, ...]:
        message = Message(self.ranks[target], num_bytes, self.exchange.operation, level)
        sent = self.drawing.task(self.ranks[source], message, after, (self.jobs[source], self.jobs[target]))
        # Sent and received; ranks send as much as they receive.
        return self._work(target, Work(CARRY, 2 * num_bytes), sent)

    def _work(self, number: int, work: Work, after: tuple[int, ...]) -> tuple[int, ...]:
        return self.drawing.task(self.ranks[number], work, after, (self.jobs[number],))

    def _spread(self, hop: Hop) -> None:
        arrive: list[tuple[int, ...]] = [() for _ in self.jobs]
        for rank in range(len(self.jobs)):
            targets, before = self._targets(hop, rank), self.ends[rank]
            for target in targets:
                if hop.packs is not None:
                    part = Work(hop.packs.kind, hop.packs.amount / len(targets))
                    before = self._work(rank, part, before)
                arrive[target] += (sent := self._send(rank, target, hop.num_bytes / len(targets), hop.level, before))
                arrive[rank] += sent
        for rank in range(len(self.jobs)):
            self.ends[rank] = arrive[rank] or self.ends[rank]
            self.ends[rank] = self._work(rank, Work(ROUND, 1.0), self.ends[rank])
            if hop.unpacks is not None:
                self.ends[rank] = self._work(rank, hop.unpacks, self.ends[rank])

    def _round(self, hop: Hop) -> None:
        grid = self.grid
        size = grid.world_size if hop.level == "inter" else grid.local_size
        turns = 2 * (size - 1)
        for _ in range(turns):
            before, arrive = list(self.ends), list(self.ends)
            for rank in range(len(self.jobs)):
                first = rank - rank % size
                target = first + (rank - first + 1) % size
                arrive[target] = self._send(rank, target, hop.num_bytes / turns, hop.level, before[rank])
            self.ends = arrive
