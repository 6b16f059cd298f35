"""V-Half: two chunks a rank in the shape of a V, and half of 1F1B's activations."""

from __future__ import annotations

from itertools import product

from thinwire.methods.pipeline.plan import FORWARD, INPUT, WEIGHT, Plan, ordered, straight

# A rank's three passes of its two chunks, each of one unit of time, come again for each micro-batch.
INTERVAL = 6
# Units from one rank to the next: the first chunk's forward, down the ranks; the second's, up; and their backwards.
DOWN, UP = 2, 1


def v_half(num_ranks: int, num_micro_batches: int) -> Plan:
    """Rank r holds chunks r and 2p - 1 - r; one block of passes is repeated every six units.

    With the steps between ranks 2, 1, 2, 1 (forward down and up, backward down and up) the two passes of any rank
    stay in different units of the six, whatever p is, and an activation of the first chunk of rank 0 lives for about
    6 p units, so that p + 3 chunk-activations at most are held, where 1F1B holds 2 p of this size.
    Source: Qi, Wan, Amar and Lin, "Pipeline Parallelism with Controllable Memory" (NeurIPS 2024), section 3.
    """
    starts = _block(num_ranks)
    orders = []
    for rank in range(num_ranks):
        first, second = rank, 2 * num_ranks - 1 - rank
        chunks = {"F0": (FORWARD, first), "F1": (FORWARD, second), "I1": (INPUT, second), "I0": (INPUT, first)}
        chunks |= {"W1": (WEIGHT, second), "W0": (WEIGHT, first)}
        timed = sorted(
            (INTERVAL * number + start, (*chunks[name], number))
            for name, start in starts[rank].items()
            for number in range(num_micro_batches)
        )
        orders.append(ordered(action for _, action in timed))
    home = (*range(num_ranks), *reversed(range(num_ranks)))
    return Plan(home, straight(2 * num_ranks, num_micro_batches), tuple(orders))


def _block(num_ranks: int) -> list[dict[str, int]]:
    """When each rank starts each pass of micro-batch 0: the turns of the V as early as no unit is taken twice."""
    last = num_ranks - 1
    for turns in sorted(product(range(1, INTERVAL + 1), repeat=3), key=sum):
        ranks = []
        for rank in range(num_ranks):
            turn = last * DOWN
            starts = {"F0": rank * DOWN, "F1": turn + turns[0] + (last - rank) * UP}
            turn += turns[0] + last * UP
            starts["I1"] = turn + turns[1] + rank * DOWN
            turn += turns[1] + last * DOWN
            starts["I0"] = turn + turns[2] + (last - rank) * UP
            ranks.append(starts)
        if all(len({start % INTERVAL for start in starts.values()}) == len(starts) for starts in ranks):
            return [_with_weights(starts) for starts in ranks]
    raise AssertionError("some turns always fit: the steps between ranks add up to multiples of three")


def _with_weights(starts: dict[str, int]) -> dict[str, int]:
    """Each chunk's gradients of weights in the first free unit after its backward."""
    taken = {start % INTERVAL for start in starts.values()}
    for name, after in (("W1", "I1"), ("W0", "I0")):
        start = starts[after] + 1
        while start % INTERVAL in taken:
            start += 1
        taken.add(start % INTERVAL)
        starts = {**starts, name: start}
    return starts
