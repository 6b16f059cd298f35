"""Which ranks a plan groups: a part of a machine, a machine, or machines that keep off a bad link."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.machines import FAST, machine, near
from thinwire.cost import Cores, Machine
from thinwire.errors import Problems
from thinwire.models import Llama, build_skeleton
from thinwire.planner import selection as module
from thinwire.planner.chosen_plan import changes, planned
from thinwire.planner.grouping import other_groups
from thinwire.planner.plan import plan
from thinwire.planner.plan_options import PlanConfig
from thinwire.planner.training_plan import TrainingPlan
from thinwire.planner.written import made_plan, write_plan
from thinwire.run.config import TrainConfig
from thinwire.run.settings import read_toml


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer candidates are simulated than for a user."""
    monkeypatch.setattr(module, "NUM_SIMULATED", 6)


BAD = machine(FAST, bad=(0, 2))


def small(made: Machine, **more: object) -> TrainingPlan:
    return plan("tiny", made, tokens_per_step=2048, micro_batch=2, stages=1, axes=(), **more)  # type: ignore[arg-type]


def test_groups_of_machines_keep_off_a_bad_link() -> None:
    """A rank sends to its group, and to one rank of the other: of four machines two pairs send each other nothing."""
    found = small(BAD, strategies=["zero"])
    way, pricing = found.best.candidate, found.pricing
    assert way.group == 2 and found.best.order in ((0, 1, 3, 2), (0, 3, 1, 2))
    # In every order of the machines, and in every group, nothing is faster.
    for group, rest in itertools.product((0, 2, 4), itertools.permutations(range(1, 4))):
        assert pricing.simulated(replace(way, group=group), (0, *rest)).makespan_s >= 0.999 * found.best.step_s
    alone = next(each for each in found.search.fastest if not each.candidate.group)
    assert found.best.step_s < 0.6 * alone.step_s
    told = json.loads(found.to_json())
    assert told["link_bytes"][0][2] == told["link_bytes"][2][0] == 0 and "--local-size 2" in told["flags"]
    assert sum(each or 0 for each in told["link_bytes"][0]) == pytest.approx(told["predicted"]["sent_bytes"])
    assert found.values["local_size"] == 2


def test_groups_are_tried_where_they_change_what_is_sent() -> None:
    """Flat exchanges of one codec are the same in groups of one rank and of all; those of two codecs are not."""
    one = small(near(FAST), strategies=["zero", "sdp4bit", "ddp"], has_settings=False)
    ways = {each.candidate.strategy: replace(each.candidate, group=0) for each in one.search.fastest}
    assert {name: other_groups(one.pricing, way) for name, way in ways.items()} == {
        "zero": (1,), "sdp4bit": (1, 4), "ddp": (),
    }  # fmt: skip
    spread = replace(ways["zero"], replicas=2, sequence=2)
    islands = replace(ways["zero"], outer="diloco", islands=2, replicas=2)
    assert not other_groups(one.pricing, spread) and not other_groups(one.pricing, islands)
    # Inside a stage of two ranks; and beside matrices over two.
    half = replace(ways["sdp4bit"], replicas=2)
    halves = [replace(half, stages=2), replace(half, tensor=2)]
    assert [other_groups(one.pricing, way) for way in halves] == [(1,), (4,)]
    # Where links inside machines are fast, and alike between them, machines are the groups.
    assert {each.candidate.group for each in one.search.fastest} > {0} and not one.best.candidate.group


def test_a_stated_group_is_kept_and_a_chosen_one_is_written() -> None:
    model = build_skeleton("tiny", 257, 256)
    assert isinstance(model, Llama)
    asked = TrainConfig(model="tiny", strategy="auto", workers=1, nodes=4, join="a:1", micro_batch=2, stages=1)
    free = planned(asked, model, BAD, "fp32")
    best = replace(free.best, candidate=replace(free.best.candidate, group=2))
    chosen = replace(free, search=replace(free.search, fastest=(best,)))
    assert changes(asked, chosen)["local_size"] == 2 and "groups of 2" in best.candidate.layout
    stated = planned(replace(asked, local_size=1), model, BAD, "fp32")
    assert {each.candidate.group for each in stated.search.fastest} == {0}
    assert "local_size" not in changes(asked, stated)


def test_a_plan_with_groups_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "machine.json", tmp_path / "plan.toml"
    file.write_text(replace(BAD, cores=Cores((0,) * 4, (4.0,))).to_json())
    asked = PlanConfig(machine=str(file), model="tiny", strategies="zero", stages=1, out=str(out))
    found = made_plan(asked, Problems())
    write_plan(asked, found)
    printed = capsys.readouterr().out
    # A setting that is not chosen is named by its flags.
    other = replace(found.best, candidate=replace(found.best.candidate, strategy="diloco[sync_every=50]"))
    aside = replace(found, search=replace(found.search, aside={"unknown": [other]})).rows("--strategy auto")
    assert any("groups of 2 --diloco.sync-every 50" in effect.replace("_", "-") for _, effect, _ in aside)
    config = read_toml(out, Problems())
    assert config.local_size == found.values["local_size"] == 2 and config.order == found.best.order
    assert "--local-size 2, all on this machine" in printed and "groups of 2" in printed
    assert "-- thinwire train" in printed
