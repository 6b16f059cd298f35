"""FedFix, Gossip and DADAO as the trainer drives them: the library's results, where the clock decides nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.conformance.strategy_suite import hash_of
from tests.workers import run_workers
from thinwire.collectives import Topology
from thinwire.compose import apply
from thinwire.errors import ConfigError
from thinwire.islands.own_pace import OwnPaceOptimizer
from thinwire.registry import strategy_named

STEPS, STEP_S, LR = 12, 0.002, 0.1
# How many ticks a job takes is the clock's.
ALONE: dict[str, Any] = {"interval_s": 0.001, "local_steps": 5, "weighting": "importance"}


class Line(nn.Module):
    """f(w) = g w: its gradient does not depend on w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.w * gradient).sum()


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(100 * rank + step))


def applied(model: nn.Module, name: str, **options: Any) -> tuple[nn.Module, OwnPaceOptimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    wrapped, driven = apply(
        strategy_named(name, **options),
        model,
        optimizer,
        local_size=1,
        seed=3,
        timeout_s=300,
        checked=True,
        overlap=True,
    )
    assert isinstance(driven, OwnPaceOptimizer) and driven.has_own_pace
    return wrapped, driven


def drive(wrapped: nn.Module, driven: OwnPaceOptimizer, batch: Tensor) -> float:
    loss = wrapped(batch)
    loss.backward()
    driven.note_loss(float(loss.detach()))
    driven.clip_grad_norm_(1e9)
    driven.step()
    driven.zero_grad()
    return float(loss.detach())


def test_fedfix_alone_is_the_library_s_bit_for_bit() -> None:
    model = Line()
    wrapped, driven = applied(model, "fedfix", **ALONE)
    for step in range(STEPS):
        drive(wrapped, driven, gradient(0, step))
    driven.finish()
    same = Line()
    optimizer = torch.optim.SGD(same.parameters(), lr=LR)
    with thinwire.FedFix(same, optimizer, **ALONE, announce=False):
        for step in range(STEPS):
            same(gradient(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.w, same.w) and not torch.equal(model.w, Line().w)


def pairs(rank: int, world_size: int) -> dict[str, Any]:
    """Gossip, whose mean is that of all updates whatever the clock does; one rank is slow, and asks to stop."""
    model, same = Line(), Line()
    wrapped, driven = applied(model, "gossip", step_s=STEP_S)
    losses = [(drive(wrapped, driven, gradient(rank, step)), driven.mean_loss) for step in range(STEPS)]
    before = driven.meter.snapshot().sent_by("gossip")
    if rank == 1:
        driven.request_stop()
        time.sleep(0.1)
        drive(wrapped, driven, torch.zeros(3))
        assert driven.stop_requested
    driven.finish()
    driven.check_replicas()
    assert driven.meter.snapshot().sent_by("gossip") >= before
    optimizer = torch.optim.SGD(same.parameters(), lr=LR)
    with thinwire.Gossip(same, optimizer, step_s=STEP_S, announce=False):
        for step in range(STEPS):
            same(gradient(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    # A NaN is this rank's own.
    wrapped, other = applied(Line(), "fedfix", interval_s=0.01, local_steps=1)
    drive(wrapped, other, torch.full((3,), torch.nan if rank else 1.0))
    other.finish()
    driven.close()
    return {
        "weights": model.w.detach().clone(),
        "library": same.w.detach().clone(),
        "losses": losses,
        "steps": driven.steps,
        "stopped": driven.stop_requested,
        "skipped": other.skipped_steps,
        "hash": hash_of(model),
        "rows": [row[0] for row in driven.describe()],
    }


class Bowl(nn.Module):
    """f(x) = |A (x - c)|^2 / 2 with curvatures from 1 to 3."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(3))
        # No buffers: those are made equal on all ranks at the start.
        self.curvature = torch.tensor([1.0, 2.0, 3.0])
        self.centre = torch.tensor([1.0, -1.0, 2.0]) * (-1) ** rank + rank

    def forward(self, _: Tensor) -> Tensor:
        return (self.curvature * (self.x - self.centre).square()).sum() / 2


def dadao(rank: int, world_size: int) -> Tensor:
    model = Bowl(rank)
    wrapped, driven = applied(model, "dadao", smoothness=3.0, strong_convexity=1.0, step_s=STEP_S)
    for _ in range(120):
        drive(wrapped, driven, model.centre)
    driven.finish()
    driven.check_replicas()
    return model.x.detach().clone()


def both(rank: int, world_size: int) -> dict[str, Any]:
    return pairs(rank, world_size) | {"dadao": dadao(rank, world_size)}


def test_pairs_end_with_the_mean_and_dadao_with_the_minimum() -> None:
    results = run_workers(both, 2)
    moved = torch.stack([sum((gradient(rank, step) for step in range(STEPS)), torch.zeros(3)) for rank in range(2)])
    expected = Line().w.detach() - LR * moved.mean(0)
    for rank, found in enumerate(results):
        torch.testing.assert_close(found["weights"], expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(found["library"], expected, rtol=0, atol=2e-6)
        assert found["hash"] == results[0]["hash"]
        # The first loss is the mean over ranks, the others are each rank's own.
        firsts = [result["losses"][0][0] for result in results]
        assert found["losses"][0][1] == pytest.approx(sum(firsts) / 2)
        assert all(own == told for own, told in found["losses"][1:])
        assert found["steps"] == STEPS and found["stopped"], "all end where the slowest is, and know of the stop"
        assert found["skipped"] == rank
        assert {"--steps", "--seed", "--checkpoint-every"} <= set(found["rows"])
        # The two bowls have the same curvature: the minimum of their sum lies half-way between their centres.
        torch.testing.assert_close(found["dadao"], torch.full((3,), 0.5), rtol=0, atol=0.05)
        assert torch.equal(found["dadao"], results[0]["dadao"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedfix", {"importance": (1.0, 2.0, 3.0)}, "one number above 0 for each of the 2 ranks"),
        ("gossip", {"graph": "rign"}, "did you mean 'ring'"),
        ("gossip", {"graph": ((0, 2),)}, "graph|edge"),
        ("dadao", {"strong_convexity": 20.0}, "strong_convexity 20"),
    ],
)
def test_what_can_not_work_is_refused_before_a_process_starts(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy_named(name, **options).plan(nn.Module(), Topology(2, 1), 1)


def test_islands_have_no_rank_that_goes_its_own_pace() -> None:
    with pytest.raises(ConfigError, match="has no step in common"):
        strategy_named("diloco", inner=strategy_named("fedfix"))
