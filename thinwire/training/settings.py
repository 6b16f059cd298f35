"""Reads a configuration: defaults, then a TOML file, then flags; and writes one back."""

from __future__ import annotations

import functools
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, field, fields, is_dataclass, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, cast, get_type_hints

import tyro

from thinwire.errors import ConfigError, nearest, type_name
from thinwire.flags import parse_flags
from thinwire.methods.interface import Method, PlannedByRun
from thinwire.methods.islands.diloco import ISLANDS
from thinwire.methods.options import fits
from thinwire.models.llama import LlamaConfig
from thinwire.optim import OPTIMIZERS
from thinwire.registry import STRATEGIES
from thinwire.training.config import TrainConfig, flag
from thinwire.training.problems import Problems
from thinwire.training.run_dir import RunDir

# Of one start only: a run repeated from its config.toml must not delete or move another.
NOT_WRITTEN = ("resume", "overwrite", "allow_resume_drift", "stop_at", "inject", "node", "tables")
HELP_FLAGS = ("--help", "-h")
# The fields of a strategy that hold another one: which it stands on, or which runs inside its islands.
BASE, INNER = "base", "inner"
DEFAULT_INNER = "ddp"
RESUME, AUTO = "--resume", "auto"


@functools.cache
def option_tables() -> Mapping[str, type]:
    """The dataclass behind each table of options: [llama], and one for every strategy that has options."""
    strategies = {class_of(strategy) for strategy in STRATEGIES}
    with_options = sorted((cls for cls in strategies if options_of(cls)), key=lambda c: c.__name__)
    return MappingProxyType({"llama": LlamaConfig} | {table_name(cls): cls for cls in with_options})


def class_of(strategy: str) -> type:
    """The dataclass of a strategy, without making one: that may load a compiler, to measure what codecs lose."""
    make: Any = STRATEGIES[strategy]
    return cast(type, make.func if isinstance(make, functools.partial) else make)


def table_name(cls: type) -> str:
    """The name of a class's table: its own, in lower case, unless it states another."""
    return getattr(cls, "table", cls.__name__.lower())


def options_of(cls: type) -> list[Field]:
    """The fields that a table has: all but strategies that belong to another one, which have tables of their own."""
    held = (BASE, INNER) if hasattr(cls, "plan") else ()
    return [item for item in fields(cls) if item.name not in held] if is_dataclass(cls) else []


def strategy_table(strategy: str) -> str | None:
    """The name of the table that `strategy` takes its options from, if any."""
    name = table_name(class_of(strategy))
    return name if name in option_tables() else None


def base_table(strategy: str) -> str | None:
    """The name of the table of the strategy that `strategy` stands on, if any."""
    base = getattr(STRATEGIES[strategy](), BASE, None)
    return table_name(type(base)) if base is not None else None


def has_islands(strategy: str) -> bool:
    """Whether it trains islands, each by a strategy of its own."""
    return strategy in ISLANDS


def inner_of(config: TrainConfig) -> TrainConfig:
    """What the islands of this configuration are trained by."""
    return replace(config, strategy=config.inner or DEFAULT_INNER, inner=None)


def island_size(config: TrainConfig) -> int:
    """Ranks of one island: those that share a fast link. By default a machine's, and 1 where there is one machine.

    Raises ConfigError where islands would not fit into a machine.
    """
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", config.workers))
    size = config.local_size or (machine if machine < config.world_size else 1)
    if machine % size:
        raise ConfigError(
            f"--local-size {size}: an island lies on one machine, which has {machine} workers; nearest: "
            f"{min((n for n in range(1, machine + 1) if machine % n == 0), key=lambda n: abs(n - size))}"
        )
    return size


def used_tables(config: TrainConfig) -> set[str]:
    """The tables of options that have an effect in this run."""
    llama = None if config.model.startswith("hf:") else "llama"
    inner = used_tables(inner_of(config)) if has_islands(config.strategy) else set()
    return inner | {table for table in (llama, strategy_table(config.strategy), base_table(config.strategy)) if table}


def build_strategy(config: TrainConfig) -> Method:
    """The strategy with its options, for a run of this length.

    Raises ConfigError for an unknown name, a refused option, or one that does not fit the run.
    """
    if config.inner is not None and config.inner not in STRATEGIES:
        raise ConfigError(f"--inner {config.inner}: no such strategy{nearest(config.inner, STRATEGIES)}")
    if config.strategy not in STRATEGIES:
        raise ConfigError(f"--strategy {config.strategy}: no such strategy{nearest(config.strategy, STRATEGIES)}")
    make, options = STRATEGIES[config.strategy], config.tables.get(strategy_table(config.strategy) or "", {})
    if stated := config.tables.get(base_table(config.strategy) or ""):
        options = {**options, BASE: replace(getattr(make(), BASE), **stated)}
    if has_islands(config.strategy):
        options = {**options, INNER: build_strategy(inner_of(config))}
    strategy = make(**options)
    return strategy.for_run(config.steps, config.num_warmup_steps) if isinstance(strategy, PlannedByRun) else strategy


