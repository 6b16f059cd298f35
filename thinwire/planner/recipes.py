"""`thinwire explain --recipe`: how a large model was trained, by closed forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from thinwire.cost.closed import bubble
from thinwire.cost.gpt import RECIPES
from thinwire.flags import flag
from thinwire.planner.options import ExplainConfig
from thinwire.report.units import bytes_text, percent_text, seconds_text, short
from thinwire.table import Row

# Bytes of each parameter: bf16 weight and gradient; fp32 master and two moments, which replicas share out.
KEPT, SHARED = 2 + 2, 4 + 8


def print_recipe(config: ExplainConfig, console: Console) -> None:
    """Print the recipe that is named, and the options beside it that have no effect."""
    assert config.recipe is not None
    table = Table("of one replica", "", "how", title=f"how {config.recipe} was trained", title_justify="left")
    for row in recipe_rows(config.recipe):
        table.add_row(*row)
    console.print(table)
    for asked, effect, why in unused(config):
        console.print(f"{asked}: {effect} ({why})")


def recipe_rows(name: str) -> Iterator[Row]:
    """Rows of (what, figure, how it is found)."""
    recipe, model = RECIPES[name], RECIPES[name].model
    share = model.parameters / recipe.ranks
    idle = bubble(recipe.stages, recipe.num_sequences)
    shape = (
        f"{model.layers} layers of {model.hidden:,} features, a vocabulary of {model.vocab:,}, s = {model.seq_len:,}"
    )
    how = "12 l h² (1 + 13 / 12 h + (V + s) / 12 l h)"
    yield "parameters", short(model.parameters), f"{how}; {shape}"
    no_stages = "; the source states no stages" if name == "22b" else ""
    yield "ranks", f"{recipe.ranks}", f"{recipe.tensor} tensor ranks x {recipe.stages} stages{no_stages}"
    yield "a step", f"{recipe.num_sequences} micro-batches of 1 sequence", "micro-batches of several were slower"
    state = f"{bytes_text((KEPT + SHARED) * share)} to {bytes_text(KEPT * share)}"
    why = f"{KEPT + SHARED} bytes a parameter, mean over stages, to {KEPT}, where many replicas share optimizer states"
    yield "state of a rank", state, why
    yield "idle", percent_text(idle / (1 + idle)), "(p - 1) / (m + p - 1), 1F1B"
    operations = "96 B s l h² (1 + s / 6 h + V / 16 l h): layers are computed again"
    yield "operations of a step", short(model.operations(recipe.num_sequences)), operations
    reached = f"a rank reached {short(recipe.flops)} operations a second, all waits included"
    yield "seconds of a step", seconds_text(recipe.step_s), reached


def unused(config: ExplainConfig) -> Iterator[Row]:
    """Rows about options that have no effect beside a recipe."""
    for item in fields(ExplainConfig):
        value = getattr(config, item.name)
        if item.name not in ("recipe", "tables") and value != getattr(ExplainConfig(), item.name):
            yield f"{flag(item.name)} {value}", "no effect", "a recipe states all of it"
    for table, values in config.tables.items():
        for option in values:
            yield flag(f"{table}.{option}"), "no effect", "a recipe states all of it"
