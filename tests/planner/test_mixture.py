"""Where a mixture's experts lie: which nodes share them, and what that costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.planner.test_plan import FAST, RATES, machine, small
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
