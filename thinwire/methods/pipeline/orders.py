"""The orders that need no measurement, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from thinwire import _compat
from thinwire.errors import ConfigError, nearest
from thinwire.methods.pipeline.plan import (
    AGREE,
    BACKWARD,
    EMBED,
    FORWARD,
    SCATTER,
    SCORE,
    TRAIN,
    Plan,
    ordered,
    repeated,
    straight,
)
from thinwire.methods.pipeline.v_half import v_half

# How far a search for a number of micro-batches that a schedule takes may go.
NEAREST_WITHIN = 64


def gpipe(num_ranks: int, num_micro_batches: int) -> Plan:
    """All forwards, then all backwards: idle for p - 1 of M + p - 1 turns, with M micro-batches in flight.

    Source: Huang et al., "GPipe" (NeurIPS 2019), section 2.2.
    """
    numbers = range(num_micro_batches)
    orders = tuple(
        ordered([(FORWARD, rank, i) for i in numbers] + [(BACKWARD, rank, i) for i in numbers])
        for rank in range(num_ranks)
    )
    return Plan(tuple(range(num_ranks)), straight(num_ranks, num_micro_batches), orders)


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Plan:
    """Each rank goes p - r - 1 forwards ahead, then does one forward and one backward in turn.

    As idle as GPipe, with p - r micro-batches in flight on rank r. Any number of micro-batches.
    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (SC 2021), section 2.2.
    """
    orders = []
    for rank in range(num_ranks):
        ahead = min(num_micro_batches, num_ranks - rank - 1)
        order = [(FORWARD, rank, i) for i in range(ahead)]
        for number in range(num_micro_batches):
            if ahead + number < num_micro_batches:
                order.append((FORWARD, rank, ahead + number))
            order.append((BACKWARD, rank, number))
        orders.append(ordered(order))
    return Plan(tuple(range(num_ranks)), straight(num_ranks, num_micro_batches), tuple(orders))


# Units of time of a turn of `spread_one_f_one_b`: a forward takes 2, a backward 4, S and T 1 each.
TURN, HOP = 8, 4


def spread_one_f_one_b(num_ranks: int, num_micro_batches: int, barriers: int) -> Plan:
    """1F1B with head and embedding spread over all ranks: in each turn one forward, one backward, one S and one T.

    At most p - r + barriers micro-batches are in flight on rank r: each barrier puts one turn between the last forward
    of a micro-batch and its first backward. Embeddings are made one turn ahead, and get their gradients one turn later.
    Any number of micro-batches. Steps from rank to rank of half a turn, forward and back, leave two kinds of ranks,
    which alternate; with the times below none does two things at once.
    Source: "Balancing Pipeline Parallelism with Vocabulary Parallelism" (MLSys 2025), section 5.
    """
    starts = []
    for rank in range(num_ranks):
        # Of micro-batch 0, from the end of its last forward on.
        away = HOP * (num_ranks - 1 - rank)
        first, last = -2 - HOP * (num_ranks - 1), TURN * barriers + 1 + HOP * num_ranks
        passes = (
            ((SCORE, 0.0), (AGREE, 4.9), (TRAIN, 5.0))
            if away % TURN == 0
            else ((SCORE, 1.0), (AGREE, 3.9), (TRAIN, 4.0))
        )
        starts.append(
            {(FORWARD, rank): -2.0 - away, (BACKWARD, rank): TURN * barriers + 1.0 + away}
            | {(EMBED, rank): first - TURN - 0.1, (SCATTER, rank): last + TURN - 0.1}
            | {(kind, rank): start for kind, start in passes}
        )  # fmt: skip
    home, paths = tuple(range(num_ranks)), straight(num_ranks, num_micro_batches)
    return Plan(home, paths, repeated(starts, TURN, num_micro_batches), barriers)


@cache
def from_torch(schedule: str, chunks_per_rank: int, num_ranks: int, num_micro_batches: int) -> Plan:
    """The compute actions of one of torch.distributed.pipelining's schedules.

    schedule: torch's name. Raises ConfigError for a number of micro-batches that it does not take.
    """
    try:
        tables = _compat.pipeline_table(schedule, num_ranks, num_micro_batches, chunks_per_rank)
    except ValueError as error:
        near = _nearest_that_works(schedule, chunks_per_rank, num_ranks, num_micro_batches)
        advice = f"; nearest that works: {near}" if near else ""
        rule = _rule(schedule, chunks_per_rank, num_ranks, num_micro_batches) or str(error)
        raise ConfigError(f"{num_micro_batches} micro-batches on {num_ranks} ranks: {rule}{advice}") from None
    home = {chunk: rank for rank, table in enumerate(tables) for _, chunk, _ in table}
    orders = tuple(ordered(table) for table in tables)
    paths = straight(len(home), num_micro_batches)
    return Plan(tuple(home.get(chunk, 0) for chunk in range(len(home))), paths, orders)


def _rule(schedule: str, chunks_per_rank: int, num_ranks: int, num_micro_batches: int) -> str:
    """What a schedule asks of a number of micro-batches, in words; empty: torch says it."""
    chunks, rounds = chunks_per_rank * num_ranks, max(1, num_micro_batches // num_ranks)
    if schedule == "DualPipeV" and num_micro_batches < chunks:
        return f"dualpipe-v needs at least as many as chunks of layers, {chunks_per_rank} on each rank, so {chunks}"
    if num_micro_batches % rounds:
        return f"interleaved orders take a multiple of their rounds, {num_micro_batches} // {num_ranks} = {rounds}"
    return ""


def _nearest_that_works(schedule: str, chunks_per_rank: int, num_ranks: int, num_micro_batches: int) -> int | None:
    for distance in range(1, NEAREST_WITHIN):
        for number in (num_micro_batches + distance, num_micro_batches - distance):
            if number >= 1 and _is_taken(schedule, chunks_per_rank, num_ranks, number):
                return number
    return None


def _is_taken(schedule: str, chunks_per_rank: int, num_ranks: int, num_micro_batches: int) -> bool:
    try:
        _compat.pipeline_table(schedule, num_ranks, num_micro_batches, chunks_per_rank)
    except ValueError:
        return False
    return True


def _only_one(order: Callable[[int, int], Plan], chunks_per_rank: int, num_ranks: int, num_micro_batches: int) -> Plan:
    return order(num_ranks, num_micro_batches)


# By name: how many chunks a rank may have, and the plan of (chunks per rank, ranks, micro-batches).
ORDERS: dict[str, tuple[range, Callable[[int, int, int], Plan]]] = {
    "gpipe": (range(1, 2), partial(_only_one, gpipe)),
    "1f1b": (range(1, 2), partial(_only_one, one_f_one_b)),
    "v-half": (range(2, 3), partial(_only_one, v_half)),
    "interleaved": (range(2, 1 << 16), partial(from_torch, "Interleaved1F1B")),
    "looped-bfs": (range(2, 1 << 16), partial(from_torch, "LoopedBFS")),
    "interleaved-zb": (range(2, 1 << 16), partial(from_torch, "InterleavedZeroBubble")),
    "zbv": (range(2, 3), partial(from_torch, "ZBVZeroBubble")),
    "dualpipe-v": (range(2, 3), partial(from_torch, "DualPipeV")),
}
# Those in which head and embedding may be spread: the plan of (ranks, micro-batches, barriers).
SPREAD_ORDERS: dict[str, Callable[[int, int, int], Plan]] = {"1f1b": spread_one_f_one_b, "v-half": v_half}


def plan(order: str, num_ranks: int, num_micro_batches: int, chunks_per_rank: int | None = None) -> Plan:
    """The plan of one of ORDERS.

    chunks_per_rank: None: the fewest that the order takes. Raises ConfigError for another name, and for numbers that
    the order can't take.
    """
    if order not in ORDERS:
        raise ConfigError(f"no order is called {order!r}{nearest(order, ORDERS)}")
    if num_ranks < 1 or num_micro_batches < 1:
        raise ConfigError(f"{num_ranks} ranks and {num_micro_batches} micro-batches: both must be at least 1")
    allowed, make = ORDERS[order]
    chunks = allowed.start if chunks_per_rank is None else chunks_per_rank
    if chunks not in allowed:
        best = min(max(chunks, allowed.start), allowed.stop - 1)
        raise ConfigError(f"{order} with {chunks} chunks on each rank: nearest that it takes: {best}")
    return make(chunks, num_ranks, num_micro_batches)
