"""What was measured is the same on all ranks, and gives the same plan."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.hosts.pipeline import models
from tests.workers import run_workers
from thinwire.collectives import Communicator, Mailbox, Topology
from thinwire.cost import Network
from thinwire.hosts.pipeline import Runner, measured, memory
from thinwire.methods.pipeline import Costs, Plan, cut, fitted, plan, simulate
from thinwire.models import build_model


class Slow(models.Stage):
    """A stage whose forward takes at least so long."""

    seconds = 0.05

    def forward(self, hidden: Tensor | None, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(hidden, micro_batch)


def _measure(rank: int, world_size: int) -> tuple[Costs, Plan, float]:
    batches = models.micro_batches([3] * 4)
    stage = Slow(rank, world_size) if rank == 1 else models.Stage(rank, world_size)
    mailbox = Mailbox(None, Topology(world_size, 1))
    first = plan("1f1b", world_size, 4)
    runner = Runner(first, {rank: stage}, mailbox, models.shape, dtype=torch.float64)
    runner.run(batches)
    comm = Communicator(local_size=1)
    costs = measured(runner, comm, batches)
    fit = fitted(first.home, first.paths, costs, Network.even(world_size, rate=1e6))
    # The same mailbox carries the next plan.
    loss = Runner(fit, {rank: stage}, mailbox, models.shape, dtype=torch.float64).run(batches)
    comm.close()
    mailbox.close()
    return costs, fit, loss.item()


def test_all_ranks_see_the_same_costs_and_make_the_same_plan() -> None:
    told: list[Any] = run_workers(_measure, 3, local_size=1)
    costs, fit, _ = told[0]
    assert all(other[:2] == (costs, fit) for other in told)
    assert costs.forward_s[1] >= Slow.seconds
    assert all(seconds > 0 for seconds in (*costs.forward_s, *costs.input_s, *costs.weight_s))
    assert costs.forward_bytes == costs.backward_bytes == (8 * 3 * models.WIDTH,) * 2 + (0.0,)
    assert simulate(fit, costs).makespan_s >= 4 * Slow.seconds
    loss, _ = models.alone(list(fit.paths), [3] * 4, [0.25] * 4)
    assert abs(sum(row[2] for row in told) - loss) < 1e-12


@pytest.mark.parametrize("first", [True, False])
def test_what_a_chunk_keeps_is_counted_without_running_it(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cut(build_model("tiny", 64, 32, overrides={"num_hidden_layers": 2}), 2)
    chunk, hidden = made.chunk(int(not first)), None if first else (3, 20, made.features)
    batch = (torch.empty(3, 20, dtype=torch.int64, device="meta"),) * 2
    counted = memory.kept_by(chunk, hidden, made.dtype, batch)
    state = torch.get_rng_state()
    # By a real forward.
    monkeypatch.setattr(memory, "FakeTensorMode", Mock(side_effect=RuntimeError))
    assert memory.kept_by(chunk, hidden, made.dtype, batch) == counted
    assert counted[1] == (0 if first else 3 * 20 * made.features * 4) and counted[0] > 10 * 3 * 20 * made.features * 4
    assert torch.equal(torch.get_rng_state(), state)
