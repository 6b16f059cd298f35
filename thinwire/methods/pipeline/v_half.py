"""V-Half: two chunks a rank in the shape of a V, and half of 1F1B's activations."""

from __future__ import annotations

from itertools import product

from thinwire.methods.pipeline.plan import (
    AGREE,
    EMBED,
    FORWARD,
    INPUT,
    SCATTER,
    SCORE,
    TRAIN,
    WEIGHT,
    Plan,
    repeated,
    straight,
)

# A rank's three passes of its two chunks, each of one unit of time, come again for each micro-batch; a spread head has
# two passes more.
PASSES, SPREAD_PASSES = 6, 8
# Units from one rank to the next: the first chunk's forward, down the ranks; the second's, up; and their backwards. The
# sum divides the passes, or half of them does, so that steps add up alike on all ranks.
STEPS = {PASSES: (2, 1), SPREAD_PASSES: (2, 2)}
Starts = dict[tuple[str, int], float]


def v_half(num_ranks: int, num_micro_batches: int, barriers: int = 0) -> Plan:
    """Rank r holds chunks r and 2p - 1 - r; one block of passes is repeated every six units.

    With the steps between ranks 2, 1, 2, 1 (forward down and up, backward down and up) the two passes of any rank
    stay in different units of the six, whatever p is, and an activation of the first chunk of rank 0 lives for about
    6 p units, so that p + 3 chunk-activations at most are held, where 1F1B holds 2 p of this size.

    barriers: see Plan. A spread head and embedding have two units of the block, which are eight then, with steps of 2
    each, and each barrier puts one block between a micro-batch's last forward and its first backward.
    Source: Qi, Wan, Amar and Lin, "Pipeline Parallelism with Controllable Memory" (NeurIPS 2024), section 3.
    """
    interval = SPREAD_PASSES if barriers else PASSES
    home = (*range(num_ranks), *reversed(range(num_ranks)))
    orders = repeated(_block(num_ranks, interval, barriers), interval, num_micro_batches)
    return Plan(home, straight(2 * num_ranks, num_micro_batches), orders, barriers)


def _block(num_ranks: int, interval: int, barriers: int) -> list[Starts]:
    """When each rank starts each pass of micro-batch 0: the turns of the V, as early as possible without overlap."""
    last, (down, up) = num_ranks - 1, STEPS[interval]
    for turns in sorted(product(range(1, interval + 1), repeat=3), key=sum):
        ranks: list[Starts] = []
        for rank in range(num_ranks):
            first, second = rank, 2 * num_ranks - 1 - rank
            turn = last * down
            starts: Starts = {(FORWARD, first): rank * down, (FORWARD, second): turn + turns[0] + (last - rank) * up}
            turn += turns[0] + last * up + interval * barriers
            starts[INPUT, second] = turn + turns[1] + rank * down
            turn += turns[1] + last * down
            starts[INPUT, first] = turn + turns[2] + (last - rank) * up
            ranks.append(starts)
        if all(len({start % interval for start in starts.values()}) == len(starts) for starts in ranks):
            if barriers:
                _add_spread(ranks, interval)
            for rank, starts in enumerate(ranks):
                for chunk in (2 * num_ranks - 1 - rank, rank):
                    starts[WEIGHT, chunk] = _free(starts, starts[INPUT, chunk] + 1, interval)
            return ranks
    raise AssertionError("some turns always fit: the steps between ranks add up to multiples of three, or of four")


def _add_spread(ranks: list[Starts], interval: int) -> None:
    """Add the passes of head and embedding: S as early as possible, T after all S."""
    last_chunk = 2 * len(ranks) - 1
    for rank, starts in enumerate(ranks):
        starts[SCORE, rank] = _free(starts, ranks[0][FORWARD, last_chunk] + 1, interval)
    done = max(starts[SCORE, rank] for rank, starts in enumerate(ranks)) + 1
    begun, ended = ranks[0][FORWARD, 0] - interval, ranks[0][INPUT, 0] + 1 + interval
    for rank, starts in enumerate(ranks):
        starts[TRAIN, rank] = _free(starts, done, interval)
        # These take no unit of their own.
        starts |= {(AGREE, rank): done - 0.1, (EMBED, rank): begun - 0.1, (SCATTER, rank): ended - 0.1}


def _free(starts: Starts, start: float, interval: int) -> float:
    """The first unit from `start` on in which none of a rank's passes runs."""
    taken = {each % interval for each in starts.values()}
    while start % interval in taken:
        start += 1
    return start
