"""Where machines are all alike, one replica stands for all others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from torch import nn

from tests.planner.test_step import EXACT, methods
from thinwire.cost import Cores, Machine, Network
from thinwire.methods.interface import MethodPlan
from thinwire.models import Llama, build_skeleton
from thinwire.planner.candidates import Candidate
from thinwire.planner.prices import price_one
from thinwire.planner.pricing import Pricing
from thinwire.planner.search import price
from thinwire.planner.stages import Grid
from thinwire.planner.twins import Twins

WAY = Candidate("zero", 1, 4, 2, 4, EXACT)


class Free(dict[str, float]):
    """Rates of work: what is not stated takes no time."""

    def __contains__(self, kind: object) -> bool:
        return True

    def __missing__(self, kind: str) -> float:
        return math.inf


@pytest.mark.parametrize("strategy", ["zero", "sdp4bit", "ddp"])
@pytest.mark.parametrize("local_size", [1, 2])
def test_a_step_with_one_other_replica_takes_as_long_as_one_of_all(strategy: str, local_size: int) -> None:
    rate, local_rate, flops = 4e6, 3e7, 4e9
    grid = Grid(4 // local_size, local_size, flops, rate, local_rate)
    network = Network.even(4, rate, local_size=local_size, local_rate=local_rate)
    machine = Machine(("",) * 4, network, Cores((0, 1, 2, 3), (math.inf,) * 4), Free({"layer 64 fp32": flops}))
    model = build_skeleton("tiny", 257, 64)
    assert isinstance(model, Llama)
    pricing = Pricing(model, machine, methods(), 64, "fp32")
    for stages in (1, 2):
        way = replace(WAY, strategy=strategy, stages=stages, replicas=4 // stages)

        def plan_of(part: nn.Module, way: Candidate = way) -> MethodPlan:
            return pricing.plan_of(way, part)

        own = Twins(methods()[strategy], pricing.replicas(way))
        found, whole = price(model, way, own, plan_of, grid, 64, "auto"), price_one(pricing, way)
        assert found.step_s == pytest.approx(whole.step_s, rel=0.02), stages
        # Some of what is sent is hidden by computing.
        assert found.link_s < found.step_s and 0 < found.bubble < 1
