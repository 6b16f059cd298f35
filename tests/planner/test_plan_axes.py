"""Ways to train that divide ranks over other axes than data and stages: what they cost, and whether they are chosen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.planner.machines import FAST, RATES, machine, near, planned, racks, small
from thinwire.collectives import Topology
from thinwire.cost import Cores, Network
from thinwire.errors import ConfigError
from thinwire.methods.data.zero import Zero
from thinwire.methods.islands.diloco import DiLoCo
from thinwire.models import build_skeleton
from thinwire.options import has_islands
from thinwire.planner.choice import priced
from thinwire.planner.islands import around, islands_of, outer_s, price, spread
from thinwire.planner.plan import plan
from thinwire.planner.settings import name_of
from thinwire.planner.traced import link_messages
from thinwire.planner.written import not_measured, show
from thinwire.run.config import TrainConfig

pytestmark = pytest.mark.usefixtures("few")


def test_ranks_of_a_node_may_share_matrices_and_sequences() -> None:
    # Two sequences for four ranks.
    found = plan("tiny", near(1e9), tokens_per_step=512, micro_batch=2, stages=1)
    ways = {way.candidate.mesh: way for way in found.search.fastest}
    assert set(ways) == {"data=2,tensor=2", "data=2,sequence=2", "sequence=4"}
    assert found.best.candidate.mesh != "sequence=4"
    for mesh, way in ways.items():
        shown = replace(found, search=replace(found.search, fastest=(way,)))
        values = shown.values
        tables = {"sequence": values.pop("sequence")} if "sequence" in values else {}
        config = TrainConfig(workers=2, nodes=2, join="a:1", tables=tables, **values)
        assert str(config.mesh_shape.in_order()).replace("data=1,", "") == mesh
        told = json.loads(shown.to_json())
        assert {rank for rank, *_ in told["timeline"]} == {0, 1, 2, 3}
        assert sum(each or 0 for each in told["link_bytes"][0]) == pytest.approx(told["predicted"]["sent_bytes"])
        # As many messages as make the bytes, where there are any.
        used, sending = ([[bool(n) for n in row] for row in told[f"link_{what}"]] for what in ("bytes", "messages"))
        assert used == sending
        # Each layer's attention sends two in each micro-batch to those that share a sequence.
        beside = link_messages(found.pricing, way, [])
        sharing = found.pricing.attention(way.candidate, way.order).sent
        passes = way.candidate.num_micro_batches * len(found.pricing.model.model.layers)
        assert beside == dict.fromkeys(sharing, 2 * passes) and bool(beside) == ("sequence" in mesh)
    # Half of the matrices, or half of the tokens, are half of the work; messages are on top.
    alone = plan("tiny", near(1e9), tokens_per_step=1024, micro_batch=1, stages=1).search.fastest
    whole = next(way for way in alone if way.candidate.mesh == "data=4").terms["compute_s"]
    for mesh in ("data=2,tensor=2", "data=2,sequence=2"):
        assert 0.5 < ways[mesh].terms["compute_s"] / whole < 0.8
    # A sequence between nodes on a slow link takes longer than one inside of them.
    slow = plan("tiny", near(1e6), tokens_per_step=512, micro_batch=2, stages=1).search.fastest
    inside_s = {way.candidate.mesh: way.terms["compute_s"] for way in slow}
    assert inside_s["sequence=4"] > 4 * inside_s["data=2,sequence=2"]
    with pytest.raises(ConfigError, match="no mesh of 3 ranks shares 1 sequences evenly; nearest: 768"):
        plan("tiny", machine(FAST, num_ranks=3), tokens_per_step=256, stages=1)


def test_rings_and_shared_sequences_take_an_order_too() -> None:
    """Pairs of nodes that are near each other share a sequence; a ring leaves a bad link out."""
    rates = tuple(tuple(1e9 if a % 2 == b % 2 else 1e6 for b in range(4)) for a in range(4))
    made = replace(machine(FAST), network=Network((0, 1, 2, 3), rates, ((1e-5,) * 4,) * 4))
    found = plan("tiny", made, tokens_per_step=512, micro_batch=2, stages=1, axes=("sequence",), strategies=["zero"])
    ways = {way.candidate.mesh: way for way in found.search.fastest}
    shared = ways["data=2,sequence=2"]
    assert shared.order in ((0, 2, 1, 3), (0, 2, 3, 1))
    told = json.loads(replace(found, search=replace(found.search, fastest=(shared,))).to_json())
    rows = [[each or 0.0 for each in row] for row in told["link_bytes"]]
    # Attention stays between near nodes; replicas of all of them exchange the rest.
    assert rows[0][2] > rows[0][1] == pytest.approx(rows[0][3]) and told["predicted"]["step_s"] == shared.step_s
    assert sum(rows[0]) == pytest.approx(told["predicted"]["sent_bytes"])
    for strategy, order in (("ddp", (0, 2, 1, 3)), ("zero", (0, 1, 2, 3))):
        bad = planned(machine(FAST, bad=(0, 1)), strategies=[strategy], stages=1, axes=(), has_groups=False).best
        assert bad.order == order or (strategy == "ddp" and bad.order == (0, 3, 1, 2))


def test_any_strategy_whose_ranks_wait_for_each_other_has_a_price() -> None:
    class Measured(dict[str, float]):
        """All kinds of work are known."""

        def __contains__(self, kind: object) -> bool:
            return True

        def __missing__(self, kind: str) -> float:
            return 5e8

    names = priced()
    assert {"powersgd", "demo", "zeropp", "frontier", "diloco"} <= set(names)
    found = small(replace(near(FAST), rates=Measured(RATES)), strategies=names, stages=1, axes=("island",))
    ways = [way.candidate for way in found.search.fastest]
    refused = [way for ways in found.search.refused.values() for way in ways]
    plain = {name_of(way.strategy) for way in [*ways, *refused] if not way.outer}
    assert plain == {name for name in names if not has_islands(name)}
    assert not [way for way in refused if not way.outer], found.search.refused
    assert found.objective.why.startswith("seconds a token")
    with pytest.raises(ConfigError, match="gossip: its ranks step at their own pace"):
        small(near(FAST), strategies=["gossip"])


def test_what_cannot_run_yet_is_priced_shown_and_never_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    found = small(near(FAST))
    aside = {priced.candidate.mesh: (why, priced) for why, ways in found.search.aside.items() for priced in ways}
    for mesh, words in (
        ("pipeline=2,sequence=2", "pipeline beside sequence"),
        ("sequence=2,tensor=2", "beside tensor"),
    ):
        why, priced = aside[mesh]
        assert words in why and priced.step_s > 0 and priced.memory_bytes > 0
    assert all(not priced.candidate.not_yet for priced in found.search.fastest)
    # However fast they are.
    told = json.loads(found.to_json())["not_chosen"]
    assert {entry["mesh"] for entry in told} == aside.keys() and all(entry["why"] for entry in told)
    show(found)
    printed = capsys.readouterr().out
    assert "No layer of" not in printed
    way = found.best.candidate
    assert f" {way.num_micro_batches} x {way.micro_batch} " in printed and "micro-batches x sequences: " in printed
    assert "Priced, not chosen: " in printed and "pipeline=2,sequence=2" in printed
    assert "All of it is for fp32" in printed and "has one rank" not in printed
    one_rank = replace(found.machine.part([0]), rates={**found.machine.rates, "layer 64 bf16": 1e9})
    assert [line.partition(",")[0] for line in not_measured(one_rank)] == ["The machine has one rank"]
    busy = [*not_measured(replace(found.machine, core_share=0.24))]
    assert "a rank got a core for 24% of the time, and the rates are too low" in busy[0] and "Warning" not in printed
    assert json.loads(replace(found, machine=replace(found.machine, core_share=0.24)).to_json())["core_share"] == 0.24
    assert f"Objective: {found.objective.why}." in printed and found.objective.why.startswith("seconds")
    rows = {effect: why for asked, effect, why in found.rows("--strategy auto") if asked == "priced, not chosen"}
    assert any("pipeline=2,sequence=2" in effect for effect in rows)
    # Half of the tokens pass through each stage, and attention's messages come on top.
    alone = next(one.terms["pipeline_s"] for one in found.search.fastest if one.candidate.mesh == "pipeline=2,data=2")
    assert 0.5 * alone < aside["pipeline=2,sequence=2"][1].terms["pipeline_s"] < 2 * alone


def test_islands_are_candidates_where_they_are_named() -> None:
    free = small(near(FAST / 10))
    islands = [way for ways in free.search.aside.values() for way in ways if way.candidate.outer]
    assert islands and min(way.step_s for way in islands) < free.best.step_s and not free.best.candidate.outer
    made = near(FAST / 10)
    by_seconds = small(made, strategies=["diloco", "zero"])
    assert by_seconds.best.candidate.outer == "diloco[sync_every=500]"
    assert by_seconds.values["diloco"] == {"sync_every": 500} and by_seconds.values["strategy"] == "diloco"
    found = small(made, strategies=["diloco", "zero"], has_settings=False)
    meshes = {way.candidate.mesh for way in found.search.fastest}
    assert {"island=4", "island=2,data=2", "island=2,pipeline=2", "island=2,tensor=2"} <= meshes
    assert found.best.candidate.outer == "diloco" and found.search.fastest[-1].candidate.outer == ""
    for way in (way for way in found.search.fastest if way.candidate.outer):
        shown = replace(found, search=replace(found.search, fastest=(way,)))
        values = shown.values
        tables = {"pipeline": values.pop("pipeline")} if "pipeline" in values else {}
        config = TrainConfig(workers=2, nodes=2, join="a:1", tables=tables, **values)
        size = 4 // way.candidate.islands
        assert (config.strategy, config.inner, config.local_size) == ("diloco", "zero", size)
        assert config.mesh_shape.world_size == 4 and config.mesh_shape.sizes.get("island", 4 // size) == 4 // size
        told = json.loads(shown.to_json())
        assert {rank for rank, *_ in told["timeline"]} == {0, 1, 2, 3}
        sent = sum(each or 0 for each in told["link_bytes"][0])
        assert sent == pytest.approx(told["predicted"]["sent_bytes"])
        if way.candidate.mesh in ("island=4", "island=2,data=2"):
            # The bytes are those of the method's plan, on the first rank.
            method = replace(DiLoCo(), inner=Zero())
            model = build_skeleton("tiny", 257, 256)
            whole = method.plan(model, Topology(4 // size, size), way.candidate.num_micro_batches)
            assert sent == pytest.approx(sum(whole.sent.values()), rel=1e-3)
    # A part of an exchange, each step: fewer bytes over the slow links than any other way sends.
    assert found.best.terms["exposed_comm_s"] < 0.1 * found.search.fastest[-1].terms["exposed_comm_s"]


def test_islands_share_the_cores_of_their_machine_as_other_ways_do() -> None:
    made = replace(near(FAST), cores=Cores((0,) * 4, (2.0,), 0.3))
    found = small(made, strategies=["sparseloco", "zero"], has_settings=False, stages=1)
    computes = {
        way.candidate.mesh: way.terms["compute_s"] for way in found.search.fastest if way.candidate.micro_batch == 2
    }
    assert computes["island=4"] == pytest.approx(computes["data=4"], rel=0.2)


def test_an_exchange_of_islands_has_the_cores_of_the_ranks_that_wait() -> None:
    """Two islands of two ranks on two cores: their first ranks exchange alone, each with a core."""
    packing = {kind: rate / 1e3 for kind, rate in RATES.items() if kind.startswith(("encode", "decode"))}

    def exchange_s(cores: float) -> float:
        made = replace(near(1e12), cores=Cores((0,) * 4, (cores,)), rates=RATES | packing)
        found = small(made, strategies=["sparseloco", "zero"], has_settings=False, stages=1)
        way = next(each.candidate for each in found.search.fastest if each.candidate.mesh == "island=2,data=2")
        method = around(found.pricing, way)
        return outer_s(found.pricing, way, method, spread(found.pricing, way, method))

    assert exchange_s(1.0) > exchange_s(2.0) == exchange_s(64.0)


def test_islands_of_muloco_are_planned_with_the_state_of_muon() -> None:
    """Uncut, in stages, and with matrices that are cut: one momentum in place of two moments."""
    found = small(near(FAST), strategies=["muloco", "ddp"], has_settings=False)
    ways = {way.candidate.mesh: way for way in found.search.fastest if way.candidate.outer}
    for mesh in ("island=2,data=2", "island=2,pipeline=2", "island=2,tensor=2"):
        way, method = ways[mesh].candidate, around(found.pricing, ways[mesh].candidate)
        kept = method.outer().state(method.fragments(found.pricing.model)).kept_bytes()
        by_adamw = price(found.pricing.on(islands_of(found.pricing, way)[0], "adamw"), way.inside).counted
        own = ways[mesh].counted
        assert by_adamw is not None and own is not None
        assert own.counted_bytes < by_adamw.counted_bytes + sum(kept.values())


def test_islands_of_several_machines_are_priced_and_not_chosen() -> None:
    """Two racks: an exchange between them once in many steps is the usual case."""
    found = small(racks(FAST, FAST / 100), strategies=["diloco", "zero"], stages=1, has_settings=False)
    ((why, ways),) = found.search.aside.items()
    assert why == "an island of several machines is not supported yet"
    way = ways[0]
    assert way.candidate.mesh == "island=2,data=2" and way.candidate.nodes == 2 and way.candidate.outer == "diloco"
    alone = next(each for each in found.search.fastest if each.candidate.mesh == "data=4")
    inside = price(found.pricing.on([0, 1]), way.candidate.inside)
    # The link between racks carries a share of an exchange.
    assert inside.step_s < way.step_s < 0.5 * alone.step_s
    assert all(each.candidate.nodes == 1 for each in found.search.fastest)


def test_ranks_may_share_the_experts_of_a_mixture() -> None:
    rates = RATES | {"mixture-layer 64 fp32": 4e9, "mixture-launch 64 fp32": 1e4}
    found = small(replace(near(FAST), rates=rates), "moe-tiny", strategies=["zero", "ddp"])
    ways = {way.candidate.mesh: way for way in found.search.fastest}
    assert {"data=4", "data=2,expert=2", "expert=4"} <= ways.keys()
    way = ways["data=2,expert=2"]
    shown = replace(found, search=replace(found.search, fastest=(way,)))
    table = shown.values["experts"]
    assert table["parallel"] == 2
    assert table.keys() == {"parallel", "move", "route", "chunks", "chunks_back", "once_a_step"}
    assert f"--experts.move {table['move']}" in way.candidate.flags
    told = json.loads(shown.to_json())
    assert sum(each or 0 for each in told["link_bytes"][0]) == pytest.approx(told["predicted"]["sent_bytes"])
    # ddp has replicas of all weights.
    assert all(one.candidate.strategy == "zero" for one in found.search.fastest if one.candidate.experts > 1)
    # A rank has half of the experts, or all of them.
    assert way.memory_bytes < ways["data=4"].memory_bytes
    with pytest.raises(ConfigError, match=r"mixture-layers in fp32 were not measured .* its preset among --models"):
        small(near(FAST), "moe-tiny")
