"""Where a mixture's experts lie: which nodes share them, and what that costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.planner.test_plan import FAST, RATES, machine, near, small
from thinwire.cost import Machine, Network
from thinwire.planner.islands import price
from thinwire.planner.mixture import shared_experts

MIXTURE = RATES | {"mixture-layer 64 fp32": 4e9, "mixture-launch 64 fp32": 1e4}


def in_pairs(near: float, far: float) -> Machine:
    """Four nodes; 0 and 2 are near each other, and 1 and 3."""
    rates = tuple(tuple(near if a % 2 == b % 2 else far for b in range(4)) for a in range(4))
    return replace(machine(FAST), rates=MIXTURE, network=Network((0, 1, 2, 3), rates, ((1e-4,) * 4,) * 4))


def test_nodes_that_are_near_each_other_share_experts() -> None:
    found = small(in_pairs(1e8, 1e6), "moe-tiny", strategies=["zero"], axes=())
    priced = next(one for one in found.search.fastest if one.candidate.mesh == "data=2,expert=2")
    assert priced.order in ((0, 2, 1, 3), (0, 2, 3, 1))
    way, pricing = priced.candidate, found.pricing
    near_s, far_s = (shared_experts(pricing, way, order) for order in (priced.order, (0, 1, 2, 3)))
    # Rows pass the fast links, then; weights pass the slow ones in both.
    assert near_s.layer_s < 0.2 * far_s.layer_s and near_s.weights_s > far_s.weights_s
    assert near_s.timeline.makespan_s + near_s.weights_s < far_s.timeline.makespan_s + far_s.weights_s
    shown = replace(found, search=replace(found.search, fastest=(priced,)))
    assert shown.values["order"] == priced.order
    rows = [[each or 0.0 for each in row] for row in json.loads(shown.to_json())["link_bytes"]]
    assert sum(rows[0]) == pytest.approx(priced.terms["sent_bytes"])
    # Replicas have the same experts: 0 and the node in the third place.
    assert rows[0][2] > rows[0][priced.order[2]] > rows[0][priced.order[3]]
    # On links that are all alike no order is better.
    even = price(small(replace(machine(FAST), rates=MIXTURE), "moe-tiny", strategies=["zero"], axes=()).pricing, way)
    assert even.order == (0, 1, 2, 3)


def test_stages_of_a_mixture_are_priced_and_tensor_ranks_are_shown() -> None:
    found = small(replace(near(FAST), rates=MIXTURE), "moe-tiny", strategies=["zero"])
    aside = {one.candidate.mesh: (why, one) for why, ways in found.search.aside.items() for one in ways}
    why, staged = aside["pipeline=2,data=2"]
    assert "each would lose part of its balance loss" in why and staged.step_s > 0
    assert all(one.candidate.stages == one.candidate.tensor == 1 for one in found.search.fastest)
    # A stage has the experts of its layers.
    parts = found.pricing.staged(staged.candidate, staged.order).stages.parts
    numels = [sum(param.numel() for param in module.parameters()) for module in (*parts, found.pricing.model)]
    assert sum(numels[:2]) == numels[2] and max(numels[:2]) < 0.8 * numels[2]
    refused = {why: {way.mesh for way in ways} for why, ways in found.search.refused.items()}
    meshes = next(ways for why, ways in refused.items() if why.startswith("a tensor axis refuses a mixture"))
    assert "data=2,tensor=2" in meshes
    assert any("pipeline=2,expert=2" in ways for why, ways in refused.items() if "beside stages" in why)
