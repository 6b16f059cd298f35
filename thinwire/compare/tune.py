"""`thinwire tune`: plan, race the most promising ways, correct the prediction by what they took, and race on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.compare.verify import check_outside, raced, with_fastest
from thinwire.errors import ConfigError, Problems
from thinwire.planner.plan_line import read_tune_line
from thinwire.planner.plan_options import TuneConfig

if TYPE_CHECKING:
    from thinwire.planner.training_plan import TrainingPlan
    from thinwire.planner.tune import Trial


def run_tune(args: Sequence[str]) -> int:
    """Plan, tune, and write the fastest. Raises ConfigError with all errors at once."""
    problems = Problems()
    config = read_tune_line(args, problems)
    # Nobody who asks for --help waits for torch.
    from thinwire.planner.written import made_plan, write_plan

    if not 1 <= config.verify <= config.trials:
        race = max(1, config.verify)
        problems.messages.append(
            f"--trials {config.trials} and --verify {config.verify}: a race has at least one way, and all together as "
            f"many; nearest: --trials {max(race, config.trials)} --verify {race}"
        )
    problems.note(check_outside, "thinwire tune")
    write_plan(config, tuned(config, made_plan(config, problems)))
    return 0


def tuned(config: TuneConfig, found: TrainingPlan) -> TrainingPlan:
    """The plan with the fastest of all ways that were raced in front. Raises as `raced` and `with_fastest` do."""
    from thinwire.planner.tune import Trial, corrected, importance, next_ways

    ways, trials = found.search.fastest, list[Trial]()
    if config.trials > len(ways):
        raise ConfigError(f"--trials {config.trials}: {len(ways)} ways were priced and fit; nearest: {len(ways)}")
    while len(trials) < config.trials:
        chosen = next_ways(ways, trials, min(config.verify, config.trials - len(trials)))
        trials += map(Trial, chosen, raced(config, found, chosen, f"tune-{len(trials) + 1}"))
        best = min(trials, key=lambda trial: trial.step_s * trial.way.steps)
        print(f"{len(trials)} of {config.trials} ways measured; the fastest: {told(best)}")
    made = with_fastest(found, [trial.way for trial in trials], [trial.step_s for trial in trials])
    parts = ", ".join(f"{name} {part:.0%}" for name, part in importance(trials).items() if part >= 0.005)
    print(f"What the times of the {len(trials)} ways depend on: {parts or 'no knob that was turned'}")
    for way, step_s, factor in corrected(ways, trials)[:1]:
        promise = f"{step_s:.3g} s a step by the corrected prediction, within a factor of {factor:.2f}"
        print(f"The most promising that was not measured: {way.candidate.flags}: {promise}")
    return made


def told(trial: Trial) -> str:
    """A trial in words."""
    if not math.isfinite(trial.step_s):
        return "none ran to its end"
    predicted = trial.way.step_s
    return f"{trial.step_s:.3g} s a step, predicted {predicted:.3g}: {trial.way.candidate.flags}"
