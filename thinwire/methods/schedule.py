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
        self.found, self.grid, self.computes = found, grid, computes
        self.drawing = Drawing(grid.world_size, NUM_SLOTS)
        self.ranks = range(grid.world_size)
        # The last task of each rank's training thread.
        self.last: list[tuple[int, ...]] = [() for _ in self.ranks]
        self.pending: list[tuple[int, ...]] = [() for _ in self.ranks]
        num = len(found.shares)
        of = {
            (when, unit): [each for each in found.each if each.when == when and each.unit == unit]
            for when in (FORWARD, BACKWARD, AGAIN)
            for unit in range(num)
        }
        arrived = [self._all(of[FORWARD, unit], ()) for unit in range(num)] if found.ahead is None else None
        coming: list[list[tuple[int, ...]]] = []
        for number in range(micro_batches):
            for unit in range(num):
                if arrived is not None:
                    self._compute(unit, 1, arrived[unit] if number == 0 else None)
                    continue
                while number == 0 and len(coming) <= min(unit + (found.ahead or 0), num - 1):
                    coming.append(self._all(of[FORWARD, len(coming)], self.last))
                self._compute(unit, 1, coming[unit] if number == 0 else None)
            is_last = number == micro_batches - 1
            for unit in reversed(range(num)):
                again = self._all(of[AGAIN, unit], self.last) if is_last else None
                self._compute(unit, 2, again)
                if is_last:
                    for rank, ends in enumerate(self._all(of[BACKWARD, unit], self.last)):
                        self.pending[rank] += ends
        for each in (each for each in found.each if each.when == END):
            self._join()
            found_ends = self._all([each], self.last)
            self.last = [own or last for own, last in zip(found_ends, self.last, strict=True)]
        self._join()
        if found.kept_bytes:
            for rank in self.ranks:
                self.last[rank] = self.drawing.task(rank, Work("copy", found.kept_bytes), self.last[rank])
        self.graph = self.drawing.done()

    def _join(self) -> None:
        """Make the training thread wait for everything that is on its way."""
        self.last = [last + pending for last, pending in zip(self.last, self.pending, strict=True)]
        self.pending = [() for _ in self.ranks]

    def _compute(self, unit: int, times: int, awaited: Sequence[tuple[int, ...]] | None) -> None:
        amount = times * self.found.shares[unit] * self.computes.amount
        for rank in self.ranks:
            after = self.last[rank] + (awaited[rank] if awaited is not None else ())
            self.last[rank] = self.drawing.task(rank, Work(self.computes.kind, amount), after)

    def _all(self, exchanges: Sequence[PlannedExchange], after: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Draw collectives of all ranks. Return the tasks for which each rank must wait to have the results."""
        ends: list[tuple[int, ...]] = [() for _ in self.ranks]
        for each in exchanges:
            jobs = [self.drawing.job(rank, after[rank] if after else ()) for rank in self.ranks]
            for rank, own in enumerate(_Collective(self, each, jobs).ends):
                ends[rank] += own
        return ends


class _Collective:
    """The tasks of one collective, hop after hop. ends: the tasks for which each rank waits."""

    def __init__(self, step: _Step, exchange: PlannedExchange, jobs: Sequence[int]) -> None:
        self.grid, self.drawing, self.exchange, self.jobs = step.grid, step.drawing, exchange, jobs
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
        message = Message(target, num_bytes, self.exchange.operation, level)
        sent = self.drawing.task(source, message, after, (self.jobs[source], self.jobs[target]))
        # Sent and received; ranks send as much as they receive.
        return self.drawing.task(target, Work(CARRY, 2 * num_bytes), sent, (self.jobs[target],))

    def _spread(self, hop: Hop) -> None:
        arrive: list[tuple[int, ...]] = [() for _ in self.jobs]
        for rank, job in enumerate(self.jobs):
            targets, before = self._targets(hop, rank), self.ends[rank]
            for target in targets:
                if hop.packs is not None:
                    part = Work(hop.packs.kind, hop.packs.amount / len(targets))
                    before = self.drawing.task(rank, part, before, (job,))
                arrive[target] += (sent := self._send(rank, target, hop.num_bytes / len(targets), hop.level, before))
                arrive[rank] += sent
        for rank, job in enumerate(self.jobs):
            self.ends[rank] = arrive[rank] or self.ends[rank]
            self.ends[rank] = self.drawing.task(rank, Work(ROUND, 1.0), self.ends[rank], (job,))
            if hop.unpacks is not None:
                self.ends[rank] = self.drawing.task(rank, hop.unpacks, self.ends[rank], (job,))

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
