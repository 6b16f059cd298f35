"""Runs a race: in each round every contestant runs once, in the same network on the same cores."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

from thinwire.compare.checks import DEFAULT_STEPS, WARM_UP_STEPS
from thinwire.compare.commands import Files, alone_command, alone_dirs, contestant_command, environment, num_alone_steps
from thinwire.compare.contestants import COMPUTE, Contestant
from thinwire.compare.leg import LegStart, StopWish, read_summary, run_leg
from thinwire.compare.measure import Result, measure
from thinwire.compare.options import RaceConfig
from thinwire.compare.plan import RacePlan, make_plan
from thinwire.compare.record import Alone, RaceRecord, delete_race, load_record, recorded_dtype
from thinwire.compare.table import Board
from thinwire.errors import ConfigError, Problems
from thinwire.lab import LabNetwork
from thinwire.report import write_race_report
from thinwire.report.metrics import read_metrics
from thinwire.report.run import number
from thinwire.run.config import TrainConfig
from thinwire.run.run_dir import RunDir


def race(
    config: RaceConfig,
    train: TrainConfig | None = None,
    *,
    command: str = "",
    problems: Problems | None = None,
    board: Board | None = None,
    contestants: Sequence[Contestant] | None = None,
) -> Result:
    """Run a race, write OUT/compare.json after every leg and OUT/compare.html at the end. Return the result.

    SIGINT and SIGTERM end it after the current steps, with the result so far. Raises ConfigError, with all problems at
    once, before anything is started.

    Args:
        command: the command line as typed, for the page.
        problems: errors found so far, to be raised with those found here.
        contestants: those that race, in place of those that the configuration names.
    """
    train = train or TrainConfig(steps=DEFAULT_STEPS)
    if config.resume and train.dtype == "auto":
        train = replace(train, dtype=recorded_dtype(Path(config.out)))
    plan = make_plan(config, train, problems or Problems(), contestants)
    record = RaceRecord(plan.settings(), command)
    if config.resume:
        record = load_record(plan.out, record.settings)
    with StopWish() as wish, LabNetwork(plan.lab) as network:
        if config.overwrite:
            delete_race(plan.out)
        try:
            plan.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {plan.out}: can't be made ({error.strerror}); give another folder") from None
        board = board or Board()
        with closing(board):
            RaceRunner(plan, record, network, wish, board).run()
    result = measure(plan, record)
    record.save(plan.out, result.to_json())
    board.finish(result, write_race_report(plan.out))
    return result


class RaceRunner:
    """Runs the remaining legs of a race and adds each to `record`."""

    def __init__(self, plan: RacePlan, record: RaceRecord, network: LabNetwork, wish: StopWish, board: Board) -> None:
        self.plan, self.record, self.network, self.wish, self.board = plan, record, network, wish, board

    def run(self) -> None:
        """Run every round of every seed, until a signal asks to stop. The order shifts by one each time."""
        legs = list(self._schedule())
        self.board.start(self.plan, len(legs))
        for seed, turn, contestant in legs:
            if self.wish.signum:
                break
            if contestant is None:
                self._compute_alone(seed, turn)
            elif self.record.failure(contestant.name):
                self.board.leg_skipped()
            else:
                self._contestant(contestant, seed, turn)
            self.record.stopped = self.wish.name
            self.record.save(self.plan.out, measure(self.plan, self.record).to_json())

    def _schedule(self) -> Iterator[tuple[int, int, Contestant | None]]:
        """Yield (seed, round, contestant) of each remaining leg; None stands for the computation alone."""
        plan, num_rounds = self.plan, len(self.plan.stops)
        measured = {(alone.seed, alone.turn) for alone in self.record.alone}
        runners = [*plan.contestants, *([None] if plan.race.bound else [])]
        for shift, (seed, turn) in enumerate(product(plan.seeds, range(1, num_rounds + 1))):
            first = shift % len(runners)
            for contestant in (*runners[first:], *runners[:first]):
                if contestant is None:
                    is_due = (seed, turn) not in measured
                else:
                    has_turn = turn == num_rounds or not contestant.is_whole
                    is_due = has_turn and not self.record.entry(contestant.name, seed).has_done(turn)
                if is_due:
                    yield seed, turn, contestant

    def _contestant(self, contestant: Contestant, seed: int, turn: int) -> None:
        entry, stop = self.record.entry(contestant.name, seed), self.plan.stops[turn - 1]
        files = Files.of(self.plan.out, contestant.name, seed)
        command = contestant_command(self.plan, contestant, seed, stop)
        begin = self._start(command, files, turn, stop, last_step=0 if contestant.is_whole else entry.last_step)
        begin = replace(
            begin, settled_after=contestant.settled_after(self.plan.train),
            timed_steps=self.plan.timed_steps[contestant.name],
        )  # fmt: skip
        self.board.leg(contestant.name, seed, turn, self.plan.train.steps)
        if contestant.is_whole:
            entry.legs.clear()
        leg, entry.failed = run_leg(self.network, begin, self.wish, self.board.step)
        entry.legs.append(leg)
        peak = number(read_summary(files.run_dir).get("peak_rss_bytes"))
        if math.isfinite(peak):
            entry.peak_rss_bytes = max(int(peak), entry.peak_rss_bytes or 0)
        if entry.has_done(len(self.plan.stops)) and not contestant.command:
            # No leg needs the checkpoints any more, and the checkpoints of many contestants would fill the disk.
            for run_dir in (files.run_dir, *files.run_dir.glob("island-*")):
                shutil.rmtree(RunDir(run_dir).checkpoints, ignore_errors=True)
        self.board.leg_done(entry.failed)

    def _compute_alone(self, seed: int, turn: int) -> None:
        """Record the median step of all ranks when each trains its share without the others."""
        command, (first, *others) = alone_command(self.plan, seed), alone_dirs(self.plan, seed)
        files = Files.of(self.plan.out, COMPUTE, seed)
        begin = replace(self._start(command, files, turn, stop=0, last_step=0), metrics=first / "metrics.jsonl")
        self.board.leg("computing alone", seed, turn, num_alone_steps(self.plan))
        _, failed = run_leg(self.network, begin, self.wish, self.board.step)
        steps = [record for path in (first, *others) for record in read_metrics(path / "metrics.jsonl")[WARM_UP_STEPS:]]
        if steps and not failed and not self.wish.signum:
            step_s, forward_s = median(step.step_s for step in steps), median(step.forward_s for step in steps)
            self.record.alone.append(Alone(seed, turn, step_s, forward_s))
        for run_dir in (first, *others):
            shutil.rmtree(RunDir(run_dir).checkpoints, ignore_errors=True)
        self.record.alone_failed = failed
        self.board.leg_done(failed)

    def _start(self, command: list[str], files: Files, turn: int, stop: int, last_step: int) -> LegStart:
        race = self.plan.race
        return LegStart(
            command, environment(self.plan), files.output, files.metrics, turn, last_step, stop, race.timeout
        )  # fmt: skip
