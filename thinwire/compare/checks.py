"""Reads and checks the flags of `thinwire compare`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.compare.options import RaceConfig, command_line, of_other_place
from thinwire.errors import ConfigError, Problems, near_folder, unusable_folder
from thinwire.flags import is_plain
from thinwire.launch.line import command_line as of_training, configured
from thinwire.run.config import TrainConfig, number_errors

# Each contestant takes all of them, and losses are well apart after a fifth of a training's 1,000.
DEFAULT_STEPS = 200

# Steps after each start that are not timed, while caches fill, buffers are made and connections open.
WARM_UP_STEPS = 2
DEFAULT_ROUNDS = 3
# Of each round: enough for a median. Losses do not depend on the network, and most steps need not wait for it.
DEFAULT_TIMED_STEPS = 10
# A mean over whole periods counts each step of a period equally often.
TIMED_EXCHANGES = 2

# Options that are checked without torch, for which nobody who misspells a flag waits.
PLAIN = ("timeout", "out", "bound", "resume", "overwrite")


def read_race(args: Sequence[str], problems: Problems) -> tuple[RaceConfig, TrainConfig]:
    """Read the race and the training from the command line. Notes all errors.

    Without CONFIG.toml and --steps, the training takes DEFAULT_STEPS. Raises ConfigError for a CONFIG.toml that can't
    be read; SystemExit after --help.
    """
    own, train_args = list(args), []
    if "--" in own:
        cut = own.index("--")
        own, train_args = own[:cut], own[cut + 1 :]
    found = command_line().read(own, problems, elsewhere=of_other_place)
    stated = found[""]
    if problems.messages and not train_args and is_plain(found, PLAIN):
        race = RaceConfig(**stated)
        problems.messages += [*number_errors(race), *folder_errors(race)]
        problems.raise_any()
    config_file = stated.pop("config_file", None)
    of_train = of_training().read([*filter(None, [config_file]), *train_args], problems)
    has_length = bool({"config_file", "steps", "minutes"} & of_train[""].keys())
    train = configured(of_train, problems)
    return RaceConfig(**stated), train if has_length else replace(train, steps=DEFAULT_STEPS)


def read_seeds(text: str | None, default: int) -> tuple[int, ...]:
    """The seeds in `0,1,2`. Raises ConfigError for anything else."""
    if text is None:
        return (default,)
    seeds = [part.strip() for part in text.split(",")]
    if not all(seed.isdecimal() for seed in seeds) or len({*map(int, seeds)}) < len(seeds):
        raise ConfigError(f"--seeds {text}: must be different whole numbers between commas, such as 0,1,2")
    return tuple(map(int, seeds))


def read_target(text: str | None) -> float | str | None:
    """A loss, auto, or None. Raises ConfigError for anything else."""
    if text is None or text == "auto":
        return text
    try:
        loss = float(text)
    except ValueError:
        loss = math.nan
    if not (math.isfinite(loss) and loss > 0):
        raise ConfigError(f"--target-loss {text}: must be a number above 0, or auto")
    return loss


def most_rounds(num_steps: int) -> int:
    """The largest possible number of rounds: each needs its warm-up and at least one timed step."""
    return num_steps // (WARM_UP_STEPS + 1)


def rounds_of(race: RaceConfig, num_steps: int) -> int:
    """The number of rounds asked for; by default DEFAULT_ROUNDS, or fewer if there are too few steps."""
    return race.rounds or max(1, min(DEFAULT_ROUNDS, most_rounds(num_steps)))


def range_errors(race: RaceConfig, num_steps: int) -> Iterator[str]:
    """One message for each number out of its range."""
    least, most = WARM_UP_STEPS + 1, most_rounds(num_steps)
    if most < 1:
        rule = f"a race needs at least {least}, of which {WARM_UP_STEPS} warm up"
        yield f"--steps {num_steps}: {rule}; nearest: -- --steps {least}"
    elif race.rounds is not None and not 1 <= race.rounds <= most:
        yield (
            f"--rounds {race.rounds}: {num_steps} steps make 1 to {most} rounds, each of which warms up for "
            f"{WARM_UP_STEPS} steps; nearest: --rounds {min(max(race.rounds, 1), most)}, or -- --steps "
            f"{least * max(race.rounds, 1)}"
        )
    if race.timed_steps is not None and race.timed_steps < 1:
        yield f"--timed-steps {race.timed_steps}: must be at least 1; nearest: 1"
    if race.smooth is not None and num_steps >= 1 and not 1 <= race.smooth <= num_steps:
        nearest = min(max(race.smooth, 1), num_steps)
        yield f"--smooth {race.smooth}: must be from 1 to the number of steps, {num_steps}; nearest: {nearest}"
    yield from number_errors(race)


def folder_errors(race: RaceConfig) -> Iterator[str]:
    """A message if the folder can't be used, or holds a race that is neither resumed nor overwritten."""
    out = Path(race.out)
    if race.resume and race.overwrite:
        yield "--resume and --overwrite contradict each other: give one of them"
    if not race.out.strip():
        yield "--out is empty: give a folder, such as runs/compare"
    elif why := unusable_folder(out):
        yield f"--out {out}: {why}{near_folder(out)}"
    elif (out / "compare.json").exists():
        if not (race.resume or race.overwrite):
            yield (
                f"--out {out} already holds a race: add --resume to go on with it, --overwrite to delete it, or choose "
                "another folder"
            )
    elif race.resume:
        yield f"--resume: --out {out} holds no race to go on with"
    elif out.is_dir() and any(out.iterdir()):
        yield f"--out {out} is not empty and holds no race: choose another folder"
