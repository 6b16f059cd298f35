"""Reads the command lines of `thinwire plan` and `thinwire tune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from thinwire.cost import Machine
from thinwire.errors import Problems
from thinwire.flags import CommandLine, is_plain
from thinwire.models.presets import check_preset
from thinwire.planner.options import tables_of
from thinwire.planner.outputs import wrong_outputs
from thinwire.planner.plan_options import PlanConfig, TuneConfig, found_by_plan, plan_line, tune_line

T = TypeVar("T", bound=PlanConfig)
# Options that are checked without torch, for which nobody who misspells a flag waits.
PLAIN = ("machine", "model", "out", "trace")


def read_plan_line(args: Sequence[str], problems: Problems) -> PlanConfig:
    """Read the options from the command line. Notes all errors. Raises SystemExit after --help."""
    return _read(PlanConfig, plan_line(), args, problems)


def read_tune_line(args: Sequence[str], problems: Problems) -> TuneConfig:
    """As `read_plan_line`."""
    return _read(TuneConfig, tune_line(), args, problems)


def _read(cls: type[T], line: CommandLine, args: Sequence[str], problems: Problems) -> T:
    """The options. Raises ConfigError with all that is wrong, if nothing but PLAIN options is stated."""
    stated = line.read(args, problems, elsewhere=found_by_plan)
    plain = is_plain(stated, PLAIN)
    own = stated.pop("")
    config = cls(**own, tables=tables_of(own.get("model", cls.model), stated, problems))
    if plain:
        found = Problems(problems.messages)
        found.note(Machine.read, config.machine)
        found.messages += wrong_outputs(config)
        found.note(check_preset, config.model)
        found.raise_any()
    return config
