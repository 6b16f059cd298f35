"""A plan that is fitted to what was measured: list scheduling on the simulated clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.plan import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Plan, Visit
from thinwire.methods.pipeline.simulate import Clock, Costs

# Backward frees memory and lets others go on; the gradients of weights are for nobody but the optimizer.
URGENCY = {BACKWARD: 0, INPUT: 0, FORWARD: 1, WEIGHT: 2}


def fitted(
    home: Sequence[int], paths: Sequence[Sequence[int]], costs: Costs, network: Network | None = None, *,
    in_flight: int | None = None, halves: bool = False,
) -> Plan:  # fmt: skip
    """The plan in which a rank that is free does at once the most urgent of what can start.

    Backward comes before forward, early micro-batches before late ones, and, at one micro-batch, the furthest hop
    first. What the measured seconds and rates lead to becomes a fixed order, so a run repeats bit for bit; the same
    costs give the same plan, so one rank makes it and tells the others.

    in_flight: micro-batches at most at once that a rank has begun and not yet ended; None: twice the number of
    ranks. More hide longer messages, and keep more activations. halves: each backward is done as its two halves.
    Raises ConfigError where in_flight is below 1, or so low that ranks would wait for each other for ever.
    """
    num_ranks = max(home) + 1
    most = 2 * num_ranks if in_flight is None else in_flight
    if most < 1:
        raise ConfigError(f"in_flight {most}: must be at least 1")
    scheduler = _Scheduler(home, paths, most, halves)
    timeline = Clock(home, paths, num_ranks, costs, network).run(scheduler.choose, set())
    if any(scheduler.waiting):
        raise ConfigError(
            f"in_flight {most} is too few for these paths: ranks that have begun so many micro-batches wait for each "
            f"other for ever; nearest that may do: {most + 1}"
        )
    return Plan(tuple(home), tuple(map(tuple, paths)), timeline.orders)


class _Scheduler:
    """What each rank has still to do, most urgent first, and which micro-batches it has begun and not ended."""

    def __init__(self, home: Sequence[int], paths: Sequence[Sequence[int]], most: int, halves: bool) -> None:
        self.most = most
        kinds = (FORWARD, INPUT, WEIGHT) if halves else (FORWARD, BACKWARD)
        self.ends = WEIGHT if halves else BACKWARD
        hops = {Visit(chunk, number): hop for number, path in enumerate(paths) for hop, chunk in enumerate(path)}
        num_ranks = max(home) + 1
        visits = [[visit for visit in hops if home[visit.chunk] == rank] for rank in range(num_ranks)]
        self.waiting = [
            sorted(
                (Action(kind, *visit) for visit in of_rank for kind in kinds),
                key=lambda action: (URGENCY[action.kind], action.micro_batch, -hops[action.visit]),
            )
            for of_rank in visits
        ]
        self.left = [_count(visit.micro_batch for visit in of_rank) for of_rank in visits]
        self.begun: list[set[int]] = [set() for _ in visits]

    def choose(self, rank: int, clock: Clock) -> Action | None:
        """The most urgent action that can start now."""
        begun = self.begun[rank]
        for action in self.waiting[rank]:
            is_full = action.kind == FORWARD and action.micro_batch not in begun and len(begun) == self.most
            if not is_full and clock.can_start(action):
                self._note(rank, action)
                return action
        return None

    def _note(self, rank: int, action: Action) -> None:
        self.waiting[rank].remove(action)
        self.begun[rank].add(action.micro_batch)
        if action.kind == self.ends:
            self.left[rank][action.micro_batch] -= 1
            if self.left[rank][action.micro_batch] == 0:
                self.begun[rank].discard(action.micro_batch)


def _count(numbers: Iterable[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for number in numbers:
        counts[number] = counts.get(number, 0) + 1
    return counts
