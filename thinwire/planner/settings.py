"""Settings of a strategy that a search tries beside its own, written `NAME[option=value,...]` as in a race."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from thinwire.errors import ConfigError, Problems
from thinwire.flags import options_of
from thinwire.methods.interface import Method
from thinwire.options import Tables, build_strategy, option_tables, strategy_table
from thinwire.registry import STRATEGIES
from thinwire.run.spelled import options_in

# Steps and warm-up steps of the run that strategies are planned for.
NUM_STEPS, NUM_WARMUP_STEPS = 1000, 100


def spelled(name: str, options: Mapping[str, Any]) -> str:
    """A strategy with some of its options, as text."""
    texts = (
        f"{option}={str(value).lower() if isinstance(value, bool) else value}" for option, value in options.items()
    )
    return f"{name}[{','.join(texts)}]" if options else name


def name_of(strategy: str) -> str:
    """The name in such a text."""
    return strategy.partition("[")[0]


@cache
def table_of(strategy: str) -> Mapping[str, Mapping[str, Any]]:
    """The options in such a text, by the name of their table; empty: there are none."""
    name, bracket, options = strategy.partition("[")
    return {strategy_table(name) or "": options_in(options.removesuffix("]"), f"{strategy}: ")} if bracket else {}


def train_flags(strategy: str) -> str:
    """Such a text as flags of `thinwire train`; options that the strategy does not have are the trainer's own."""
    name, flags = name_of(strategy), [f"--strategy {name_of(strategy)}"]
    own = {each.name for each in options_of(option_tables()[table])} if (table := strategy_table(name)) else set()
    for values in table_of(strategy).values():
        for option, value in values.items():
            flag = f"{table}.{option}" if option in own else option
            flags.append(f"--{flag.replace('_', '-')} {shlex.quote(str(value))}")
    return " ".join(flags)


def make(name: str, tables: Tables) -> Method:
    """A strategy with its options. Raises ConfigError."""
    return build_strategy(name, tables, num_steps=NUM_STEPS, num_warmup_steps=NUM_WARMUP_STEPS)


def methods_of(names: tuple[str, ...], tables: Tables) -> dict[str, Method]:
    """Strategies with their options, by name. Raises ConfigError with all errors at once."""
    problems = Problems()
    found = {name: problems.note(make, name, tables) for name in names if name in STRATEGIES}
    problems.raise_any()
    return {name: method for name, method in found.items() if method is not None}


def settings_of(methods: Mapping[str, Method], tables: Tables) -> dict[str, Method]:
    """The settings that these methods name as worth trying, by their text; see `Method.worth_trying`.

    Options that are stated, or that make a strategy what its name says, stay as they are.
    """
    found: dict[str, Method] = {}
    for name, method in methods.items():
        table = strategy_table(name) or ""
        stated = tables.get(table, {})
        for options in method.worth_trying:
            if options.keys().isdisjoint({*stated, *STRATEGIES[name].keywords}):
                # What does not go with the stated options is no candidate.
                with suppress(ConfigError):
                    made = make(name, {**tables, table: {**stated, **options}})
                    if made not in (*methods.values(), *found.values()):
                        found[spelled(name, options)] = made
    return found
