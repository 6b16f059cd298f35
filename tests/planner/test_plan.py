"""What is chosen on machines of which all is known, and what a plan's files say."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.commands import CommandRunner
from thinwire.calibration.machine import CODECS
from thinwire.collectives import Topology
from thinwire.compare.contestants import Contestant
from thinwire.compare.measure import Figures
from thinwire.compare.options import RaceConfig
from thinwire.compare.plan import make_plan
from thinwire.compare.tune import run_tune
from thinwire.compare.verify import run_plan
from thinwire.cost import Cores, Machine, Network
from thinwire.errors import ConfigError, Problems
from thinwire.methods.data.zero import Zero
from thinwire.methods.islands.diloco import DiLoCo
from thinwire.models import build_skeleton
from thinwire.options import has_islands
from thinwire.planner import selection as module
from thinwire.planner.candidates import Candidate, candidates
from thinwire.planner.choice import priced
from thinwire.planner.islands import price
from thinwire.planner.memory import Offset
from thinwire.planner.placed import PlacedMachine
from thinwire.planner.plan import least_bytes, plan
from thinwire.planner.plan_options import PlanConfig
from thinwire.planner.rough import best_nodes
from thinwire.planner.search import Priced
from thinwire.planner.settings import name_of
from thinwire.planner.table import reasons_of
from thinwire.planner.traced import link_messages
from thinwire.planner.training_plan import TrainingPlan
from thinwire.planner.written import made_plan, not_measured, show
from thinwire.report.page import plan_table
from thinwire.report.run import read_run
from thinwire.run.config import TrainConfig
from thinwire.run.settings import read_toml
from thinwire.run.signals import StoppedError

FAST, SLOW = 12.5e6, 1.25e6
RATES = {"layer 64 fp32": 4e9, "launch 64 fp32": 1e4, "layer 512 fp32": 4e11, "launch 512 fp32": 1e4, "copy": 5e9}
RATES |= {"carry": 5e8, "round": 2e3} | {f"{way} {codec}": 5e8 for way in ("encode", "decode") for codec in CODECS}


def machine(rate: float, bad: tuple[int, int] | None = None, num_ranks: int = 4) -> Machine:
    """Ranks with a core each, and links that are all alike but one."""
    ranks = range(num_ranks)
    rates = tuple(tuple(SLOW if bad in ((a, b), (b, a)) else rate for b in ranks) for a in ranks)
    network = Network(tuple(ranks), rates, ((1e-3,) * num_ranks,) * num_ranks, 0.02)
    return Machine(("a",) * num_ranks, network, Cores(tuple(ranks), (1.0,) * num_ranks), RATES)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer candidates are simulated than for a user."""
    monkeypatch.setattr(module, "NUM_SIMULATED", 6)
    monkeypatch.setattr(module, "NUM_SMALLEST", 6)


def planned(made: Machine, **more: object) -> TrainingPlan:
    return plan("demo", made, tokens_per_step=8192, micro_batch=8, **more)  # type: ignore[arg-type]


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


def priced_of(found: TrainingPlan, ways: Iterable[Candidate]) -> list[Priced]:
    """The prices of those that can run."""
    prices = []
    for way in ways:
        with suppress(ConfigError):
            prices.append(price(found.pricing, way))
    return prices


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