def with_optimizer(config: TrainConfig) -> TrainConfig:
    """The configuration with its strategy's own choice where no optimizer is stated.

    Raises ConfigError for what build_strategy refuses, and for an optimizer that the strategy can't drive.
    """
    strategy, name = build_strategy(config), config.optimizer
    if name is not None and name not in OPTIMIZERS:
        raise ConfigError(f"--optimizer {name}: no such optimizer{nearest(name, strategy.optimizers)}")
    if name is not None and name not in strategy.optimizers:
        raise ConfigError(
            f"--optimizer {name} does not fit strategy {strategy.name}, which {strategy.optimizers_reason}"
            f"{nearest(name, strategy.optimizers)}"
        )
    return replace(config, optimizer=name or strategy.optimizers[0])


def read_config(args: Sequence[str], problems: Problems) -> TrainConfig:
    """The configuration that the command line asks for; wrong keys, flags and types are noted as problems.

    With --resume and no CONFIG.toml, the run directory's own config.toml takes its place. Raises ConfigError for a
    file or a flag's value that can't be read; SystemExit after --help.
    """
    args = list(without_values_of_switches(args, problems, TrainConfig))
    args = list(without_unknown_flags(args, problems, known_flags()))
    config, path = parse(args, TrainConfig(), problems)
    if path is None and config.resume and not set(HELP_FLAGS) & set(args):
        own = RunDir(config.run_dir).config(config.node)
        path = str(own) if own.is_file() else None
    if path is not None:
        config, _ = parse(args, read_toml(Path(path), problems), problems)
    return config


def parse(args: Sequence[str], defaults: TrainConfig, problems: Problems) -> tuple[TrainConfig, str | None]:
    """The configuration and the path of CONFIG.toml, from flags over `defaults`."""
    flags = flags_class()
    tables = {name: flags.__annotations__[name](**defaults.tables.get(name, {})) for name in option_tables()}
    default = flags(config_file=None, run=defaults, **tables)
    parsed = parse_flags(
        flags, args, problems.messages, default=default, prog="thinwire train", description=TrainConfig.__doc__
    )
    return replace(parsed.run, tables=stated_tables(parsed)), parsed.config_file


def stated_tables(parsed: object) -> dict[str, dict[str, Any]]:
    """The options of `table_fields` that have a value."""
    stated = {n: {k: v for k, v in asdict(getattr(parsed, n)).items() if v is not None} for n in option_tables()}
    return {name: values for name, values in stated.items() if values}


def flags_class() -> type:
    """What tyro parses: CONFIG.toml, the flat flags, and a prefix such as --sdp4bit. for each table."""
    config_file = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG.toml]", help="")]
    run = Annotated[TrainConfig, tyro.conf.arg(name="")]
    return make_dataclass("Train", [("config_file", config_file), ("run", run), *table_fields()])


def table_fields() -> list[tuple[str, type]]:
    """A field for each table of options, for a class that tyro parses."""
    return [(name, optional_clone(cls)) for name, cls in option_tables().items()]


def optional_clone(cls: type) -> type:
    """The same fields, each None until stated: `cls` itself checks values only once they are complete."""
    hints = get_type_hints(cls)

    def cloned(item: Field) -> tuple[str, Any, Any]:
        note = tyro.conf.arg(help=f"{item.name.replace('_', ' ')}; by default {shown_default(cls, item)}")
        return item.name, Annotated[hints[item.name] | None, note], field(default=None)

    clone = make_dataclass(cls.__name__, [cloned(item) for item in options_of(cls)])
    clone.__doc__ = (cls.__doc__ or "").split("\n")[0]
    return clone


def shown_default(cls: type, item: Field) -> str:
    return "the preset's" if cls is LlamaConfig else str(item.default)


def known_flags() -> list[str]:
    """Every flag of `thinwire train`."""
    flat = [flag(item.name) for item in fields(TrainConfig) if item.name != "tables"]
    return [*flat, *switches(TrainConfig), *table_flags(), *HELP_FLAGS]


