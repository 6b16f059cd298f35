"""What is chosen on machines of which all is known, and in which order of ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.machines import FAST, RATES, machine, planned, priced_of, racks, small
from thinwire.cost import Cores, Network
from thinwire.planner import selection as module
from thinwire.planner.candidates import candidates
from thinwire.planner.islands import price
from thinwire.planner.placed import PlacedMachine
from thinwire.planner.rough import best_nodes

pytestmark = pytest.mark.usefixtures("few")


def test_the_chosen_way_is_the_fastest_and_keeps_off_a_bad_link() -> None:
    even, bad = planned(machine(FAST)), planned(machine(FAST, bad=(0, 2)))
    assert even.best.step_s <= bad.best.step_s
    for found in (even, bad):
        assert found.best.step_s == min(priced.step_s for priced in found.search.fastest)
        assert all(priced.link_s <= priced.step_s for priced in found.search.fastest)
        assert found.best.terms["step_s"] == pytest.approx(
            found.best.terms["compute_s"] + found.best.terms["exposed_comm_s"]
        )
    assert bad.best.candidate.stages > 1
    order = bad.best.order
    assert order[0] == 0 and sorted(order) == [0, 1, 2, 3]
    grid = bad.pricing.placed(order)
    stages = bad.best.candidate.stages
    neighbours = [set(pair) for ranks in grid.pipelines(stages) for pair in itertools.pairwise(ranks)]
    neighbours += [set(group) for group in grid.groups(stages) if len(group) == 2]
    assert {0, 2} not in neighbours
    # One order serves all sizes of micro-batches, unless there are fewer of them than stages.
    orders = bad.pricing.orders
    for micro_batches, more in ((stages, 0), (2 * stages, 0), (1, 2)):
        known = len(orders)
        for size in (2, 4):
            best_nodes(bad.pricing, replace(bad.best.candidate, num_micro_batches=micro_batches, micro_batch=size))
        assert len(orders) == known + more
    # Everybody sends to everybody: there the bad link decides.
    alone = {priced.candidate.strategy: priced.step_s for priced in bad.search.fastest if priced.candidate.stages == 1}
    assert bad.best.step_s < 0.7 * min(alone.values())


def test_the_chosen_way_is_near_the_best_of_all_ways_in_all_orders() -> None:
    """All candidates of one order of pipelines, each in every order of the ranks, against what few simulations find."""
    tables: dict[str, dict[str, Any]] = {"llama": {"num_hidden_layers": 4}}
    tables["pipeline"] = {"plan": "1f1b", "forward": "fp32", "backward": "fp32", "recompute": "never"}
    for made, stages in ((machine(FAST / 10, bad=(1, 2)), 4), (racks(FAST, FAST / 10), 2), (machine(FAST), 1)):
        found = small(made, strategies=("zero", "sdp4bit"), tables=tables, axes=(), stages=stages)
        best = math.inf
        for way in candidates(4, 4, 8, ("zero", "sdp4bit"), tables["pipeline"], 2):
            if way.stages == stages == 1:
                best = min(best, price(found.pricing, way).step_s)
            elif way.stages == stages:
                for rest in itertools.permutations(range(1, 4)):
                    best = min(best, found.pricing.staged(way, (0, *rest)).stages.step_s)
        assert found.best.step_s <= 1.05 * best


def test_the_chosen_way_is_near_the_best_of_all_orders_borders_and_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All candidates in all orders of micro-batches, codecs and recomputing, against what closed forms find."""
    monkeypatch.setattr(module, "NUM_SIMULATED", 24)
    tables: dict[str, dict[str, Any]] = {"llama": {"num_hidden_layers": 4}}
    listed = list(candidates(4, 4, 8, ("zero", "sdp4bit"), {}, 2))

    for made in (machine(FAST / 10, bad=(1, 2)), machine(FAST)):
        found = small(made, strategies=("zero", "sdp4bit"), tables=tables, axes=(), has_settings=False)
        best = min(each.step_s for each in priced_of(found, listed))
        assert found.best.step_s <= 1.05 * best


def test_all_wait_for_the_machine_whose_ranks_share_cores() -> None:
    made = replace(machine(FAST), cores=Cores((0, 0, 1, 1), (2.0, 1.0)))
    assert PlacedMachine.of(made, (0, 1, 2, 3), "layer 512 fp32", 4).busy == 2.0


def test_noise_of_equal_links_makes_no_order() -> None:
    made = machine(FAST)
    rates = tuple(tuple(0.94 * FAST if {a, b} == {0, 1} else FAST for b in range(4)) for a in range(4))
    noisy = replace(made, network=replace(made.network, rates=rates))
    assert planned(noisy, stages=4, axes=()).best.order == (0, 1, 2, 3)
    bad = planned(machine(FAST, bad=(0, 1)), stages=4, axes=()).best.order
    assert bad != (0, 1, 2, 3)


def test_where_delays_differ_each_size_of_micro_batches_has_its_order() -> None:
    """Each trip through the stages pays for the delays, and more micro-batches make more trips."""
    made, tables = machine(FAST), {"llama": {"num_hidden_layers": 4}}
    found = small(made, strategies=("zero",), stages=4, axes=(), tables=tables)
    way = replace(found.best.candidate, micro_batch=1, num_micro_batches=8)
    delays = tuple(tuple(0.05 if {a, b} == {0, 1} else 1e-3 for b in range(4)) for a in range(4))
    far = replace(found.pricing, machine=replace(made, network=replace(made.network, delays_s=delays)), orders={})
    for pricing, num in ((replace(found.pricing, orders={}), 1), (far, 2)):
        for size in (1, 2):
            order = best_nodes(pricing, replace(way, micro_batch=size, num_micro_batches=8 // size))
        assert len(pricing.orders) == num
    assert {0, 1} not in [set(pair) for pair in itertools.pairwise(order)]


def test_fast_links_need_no_stages_and_no_packing() -> None:
    # What is not packed costs nothing, nor does a cast.
    quick = dict.fromkeys(("encode fp32", "decode fp32", "carry", "copy"), 1e13) | {"round": 1e6}
    near = replace(machine(1e12), network=Network.even(4, 1e12, 1e-6), rates=RATES | quick)
    best = planned(near).best
    assert best.candidate.stages == best.candidate.sequence == 1 and "sdp4bit" not in best.candidate.strategy
    assert best.terms["step_s"] < 1.3 * best.terms["compute_s"]
    assert planned(machine(1e12), stages=2).best.candidate.stages == 2
