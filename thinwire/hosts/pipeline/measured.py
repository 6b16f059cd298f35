"""Measures what a step of a pipeline cost on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch

from thinwire.collectives import Communicator
from thinwire.hosts.pipeline.runner import Runner
from thinwire.methods.pipeline import Costs
from thinwire.methods.pipeline.costs import SpreadCosts
from thinwire.methods.pipeline.plan import BACKWARD, FORWARD, INPUT, SPREAD_KINDS, WEIGHT, Action


def measured(runner: Runner, comm: Communicator, micro_batches: Sequence[Any]) -> Costs:
    """The costs of the last `run` with these micro-batches: medians over them. A collective, equal on all ranks.

    comm: over the pipeline's ranks, in order. Seconds are a rank's own. They include packing of messages, but not
    waiting for them. A whole backward counts as two equal halves. Activations count as 1 each. A chunk that no
    micro-batch visited is as slow as the mean of the others, and sends as much as the one that sends most.
    """
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for action, begun_s, ended_s in runner.spans:
        seconds[action.kind, action.chunk].append(ended_s - begun_s)
    own = torch.zeros(len(runner.plan.home), 3, dtype=torch.float64)
    spread = torch.tensor([median(seconds.get((kind, comm.rank), [0.0])) for kind in SPREAD_KINDS], dtype=torch.float64)
    for (kind, chunk), found in seconds.items():
        if kind == BACKWARD:
            own[chunk, 1:] = median(found) / 2
        elif kind in (FORWARD, INPUT, WEIGHT):
            own[chunk, (FORWARD, INPUT, WEIGHT).index(kind)] = median(found)
    # Each chunk has one home: of the others' rows all but one are zeros.
    forward_s, input_s, weight_s = comm.wait(comm.all_gather_exact(own)).sum(0).T.tolist()
    forward_bytes, backward_bytes = (
        tuple(runner.border_bytes(direction, chunk, micro_batches) for chunk in range(len(runner.plan.home)))
        for direction in ("forward", "backward")
    )
    visited = {chunk for path in runner.plan.paths for chunk in path}
    forward_s, input_s, weight_s = (_filled(seconds, visited, mean) for seconds in (forward_s, input_s, weight_s))
    forward_bytes, backward_bytes = (_filled(sizes, visited, max) for sizes in (forward_bytes, backward_bytes))
    even = Costs.even(len(runner.plan.home))
    if runner.plan.barriers:
        # All wait for the slowest.
        slowest = comm.wait(comm.all_gather_exact(spread)).amax(0).tolist()
        sizes = runner.shared_bytes(micro_batches)
        even = replace(even, spread=SpreadCosts(dict(zip(SPREAD_KINDS, slowest, strict=True)), sizes))
    return replace(
        even, forward_s=tuple(forward_s), input_s=tuple(input_s), weight_s=tuple(weight_s),
        forward_bytes=forward_bytes, backward_bytes=backward_bytes,
    )  # fmt: skip


def _filled(
    values: Sequence[float], known: Collection[int], of: Callable[[Sequence[float]], float]
) -> tuple[float, ...]:
    """The values, with `of` the known ones in place of the others."""
    stand_in = of([value for number, value in enumerate(values) if number in known])
    return tuple(value if number in known else stand_in for number, value in enumerate(values))


def spans_of_all(runner: Runner, comm: Communicator) -> list[list[tuple[Action, float, float]]]:
    """What each rank did in the last `run`, and when: (action, start, end). A collective, equal on all ranks.

    Seconds are counted from the start of the step on the rank itself: clocks of machines differ by more.
    """
    orders = runner.plan.orders
    own = torch.zeros(max(map(len, orders)), 2, dtype=torch.float64)
    own[: len(runner.spans)] = torch.tensor([times for _, *times in runner.spans], dtype=torch.float64).view(-1, 2)
    told = comm.wait(comm.all_gather_exact(own)).view(len(orders), -1, 2).tolist()
    return [
        [(action, begin, end) for action, (begin, end) in zip(order, times, strict=False)]
        for order, times in zip(orders, told, strict=True)
    ]
