"""Where a mixture's experts lie: which nodes share them, and what that costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import nn

from tests.planner.machines import FAST, RATES, machine, near, small
from thinwire.cost import Machine, Network
from thinwire.models.seam import experts_of
from thinwire.planner.islands import price
from thinwire.planner.mixture import shared_experts, shared_layer

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
    assert near_s.layer.seconds < 0.2 * far_s.layer.seconds and near_s.weights_s > far_s.weights_s
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


def test_what_a_mixture_can_not_be_cut_by_yet_is_priced_and_shown() -> None:
    found = small(replace(near(FAST), rates=MIXTURE), "moe-tiny", strategies=["zero"])
    aside = {one.candidate.mesh: (why, one) for why, ways in found.search.aside.items() for one in ways}
    why, staged = aside["pipeline=2,data=2"]
    assert "each would lose part of its balance loss" in why and staged.step_s > 0
    assert all(one.candidate.stages == one.candidate.tensor == 1 for one in found.search.fastest)
    # A stage has the experts of its layers.
    parts = found.pricing.staged(staged.candidate, staged.order).stages.parts
    numels = [parameters(module) for module in (*parts, found.pricing.model)]
    assert sum(numels[:2]) == numels[2] and max(numels[:2]) < 0.8 * numels[2]
    # Two tensor ranks have half of every matrix; a stage's ranks have half of the experts.
    why, cut = aside["data=2,tensor=2"]
    assert why == "tensor ranks of a mixture are not supported yet: each would lose part of its balance loss"
    whole = next(one for one in found.search.fastest if one.candidate.mesh == "data=4")
    assert 0.4 < parameters(found.pricing.cut(2)) / numels[2] < 0.6
    assert cut.counted is not None and whole.counted is not None
    assert cut.counted.counted_bytes < 0.8 * whole.counted.counted_bytes
    for mesh, words in (("pipeline=2,expert=2", "pipeline beside expert"), ("expert=2,tensor=2", "beside tensor")):
        why, shared = aside[mesh]
        assert words in why and 0 < shared.terms["compute_s"] < shared.step_s and shared.candidate.travel
    assert not found.search.refused


def test_experts_in_stages_cost_what_they_do_without() -> None:
    """Two stages of two ranks; each sends the rows of its layers, and the weights of its experts, as one stage does."""
    found = small(replace(near(1e12), rates=MIXTURE), "moe-tiny", strategies=["zero"], axes=())
    aside = {one.candidate.mesh: one for ways in found.search.aside.values() for one in ways}
    staged, pricing = aside["pipeline=2,expert=2"], found.pricing
    way = replace(staged.candidate, travel=())
    replicas = replace(way, experts=1, replicas=2)
    dense = price(pricing, replicas)
    layer = shared_layer(pricing, way, (0, 1, 2, 3))
    # On links that take no time, experts cost no more than products of a dense model.
    assert staged.terms["pipeline_s"] == pytest.approx(dense.terms["pipeline_s"], rel=0.05)
    rows = sum(num for (source, _), num in layer.rows().items() if source == 0)
    layers = [len(experts_of(part)) for part in pricing.staged(way, (0, 1, 2, 3)).stages.parts]
    assert sum(layers) == 3 and rows > 0
    assert staged.terms["sent_bytes"] > layers[0] * way.num_micro_batches * rows
    assert staged.counted is not None and dense.counted is not None
    assert staged.counted.counted_bytes < dense.counted.counted_bytes


def parameters(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())
