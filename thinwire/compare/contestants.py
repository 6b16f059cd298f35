"""The contestants of a race: strategies of `thinwire train` with their options, and outside programs."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from thinwire.errors import ConfigError, Problems, nearest
from thinwire.flags import options_of
from thinwire.options import (
    EXPERTS,
    PIPELINE,
    RESIDENCY,
    SEQUENCE,
    checked_values,
    has_islands,
    option_tables,
    strategy_table,
)
from thinwire.registry import STRATEGIES
from thinwire.run.config import TrainConfig, range_errors
from thinwire.run.run import Run
from thinwire.run.spelled import options_in, split

PLACEHOLDERS = ("run_dir", "steps", "seed", "config", "resume", "stop_at")
# Training options that each contestant may set for itself, because their best values depend on the method.
TUNED = ("lr", "optimizer", "weight_decay", "grad_clip")
# How the model lies on the ranks, and options of tables such as pipeline.plan: each contestant's own, too.
LAYOUT = ("stages", "tensor", "micro_batch", "order", "local_size", "memory", "store", "activations", "slices")
LAYOUT_OPTIONS = (PIPELINE, SEQUENCE, EXPERTS, RESIDENCY)
# The strategy inside each island, of a contestant that trains islands.
INSIDE = "inner"
# Folder and row of the measurement of computing alone. It is not a contestant.
COMPUTE = "compute"
_NAME = r"[A-Za-z0-9][\w.+-]*"
_STRATEGY = re.compile(rf"(?:(?P<name>{_NAME})=)?(?P<strategy>{_NAME})(?:\[(?P<options>.*)\])?")
_COMMAND = re.compile(rf"cmd:(?P<name>{_NAME})=(?P<command>.+)", re.DOTALL)


@dataclass(frozen=True)
class Contestant:
    """One row of the table: a strategy with options, or a command with placeholders."""

    name: str
    strategy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    def __str__(self) -> str:
        """The strategy with its options, or the command, without the name."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return self.command or (f"{self.strategy}[{options}]" if options else self.strategy)

    @property
    def is_whole(self) -> bool:
        """Whether the contestant can't be cut into rounds."""
        return bool(self.command) and "{stop_at}" not in self.command

    def config(self, base: TrainConfig) -> TrainConfig:
        """The configuration with this strategy. An outside program gets the base configuration."""
        if self.command:
            return base
        own = dict(self.options)
        stated = {name: own.pop(name) for name in (*TUNED, *LAYOUT, INSIDE) if name in own}
        added = {table: taken_out(own, table) for table in LAYOUT_OPTIONS}
        added[strategy_table(self.strategy) or ""] = own
        tables = {name: {**base.tables.get(name, {}), **values} for name, values in added.items() if values}
        return replace(base, strategy=self.strategy, tables={**base.tables, **tables}, **stated)

    @property
    def has_layout(self) -> bool:
        """Whether it lies on the ranks in its own way."""
        return any(name in LAYOUT or name.partition(".")[0] in LAYOUT_OPTIONS for name in self.options)

    def settled_after(self, base: TrainConfig) -> int:
        """Number of first steps in which the strategy does not yet work as it does later; 0 for an outside program."""
        return 0 if self.command else Run.of(self.config(base)).strategy.settled_after

    def exchanges_every(self, base: TrainConfig) -> int:
        """Steps from one exchange to the next; 1 for an outside program."""
        return 1 if self.command else Run.of(self.config(base)).strategy.exchanges_every

    def words(self, values: Mapping[str, str]) -> list[str]:
        """The command with its placeholders filled in. Words that become empty are left out."""
        words = [_filled(word, values) for word in shlex.split(self.command)]
        return [word for word in words if word]


def taken_out(options: dict[str, Any], table: str) -> dict[str, Any]:
    """Take the options TABLE.NAME out of `options`; return them by NAME."""
    prefix = f"{table}."
    return {name.removeprefix(prefix): options.pop(name) for name in [*options] if name.startswith(prefix)}


def _filled(word: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), word)


def read_contestants(text: str, problems: Problems, base: TrainConfig | None = None) -> list[Contestant]:
    """The contestants in `a,b,NAME=c[option=value,...],cmd:NAME=COMMAND`. Notes all errors in them.

    A comma inside brackets or quotes does not separate contestants. base: the training that all contestants share.
    """
    contestants, base = [], base or TrainConfig()
    parts = problems.note(split, text, f"--strategies {text}: ") or []
    for part in filter(None, map(str.strip, parts)):
        with problems.collect():
            read = read_command(part) if part.startswith("cmd:") else read_strategy(part, problems, base)
            contestants.append(read)
    names = [contestant.name for contestant in contestants]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        problems.messages.append(
            f"--strategies: {name!r} is given {names.count(name)} times; give one of them another name, such as "
            f"{name}-2={name}"
        )
    if not contestants and not problems.messages:
        problems.messages.append("--strategies is empty: name at least one, such as zero,sdp4bit")
    return contestants


