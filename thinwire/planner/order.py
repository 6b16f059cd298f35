"""Finds the order of ranks by simulated annealing over the order of nodes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache

START, COOLING = 1.0, 0.999
# Of one search; each begins with the best order of the one before.
NUM_MOVES, NUM_SEARCHES = 3000, 3
# Orders that are all tried.
FEW = 720
RankOrder = tuple[int, ...]


def annealed(
    cost: Callable[[RankOrder], float],
    start: Sequence[int],
    *,
    seed: int = 0,
    num_moves: int = NUM_MOVES,
    fixed: int = 1,
) -> tuple[RankOrder, float]:
    """The order with the lowest cost that annealing finds, never worse than `start`; and its cost.

    A move reverses a stretch, moves one element, swaps two, moves a stretch, or moves a stretch reversed. A worse order
    is accepted with probability exp(-d' / T), where d' is the difference divided by the power of ten above it, and T
    falls by 0.999 with each move. At the end the best order is bettered by single moves as long as one does.

    fixed: number of places at the start that stay as they are. The same seed gives the same order.
    Source: "Pipette" (DATE 2024), section V.
    """
    rng, best = random.Random(seed), tuple(start)
    if math.factorial(len(best) - fixed) <= FEW:
        orders = ((*best[:fixed], *rest) for rest in itertools.permutations(best[fixed:]))
        best = min(orders, key=cost)
        return best, cost(best)
    known = cache(cost)
    for _ in range(NUM_SEARCHES):
        order, temperature = best, START
        for _ in range(num_moves):
            tried = (*order[:fixed], *_moved(order[fixed:], rng))
            # Two infinite costs have no difference.
            is_worse = known(tried) > known(order)
            if not is_worse or rng.random() < math.exp(-_normalised(known(tried) - known(order)) / temperature):
                order = tried
                best = min(best, order, key=known)
            temperature *= COOLING
    while known(near := min(_neighbours(best, fixed), key=known)) < known(best):
        best = near
    return best, known(best)


def _neighbours(order: RankOrder, fixed: int) -> Iterator[RankOrder]:
    """All orders that are one reversed stretch, one moved element, or one swap away."""
    for first, last in itertools.combinations(range(fixed, len(order)), 2):
        before, (one, *between), behind = order[:first], order[first:last], order[last:]
        other, *after = behind
        yield (*before, other, *between[::-1], one, *after)
        yield (*before, other, *between, one, *after)
        yield (*before, *between, other, one, *after)
        yield (*before, other, one, *between, *after)


def _normalised(difference: float) -> float:
    """The value divided by the power of ten above it: from 0.1 to 1, whatever the unit."""
    if difference == math.inf:
        return math.inf
    return difference / 10 ** (math.floor(math.log10(difference)) + 1)


def _moved(order: RankOrder, rng: random.Random) -> list[int]:
    moved = list(order)
    first, last = sorted(rng.sample(range(len(moved) + 1), 2))
    move = rng.randrange(5)
    if move == 0:
        moved[first:last] = moved[first:last][::-1]
    elif move == 1:
        moved.insert(rng.randrange(len(moved)), moved.pop(rng.randrange(len(moved))))
    elif move == 2:
        a, b = rng.sample(range(len(moved)), 2)
        moved[a], moved[b] = moved[b], moved[a]
    else:
        stretch, rest = moved[first:last], moved[:first] + moved[last:]
        at = rng.randrange(len(rest) + 1)
        moved = rest[:at] + (stretch if move == 3 else stretch[::-1]) + rest[at:]
    return moved
