"""`thinwire plan` as a command: plan, then, if asked, race the best candidates and compare with the predictions."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError, Problems, ThinwireError
from thinwire.planner.plan_line import read_plan_line
from thinwire.planner.plan_options import PlanConfig

if TYPE_CHECKING:
    from thinwire.compare.contestants import Contestant
    from thinwire.compare.measure import Result
    from thinwire.compare.options import RaceConfig
    from thinwire.planner.search import Priced
    from thinwire.planner.training_plan import TrainingPlan
    from thinwire.run.config import TrainConfig

# Steps of each way, at least: in each of two rounds, some warm up and the others are timed.
STEPS, ROUNDS = 20, 2
# Parts of a prediction, and how a race calls them.
TERMS = {
    "step_s": "step_s", "compute_s": "compute_s", "exposed_comm_s": "exposed_comm_s", "codec_s": "codec_s",
    "sent_bytes": "sent_bytes_per_step", "peak_rss_bytes": "peak_rss_bytes",
}  # fmt: skip


def run_plan(args: Sequence[str]) -> int:
    """Plan, print the result, and write it. Raises ConfigError with all errors at once."""
    problems = Problems()
    config = read_plan_line(args, problems)
    # Nobody who asks for --help waits for torch.
    from thinwire.planner.written import made_plan, write_plan

    if config.verify:
        problems.note(check_outside, "thinwire plan --verify")
    found = made_plan(config, problems)
    if config.verify:
        found = verified(config, found)
    write_plan(config, found)
    return 0


def check_outside(command: str) -> None:
    """Raise ConfigError for a command that makes labs of its own, but was started as one of several ranks."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        raise ConfigError(
            f"{command} makes labs of its own, and is one of {num_ranks} ranks here; nearest: `thinwire lab ... -- "
            "thinwire calibrate --out machine.json`, and then this command by itself"
        )


def verified(config: PlanConfig, found: TrainingPlan) -> TrainingPlan:
    """Race the fastest candidates in the lab. Return the plan with the measured winner in front.

    Raises as `raced` and `with_fastest` do.
    """
    ways = found.search.fastest[: config.verify]
    times = raced(config, found, ways, "verify")
    made, scores = with_fastest(found, ways, times), scores_of(ways, times)
    fastest = scores.index(min(scores))
    print(
        f"the fastest measured is {contestant(fastest + 1, ways[fastest], found).name}; the fastest predicted takes "
        f"{scores[0] / scores[fastest]:.2f} times as long"
    )
    return made


def scores_of(ways: Sequence[Priced], times: Sequence[float]) -> list[float]:
    """What the plan makes small, of measured seconds a step: times the steps until a target loss, where these count."""
    return [way.steps * step_s for way, step_s in zip(ways, times, strict=True)]


def with_fastest(found: TrainingPlan, ways: Sequence[Priced], times: Sequence[float]) -> TrainingPlan:
    """The plan with the way in front that was the fastest. Raises ThinwireError where none ran to its end."""
    if not math.isfinite(min(times)):
        raise ThinwireError("no way ran to its end; what they printed is in the folder of the race")
    scores = scores_of(ways, times)
    way = ways[scores.index(min(scores))]
    rest = [other for other in found.search.fastest if other is not way]
    return replace(found, search=replace(found.search, fastest=(way, *rest)))


def raced(config: PlanConfig, found: TrainingPlan, ways: Sequence[Priced], name: str) -> list[float]:
    """Seconds of a step of each way, raced in the lab; infinite for one that did not run to its end.

    Prints predicted beside measured. name: of the race's folder, behind that of the plan. Raises ConfigError where the
    lab can't be made, StoppedError after a signal.
    """
    from thinwire.compare.emulate import emulated
    from thinwire.compare.options import RaceConfig
    from thinwire.compare.run import race
    from thinwire.run.signals import StoppedError

    contestants = [contestant(number, way, found) for number, way in enumerate(ways, 1)]
    out = Path(config.out)
    lab, told = emulated(found.machine)
    asked = RaceConfig(
        lab=str(lab), rounds=ROUNDS, bound=False, overwrite=True,
        out=str(out.with_name(f"{out.stem}-{name}")),
    )  # fmt: skip
    shared = with_exchanges(asked, shared_of(config, found), contestants)
    print(f"racing {len(ways)} way(s) in the lab, {lab}, on the cores of this machine")
    print("links as measured" if not told else "links are not all as measured: " + "; ".join(told))
    if shared.steps > STEPS:
        print(
            f"{shared.steps} steps of each, in place of {STEPS}: islands exchange rarely, and a whole period is timed"
        )
    result = race(asked, shared, contestants=contestants)
    if result.stopped:
        raise StoppedError(signal.Signals[result.stopped])
    measured = {row.name: row.mean.step_s for row in result.contestants if not row.reason}
    show(contestants, ways, result)
    return [measured.get(one.name) or math.inf for one in contestants]


