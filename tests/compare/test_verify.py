"""The ways of a plan as contestants of a race."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.test_plan import RATES
from thinwire.compare.options import RaceConfig
from thinwire.compare.plan import exchanges_timed, shared_config, timed_steps_of
from thinwire.compare.verify import ROUNDS, STEPS, contestant, lab_of, shared_of, with_exchanges
from thinwire.cost import Cores, Machine, Network
from thinwire.planner import selection as module
from thinwire.planner.plan import plan
from thinwire.planner.plan_options import PlanConfig
from thinwire.planner.search import Priced
from thinwire.planner.training_plan import TrainingPlan
from thinwire.planner.written import training
from thinwire.run.config import TrainConfig


@pytest.fixture(scope="module")
def found() -> TrainingPlan:
    """Plain training of tiny on two nodes of two ranks."""
    network = replace(Network.even(4, 12.5e6, 1e-3), nodes=(0, 0, 1, 1))
    made = Machine(tuple("abcd"), network, Cores(tuple(range(4)), (1.0,) * 4), RATES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NUM_SIMULATED", 1)
        return plan("tiny", made, tokens_per_step=512, seq_len=64, micro_batch=2, strategies=("ddp",), stages=1)


def configs(found: TrainingPlan, *ways: Priced) -> list[TrainConfig]:
    """What the ways train with in a race of them, of which the first is the plan's."""
    found = replace(found, search=replace(found.search, fastest=ways))
    shared = shared_of(PlanConfig(model="tiny", seq_len=64, micro_batch=2), found)
    contestants = [contestant(number, way, found) for number, way in enumerate(ways, 1)]
    return [one.config(shared_config(shared, lab_of(found.machine))) for one in contestants]


def test_a_way_races_with_nothing_of_the_best_way(found: TrainingPlan) -> None:
    plain = replace(found.best, candidate=replace(found.best.candidate, tensor=1, sequence=1), order=(0, 1, 2, 3))
    cut = replace(plain.candidate, tensor=2, replicas=2, memory="800mb")
    first, second = configs(found, replace(plain, candidate=cut), plain)
    assert (first.tensor, first.memory, first.strategy) == (2, "800mb", "ddp")
    assert (second.tensor, second.memory, second.strategy, second.local_size) == (None, None, "ddp", 2)
    islands = replace(plain.candidate, outer="diloco", islands=4, replicas=1)
    first, second = configs(found, replace(plain, candidate=islands), plain)
    assert (first.strategy, first.inner, first.local_size) == ("diloco", "ddp", 1)
    assert (second.strategy, second.inner, second.local_size) == ("ddp", None, 2)


def test_a_way_with_a_setting_races_and_is_written_with_it(found: TrainingPlan) -> None:
    way = replace(
        found.best, candidate=replace(found.best.candidate, strategy="powersgd[rank=8]", tensor=1, sequence=1)
    )
    islands = replace(way, candidate=replace(way.candidate, strategy="ddp", outer="diloco[sync_every=50]", islands=4))
    for each, name, table in ((way, "powersgd", {"rank": 8}), (islands, "diloco", {"sync_every": 50})):
        (raced,) = configs(found, each)
        config = PlanConfig(model="tiny", seq_len=64, micro_batch=2, tables={name: {"codec": "bf16"}})
        plan = training(config, replace(found, search=replace(found.search, fastest=(each,))), Path("plan.json"))
        assert raced.strategy == plan.strategy == name and raced.tables[name] == table
        assert plan.tables[name] == {"codec": "bf16", **table}


def test_a_race_times_whole_periods_of_islands(found: TrainingPlan) -> None:
    config, race = PlanConfig(model="tiny", seq_len=64, micro_batch=2), RaceConfig(rounds=ROUNDS)
    shared, plain = shared_of(config, found), contestant(1, found.best, found)
    way = replace(found.best, candidate=replace(found.best.candidate, outer="diloco", islands=4, replicas=1))
    islands = contestant(2, way, found)
    every = islands.exchanges_every(shared)
    assert with_exchanges(race, shared, [plain]).steps == STEPS < every and not exchanges_timed(race, shared, islands)
    longer = with_exchanges(race, shared, [plain, islands])
    assert timed_steps_of(race, longer, islands) == every
    assert exchanges_timed(race, longer, islands) == ROUNDS