def switches(cls: type) -> list[str]:
    """The flags of a dataclass that take no value, such as --checked and --no-checked."""
    names = [item.name for item in fields(cls) if isinstance(item.default, bool)]
    return [flag(f"{no}{name}") for name in names for no in ("", "no_")]


def table_flags() -> list[str]:
    """The flags of all tables of options."""
    return [flag(f"{name}.{item.name}") for name, cls in option_tables().items() for item in options_of(cls)]


def without_unknown_flags(
    args: Sequence[str], problems: Problems, known: Sequence[str], elsewhere: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The arguments less flags that are not `known` and their values, each of which becomes a problem.

    elsewhere: what to say of flags that have another place.
    """
    skipping = False
    for arg in args:
        if arg.startswith("--"):
            name = arg.partition("=")[0].replace("_", "-")
            skipping = name not in known
            if skipping:
                hint = (elsewhere or {}).get(name) or nearest(name, known)
                problems.messages.append(f"unknown flag {name}{hint}")
        if not skipping:
            yield arg


def without_values_of_switches(args: Sequence[str], problems: Problems, cls: type) -> Iterator[str]:
    """The arguments less values behind switches of `cls`, such as `--keep-best yes`, each of which becomes a problem.

    `--resume auto` is `--resume`; a CONFIG.toml may stand anywhere.
    """
    known = switches(cls)
    words: list[str] = []
    for arg in args:
        name, _, value = arg.partition("=")
        words += [name, value] if value and name.replace("_", "-") in known else [arg]
    for before, word in pairwise(["", *words]):
        switch = before.replace("_", "-")
        if switch not in known or word.startswith("-"):
            yield word
        elif switch == RESUME and word == AUTO:
            continue
        elif word.endswith(".toml") or Path(word).is_file():
            yield word
        elif switch == RESUME:
            rule = f"takes the newest sound checkpoint in --run-dir; nearest: {RESUME} {AUTO}"
            problems.messages.append(f"{switch} {word}: {rule}")
        else:
            problems.messages.append(f"{switch} {word}: takes no value; say {switch} alone, or leave it out")


def read_toml(path: Path, problems: Problems) -> TrainConfig:
    """The configuration in a TOML file; notes unknown keys and wrong types, raises ConfigError for a broken file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        names = [str(other) for other in sorted(path.parent.glob("*.toml"))]
        hint = nearest(str(path), names) if names else ""
        raise ConfigError(f"configuration file {path} does not exist{hint}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration file {path}: {error}") from None
    return parse_toml(text, str(path), problems)


def parse_toml(text: str, place: str, problems: Problems) -> TrainConfig:
    """The same of a TOML text that lies in `place`."""
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"configuration file {place}: {error}") from None
    content = {key.replace("-", "_"): value for key, value in content.items()}
    tables = {name: content.pop(name) for name in option_tables() if name in content}
    note = f"{place}: "
    flat = checked_values(TrainConfig, content, note, problems, skip=("tables",), others=option_tables())
    options = {
        name: checked_values(option_tables()[name], values, f"{note}[{name}] ", problems)
        for name, values in tables.items()
    }
    return TrainConfig(**flat, tables=options)


def checked_values(
    cls: type, content: Any, note: str, problems: Problems, *, skip: Iterable[str] = (), others: Iterable[str] = ()
) -> dict[str, Any]:
    """The values of a TOML table that are fields of `cls` and have their type; the rest become problems."""
    if not isinstance(content, Mapping):
        problems.messages.append(f"{note}must be a table of options, not {content!r}")
        return {}
    hints = {name: hint for name, hint in get_type_hints(cls).items() if name not in skip}
    names = {item.name for item in options_of(cls)} & hints.keys()
    good: dict[str, Any] = {}
    for raw, value in content.items():
        key = raw.replace("-", "_")
        if key not in names:
            problems.messages.append(f"{note}unknown key {raw!r}{nearest(key, [*names, *others])}")
        elif not fits(value, hints[key]):
            problems.messages.append(f"{note}{raw} = {value!r}: must be {type_name(hints[key])}")
        else:
            good[key] = tuple(value) if isinstance(value, list) else value
    return good


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML; unset values are left out, as are tables that the run does not use."""
    lines = [
        f"{name} = {toml_value(value)}"
        for name, value in asdict(config).items()
        if name not in NOT_WRITTEN and value is not None
    ]
    for table in sorted(config.tables.keys() & used_tables(config)):
        lines += ["", f"[{table}]", *(f"{k} = {toml_value(v)}" for k, v in config.tables[table].items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    # JSON writes strings, numbers, booleans and lists of them as TOML does.
    return json.dumps(value).replace("\x7f", "\\u007f")
