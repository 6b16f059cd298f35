"""The command line of `thinwire prune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from thinwire.errors import Problems
from thinwire.flags import CommandLine


@dataclass(frozen=True)
class PruneConfig:
    """Set the least important weights of a trained model to zero, and write it as a folder for `--model hf:DIR`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|hf:DIR")]
    """The run directory, or hf: and a folder of transformers."""
    out: str = ""
    """The folder to write; it must be empty, or not exist."""
    sparsity: float = 0.5
    """Share of each row that becomes zero."""
    method: Literal["moe-pruner", "wanda", "magnitude", "random", "obs"] = "moe-pruner"
    """Score of a weight: moe-pruner (size, and the norm of its inputs times their gates), wanda (without gates),
    magnitude, random, or obs (what the loss grows by; what is kept makes up for it)."""
    rounds: int = 1
    """Of obs: how often the gradients of a layer are measured, while its zeros grow to the share."""
    pattern: Literal["rows", "2:4"] = "rows"
    """rows: the lowest of each row; 2:4: two of every four neighbours."""
    packed: bool = False
    """Write the kept weights alone, in bf16, and a bit for each weight; `--model hf:DIR` reads it, transformers does
    not."""
    data: str | None = None
    """Text to measure inputs and the loss on, as for `thinwire train`; by default the run's own, or stdlib."""
    samples: int = 128
    """Largest number of training sequences to measure inputs on."""
    sequences: int = 16
    """Largest number of held-out sequences to measure the loss on."""
    seed: int = 0
    """Seed of the method random."""


def prune_line() -> CommandLine:
    """The flags of `thinwire prune`."""
    return CommandLine("thinwire prune", PruneConfig)


def read(args: Sequence[str]) -> PruneConfig:
    """Read the options. Raises ConfigError with all errors at once; SystemExit after --help."""
    problems = Problems()
    stated = prune_line().read(args, problems)[""]
    if not stated.get("out"):
        problems.messages.append("--out DIR is missing: the folder to write")
    for name in ("samples", "sequences"):
        if stated.get(name, 1) < 1:
            problems.messages.append(f"--{name} {stated[name]}: must be at least 1; nearest: 1")
    if not 0 <= stated.get("seed", 0) < 1 << 63:
        problems.messages.append(f"--seed {stated['seed']}: must be from 0 to {(1 << 63) - 1}; nearest: 0")
    problems.raise_any()
    return PruneConfig(**stated)
