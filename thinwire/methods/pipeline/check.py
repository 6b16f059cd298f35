"""Checks whether a plan can run, and how much it holds at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.methods.pipeline.plan import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    RECOMPUTE,
    SPREAD_KINDS,
    WEIGHT,
    Action,
    Plan,
    PlanMessage,
    Visit,
)


@dataclass(frozen=True)
class Limits:
    """What ranks can hold.

    in_flight: most micro-batches on a rank whose forward is done and whose backward is not; None: any number; one
    number for all ranks, or one for each.
    """

    in_flight: int | tuple[int, ...] | None = None

    def of(self, rank: int) -> int | None:
        """The limit of one rank."""
        return self.in_flight[rank] if isinstance(self.in_flight, tuple) else self.in_flight


def check(plan: Plan, limits: Limits | None = None) -> None:
    """Raise ConfigError, with everything that is wrong, for a plan that can't run.

    Each visit has one forward in the order of its chunk's rank, and one backward, whole or in halves; a recomputation
    comes between the two. If embedding and head are spread over all ranks, each rank does its part for each micro-batch
    once. Orders and paths have no cycle, so no rank waits for ever. What is held at once is within the limits.
    """
    problems = [*_of_paths(plan)]
    problems = problems or [*_of_orders(plan)]
    problems = problems or [*_of_waiting(plan)]
    problems = problems or [*_of_limits(plan, limits or Limits())]
    if problems:
        raise ConfigError(*problems)


def in_flight(plan: Plan) -> tuple[int, ...]:
    """For each rank, the most visits at once whose forward is done and whose whole backward is not."""
    return tuple(_peak(order) for order in plan.orders)


def _peak(order: Sequence[Action]) -> int:
    held = peak = 0
    for action in order:
        held += action.kind == FORWARD
        peak = max(peak, held)
        held -= action.kind in (BACKWARD, WEIGHT)
    return peak


def _of_paths(plan: Plan) -> Iterator[str]:
    for chunk, home in enumerate(plan.home):
        if not 0 <= home < plan.num_ranks:
            yield f"chunk {chunk} lives on rank {home}: ranks are 0 to {plan.num_ranks - 1}"
    for rank in range(plan.num_ranks):
        if not plan.chunks_of(rank):
            yield f"rank {rank} holds no chunk: give it one, or plan for {plan.num_ranks - 1} ranks"
    if not plan.paths:
        yield "a plan needs at least 1 micro-batch"
    for micro_batch, path in enumerate(plan.paths):
        strangers = sorted(set(path) - set(range(len(plan.home))))
        if not path:
            yield f"micro-batch {micro_batch} visits no chunk: its path needs at least one"
        elif strangers:
            known = f"0 to {len(plan.home) - 1}"
            yield f"micro-batch {micro_batch} visits chunk {strangers[0]}, which does not exist: chunks are {known}"
        elif len(set(path)) < len(path):
            twice = next(chunk for chunk, times in Counter(path).items() if times > 1)
            yield f"micro-batch {micro_batch} visits chunk {twice} more than once: a path visits a chunk at most once"
        for source, target in plan.bridges:
            if not (source in path and target in path[path.index(source) + 1 :]):
                yield f"micro-batch {micro_batch} does not visit chunk {source} and later {target}: a bridge needs both"
    if plan.bridges and any(action.kind == INPUT for order in plan.orders for action in order):
        yield "bridges between chunks need whole backwards: nearest: an order without halves, such as 1f1b or fitted"
    if len(set(plan.bridges)) < len(plan.bridges):
        yield "two bridges between the same chunks: one carries what a chunk gives the other"


def _of_orders(plan: Plan) -> Iterator[str]:
    found: Counter[Action] = Counter()
    for rank, order in enumerate(plan.orders):
        for action in order:
            found[action] += 1
            if plan.barriers and action.kind in SPREAD_KINDS:
                if action.chunk != rank or not 0 <= action.micro_batch < plan.num_micro_batches:
                    yield f"rank {rank}: {action}: its rows are {rank}, micro-batches 0 to {plan.num_micro_batches - 1}"
            elif action.kind not in KINDS:
                known = (*KINDS, *(SPREAD_KINDS if plan.barriers else ()))
                yield f"rank {rank}: {action} is no action: kinds are {', '.join(known)}"
            elif action.visit not in plan.routes.hop:
                yield f"rank {rank}: {action}: micro-batch {action.micro_batch} does not visit chunk {action.chunk}"
            elif plan.home[action.chunk] != rank:
                home = plan.home[action.chunk]
                yield f"rank {rank}: {action} belongs to rank {home}, where chunk {action.chunk} lives"
    repeated = [(action, times) for action, times in found.items() if times > 1]
    yield from (f"{action} stands {times} times in the orders: once is right" for action, times in repeated)
    for visit in plan.routes.hop:
        yield from _of_visit(visit, {kind for kind in KINDS if Action(kind, *visit) in found}, plan.home[visit.chunk])
    for rank in range(plan.num_ranks if plan.barriers else 0):
        for number in range(plan.num_micro_batches):
            missing = [kind for kind in SPREAD_KINDS if Action(kind, rank, number) not in found]
            if missing:
                yield f"rank {rank}: micro-batch {number} has no {' and no '.join(missing)}"


def _of_visit(visit: Visit, kinds: set[str], home: int) -> Iterator[str]:
    where = f"micro-batch {visit.micro_batch} at chunk {visit.chunk} (rank {home})"
    if FORWARD not in kinds:
        yield f"{where} has no forward"
    if kinds - {FORWARD, RECOMPUTE} not in ({BACKWARD}, {INPUT, WEIGHT}):
        has = " and ".join(sorted(kinds - {FORWARD, RECOMPUTE})) or "none"
        yield f"{where} has as its backward {has}: it needs B alone, or both I and W"


def _of_waiting(plan: Plan) -> Iterator[str]:
    """Run the orders without a clock. Yield what each rank waits for if all of them wait."""
    done: set[Action | PlanMessage] = set()
    places = [0] * plan.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(plan.orders):
            while places[rank] < len(order) and all(need in done for need in plan.routes.needs(order[places[rank]])):
                action = order[places[rank]]
                done |= {action, *plan.routes.gives(action)}
                places[rank] += 1
                moved = True
    stuck = [(rank, order[places[rank]]) for rank, order in enumerate(plan.orders) if places[rank] < len(order)]
    for rank, action in stuck:
        missing = next(need for need in plan.routes.needs(action) if need not in done)
        yield f"rank {rank} waits for ever: {action} needs {missing}, which comes later or waits itself"
    for rank, order in enumerate(plan.orders if not stuck else ()):
        yield from (f"rank {rank}: {problem}" for problem in _of_recomputing(order))


def _of_recomputing(order: Sequence[Action]) -> Iterator[str]:
    begun: set[Visit] = set()
    for action in order:
        if action.kind in (BACKWARD, INPUT):
            begun.add(action.visit)
        elif action.kind == RECOMPUTE and action.visit in begun:
            yield f"{action} comes after the backward that it is for"


def _of_limits(plan: Plan, limits: Limits) -> Iterator[str]:
    if isinstance(limits.in_flight, tuple) and len(limits.in_flight) != plan.num_ranks:
        yield f"limits of {len(limits.in_flight)} ranks for a plan of {plan.num_ranks}: give one number, or one a rank"
        return
    for rank, peak in enumerate(in_flight(plan)):
        most = limits.of(rank)
        if most is not None and peak > most:
            yield f"rank {rank} holds {peak} activations at once: at most {most} are allowed"
