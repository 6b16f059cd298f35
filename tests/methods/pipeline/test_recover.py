"""The arithmetic of CheckFree: means of neighbours, what can't be recovered, and what is refused."""

from __future__ import annotations

import pytest
import torch

from thinwire import DDP, ConfigError, Pipeline, SDP4Bit
from thinwire.methods.pipeline import Costs, check, fitted
from thinwire.methods.pipeline.inside import check_recovers
from thinwire.methods.pipeline.options import check_stages
from thinwire.methods.pipeline.recover import between, beyond_recovery, counterpart, healthy_replica, lr_factor, sources


def test_a_larger_gradient_weighs_more_and_none_divides_by_zero() -> None:
    before, after = torch.ones(4), torch.full((4,), 3.0)
    assert torch.allclose(between(before, after, 1.0, 3.0), torch.full((4,), 2.5), atol=1e-3)
    assert torch.equal(between(before, after, 0.0, 0.0), torch.full((4,), 2.0))
    assert torch.equal(between(before, after, 5.0, 5.0), torch.full((4,), 2.0))


def test_neighbours_and_layers_are_paired_by_place() -> None:
    assert [sources("average", stage, 4) for stage in range(4)] == [(1,), (0, 2), (1, 3), (2,)]
    assert sources("copy", 2, 4) == (1,) and sources("copy", 0, 4) == (1,) and sources("random", 2, 4) == ()
    assert [sources("swap", stage, 6) for stage in range(6)] == [(1,), (0,), (1, 3), (2, 4), (5,), (4,)]
    assert [counterpart(layer, 4, 2) for layer in range(4)] == [0, 0, 1, 1]
    assert [counterpart(layer, 2, 3) for layer in range(2)] == [0, 1]
    assert lr_factor(0) == 1 and lr_factor(2) == pytest.approx(1.21) and lr_factor(50) == 1.5


@pytest.mark.parametrize(
    ("lost", "tied", "why"),
    [
        ({1}, True, ""), ({0, 2}, True, ""), ({0, 3}, False, ""), ({0, 3}, True, "the weight that they share"),
        ({1, 2}, False, "stages 1 and 2 were lost together"), ({0, 1, 3}, False, "stages 0 and 1"),
    ],
)  # fmt: skip
def test_neighbours_lost_together_are_beyond_recovery(lost: set[int], tied: bool, why: str) -> None:
    assert why in beyond_recovery(lost, 4, tied=tied) and bool(why) == bool(beyond_recovery(lost, 4, tied=tied))


def test_a_lost_stage_is_made_by_a_replica_of_the_pipeline_that_has_its_neighbours() -> None:
    there = {(0, 0), (0, 1), (2, 1), (3, 0), (3, 1)}
    assert healthy_replica({1}, there, 4, tied=False) == 1
    assert healthy_replica({1}, there - {(0, 1)}, 4, tied=False) is None
    assert healthy_replica({0}, {(1, 0), (1, 1), (3, 1)}, 4, tied=True) == 1
    assert healthy_replica(set(), there, 4, tied=True) == 0


def test_what_does_not_fit_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"nearest: recover 'none' \(--pipeline\.recover none\), or 3 stages$"):
        check_stages(Pipeline(recover="average"), 2, 2)
    with pytest.raises(ConfigError, match=r"2 replicas of each stage by ddp: .* nearest: zero or sdp4bit"):
        check_recovers(Pipeline(recover="average"), DDP(), {"data": 2})
    check_recovers(Pipeline(recover="average"), SDP4Bit(), {"data": 2})
    with pytest.raises(ConfigError, match="has 2 chunks on each; nearest: plan 'fitted'"):
        Pipeline(recover="average", plan="zbv")
    # With micro-batches too, of which these stages have no plan: this fault alone, at once.
    for stages in (1, 2, 3):
        with pytest.raises(
            ConfigError, match=rf"^recover 'swap' with {stages} stages: .* nearest: recover 'none' .*, or 4 stages$"
        ):
            check_stages(Pipeline(recover="swap"), stages, 4, 16)
        with pytest.raises(ConfigError, match="nearest: recover 'none'"):
            Pipeline(recover="swap").plan_of(stages, 4)
    with pytest.raises(ConfigError, match=r"path \(0, 2, 1, 2\): visits a chunk twice; nearest: \(0, 2, 1\)"):
        fitted((0, 1, 2), [(0, 2, 1, 2)], Costs.even(3))
    with pytest.raises(ConfigError, match=r"'swap' with 1 micro-batch: .* nearest: 2"):
        check_stages(Pipeline(recover="swap"), 4, 4, 1)
    with pytest.raises(ConfigError, match="'swap' has paths of its own"):
        Pipeline(recover="swap", head="first")
    with pytest.raises(ConfigError, match="recover 'mean' is unknown"):
        Pipeline(recover="mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="delta: nothing is rounded forward"):
        Pipeline(delta=True, forward="fp32")


@pytest.mark.parametrize(("stages", "num"), [(4, 2), (5, 7), (8, 16)])
def test_half_of_the_micro_batches_are_swapped_and_the_plan_can_run(stages: int, num: int) -> None:
    plan = Pipeline(recover="swap").plan_of(stages, num)
    check(plan)
    assert plan.home == (0, *range(stages), stages - 1)
    assert [path == tuple(range(stages + 2)) for path in plan.paths] == [number % 2 == 0 for number in range(num)]
    assert plan.paths[1][:4] == (0, 2, 1, 3 if stages > 4 else 4) and plan.paths[1][-2:] == (stages - 1, stages + 1)
