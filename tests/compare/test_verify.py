"""The ways of a plan as contestants of a race."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.planner.machines import FAST, RATES, SLOW, machine
from thinwire.compare import emulate
from thinwire.compare.emulate import emulated, lab_of
from thinwire.compare.options import RaceConfig
from thinwire.compare.plan import exchanges_timed, shared_config, timed_steps_of
from thinwire.compare.verify import ROUNDS, STEPS, contestant, shared_of, with_exchanges
from thinwire.cost import Cores, Machine, Network
from thinwire.errors import ConfigError
from thinwire.lab import LabSpec
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


def linked(made: Machine, rate: dict[tuple[int, int], float], delay_s: dict[tuple[int, int], float]) -> Machine:
    """The machine with other rates and delays of some links, by (from, to)."""
    network = made.network
    rates, delays = [list(row) for row in network.rates], [list(row) for row in network.delays_s]
    for table, changes in ((rates, rate), (delays, delay_s)):
        for (a, b), value in changes.items():
            table[a][b] = value
    return replace(
        made, network=replace(network, rates=tuple(map(tuple, rates)), delays_s=tuple(map(tuple, delays)))
    )  # fmt: skip


def test_the_lab_has_the_links_of_the_machine() -> None:
    assert str(lab_of(machine(FAST))) == "nodes=4,rate=100000kbit,local_size=1"
    assert str(lab_of(machine(FAST, bad=(0, 2)))) == "nodes=4,rate=100000kbit,local_size=1,link=0-2:10000kbit"
    whole = machine(FAST)
    slow = linked(whole, {pair: SLOW for pair in whole.network.pairs if 3 in pair}, {})
    assert str(lab_of(slow)) == "nodes=4,rate=100000kbit,local_size=1,slow=3:10000kbit"
    near = replace(whole, network=replace(whole.network, nodes=(0, 0, 1, 1)))
    assert str(lab_of(near)) == "nodes=2,rate=100000kbit,local_size=2"
    assert lab_of(replace(whole, network=replace(whole.network, nodes=(0,) * 4))).rate is None


def test_the_lab_has_the_delay_of_the_machine_or_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LabSpec] = []

    def network(spec: LabSpec) -> SimpleNamespace:
        made.append(spec)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(emulate, "LabNetwork", network)
    far = linked(machine(FAST), {}, dict.fromkeys(machine(FAST).network.pairs, 0.05))
    # A message of one byte takes half a millisecond in a lab without delay.
    lab, told = emulated(far)
    assert str(lab) == "nodes=4,rate=100000kbit,local_size=1,delay=49.5ms" and not told
    assert [spec.delay for spec in made] == ["49.5ms"]
    near, told = emulated(machine(FAST))
    assert near.delay is None and not told and len(made) == 1
    # One link over another way: all have the same in the lab.
    lab, (told_delays,) = emulated(linked(far, {}, {(0, 3): 0.2, (3, 0): 0.2}))
    assert lab.delay == "49.5ms" and told_delays == "delays of 50 to 200 ms were measured: all links have 49.5ms there"
    lab, (told_beside,) = emulated(linked(far, {(0, 2): SLOW, (2, 0): SLOW}, {}))
    assert lab.link and lab.delay is None and told_beside.startswith("links have no delay there, and 49.5 ms were")
    lab, (told_back,) = emulated(linked(machine(FAST), {pair: SLOW for pair in far.network.pairs if pair[0] == 3}, {}))
    assert lab.slow == {3: "10000kbit"} and told_back.startswith("10 Mbit/s from 3 to 0 and 100 back were measured")

    def refuse(spec: LabSpec) -> SimpleNamespace:
        raise ConfigError("this kernel has no netem queue")

    monkeypatch.setattr(emulate, "LabNetwork", refuse)
    lab, told = emulated(far)
    assert lab.delay is None
    assert told == ["links have no delay there, and 49.5ms were measured: this kernel has no netem queue"]


def test_the_lab_limits_no_link_whose_rate_is_unknown_or_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "LabNetwork", lambda spec: SimpleNamespace(close=lambda: None))
    lab, (told,) = emulated(machine(math.inf))
    assert str(lab) == "nodes=4,rate=none,local_size=1"
    assert told == "of some links no rate is known: they have no limit there"
    # 24 Gbit/s, and one link of 100 Mbit/s; then one node of 10 Mbit/s.
    fast = machine(3e9)
    lab, (told,) = emulated(linked(fast, dict.fromkeys([(0, 2), (2, 0)], FAST), {}))
    assert str(lab) == "nodes=4,rate=none,local_size=1,link=0-2:100000kbit"
    assert told.startswith("24 Gbit/s were measured: above 20gbit links have no limit there")
    lab, _ = emulated(linked(fast, {pair: SLOW for pair in fast.network.pairs if 3 in pair}, {}))
    assert str(lab) == "nodes=4,rate=none,local_size=1,slow=3:10000kbit"
    assert lab_of(machine(2.5e9)).rate == "20000000kbit"
    lab, (told,) = emulated(machine(50e3))
    assert lab.rate == "1000kbit" and told == "400 kbit/s were measured: the slowest links have 1mbit there"
