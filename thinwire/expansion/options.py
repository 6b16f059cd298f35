"""The command line of `thinwire expand`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from thinwire.errors import Problems
from thinwire.flags import CommandLine


@dataclass(frozen=True)
class ExpandConfig:
    """Make a wider and deeper model that computes the same, as a folder that `--model hf:DIR` trains on."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|hf:DIR")]
    """The run directory, or hf: and a folder of transformers."""
    to: str = ""
    """The folder to write; it must be empty, or not exist."""
    hidden_size: int | None = None
    """Width of the larger model; by default as it is."""
    layers: int | None = None
    """Layers of the larger model, at most twice as many; by default as they are."""
    intermediate_size: int | None = None
    """Inner width of the larger model's MLPs; by default in proportion to the width."""
    inserted: Literal["cancelling", "zero"] = "cancelling"
    """Last matrices of inserted layers: cancelling (the paper's type 2: all weights learn from the first step), or zero
    (type 1)."""
    seed: int = 0
    """Seed of the new weights."""
    data: str | None = None
    """Text to compare both models on, as for `thinwire train`; by default the run's own, or stdlib. Only the held-out
    part is used."""
    sequences: int = 16
    """Largest number of held-out sequences to compare on."""


def expand_line() -> CommandLine:
    """The flags of `thinwire expand`."""
    return CommandLine("thinwire expand", ExpandConfig)


def read(args: Sequence[str]) -> ExpandConfig:
    """Read the options. Raises ConfigError with all errors at once; SystemExit after --help."""
    problems = Problems()
    stated = expand_line().read(args, problems)[""]
    if not stated.get("to"):
        problems.messages.append("--to DIR is missing: the folder to write")
    sizes = "hidden_size", "layers", "intermediate_size"
    if not stated.keys() & set(sizes):
        problems.messages.append("nothing would grow: no size is stated; nearest: --hidden-size N or --layers N")
    for name in (*sizes, "sequences"):
        if stated.get(name, 1) < 1:
            problems.messages.append(f"--{name.replace('_', '-')} {stated[name]}: must be at least 1; nearest: 1")
    if not 0 <= stated.get("seed", 0) < 1 << 63:
        problems.messages.append(f"--seed {stated['seed']}: must be from 0 to {(1 << 63) - 1}; nearest: 0")
    problems.raise_any()
    return ExpandConfig(**stated)
