"""A plan that is fitted to measurements: list scheduling on the simulated clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.clock import PipelineClock
from thinwire.methods.pipeline.costs import Costs
from thinwire.methods.pipeline.plan import (
    AGREE,
    BACKWARD,
    EMBED,
    FORWARD,
    INPUT,
    SCATTER,
    SCORE,
    SPREAD_KINDS,
    TRAIN,
    WEIGHT,
    Action,
    Plan,
    Visit,
)

# Backward frees memory and lets others go on; the gradients of weights are for nobody but the optimizer. Where the head
# is spread, all ranks wait for each other's scores, and logits are kept until T.
URGENCY = {AGREE: 0, BACKWARD: 1, INPUT: 1, SCORE: 2, TRAIN: 2, SCATTER: 2, EMBED: 3, FORWARD: 4, WEIGHT: 5}
# Micro-batches whose embedding may be there before the first layer takes it, and the one that it takes.
EMBEDDED = 2


def fitted(
    home: Sequence[int], paths: Sequence[Sequence[int]], costs: Costs, network: Network | None = None, *,
    in_flight: int | Sequence[int] | None = None, halves: bool = False, barriers: int = 0,
) -> Plan:  # fmt: skip
    """The plan in which every free rank starts the most urgent possible action at once.

    Backward comes before forward, early micro-batches before late ones, and for one micro-batch the furthest hop first.
    The result is a fixed order, so a run repeats bit for bit. The same costs give the same plan, so one rank makes it
    and sends it to the others.

    Args:
        in_flight: most micro-batches at once that a rank has begun but not finished; None: twice the number of ranks;
            one number for all ranks, or one for each. A larger number hides longer messages, and keeps more
            activations.
        halves: each backward is done as its two halves.
        barriers: see Plan; embeddings are then made one micro-batch ahead.

    Raises ConfigError for in_flight below 1, or so low that ranks would wait for each other for ever.
    """
    num_ranks = max(home) + 1
    given = 2 * num_ranks if in_flight is None else in_flight
    most = [given] * num_ranks if isinstance(given, int) else list(given)
    if min(most) < 1:
        raise ConfigError(f"in_flight {min(most)}: must be at least 1")
    scheduler = _Scheduler(home, paths, most, halves, barriers)
    spans = PipelineClock(home, paths, num_ranks, costs, network, barriers).run(scheduler.choose)
    if any(scheduler.waiting):
        raise ConfigError(
            f"in_flight {min(most)} is too few for these paths: ranks that have begun so many micro-batches wait for "
            f"each other for ever; nearest that may do: {min(most) + 1}"
        )
    orders = tuple(tuple(action for action, _, _ in own) for own in spans)
    return Plan(tuple(home), tuple(map(tuple, paths)), orders, barriers)


class _Scheduler:
    """The remaining actions of each rank, most urgent first, and the micro-batches it has begun but not finished."""

    def __init__(
        self, home: Sequence[int], paths: Sequence[Sequence[int]], most: Sequence[int], halves: bool, barriers: int
    ) -> None:
        self.most, self.paths = most, paths
        kinds = (FORWARD, INPUT, WEIGHT) if halves else (FORWARD, BACKWARD)
        self.ends = WEIGHT if halves else BACKWARD
        hops = {Visit(chunk, number): hop for number, path in enumerate(paths) for hop, chunk in enumerate(path)}
        num_ranks = max(home) + 1
        visits = [[visit for visit in hops if home[visit.chunk] == rank] for rank in range(num_ranks)]
        spread = SPREAD_KINDS if barriers else ()
        self.waiting = [
            sorted(
                [
                    *(Action(kind, *visit) for visit in of_rank for kind in kinds),
                    *(Action(kind, rank, number) for number in range(len(paths)) for kind in spread),
                ],
                key=lambda action: (URGENCY[action.kind], action.micro_batch, -hops.get(action.visit, 0), action.kind),
            )
            for rank, of_rank in enumerate(visits)
        ]
        self.left = [_count(visit.micro_batch for visit in of_rank) for of_rank in visits]
        self.begun: list[set[int]] = [set() for _ in visits]

    def choose(self, rank: int, clock: PipelineClock) -> Action | None:
        """The most urgent action that can start now."""
        begun = self.begun[rank]
        for action in self.waiting[rank]:
            is_full = action.kind == FORWARD and action.micro_batch not in begun and len(begun) == self.most[rank]
            ahead = action.micro_batch - EMBEDDED
            if action.kind == EMBED and ahead >= 0:
                is_full = Action(FORWARD, self.paths[ahead][0], ahead) not in clock.done
            if not is_full and clock.can_start(action):
                self._note(rank, action)
                return action
        return None

    def _note(self, rank: int, action: Action) -> None:
        self.waiting[rank].remove(action)
        if action.kind in SPREAD_KINDS:
            return
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
