"""What a plan's files say, and the runs and races that follow it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.planner.machines import FAST, SLOW, machine
from tests.training.commands import CommandRunner
from thinwire.compare.contestants import Contestant
from thinwire.compare.measure import Figures
from thinwire.compare.options import RaceConfig
from thinwire.compare.plan import make_plan
from thinwire.compare.tune import run_tune
from thinwire.compare.verify import run_plan
from thinwire.cost import Machine
from thinwire.errors import ConfigError, Problems
from thinwire.planner.plan_options import PlanConfig
from thinwire.planner.table import reasons_of
from thinwire.planner.written import made_plan
from thinwire.report.page import plan_table
from thinwire.report.run import read_run
from thinwire.run.config import TrainConfig
from thinwire.run.settings import read_toml
from thinwire.run.signals import StoppedError

pytestmark = pytest.mark.usefixtures("few")


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


def test_what_train_refuses_a_plan_refuses_in_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machine.json").write_text(
        replace(machine(FAST), rates={**machine(FAST).rates, "encode bf16": 1e9}).to_json()
    )
    monkeypatch.chdir(tmp_path)
    for flags, told in (
        ("--slices 0", "--slices 0: must be at least 1; nearest: 1"),
        ("--slices -1", "--slices -1: must be at least 1; nearest: 1"),
        ("--powersgd.rank 0", "rank 0"),
        ("--sdp4bit.weights foo", "foo"),
        ("--dtype bf16", r"calibrate it anew, with --dtypes fp32 bf16"),
        ("--machine .", r"\.: is a folder; nearest: machine\.json; thinwire calibrate --out machine\.json writes it"),
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            run_plan(["--model", "tiny", "--strategies", "zero", "--stages", "1", *flags.split()])
        assert len(caught.value.problems) == 1


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
