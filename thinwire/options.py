"""Tables of options: the dataclass behind each table, and building a strategy from them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from thinwire.errors import ConfigError, Problems, nearest, type_rule
from thinwire.flags import flag, options_of
from thinwire.methods.experts import ExpertParallel
from thinwire.methods.interface import Method, PlannedByRun
from thinwire.methods.memory import Residency
from thinwire.methods.options import fits
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.sequence import SequenceParallel
from thinwire.models.llama import LlamaConfig
from thinwire.models.moe import MIXTURES, MoEConfig
from thinwire.registry import STRATEGIES, check_name, class_of

Tables = Mapping[str, Mapping[str, Any]]
T = TypeVar("T")

# The fields of a strategy that hold another one: the one that it stands on, or the one inside its islands.
BASE, INNER = "base", "inner"
DEFAULT_INNER = "ddp"
# What --strategy auto chooses from: they learn as much from a token as exact training does (docs/performance.md).
CHOSEN_FROM = ("zero", "zero-bf16", "sdp4bit", "ddp", "ddp-bf16")
# Methods of islands that a plan prices: what they learn from a token depends on the run.
ISLANDS = ("diloco", "streaming-diloco", "local-sgd", "sparseloco")
LLAMA, MOE, PIPELINE, SEQUENCE, EXPERTS = "llama", "moe", "pipeline", "sequence", "experts"
RESIDENCY = "residency"
# How the model's work is cut, and where it lies. No checkpoint depends on it, so a resumed run may change it.
LAYOUT_TABLES: Mapping[str, type] = {
    PIPELINE: Pipeline, SEQUENCE: SequenceParallel, EXPERTS: ExpertParallel, RESIDENCY: Residency,
}  # fmt: skip


def with_capacity(model: str, tables: Tables, problems: Problems) -> Tables:
    """The tables, in which a capacity of [experts] is that of [moe], so that whatever reads a capacity reads one.

    Notes a capacity that contradicts that of [moe], or of a model that has none.
    """
    own = dict(tables.get(EXPERTS, {}))
    if (factor := own.pop("capacity", None)) is None:
        return tables
    name, stated = f"--experts.capacity {factor:g}", tables.get(MOE, {}).get("capacity_factor", factor)
    if model_table(model) != MOE:
        drops = f"only thinwire's own mixtures drop rows; nearest: --model {next(iter(MIXTURES))}, or leave it out"
        problems.messages.append(f"{name} for --model {model}: {drops}")
        return tables
    # A number that is none equals no other.
    if stated not in (factor,):
        near = f"both are the most rows of an expert; nearest: --experts.capacity {stated:g}"
        problems.messages.append(f"{name} and --moe.capacity-factor {stated:g}: {near}")
    kept = {EXPERTS: own, MOE: {**tables.get(MOE, {}), "capacity_factor": stated}}
    return {table: values for table, values in {**tables, **kept}.items() if values}


@functools.cache
def option_tables() -> Mapping[str, type]:
    """The dataclass behind each table: of models, of layouts such as [pipeline], and of every strategy."""
    strategies = {class_of(strategy) for strategy in STRATEGIES}
    with_options = sorted((cls for cls in strategies if options_of(cls)), key=lambda cls: cls.__name__)
    others = {LLAMA: LlamaConfig, MOE: MoEConfig, **LAYOUT_TABLES}
    return MappingProxyType(others | {table_name(cls): cls for cls in with_options})


def model_table(model: str) -> str | None:
    """Name of the table in which a preset's sizes can be changed; None for a model of transformers."""
    if model.startswith("hf:"):
        return None
    return MOE if model in MIXTURES else LLAMA


def table_name(cls: type) -> str:
    """Name of the table for a class: the class's own name in lower case, unless it states another."""
    return getattr(cls, "table", cls.__name__.lower())


def strategy_table(strategy: str) -> str | None:
    """Name of the table that holds the options of `strategy`; None if it has none."""
    name = table_name(class_of(strategy))
    return name if name in option_tables() else None


def base_of(strategy: str) -> Any:
    """The inner strategy that `strategy` uses by default; None for most."""
    keywords, cls = STRATEGIES[strategy].keywords, class_of(strategy)
    found = {item.name: item for item in fields(cls)}.get(BASE) if is_dataclass(cls) else None
    if BASE in keywords or found is None:
        return keywords.get(BASE)
    return found.default if found.default_factory is MISSING else found.default_factory()


def has_islands(strategy: str) -> bool:
    """Whether the strategy trains islands, each with an inner strategy."""
    return strategy in STRATEGIES and issubclass(class_of(strategy), IslandsMethod)


