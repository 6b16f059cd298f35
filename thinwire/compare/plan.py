"""The plan of a race: contestants, network, number of steps, order."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.compare.checks import (
    DEFAULT_ROUNDS,
    DEFAULT_STEPS,
    DEFAULT_TIMED_STEPS,
    TIMED_EXCHANGES,
    WARM_UP_STEPS,
    folder_errors,
    range_errors,
    read_seeds,
    read_target,
    rounds_of,
)
from thinwire.compare.contestants import Contestant, read_contestants
from thinwire.compare.options import RaceConfig
from thinwire.data import load_tokenizer
from thinwire.errors import Problems, counted
from thinwire.flags import flag
from thinwire.lab import LabSpec
from thinwire.launch.machine import choose_dtype, threads_per_worker
from thinwire.launch.prepare import check
from thinwire.report.frontier import best_rates
from thinwire.run.config import DEFAULTS, TrainConfig, with_derived
from thinwire.run.effects import late_rows, unused_rows
from thinwire.run.run import Run, tables_in_effect, tokens_of
from thinwire.table import Row

DEFAULT_SMOOTH = 20
# Options that the race sets itself, and why. A user who states one is told that it has no effect.
SET_BY_RACE = {
    "strategy": "--strategies names those that race",
    "workers": "--lab says how many ranks there are",
    "local_size": "--lab says how many ranks share a node",
    "nodes": "--lab says how many there are",
    "node": "--lab numbers them",
    "join": "--lab sets the address",
    "run_dir": "runs lie below --out",
    "resume": "--resume of the race stands before `--`",
    "overwrite": "--overwrite of the race stands before `--`",
    "dry_run": "a race has none",
    "stop_at": "--rounds cuts the steps",
    "minutes": "--steps says how many all contestants take",
    "device": "ranks of the lab train on the CPU",
    "sample_tokens": "no text is generated",
    "prompt": "no text is generated",
}


@dataclass(frozen=True)
class RacePlan:
    """A race that can be run.

    Args:
        train: the configuration of all contestants.
        stops: the last step of each round.
        timed_steps: of each contestant, steps of a round, after its warm-up, that run in the slow network; None: all.
    """

    race: RaceConfig
    train: TrainConfig
    contestants: tuple[Contestant, ...]
    lab: LabSpec
    seeds: tuple[int, ...]
    stops: tuple[int, ...]
    timed_steps: dict[str, int | None]
    smooth: int
    target: float | str | None
    threads: int
    rows: tuple[Row, ...]

    @property
    def out(self) -> Path:
        return Path(self.race.out)

    @property
    def tokens_per_step(self) -> int:
        return self.train.tokens_per_step or 0

    def settings(self) -> dict[str, Any]:
        """The settings, as JSON, that a resumed race must share with the interrupted one."""
        train = {name: value for name, value in asdict(self.train).items() if name not in SET_BY_RACE}
        return {
            "strategies": {contestant.name: str(contestant) for contestant in self.contestants},
            "lab": str(self.lab),
            "seeds": list(self.seeds),
            "rounds": len(self.stops),
            "timed_steps": self.timed_steps,
            "smooth": self.smooth,
            "target_loss": self.target,
            "bound": self.race.bound,
            "train": {**train, "track": list(self.train.track)},
        }


def make_plan(
    race: RaceConfig, train: TrainConfig, problems: Problems, contestants: Sequence[Contestant] | None = None
) -> RacePlan:
    """Check everything, choose the compute dtype and prepare the tokens, once for all contestants.

    contestants: those that race; None: those that the configuration names.

    Raises ConfigError with all problems at once.
    """
    lab = problems.note(LabSpec.from_text, race.lab) or LabSpec()
    is_users = contestants is None
    contestants = list(contestants or read_contestants(race.strategies, problems, shared_config(train, lab)))
    seeds = problems.note(read_seeds, race.seeds, train.seed) or ()
    target = problems.note(read_target, race.target_loss)
    problems.messages += [*range_errors(race, train.steps), *folder_errors(race)]
    asked, train = train, shared_config(train, lab)
    check_training(train, contestants, problems)
    problems.raise_any()
    for contestant in contestants if is_users else ():
        if not exchanges_timed(race, train, contestant):
            problems.messages.append(
                f"{contestant.name} exchanges every {contestant.exchanges_every(train)} steps, and no timed step is "
                "one of them, so that its time and bytes would be those of a run that never exchanges; nearest: "
                f"-- --steps {steps_with_exchanges(race, train, contestant)}"
            )
    problems.raise_any()
    threads, why_threads = threads_per_worker(lab.world_size)
    dtype: Any
    dtype, why = choose_dtype(train.dtype, threads)
    train = replace(with_derived(train), dtype=dtype)
    tokens_of(train, load_tokenizer(train.tokenizer)).split(train.seq_len)
    found = [("threads per rank", str(threads), why_threads), (f"dtype {asked.dtype}", dtype, why)]
    num_rounds = rounds_of(race, train.steps)
    return RacePlan(
        race, train, tuple(contestants), lab, seeds,
        stops=tuple(train.steps * turn // num_rounds for turn in range(1, num_rounds + 1)),
        timed_steps={one.name: timed_steps_of(race, train, one) for one in contestants},
        smooth=race.smooth or min(DEFAULT_SMOOTH, train.steps), target=target, threads=threads,
        rows=(*found, *rows_of(race, asked, train, contestants)),
    )  # fmt: skip


def timed_steps_of(race: RaceConfig, train: TrainConfig, contestant: Contestant) -> int | None:
    """See RacePlan: those asked for; by default at least DEFAULT_TIMED_STEPS and TIMED_EXCHANGES, in whole periods."""
    every, room = contestant.exchanges_every(train), train.steps // rounds_of(race, train.steps) - WARM_UP_STEPS
    if race.timed_steps is not None:
        return race.timed_steps if race.timed_steps <= room else None
    wanted = every * max(TIMED_EXCHANGES if every > 1 else 1, -(-DEFAULT_TIMED_STEPS // every))
    if every > 1:
        wanted = min(wanted, max(room // every, 1) * every)
    return wanted if wanted <= room else None


def exchanges_timed(race: RaceConfig, train: TrainConfig, contestant: Contestant) -> int:
    """How many of a contestant's exchanges fall into timed steps."""
    every, num_rounds = contestant.exchanges_every(train), rounds_of(race, train.steps)
    found, timed = 0, timed_steps_of(race, train, contestant)
    for turn in range(num_rounds):
        first, stop = (train.steps * number // num_rounds for number in (turn, turn + 1))
        warm = first + WARM_UP_STEPS
        found += (stop if timed is None else min(stop, warm + timed)) // every - warm // every
    return found


def steps_with_exchanges(race: RaceConfig, train: TrainConfig, contestant: Contestant) -> int:
    """Steps of a race each of whose rounds times a whole period of the contestant."""
    # More steps than now allow as many rounds as by default.
    return (contestant.exchanges_every(train) + WARM_UP_STEPS) * (race.rounds or DEFAULT_ROUNDS)


def shared_config(train: TrainConfig, lab: LabSpec) -> TrainConfig:
    """The training that all contestants share, on the lab's ranks."""
    stated = {name: getattr(DEFAULTS, name) for name in SET_BY_RACE}
    ranks = {"workers": lab.world_size, "local_size": lab.local_size, "device": "cpu"}
    return replace(train, **{**stated, **ranks, "sample_tokens": 0})


def check_training(train: TrainConfig, contestants: list[Contestant], problems: Problems) -> None:
    """Note every reason why a contestant's training can't start."""
    own = [contestant for contestant in contestants if contestant.strategy]
    first = own[0].config(train) if own else train
    # --out has been checked, and a run directory with this name is empty.
    nowhere = Path(tempfile.gettempdir(), uuid.uuid4().hex)
    # Each rank of the lab is a machine to itself, and says at its start what it finds of an order.
    check(replace(first, run_dir=str(nowhere), order=()), problems)
    for contestant in own[1:]:
        if contestant.has_layout:
            with problems.collect():
                # All take the steps of the race, also those whose ranks see other shares of them.
                derived = problems.note(with_derived, train)
                tokens = derived.tokens_per_step if derived is not None else None
                asked = replace(contestant.config(train), tokens_per_step=tokens)
                check(replace(asked, run_dir=str(nowhere), order=()), problems)
        else:
            problems.note(lambda one=contestant: Run.of(one.config(train)))
    # Contestants that share a wrong table of options report the same error.
    problems.messages = list(dict.fromkeys(problems.messages))


def rows_of(race: RaceConfig, asked: TrainConfig, train: TrainConfig, contestants: list[Contestant]) -> Iterator[Row]:
    """Rows of (asked for, in effect, why) for all options in which the two differ."""
    for name, why in SET_BY_RACE.items():
        if getattr(asked, name) != getattr(DEFAULTS, name):
            yield f"{flag(name)} {getattr(asked, name)}", "no effect", why
    if race.seeds is not None and asked.seed != DEFAULTS.seed:
        yield f"--seed {asked.seed}", "no effect", f"--seeds {race.seeds} names them"
    used = set().union(*(tables_in_effect(contestant.config(train)) for contestant in contestants))
    strategy = next((contestant.strategy for contestant in contestants if contestant.strategy), "zero")
    unused = {name: table for name, table in train.tables.items() if name not in used}
    yield from unused_rows(Run.of(replace(train, strategy=strategy, optimizer=None, tables=unused)))
    if train.steps == DEFAULT_STEPS:
        yield "--steps", str(DEFAULT_STEPS), "the default of a race, for each contestant; another number: -- --steps N"
    num_rounds = rounds_of(race, train.steps)
    if race.rounds is None and num_rounds < DEFAULT_ROUNDS:
        why = f"{train.steps} steps allow no more: {WARM_UP_STEPS} steps of each round are its warm-up"
        yield f"--rounds {DEFAULT_ROUNDS}", str(num_rounds), why
    for contestant in contestants:
        if contestant.strategy:
            run = Run.of(contestant.config(train))
            yield from ((option, "no step is timed", why) for option, _, why in late_rows(run))
            if 0 < (begun := run.strategy.settled_after) < train.steps:
                why = "it sends in another way until then; minutes to the target and the bytes of a step leave that out"
                yield f"first {counted(begun, 'step')} of {contestant.name}", "not timed", why
            # Those of the shared configuration are told above.
            for option, effect, why in unused_rows(run) if contestant.has_layout else ():
                if option.removeprefix("--").replace("-", "_") in contestant.options:
                    yield f"{option} of {contestant.name}", effect, why
        if contestant.is_whole and num_rounds > 1:
            yield f"rounds of {contestant.name}", "runs whole, in the last round", "its command has no {stop_at}"
    yield from rate_rows(train, contestants)
    if race.smooth is None and train.steps < DEFAULT_SMOOTH:
        yield f"--smooth {DEFAULT_SMOOTH}", str(train.steps), "there are no more steps"
    for contestant in contestants:
        every, room = contestant.exchanges_every(train), train.steps // num_rounds - WARM_UP_STEPS
        if every > max(room, 1):
            nearest = steps_with_exchanges(race, train, contestant)
            why = f"it exchanges every {every} steps; nearest: -- --steps {nearest}"
            yield f"steps of {contestant.name} that are timed", "no whole period", why
    timed = {timed_steps_of(race, train, contestant) for contestant in contestants}
    if race.timed_steps is not None and None in timed:
        yield f"--timed-steps {race.timed_steps}", "all after the warm-up", "a round has no more steps"
    if race.timed_steps is None and (few := sorted(steps for steps in timed if steps is not None)):
        length = train.steps // num_rounds
        why = f"other steps of a round do without the slow network; --timed-steps {length} times all"
        yield "--timed-steps", " to ".join(map(str, dict.fromkeys([few[0], length if None in timed else few[-1]]))), why


def rate_rows(train: TrainConfig, contestants: Sequence[Contestant]) -> Iterator[Row]:
    """A row that names the contestants for which another learning rate than --lr was best in the recorded runs."""
    size, best = best_rates(train.model)
    found: dict[float, list[Contestant]] = {}
    for one in contestants:
        if one.strategy and "lr" not in one.options and (rate := recorded_rate(one, best)) not in (None, train.lr):
            found.setdefault(rate, []).append(one)
    if found:
        rates = "; ".join(f"{rate:g} for {', '.join(one.name for one in group)}" for rate, group in found.items())
        *_, (rate, group) = found.items()
        own = f"a rate of one's own is written like {group[-1].strategy}[lr={rate:g}]"
        yield f"--lr {train.lr:g}", "for all without their own", f"best of five with {size}: {rates}; {own}"


def recorded_rate(one: Contestant, best: Mapping[str, float]) -> float | None:
    """The best recorded rate of the same strategy and options, or that of all recorded options of the strategy.

    None where those differ: a rate of other options is then a guess.
    """
    same = {text: rate for text, rate in best.items() if text.partition("[")[0] == one.strategy}
    for text, rate in same.items():
        # Read, since options may stand in any order and be written in several ways.
        if any(recorded.options == one.options for recorded in read_contestants(text, Problems())):
            return rate
    rates = {rate for text, rate in same.items() if "optimizer=" not in text}
    return rates.pop() if len(rates) == 1 and "optimizer" not in one.options else None