def shared_of(config: PlanConfig, found: TrainingPlan) -> TrainConfig:
    """The training that all ways share, without what a way states itself."""
    from thinwire.compare.contestants import INSIDE, LAYOUT
    from thinwire.planner.written import training
    from thinwire.run.config import DEFAULTS

    own = {name: getattr(DEFAULTS, name) for name in (*LAYOUT, INSIDE)} | {"micro_batch": config.micro_batch}
    made = training(config, found, Path(config.out).with_suffix(".json"))
    return replace(
        made, steps=STEPS, eval_sequences=0, checkpoint_every=0, plan=None, tables=dict(config.tables), **own
    )


def with_exchanges(race: RaceConfig, shared: TrainConfig, contestants: Sequence[Contestant]) -> TrainConfig:
    """The training with so many steps that each round times a whole period of every way."""
    from thinwire.compare.plan import steps_with_exchanges

    needed = (steps_with_exchanges(race, shared, one) for one in contestants)
    return replace(shared, steps=max(shared.steps, *needed))


def contestant(number: int, way: Priced, found: TrainingPlan) -> Contestant:
    """A candidate as a contestant of a race."""
    from thinwire.compare.contestants import Contestant
    from thinwire.methods.pipeline.across import STAGES
    from thinwire.options import EXPERTS, PIPELINE, RESIDENCY
    from thinwire.planner.settings import name_of, table_of
    from thinwire.run.places import FLAT

    candidate = way.candidate
    options: dict[str, Any] = {"micro_batch": candidate.micro_batch}
    if way.order != tuple(range(found.machine.num_ranks)):
        options["order"] = way.order
    if candidate.tensor > 1:
        options["tensor"] = candidate.tensor
    for name, value in found.held(candidate).items():
        options[name if name in FLAT else f"{RESIDENCY}.{name}"] = value
    if candidate.sequence > 1:
        options["sequence.parallel"] = candidate.sequence
    if candidate.experts > 1:
        options |= {f"{EXPERTS}.{name}": value for name, value in candidate.travel}
        options[f"{EXPERTS}.parallel"] = candidate.experts
    if candidate.group:
        options["local_size"] = candidate.group
    if candidate.outer:
        options |= {"inner": candidate.strategy, "local_size": candidate.num_ranks // candidate.islands}
    strategy = candidate.outer or candidate.strategy
    for own in table_of(strategy).values():
        options |= own
    if candidate.stages > 1:
        options["stages"] = candidate.stages
        options |= {f"{PIPELINE}.{name}": value for name, value in candidate.options.items()}
        # As it was planned; the ranks need not choose.
        options[f"{PIPELINE}.across"] = STAGES
    stages = f"-{candidate.stages}-stages" if candidate.stages > 1 else ""
    return Contestant(f"{number}-{name_of(strategy)}{stages}", name_of(strategy), options)


def show(contestants: Sequence[Contestant], ways: Sequence[Priced], result: Result) -> None:
    """Print the parts of each candidate's step, predicted and measured."""
    from rich.console import Console
    from rich.table import Table

    from thinwire.planner.table import PLAIN_WIDTH
    from thinwire.report.page import BORDER

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(PLAIN_WIDTH, console.width)
    table = Table("way", "of rank 0 and step", "predicted", "measured", "error", title="The plan against the race")
    rows = {row.name: row for row in result.contestants}
    for one, way in zip(contestants, ways, strict=True):
        row = rows[one.name]
        if row.reason:
            table.add_row(one.name, row.status, "", "", row.reason)
            continue
        for line in compared(way.terms, vars(row.mean)):
            table.add_row(one.name, *line)
    console.print(table)
    console.print(BORDER)


def compared(predicted: Mapping[str, float], measured: Mapping[str, float | None]) -> Iterator[tuple[str, ...]]:
    """Yield (part, predicted, measured, error) for each part that both have."""
    from thinwire.report.page import value_text
    from thinwire.report.units import percent_text

    for name, figure in TERMS.items():
        value, found = predicted.get(name), measured.get(figure)
        if value is not None and found is not None:
            error = percent_text(found / value - 1) if value else ""
            yield name, value_text(name, value), value_text(name, found), error
