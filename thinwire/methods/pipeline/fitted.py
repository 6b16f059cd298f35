"""A plan that is fitted to measurements: list scheduling on the simulated clock."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

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

    Raises ConfigError for a path that visits a chunk twice, and for in_flight below 1, or so low that ranks would wait
    for each other for ever.
    """
    # Such a micro-batch would go round and round.
    if twice := [path for path in paths if len(set(path)) < len(path)]:
        raise ConfigError(f"path {tuple(twice[0])}: visits a chunk twice; nearest: {tuple(dict.fromkeys(twice[0]))}")
    num_ranks = max(home) + 1
    given = 2 * num_ranks if in_flight is None else in_flight
    most = [given] * num_ranks if isinstance(given, int) else list(given)
    if min(most) < 1:
        raise ConfigError(f"in_flight {min(most)}: must be at least 1")
    scheduler = _Scheduler(home, paths, most, halves, barriers)
    spans = PipelineClock(home, paths, num_ranks, costs, network, barriers).run(scheduler.choose)
    if scheduler.num_left:
        raise ConfigError(
            f"in_flight {min(most)} is too few for these paths: ranks that have begun so many micro-batches wait for "
            f"each other for ever; nearest that may do: {min(most) + 1}"
        )
    orders = tuple(tuple(action for action, _, _ in own) for own in spans)
    return Plan(tuple(home), tuple(map(tuple, paths)), orders, barriers)


class _Scheduler:
    """For each rank the actions that others have opened, most urgent first, and what it has begun but not finished.

    An action is opened when the one that it follows has begun: before, it can't start. So few are looked at.
    """

    def __init__(
        self, home: Sequence[int], paths: Sequence[Sequence[int]], most: Sequence[int], halves: bool, barriers: int
    ) -> None:
        self.home, self.paths, self.most = home, paths, most
        self.backward, self.ends = (INPUT, WEIGHT) if halves else (BACKWARD, BACKWARD)
        self.hops = {Visit(chunk, number): hop for number, path in enumerate(paths) for hop, chunk in enumerate(path)}
        ranks = range(max(home) + 1)
        # Ranks with rows of embedding and head.
        self.spread = ranks if barriers else range(0)
        self.left = [_count(visit.micro_batch for visit in self.hops if home[visit.chunk] == rank) for rank in ranks]
        self.num_left = (3 if halves else 2) * len(self.hops) + len(SPREAD_KINDS) * len(self.spread) * len(paths)
        self.begun: list[set[int]] = [set() for _ in ranks]
        self.open: list[list[Action]] = [[] for _ in ranks]
        # Of micro-batches that begin on a rank the later ones can start no sooner.
        first = [Action(FORWARD, path[0], number) for number, path in enumerate(paths) if path]
        self.first = [iter([action for action in first if home[action.chunk] == rank]) for rank in ranks]
        for rank in ranks:
            self._open(islice(self.first[rank], 1))
        self._open(Action(EMBED, rank, 0) for rank in self.spread if paths)

    def choose(self, rank: int, clock: PipelineClock) -> Action | None:
        """The most urgent action that can start now."""
        begun = self.begun[rank]
        for place, action in enumerate(self.open[rank]):
            is_full = action.kind == FORWARD and action.micro_batch not in begun and len(begun) == self.most[rank]
            ahead = action.micro_batch - EMBEDDED
            if action.kind == EMBED and ahead >= 0:
                is_full = Action(FORWARD, self.paths[ahead][0], ahead) not in clock.done
            if not is_full and clock.can_start(action):
                del self.open[rank][place]
                self._note(rank, action)
                return action
        return None

    def _note(self, rank: int, action: Action) -> None:
        self.num_left -= 1
        self._open(self._opened_by(rank, action))
        if action.kind in SPREAD_KINDS:
            return
        self.begun[rank].add(action.micro_batch)
        if action.kind == self.ends:
            self.left[rank][action.micro_batch] -= 1
            if self.left[rank][action.micro_batch] == 0:
                self.begun[rank].discard(action.micro_batch)

    def _open(self, actions: Iterable[Action]) -> None:
        for action in actions:
            rank = action.chunk if action.kind in SPREAD_KINDS else self.home[action.chunk]
            insort(self.open[rank], action, key=self._urgency)

    def _urgency(self, action: Action) -> tuple[int, int, int, str]:
        return URGENCY[action.kind], action.micro_batch, -self.hops.get(action.visit, 0), action.kind

    def _opened_by(self, rank: int, action: Action) -> Iterator[Action]:
        """The actions that follow one on its micro-batch's way, and the next micro-batch's where one begins."""
        kind, visit, number = action.kind, action.visit, action.micro_batch
        path, hop = self.paths[number], self.hops.get(visit, 0)
        if kind == FORWARD:
            if not hop:
                yield from islice(self.first[rank], 1)
            if hop + 1 < len(path):
                yield Action(FORWARD, path[hop + 1], number)
            else:
                yield Action(self.backward, *visit)
                yield from (Action(SCORE, other, number) for other in self.spread)
        elif kind == self.backward:
            if hop:
                yield Action(self.backward, path[hop - 1], number)
            else:
                yield from (Action(SCATTER, other, number) for other in self.spread)
            if kind != self.ends:
                yield Action(self.ends, *visit)
        elif kind == EMBED and number + 1 < len(self.paths):
            yield Action(EMBED, rank, number + 1)
        elif kind in (SCORE, AGREE):
            yield Action(AGREE if kind == SCORE else TRAIN, *visit)


def _count(numbers: Iterable[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for number in numbers:
        counts[number] = counts.get(number, 0) + 1
    return counts