def used_tables(strategy: str, inner: str | None = None) -> set[str]:
    """The tables of options that affect a strategy; empty for an unknown strategy.

    inner: the strategy inside its islands, if it has islands.
    """
    if strategy not in STRATEGIES:
        return set()
    own, base = strategy_table(strategy), base_of(strategy)
    tables = {own} if own else set()
    tables |= {table_name(type(base))} if base else set()
    return tables | (used_tables(inner or DEFAULT_INNER) if has_islands(strategy) else set())


def build_strategy(
    strategy: str, tables: Tables, *, inner: str | None = None, num_steps: int, num_warmup_steps: int
) -> Method:
    """The strategy with its options, for a run of `num_steps` steps.

    inner: the strategy inside its islands. num_warmup_steps: steps during which the learning rate rises. Raises
    ConfigError for an unknown name, for a refused option, and for options that don't fit the run.
    """
    problems = Problems()
    for name, option in ((inner, "--inner"), (strategy, "--strategy")):
        if name is not None:
            problems.note(check_name, option, name)
    problems.raise_any()
    options, base = dict(tables.get(strategy_table(strategy) or "", {})), base_of(strategy)
    inside: dict[str, Any] = {}
    if base is not None and (stated := tables.get(table_name(type(base)))):
        with problems.collect():
            inside[BASE] = made(functools.partial(replace, base), stated, table_name(type(base)))
    if has_islands(strategy):
        with problems.collect():
            inside[INNER] = build_strategy(
                inner or DEFAULT_INNER, tables, num_steps=num_steps, num_warmup_steps=num_warmup_steps
            )
    built = problems.note(made, functools.partial(STRATEGIES[strategy], **inside), options, strategy_table(strategy))
    problems.raise_any()
    assert built is not None
    return built.for_run(num_steps, num_warmup_steps) if isinstance(built, PlannedByRun) else built


def made(make: Callable[..., T], options: Mapping[str, Any], table: str | None) -> T:
    """The result of `make(**options)`. Raises one ConfigError with the problems of all options, not only the first.

    A problem whose message begins with the name of an option belongs to that option; `make` is then called again
    without it. The message gets the option's flag in `table` in place of that name.
    """
    problems, left = Problems(), dict(options)
    while True:
        try:
            result = make(**left)
            break
        except ConfigError as error:
            # What is said of an option without which `make` was called is said of its default.
            texts = [text for text in error.problems if named_first(text, options.keys() - left.keys()) is None]
            wrong = [name for name in left if any(named_first(text, [name]) for text in texts)]
            problems.messages += [by_flag(text, wrong, table) for text in texts]
            if not wrong:
                problems.raise_any()
            left = {name: value for name, value in left.items() if name not in wrong}
    problems.raise_any()
    return result


def named_first(text: str, names: Iterable[str]) -> str | None:
    """The one of `names` with which a message begins."""
    return next((name for name in names if text.startswith((f"{name} ", f"{name}:"))), None)


def by_flag(text: str, names: Iterable[str], table: str | None) -> str:
    """A message that begins with one of the `names`, with the flag of that option instead."""
    name = named_first(text, names)
    if name is None:
        return text
    value = re.sub(r"^ '([^'\s]+)'( of \w+)?(?=[: ])", r" \1", text.removeprefix(name))
    return flag(f"{table}.{name}") + value


def check_unused(table: str, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for bad values of a table that this run does not use.

    Tables of models are not checked: their valid values depend on the preset.
    """
    if table in (LLAMA, MOE):
        return
    owner = next((name for name in STRATEGIES if strategy_table(name) == table), None)
    make: Any = LAYOUT_TABLES[table] if owner is None else STRATEGIES[owner]
    made(make, values, table)


def checked_values(
    cls: type, content: Any, note: str, problems: Problems, *, only: Iterable[str] = (), others: Iterable[str] = ()
) -> dict[str, Any]:
    """The values of a TOML table that are options of `cls` and have the right type; the others are noted as problems.

    only: the names that may be stated; empty: all. others: names that are valid in other places, to be suggested.
    """
    if not isinstance(content, Mapping):
        problems.messages.append(f"{note}must be a table of options, not {content!r}")
        return {}
    hints = {option.name: option.hint for option in options_of(cls) if not only or option.name in only}
    good: dict[str, Any] = {}
    for raw, value in content.items():
        key = raw.replace("-", "_")
        if key not in hints:
            problems.messages.append(f"{note}unknown key {raw!r}{nearest(key, [*hints, *others])}")
        elif not fits(value, hints[key]):
            problems.messages.append(f"{note}{raw} = {value!r}: {type_rule(value, hints[key])}")
        else:
            good[key] = tuple(value) if isinstance(value, list) else value
    return good
