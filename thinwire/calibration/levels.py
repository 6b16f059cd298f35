"""Measures the seconds of collectives on each level of the links, and of experts' products, on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from thinwire.calibration.growth import REST_S, bucket_of, grown
from thinwire.calibration.links import NUM_PROBES
from thinwire.calibration.work import PRODUCT_S, seconds_of
from thinwire.codecs import Identity
from thinwire.collectives import Communicator
from thinwire.collectives.all_to_all import all_to_all_rows
from thinwire.collectives.communicator import NUM_SLOTS
from thinwire.collectives.gather import all_gather_exact
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import all_reduce, reduce_scatter
from thinwire.collectives.rounds import Rounds
from thinwire.cost.links import ALL_TO_ALL, GATHER, INTER, INTRA, OPERATIONS, REDUCE, SCATTER, Line, Links
from thinwire.device import Device
from thinwire.models.experts import swiglu

# Messages that can be under way beside one: more would wait for their turn, and for what a link takes.
NUM_MESSAGES, NUM_TURNS = NUM_SLOTS - 1, 5
# A burst, of the seconds that a message takes beside it, that the clock alone would not show.
NOISE = 0.1
# fp32 elements for each rank, at most.
LARGEST = 1 << 20
# Experts and their sizes [experts, inner, hidden], and the rows of a short and a long product.
EXPERTS, NUM_ROWS = (2, 512, 256), (64, 512)
JOBS: dict[str, Callable[[Link, Tensor, list[int]], Rounds[Tensor]]] = {
    ALL_TO_ALL: lambda link, x, counts: all_to_all_rows(link, x.view(-1, 1), counts, counts),
    GATHER: lambda link, x, counts: all_gather_exact(link, x[: counts[0]]),
    SCATTER: lambda link, x, _: reduce_scatter(link, x, Identity(), Identity()),
    REDUCE: lambda link, x, _: all_reduce(link, x, Identity(), Identity(), Identity()),
}


def measure_links(
    comm: Communicator, experts: tuple[int, int, int] = EXPERTS, operations: Sequence[str] = OPERATIONS, *,
    device: Device | None = None, dtype: str = "fp32",
) -> Links:  # fmt: skip
    """Measure alpha + beta n of each collective on each level, and of the experts' product. A collective, equal on all.

    On a level all groups send at once: the ranks of each node, then those at the same place of all nodes. alpha is the
    time of a few bytes; what one more such message of all ranks adds, while others are under way, is what it costs the
    processors. beta is the slope between n bytes and 2 n, of which n takes PROBE_S, so that what a token bucket lets
    pass at once does not count; without such a bucket, both are fitted to the three by least squares. Of two probes the
    faster counts.

    Args:
        experts: (experts, inner, hidden), the shape of the product that is timed.
        operations: the collectives that are measured.
        device: where the product is computed; by default the CPU.
        dtype: in which it is computed, from weights in fp32: "fp32" or "bf16".

    Source: Pan et al., "FSMoE" (ASPLOS 2025), section 4.
    """
    grid, rank = comm.topology, comm.rank
    lines: dict[tuple[str, str], Line] = {}
    for level, members in (
        (INTRA, [grid.rank(grid.node(rank), place) for place in range(grid.local_size)]),
        (INTER, [grid.rank(node, grid.local_rank(rank)) for node in range(grid.num_nodes)]),
    ):
        if len(members) > 1:
            # All operations move as much at once as an all-to-all does in PROBE_S.
            num = _elements(comm, members)
            lines |= {(operation, level): _line(comm, members, operation, num) for operation in operations}
    return Links(lines, _product(comm, experts, device or Device(), dtype), _message_s(comm))


def _elements(comm: Communicator, members: Sequence[int]) -> int:
    """fp32 elements for each rank of an all-to-all that is long enough to tell a rate."""

    def probe(sizes: dict[str, int]) -> dict[str, float]:
        return {name: _seconds(comm, members, ALL_TO_ALL, num_bytes // 4) for name, num_bytes in sizes.items()}

    return grown(probe, probe({ALL_TO_ALL: 4}), 4 * LARGEST)[0][ALL_TO_ALL] // 4


def _line(comm: Communicator, members: Sequence[int], operation: str, num: int) -> Line:
    """Measure one collective among `members`. num: elements for each rank."""
    short_s, once_s, twice_s = (
        min(_seconds(comm, members, operation, each) for _ in range(NUM_PROBES)) for each in (1, num, 2 * num)
    )
    # A reduced sum comes back, too.
    each = 4 * (len(members) - 1) * (2 if operation == REDUCE else 1)
    rate, burst_s = bucket_of(num * each, once_s, twice_s, short_s)
    if burst_s > NOISE * once_s:
        return Line(short_s, 1 / rate)
    return Line.fitted([each, num * each, 2 * num * each], [short_s, once_s, twice_s])


def _message_s(comm: Communicator) -> float:
    """Seconds that one more small all-to-all adds among all ranks while others are under way."""
    if comm.world_size == 1:
        return 0.0
    x, counts = torch.zeros(comm.world_size), [1] * comm.world_size

    def several(num: int) -> float:
        comm.barrier()
        start = perf_counter()
        jobs = [comm.submit(lambda link: JOBS[ALL_TO_ALL](link, x, counts), urgent=True) for _ in range(num)]
        for job in jobs:
            comm.wait(job)
        return _slowest(comm, perf_counter() - start)[0]

    # The first turn of an urgent lane starts its threads.
    several(1 + NUM_MESSAGES)
    few_s, many_s = (min(several(num) for _ in range(NUM_TURNS)) for num in (1, 1 + NUM_MESSAGES))
    return max(0.0, many_s - few_s) / NUM_MESSAGES


def _seconds(comm: Communicator, members: Sequence[int], operation: str, num: int) -> float:
    """Seconds that a collective takes on the slowest rank."""
    x, counts = torch.zeros(num * len(members)), [num] * len(members)
    time.sleep(REST_S)
    comm.barrier()
    start = perf_counter()
    comm.wait(comm.submit(lambda link: JOBS[operation](link.subgroup(members), x, counts)))
    return _slowest(comm, perf_counter() - start)[0]


def _slowest(comm: Communicator, *seconds: float) -> list[float]:
    return comm.wait(comm.all_gather_exact(torch.tensor(seconds, dtype=torch.float64))).amax(0).tolist()


def _product(comm: Communicator, experts: tuple[int, int, int], device: Device, dtype: str) -> Line:
    """Measure a forward of the experts on all ranks at once; n counts floating-point operations."""
    num, inner, hidden = experts
    weights = [torch.ones(experts, device=device.torch) for _ in range(3)]

    def forward(num_rows: int) -> None:
        with torch.no_grad(), device.autocast(dtype):
            rows, counts = torch.ones(num_rows, hidden), torch.tensor([num_rows // num] * num)
            swiglu(rows.to(device.torch), counts.to(device.torch), weights)
        device.synchronize()

    comm.barrier()
    short_s, long_s = _slowest(comm, *(seconds_of(partial(forward, n), PRODUCT_S) for n in NUM_ROWS))
    short, long = (6 * inner * hidden * (rows // num * num) for rows in NUM_ROWS)
    # Noise must not make an operation free, nor a call.
    beta_s = max(long_s - short_s, long_s / 2) / (long - short)
    return Line(max(0.0, long_s - beta_s * long), beta_s)