def read_command(text: str) -> Contestant:
    """Read an outside program. Raises ConfigError if it can't be started."""
    match = _COMMAND.fullmatch(text)
    if not match:
        raise ConfigError(f"--strategies {text}: must be cmd:NAME=COMMAND, such as cmd:peer=python peer.py {{run_dir}}")
    contestant = Contestant(_usable(match["name"]), command=match["command"].strip())
    try:
        words = shlex.split(contestant.command)
    except ValueError as error:
        raise ConfigError(f"--strategies {text}: {str(error).lower()}") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"--strategies {text}: there is no program {words[0] if words else ''!r} here")
    stated = re.findall(r"\{(\w+)\}", " ".join(words))
    for name in (name for name in stated if name not in PLACEHOLDERS):
        raise ConfigError(f"--strategies {text}: unknown placeholder {{{name}}}{nearest(name, PLACEHOLDERS)}")
    for name in (name for name in ("run_dir", "steps") if name not in stated):
        raise ConfigError(f"--strategies {text}: the command needs {{{name}}}, or its run can't be compared")
    return contestant


def read_strategy(text: str, problems: Problems, base: TrainConfig) -> Contestant:
    """Read a strategy with its name and options. Notes wrong options; raises ConfigError for other errors."""
    match = _STRATEGY.fullmatch(text)
    if not match:
        raise ConfigError(f"--strategies {text}: must be STRATEGY, NAME=STRATEGY or NAME=STRATEGY[option=value,...]")
    strategy = match["strategy"]
    if strategy not in STRATEGIES:
        raise ConfigError(f"--strategies {text}: unknown strategy {strategy!r}{nearest(strategy, STRATEGIES)}")
    options: dict[str, Any] = {}
    if match["options"] is not None:
        note = f"--strategies {text}: "
        options = checked_options(strategy, options_in(match["options"], note), note, problems, base)
    contestant = Contestant(_usable(match["name"] or strategy), strategy, options)
    Run.of(contestant.config(base))
    return contestant


def checked_options(
    strategy: str, stated: Mapping[str, Any], note: str, problems: Problems, base: TrainConfig
) -> dict[str, Any]:
    """The checked options: the strategy's, those of TUNED, LAYOUT and LAYOUT_OPTIONS, and of islands INSIDE."""
    inside = (INSIDE,) if has_islands(strategy) else ()
    table, shared, own = strategy_table(strategy), (*TUNED, *LAYOUT, *inside), dict(stated)
    below = {layout: taken_out(own, layout) for layout in LAYOUT_OPTIONS}
    tuned = {name: own.pop(name) for name in [*own] if name.replace("-", "_") in shared}
    dotted = [f"{layout}.{each.name}" for layout in LAYOUT_OPTIONS for each in options_of(option_tables()[layout])]
    for name in [name for name in own if "." in name]:
        del own[name]
        problems.messages.append(f"{note}unknown key {name!r}{nearest(name, dotted)}")
    shared = (*shared, *(f"{layout}.*" for layout in LAYOUT_OPTIONS))
    for name in own if table is None else ():
        problems.messages.append(f"{note}{strategy} has no option {name!r}{nearest(name, shared)}")
    options = {} if table is None else checked_values(option_tables()[table], own, note, problems, others=shared)
    tuned = checked_values(TrainConfig, tuned, note, problems, only=shared)
    # Of the base itself nothing is said once more for each contestant.
    ranks = TrainConfig(workers=base.workers, nodes=base.nodes)
    problems.messages += [note + message for message in range_errors(replace(ranks, **tuned))]
    if "capacity" in below[EXPERTS]:
        problems.messages.append(
            f"{note}experts.capacity is of the model, which all contestants share; nearest: --experts.capacity after --"
        )
    for layout, values in below.items():
        checked = checked_values(option_tables()[layout], values, f"{note}{layout}.", problems)
        options |= {f"{layout}.{name}": value for name, value in checked.items()}
    return options | tuned


def _usable(name: str) -> str:
    if name == COMPUTE:
        raise ConfigError(
            f"--strategies: the name {COMPUTE!r} is taken by the measurement of computing alone; take another"
        )
    return name
