"""Reads a configuration from a TOML file, and writes one back."""

from __future__ import annotations

import difflib
import json
import resource
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, Problems
from thinwire.options import checked_values, option_tables
from thinwire.run.config import NOT_WRITTEN, TrainConfig
from thinwire.run.run import tables_in_effect

# What stands for a configuration's name where a size was written in two words.
UNITS_OF_BYTES = ("kb", "mb", "gb", "tb")


def check_length(stated: Mapping[str, Any], note: str, problems: Problems) -> None:
    """Note a problem if the length of a run is stated in two ways."""
    if stated.keys() >= {"steps", "minutes"}:
        problems.messages.append(
            f"{note}--steps {stated['steps']} and --minutes {stated['minutes']}: a run has one length; give one of them"
        )


def read_toml(path: Path, problems: Problems) -> TrainConfig:
    """The configuration in a TOML file; notes unknown keys and wrong types, raises ConfigError for a broken file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        names = [str(other) for other in sorted(path.parent.glob("*.toml"))]
        close = difflib.get_close_matches(str(path), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        if str(path).lower() in UNITS_OF_BYTES:
            hint = f"; a size is one word, such as 2{path}"
        raise ConfigError(f"configuration file {path} does not exist{hint}") from None
    except IsADirectoryError:
        inside = [str(other) for other in sorted(path.glob("*.toml"))]
        near = f"nearest: {inside[0]}" if inside else "it holds no .toml file"
        raise ConfigError(f"configuration file {path}: is a folder, and must be a file; {near}") from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"configuration file {path}: {error}") from None
    return parse_toml(text, str(path), problems)


def parse_toml(text: str, place: str, problems: Problems) -> TrainConfig:
    """The configuration in TOML text; place: where the text comes from, for messages."""
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"configuration file {place}: {error}") from None
    content = {key.replace("-", "_"): value for key, value in content.items()}
    tables = {name: content.pop(name) for name in option_tables() if name in content}
    note = f"{place}: "
    check_length(content, note, problems)
    flat = checked_values(TrainConfig, content, note, problems, others=option_tables())
    options = {
        name: checked_values(option_tables()[name], values, f"{note}[{name}] ", problems)
        for name, values in tables.items()
    }
    return TrainConfig(**flat, tables=options)


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML. Leaves out unset values, and tables that the run does not use.

    A limit of this process that stands for --memory is left out too: a run that goes on elsewhere has another one.
    """
    # With --minutes the number of steps is still to be chosen.
    left_out = (*NOT_WRITTEN, "steps") if config.minutes else NOT_WRITTEN
    lines = [
        f"{name} = {toml_value(value)}"
        for name, value in asdict(config).items()
        if name not in left_out and value is not None and not (name == "memory" and value == own_limit())
    ]
    for table in sorted(config.tables.keys() & tables_in_effect(config)):
        lines += ["", f"[{table}]", *(f"{k} = {toml_value(v)}" for k, v in config.tables[table].items())]
    return "\n".join(lines) + "\n"


def own_limit() -> str | None:
    """The limit of memory under which this process runs (ulimit -d), as text for --memory; None: there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if limit == resource.RLIM_INFINITY else f"{limit}b"


def toml_value(value: Any) -> str:
    # JSON writes strings, numbers, booleans and lists of them as TOML does.
    return json.dumps(value).replace("\x7f", "\\u007f")