def test_under_a_limit_the_fastest_of_those_that_fit_is_found() -> None:
    """Whatever closed forms find faster and does not fit; all ways are priced here to compare."""
    tables: dict[str, dict[str, Any]] = {"llama": {"num_hidden_layers": 4}}

    def within(memory_bytes: float | None) -> TrainingPlan:
        return plan(
            "tiny", machine(10 * FAST), tokens_per_step=2048, micro_batch=8, strategies=("zero",), axes=(),
            tables=tables, memory_bytes=memory_bytes,
        )  # fmt: skip

    prices = priced_of(within(None), candidates(4, 4, 8, ("zero",), {}, 8))
    limits = sorted({each.memory_bytes for each in prices})
    for tenths in (0, 3, 4):
        limit = limits[tenths * max(1, len(limits) // 10)]
        best = min(each.step_s for each in prices if each.memory_bytes <= limit)
        found = within(limit).best
        assert found.memory_bytes <= limit and found.step_s <= 1.05 * best


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


def racks(inside: float, across: float) -> Machine:
    """Two racks of two ranks."""
    rates = tuple(tuple(inside if a // 2 == b // 2 else across for b in range(4)) for a in range(4))
    made = machine(inside)
    return replace(made, network=replace(made.network, rates=rates))


def test_fast_links_need_no_stages_and_no_packing() -> None:
    # What is not packed costs nothing, nor does a cast.
    quick = dict.fromkeys(("encode fp32", "decode fp32", "carry", "copy"), 1e13) | {"round": 1e6}
    near = replace(machine(1e12), network=Network.even(4, 1e12, 1e-6), rates=RATES | quick)
    best = planned(near).best
    assert best.candidate.stages == best.candidate.sequence == 1 and "sdp4bit" not in best.candidate.strategy
    assert best.terms["step_s"] < 1.3 * best.terms["compute_s"]
    assert planned(machine(1e12), stages=2).best.candidate.stages == 2


def test_what_does_not_fit_is_not_chosen() -> None:
    free = planned(machine(FAST), strategies=("zero", "ddp"))
    least = min(priced.memory_bytes for priced in free.search.fastest)
    small = planned(machine(FAST), strategies=("zero", "ddp"), memory_bytes=1.01 * least)
    assert small.search.too_large and all(priced.memory_bytes <= 1.01 * least for priced in small.search.fastest)
    for memory_bytes in (1e6, 5e5):
        # Nothing else is told: no other number that is not the user's, and no mesh that the model has no layers for.
        with pytest.raises(ConfigError, match=r"no way to train fits; the least is [\d.]+ [MG]B[^\n]*$"):
            planned(machine(FAST), memory_bytes=memory_bytes, strategies=("zero", "ddp"), residency={"store": "none"})
    for nothing in (0.0, -5.0, math.nan):
        with pytest.raises(ConfigError, match=f"memory_bytes {nothing:g}: must be above 0"):
            planned(machine(FAST), memory_bytes=nothing)
    with pytest.raises(ConfigError, match="nearest: 8192"):
        plan("demo", machine(FAST), tokens_per_step=8000)
    lacking = replace(machine(FAST), rates={"layer 512 fp32": 1e9, "copy": 1e9})
    with pytest.raises(ConfigError, match="'encode fp32' was not measured; nearest: thinwire calibrate --codecs fp32"):
        planned(lacking)
    # Nothing is told of disks, which would not help.
    with pytest.raises(ConfigError, match=r"^layers in bf16 were not measured [^\n]*, with --dtypes fp32 bf16$"):
        planned(lacking, dtype="bf16", memory_bytes=8e9)


def test_memory_counts_the_loss_and_the_type_that_the_run_takes() -> None:
    made = replace(machine(FAST), rates={**RATES, "layer 64 bf16": 4e9, "launch 64 bf16": 1e4})

    def memory_bytes(**more: Any) -> float:
        found = plan(
            "tiny", made, tokens_per_step=8192, strategies=("zero",), stages=1, axes=(),
            **{"vocab_size": 40_000, **more},
        )  # fmt: skip
        return next(each.memory_bytes for each in found.search.fastest if each.candidate.micro_batch == 8)

    logits = 4 * 8 * 256 * 40_000
    by_loss = {loss: memory_bytes(loss=loss) for loss in ("auto", "cut", "plain")}
    assert by_loss["auto"] == by_loss["cut"] < by_loss["plain"] - 1.4 * logits
    small = {"vocab_size": 257, "seq_len": 64}
    assert memory_bytes(**small, dtype="bf16") < 0.95 * memory_bytes(**small)
    with pytest.raises(ConfigError, match=r"(?s)dtype 'fp16': no such choice.*'bf16'.*loss 'cutt': .* mean 'cut'"):
        memory_bytes(loss="cutt", dtype="fp16")


def test_what_a_plan_does_not_know_or_take_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.json"
    file.write_text(replace(machine(FAST), memory_bytes=2e9).to_json())
    asked = PlanConfig(
        machine=str(file), model="tiny", strategies="zero,ddp", stages=1, memory="8gb", out=str(tmp_path / "plan.toml"),
        tables={"llama": {"hidden_size": 128}},
    )  # fmt: skip
    found = made_plan(asked, Problems())
    printed = capsys.readouterr().out
    assert "--memory 8gb: 2 GB (a rank of the machine has no more)" in printed
    assert "No layer of 128 features was measured: the rate and the fixed cost of a pass are those of 64." in printed
    best = found.best
    other = replace(best, candidate=replace(best.candidate, stages=2), step_s=0.8 * best.step_s)
    told = list(reasons_of(replace(found.search, fastest=(other, best))))
    assert "With 1 stage(s) a step takes 1.25 times as long" in told[1]
    # Where tokens count, the one that is chosen may take longer for a step.
    told = list(reasons_of(replace(found.search, fastest=(best, replace(other, steps=1.5)))))
    assert "the way to the loss takes 1.20 times as long" in told[1] and "1.5 times the tokens of exact" in told[1]


def near(rate: float) -> Machine:
    """Two nodes of two ranks, whose links inside are fast."""
    made, nodes = machine(rate), (0, 0, 1, 1)
    rates = tuple(tuple(1e11 if a == b else rate for b in nodes) for a in nodes)
    return replace(made, network=Network(nodes, rates, ((1e-6,) * 4,) * 4))


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


def small(made: Machine, model: str = "tiny", **more: object) -> TrainingPlan:
    return plan(model, made, tokens_per_step=2048, micro_batch=2, **more)  # type: ignore[arg-type]


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


def test_a_part_lies_on_a_disk_only_where_nothing_fits_in_memory() -> None:
    made = replace(machine(FAST), disk=(1e8, 1e9), base_bytes=400e6)
    # Three times what is counted: nothing fits into 700 MB as it is.
    counted: dict[str, Any] = {"stages": 1, "estimator": Offset(3.0)}
    small = planned(made, strategies=("zero", "ddp"), memory_bytes=700e6, **counted)
    assert (
        small.best.candidate.memory == "700mb" == small.values["memory"]
        and "--memory 700mb" in small.best.candidate.flags
    )
    assert small.best.memory_bytes <= 700e6 and any("ddp keeps all" in reason for reason in small.search.refused)
    assert small.best.terms["peak_rss_bytes"] == small.best.memory_bytes
    # A process that holds more before it has a model has less room for it, on a disk or not.
    heavy = planned(replace(made, base_bytes=500e6), strategies=("zero",), memory_bytes=700e6, **counted).search
    (why,) = (why for why, ways in heavy.refused.items() if small.best.candidate in ways)
    assert "below the floor of 715 MB: process 500 MB" in why
    assert all(each.memory_bytes <= 700e6 for each in heavy.fastest)
    with pytest.raises(ConfigError, match="no way to train fits; the least is"):
        planned(replace(made, base_bytes=690e6), strategies=("zero",), memory_bytes=700e6, **counted)
    # The least that is named suffices, in memory and with a disk, and no other floor is told.
    for base in (300e6, 500e6, 560e6):
        short = replace(made, base_bytes=base)
        with pytest.raises(ConfigError, match=r"no way to train fits; the least is \d+ MB") as caught:
            planned(short, strategies=("zero",), memory_bytes=310e6, **counted)
        least = re.findall(r"(?:least is|floor of|--memory) (\d+)", str(caught.value))
        assert len(least) == 1
        assert planned(short, strategies=("zero",), memory_bytes=1e6 * int(least[0]), **counted).search.fastest
    free = planned(made, strategies=("zero",), memory_bytes=1e12, **counted)
    assert not free.best.candidate.memory and free.best.step_s < small.best.step_s
    with pytest.raises(ConfigError, match="the disk was not measured; nearest: thinwire calibrate --disk FOLDER"):
        planned(machine(FAST), strategies=("zero",), memory_bytes=100e6, stages=1)


def test_a_plan_is_a_configuration_with_its_prediction(tmp_path: Path) -> None:
    file, out = tmp_path / "machine.json", tmp_path / "plan.toml"
    file.write_text(machine(FAST, bad=(0, 2)).to_json())
    wrong = ["--machine", str(file), "--memory", "8", "--strategies", "zerro", "--stages", "3"]
    with pytest.raises(ConfigError) as caught:
        run_plan(wrong)
    assert all(part in str(caught.value) for part in ("'8gb'", "'zero'", "nearest: 2"))
    assert run_plan(["--machine", str(file), "--out", str(out)]) == 0
    problems = Problems()
    config = read_toml(out, problems)
    predicted = json.loads((tmp_path / "plan.json").read_text())
    assert not problems.messages and config.plan == str(tmp_path / "plan.json")
    assert isinstance(config.stages, int) and config.order == tuple(predicted["order"])
    assert predicted["rates"][0][2] == SLOW and predicted["rates"][0][0] is None
    # What the order keeps apart sends nothing; all that is sent stands in the table.
    assert predicted["link_bytes"][0][2] == 0 == predicted["link_bytes"][2][0]
    assert sum(each or 0 for each in predicted["link_bytes"][0]) == pytest.approx(predicted["predicted"]["sent_bytes"])
    assert max(end for *_, end in predicted["timeline"]) == pytest.approx(predicted["predicted"]["step_s"], rel=1e-3)
    trace = tmp_path / "trace.json"
    for stages in ("1", "2"):
        run_plan(["--machine", str(file), "--out", str(out), "--stages", stages, "--trace", str(trace)])
        events = [event for event in json.loads(trace.read_text()) if event["ph"] == "X"]
        assert {event["pid"] for event in events} == {0, 1, 2, 3} and all(event["dur"] >= 0 for event in events)
        last = max(event["ts"] + event["dur"] for event in events)
        assert last == pytest.approx(1e6 * json.loads((tmp_path / "plan.json").read_text())["predicted"]["step_s"])


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    made = CommandRunner(tmp_path_factory.mktemp("auto"))
    yield made
    made.close()


def test_a_run_measures_plans_and_is_held_against_its_plan(runner: CommandRunner) -> None:
    printed = runner.ranks("auto", strategy="auto", steps=3, local_size=1, micro_batch=4)
    assert "--strategy auto: --" in printed and "loopback, no network" in printed
    folder = runner.folder / "auto"
    assert Machine.read(folder / "machine.json").num_ranks == 2
    problems = Problems()
    config = read_toml(folder / "config.toml", problems)
    assert config.strategy != "auto" and config.plan == str(folder / "plan.json") and not problems.messages
    run = read_run(folder)
    assert "drifted" in run.plan
    table = plan_table(run)
    assert "The plan against the run" in table
    # Bytes are known before: the last steps sent what was predicted.
    assert run.steps[-1]["sent_bytes"] == pytest.approx(run.plan["predicted"]["sent_bytes"], rel=0.01)


def test_the_best_ways_race_and_the_fastest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raced: list[str] = []
    stopped: list[bool] = []
    failing: list[bool] = []

    def race(config: RaceConfig, train: TrainConfig, *, contestants: Sequence[Contestant]) -> SimpleNamespace:
        # All that a race checks before it starts.
        made = make_plan(config, train, Problems(), contestants)
        assert [one.config(made.train).strategy for one in contestants] == [one.strategy for one in contestants]
        assert all(one.config(made.train).mesh_shape.world_size == 4 for one in contestants)
        raced.extend(str(one) for one in contestants)
        # The last one is the fastest.
        rows = [
            SimpleNamespace(name=one.name, reason="", mean=Figures(step_s=1.0 / number, peak_rss_bytes=1e9))
            for number, one in enumerate(contestants, 1)
        ]
        if failing:
            # Some of its steps were fast before it failed.
            rows[0] = SimpleNamespace(name=rows[0].name, status="failed", reason="killed", mean=Figures(step_s=1e-3))
        return SimpleNamespace(contestants=rows, stopped="SIGINT" if stopped else "")

    monkeypatch.setattr("thinwire.compare.run.race", race)
    file, out = tmp_path / "machine.json", tmp_path / "plan.toml"
    file.write_text(machine(FAST / 5, bad=(0, 2)).to_json())
    flags = ["--machine", str(file), "--out", str(out), "--model", "tiny", "--tokens-per-step", "4096"]
    assert run_plan([*flags, "--verify", "3"]) == 0
    printed = capsys.readouterr().out
    assert "The plan against the race" in printed and "takes 3.00 times as long" in printed
    assert "links as measured\n" in printed
    assert "the border between computing and waiting is not predicted" in " ".join(printed.split())
    written, last = read_toml(out, Problems()), raced[2]
    assert f"micro_batch={written.micro_batch}" in last and last.startswith(written.strategy)
    assert (f"stages={written.stages}" in last) == (written.stages is not None)
    with pytest.raises(ConfigError, match=r"--verify 1000: \d+ ways were priced and fit; nearest: \d+"):
        run_plan([*flags, "--verify", "1000"])
    before = out.read_text()
    stopped.append(True)
    with pytest.raises(StoppedError):
        run_plan([*flags, "--verify", "2"])
    assert out.read_text() == before
    with pytest.raises(ConfigError, match=r"--trace and --verify: .* leave one of both out"):
        run_plan([*flags, "--verify", "2", "--trace", str(tmp_path / "trace.json")])
    with pytest.raises(ConfigError, match="--verify -1: must be at least 0"):
        run_plan([*flags, "--verify", "-1"])
    stopped.clear()
    raced.clear()
    assert run_tune([*flags, "--verify", "2", "--trials", "5"]) == 0
    printed = capsys.readouterr().out
    # Two, two and one; the second of a race is the fastest.
    assert len(set(raced)) == len(raced) == 5 and "2 of 5 ways measured; the fastest: 0.5 s a step" in printed
    assert "What the times of the 5 ways depend on: " in printed and "by the corrected prediction" in printed
    written, best = read_toml(out, Problems()), raced[1]
    assert f"micro_batch={written.micro_batch}" in best and best.startswith(written.strategy)
    failing.append(True)
    assert run_tune([*flags, "--verify", "2", "--trials", "3"]) == 0
    printed = capsys.readouterr().out
    assert "killed" in printed and "3 of 3 ways measured; the fastest: 0.5 s a step" in printed
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="thinwire tune makes labs of its own, and is one of 2 ranks here"):
        run_tune(flags)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match=r"--trials 1 and --verify 2: .*nearest: --trials 2 --verify 2"):
        run_tune([*flags, "--verify", "2", "--trials", "1"])


def test_the_least_memory_is_searched_within_bounds() -> None:
    assert 700e6 <= least_bytes(lambda limit: limit >= 700e6, 690e6, 100e6) <= 1.01 * 700e6
    # No memory helps: the guess stands.
    assert least_bytes(lambda limit: False, 690e6, 100e6) == 690e6
