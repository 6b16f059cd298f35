"""`thinwire explain` as a command."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from thinwire.errors import Problems
from thinwire.methods.interface import Plan
from thinwire.planner.explain import Explained, explain
from thinwire.planner.options import read_explain
from thinwire.report.units import bytes_text, seconds_text, short

# Where the output is no terminal, nobody wraps the table's lines.
PLAIN_WIDTH = 160
LEVELS = {"pair": "inside a pair", "intra": "inside a node", "inter": "between nodes"}
MEANINGS = {
    "weights": "held through the step",
    "gradients": "at the end of backward",
    "optimizer": "AdamW: both moments, and fp32 masters where they are not the weights",
    "passing": "whole weights and gradients of the parts that compute, at most",
}
FOOT = (
    "fp32, AdamW. Not counted: activations, and scratch memory for the packets of a few buckets. Bytes are payload "
    "that one rank sends in a step."
)


def run_explain(args: Sequence[str]) -> int:
    """Print what the command line asks for. Raises ConfigError with everything that is wrong."""
    problems = Problems()
    found = explain(read_explain(args, problems), problems)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(PLAIN_WIDTH, console.width)
    for table in tables(found):
        console.print(table)
    console.print(FOOT)
    for asked, effect, why in found.notes:
        console.print(f"{asked}: {effect} ({why})")
    return 0


def tables(found: Explained) -> list[Table]:
    """All strategies side by side; of one alone also every part."""
    shown = {name: footprint for name, footprint in found.footprints.items() if footprint is not None}
    made = [side_by_side(found, shown)]
    if len(shown) == 1:
        (footprint,) = shown.values()
        made += [parts_of_memory(footprint), parts_of_traffic(footprint)]
    return made


def side_by_side(found: Explained, shown: dict[str, Plan]) -> Table:
    """One row a strategy."""
    title = (
        f"{short(found.num_parameters)} parameters on {found.topology}, {found.micro_batches} micro-batch(es) a step: "
        "memory of one rank, and what it sends in a step"
    )
    has_pair = any(footprint.sent_on("pair") for footprint in shown.values())
    levels = [level for level in LEVELS if level != "pair" or has_pair]
    memory = ("weights", "gradients", "optimizer", "passing")
    seconds = [("on the link", found.link_s, found.rate), ("inside", found.local_s, found.local_rate)]
    seconds = [entry for entry in seconds if entry[2] is not None]
    heads = [*memory, "other", "memory", *(LEVELS[level] for level in levels), *(head for head, _, _ in seconds)]
    table = Table("strategy", title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    for name, footprint in shown.items():
        held = [getattr(footprint, part) for part in memory] + [sum(footprint.other.values())]
        sent = [footprint.sent_on(level) for level in levels]
        times = [seconds_text(value) for _, of, _ in seconds if (value := of(footprint)) is not None]
        table.add_row(name, *map(bytes_text, [*held, sum(held), *sent]), *times)
    return table


def parts_of_memory(footprint: Plan) -> Table:
    """One row a part of one rank's memory."""
    table = Table("memory", "bytes", "", title="what one rank holds", title_justify="left")
    for name, num_bytes in footprint.memory.items():
        table.add_row(name, bytes_text(num_bytes), MEANINGS.get(name, "kept between steps"))
    return table


def parts_of_traffic(footprint: Plan) -> Table:
    """One row an operation and level."""
    table = Table("operation", "level", "bytes", title="what one rank sends in a step", title_justify="left")
    for (operation, level), num_bytes in footprint.sent.items():
        if num_bytes:
            table.add_row(operation, LEVELS[level], bytes_text(num_bytes))
    return table
