"""--minutes: the number of steps is measured, the same on all ranks, kept, and repeated by --steps."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.commands import CommandRunner, finish
from tests.workers import run_workers
from thinwire.device import Device
from thinwire.errors import ConfigError, Problems
from thinwire.launch.line import read_config
from thinwire.launch.prepare import keep_chosen, plan
from thinwire.run.config import TrainConfig, with_derived
from thinwire.run.effects import Row
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.run.settings import to_toml
from thinwire.run.signals import StopFlag
from thinwire.training import clock
from thinwire.training.clock import MeasuredSteps, choose_model, fix_steps
from thinwire.training.trainer import Trainer


def test_steps_fill_the_time_that_is_left() -> None:
    measured = MeasuredSteps(step_s=0.5, end_s=8.0, build_s=2.0, num_steps=3)
    assert measured.steps_in(110.0) == 180
    assert measured.steps_in(5.0) == 1


def config_in(folder: Path) -> TrainConfig:
    (folder / "data.txt").write_text("some words to learn\n" * 200)
    (folder / "run").mkdir()
    return TrainConfig(
        model="tiny", data=str(folder / "data.txt"), cache_dir=str(folder / "cache"), run_dir=str(folder / "run"),
        seq_len=16, micro_batch=2, workers=2, local_size=1, minutes=3.0, eval_sequences=2, sample_tokens=4,
        dtype="fp32",
    )  # fmt: skip


def train(rank: int, world_size: int, config: TrainConfig) -> tuple[TrainConfig, list[str], list[float], float, bytes]:
    """A run whose ranks would choose other numbers of steps; its configuration, rows, losses and random state."""
    run, place = Run.of(with_derived(config)), ProcessPlace(rank, rank, world_size)
    rows: list[Row] = []
    measure = clock.measure
    if config.minutes is not None:

        def as_if(*given: object) -> MeasuredSteps:
            found = measure(*given)  # type: ignore[arg-type]
            assert found.step_s > 0 and found.build_s > 0 and found.num_steps >= 1 and found.end_s >= clock.END_S
            return replace(found, step_s=20.0 + 20 * rank, end_s=0.0, build_s=0.0)

        clock.measure = as_if  # type: ignore[assignment]
        clock.time = Clock()  # type: ignore[assignment]
        run, rows = fix_steps(run, place, Device(), "fp32", began=0.0)
    trainer = Trainer(run, place, StopFlag(), "fp32", rows)
    trainer.run()
    losses, total = [], 0.0
    if trainer.reporter is not None:
        trainer.reporter.close()
        losses, total = (
            [record.loss for record in trainer.reporter.metrics.records],
            trainer.reporter.metrics.records[-1].lr,
        )
    return run.config, [row[1] for row in rows], losses, total, bytes(torch.get_rng_state().numpy())


class Clock:
    """Stands at a minute after the start of the command; what passes is real."""

    def __init__(self) -> None:
        import time

        self.perf_counter = time.perf_counter

    def time(self) -> float:
        return 60.0


def test_all_ranks_take_the_first_ones_number_and_steps_repeats_it(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    by_minutes = run_workers(train, 2, config)
    # 0.9 of two minutes, at 20 s a step on rank 0; rank 1 would take half of them.
    assert [found[0].steps for found in by_minutes] == [5, 5] and by_minutes[0][1] == ["5 steps"]
    assert by_minutes[0][0].minutes is None and by_minutes[0][0].warmup_steps == 0
    (tmp_path / "again").mkdir()
    by_steps = run_workers(train, 2, replace(config, minutes=None, steps=5, run_dir=str(tmp_path / "again")))
    assert len(by_minutes[0][2]) == 5
    assert [found[2:] for found in by_minutes] == [found[2:] for found in by_steps]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    runner = CommandRunner(tmp_path_factory.mktemp("clock"))
    yield runner
    runner.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_the_number_is_kept_when_the_run_is_resumed(runner: CommandRunner) -> None:
    """The time is over before the first step was measured: one step, whatever the machine."""
    code, out, err = finish(runner.train("run", steps=None, minutes=0.001))
    assert code == 0, err
    assert (
        "--minutes 0.001: measuring the first steps" in out
        and "--minutes 0.001: 1 step (the time is too short, by " in out
    )
    assert "step 1/1" in out and runner.summary("run")["steps"] == 1
    kept = tomllib.loads((runner.folder / "run/config.toml").read_text())
    assert kept["steps"] == 1 and "minutes" not in kept
    again, rows = keep_chosen(TrainConfig(run_dir=str(runner.folder / "run"), resume=True, minutes=9.0, model="auto"))
    assert (again.steps, again.minutes, again.model) == (1, None, "tiny")
    assert [row[1] for row in rows] == ["1 step", "tiny"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "5", "--minutes", "1"], "--steps 5 and --minutes 1.0: a run has one length; give one of them"),
        (["--minutes", "0"], "--minutes 0.0: must be above 0"),
        (["--minutes", "1", "--strategy", "diloco"], "--minutes 1: diloco takes steps at each island's own pace"),
        (["--model", "auto"], "--model auto: chooses by the time that --minutes states; nearest: --model demo"),
        (
            ["--model", "auto", "--minutes", "1", "--nodes", "2", "--join", "127.0.0.1:1"],
            "each of 2 machines would choose for itself",
        ),
    ],
)
def test_what_can_not_be_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    problems = Problems()
    with pytest.raises(ConfigError) as error:
        plan(read_config([*words, "--run-dir", str(tmp_path / "run")], problems), problems)
    assert told in str(error.value)


def test_the_flag_decides_over_the_file(tmp_path: Path) -> None:
    problems, toml = Problems(), tmp_path / "run.toml"
    toml.write_text("steps = 70\n")
    config = read_config([str(toml), "--minutes", "2"], problems)
    assert config.minutes == 2.0 and "steps" not in to_toml(config).replace("_steps", "")
    toml.write_text("minutes = 2\n")
    config = read_config([str(toml), "--steps", "70"], problems)
    assert (config.steps, config.minutes) == (70, None) and not problems.messages
    toml.write_text("minutes = 2\nsteps = 70\n")
    read_config([str(toml)], problems)
    assert "run.toml: --steps 70 and --minutes 2" in problems.messages[0]


def test_the_model_follows_from_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "num_cores", lambda: 2)
    monkeypatch.setattr(clock, "build_model", lambda *given: None)
    monkeypatch.setattr(clock, "pass_seconds", lambda *given: 0.5)
    config = TrainConfig(model="auto", minutes=3.0, workers=4, micro_batch=4)
    # 126 s of the 180, at 4 workers on 2 cores: 1 s a step.
    assert choose_model(config, 1, "fp32", 256) == ("demo", "demo would take about 1 s a step, 126 steps in 3 min")
    model, why = choose_model(replace(config, minutes=2.0), 1, "fp32", 256)
    assert model == "tiny" and "84 steps in 2 min; with fewer than 100 the smaller model learns more" in why
