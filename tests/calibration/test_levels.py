"""Lines of the links, by a clock that only the links move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workers import run_workers
from thinwire.calibration import levels
from thinwire.collectives import Communicator
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.rounds import Rounds
from thinwire.cost import Links
from thinwire.cost.links import INTER, INTRA, OPERATIONS, REDUCE

# Seconds that a round is late, and bytes that pass in one.
DELAYS, RATES = {"intra": 0.002, "inter": 0.03}, {"intra": 4e6, "inter": 1e6}


def measured(rank: int, world_size: int) -> Links:
    """Links that are as slow as stated: the more, the slower the rank."""
    now, finish = [0.0], Exchange.finish

    def late(exchange: Any) -> Rounds[None]:
        received = sum(buffer.numel() for buffer in exchange._buffers.values())
        if received:
            now[0] += (1 + 0.01 * rank) * (DELAYS[exchange.level] + received / RATES[exchange.level])
        yield from finish(exchange)

    Exchange.finish = late  # type: ignore[method-assign, assignment]
    levels.LARGEST = 1 << 14
    levels.perf_counter, levels.REST_S = lambda: now[0], 0.0
    comm = Communicator(local_size=2)
    product, kinds = levels.swiglu, set[torch.dtype]()

    def noted(*given: Any) -> torch.Tensor:
        made = product(*given)
        kinds.add(made.dtype)
        return made

    levels.swiglu = noted  # type: ignore[assignment]
    found = levels.measure_links(comm, (2, 16, 8), dtype="bf16")
    comm.close()
    assert kinds == {torch.bfloat16}
    return found


def test_latency_and_rate_of_each_collective_on_each_level() -> None:
    first, *others = run_workers(measured, 4, local_size=2)
    assert all(each == first for each in others)
    assert set(first.lines) == {(operation, level) for operation in OPERATIONS for level in (INTRA, INTER)}
    for (operation, level), line in first.lines.items():
        # A reduced sum is scattered, and gathered.
        rounds = 2 if operation == REDUCE else 1
        assert line.alpha_s == pytest.approx(rounds * DELAYS[level], rel=0.2), (operation, level)
        assert line.beta_s == pytest.approx(1 / RATES[level], rel=0.05), (operation, level)
    assert first.product.beta_s > 0 and first.product.alpha_s >= 0
    # Of all ranks at once: one round inside a node and between nodes, whatever is under way beside it.
    assert first.message_s == pytest.approx(sum(DELAYS.values()), rel=0.2)
