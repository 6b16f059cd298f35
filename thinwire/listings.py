"""`thinwire codecs` and `thinwire checkpoints` as commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.errors import Problems
from thinwire.flags import CommandLine


@dataclass(frozen=True)
class CodecsLine:
    """List all codecs with their defaults, or those that are given: bits per element of a long tensor, traits, and the
    options that may follow, each after a ":", the default of each choice first.

    A number after "/" is the size of a group. hadamard, rows, twice and zstd follow another codec after a "+".
    """

    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CODEC ...]")] = ()
    """Such as int4/64:bf16+hadamard32 or topk1%."""


@dataclass(frozen=True)
class CheckpointsLine:
    """List the checkpoints of a run directory, and of the run's other islands: step, size, training loss of that step,
    ranks and strategy that saved it, and whether its checksums were compared."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    verify: bool = False
    """Compare the checksums of all checkpoints; the exit code is 1 if one is damaged."""


def codecs_line() -> CommandLine:
    """The flags of `thinwire codecs`."""
    return CommandLine("thinwire codecs", CodecsLine)


def checkpoints_line() -> CommandLine:
    """The flags of `thinwire checkpoints`."""
    return CommandLine("thinwire checkpoints", CheckpointsLine)


def run_codecs(args: Sequence[str]) -> int:
    """List codecs. Raises ConfigError for text that is no codec."""
    problems = Problems()
    line = CodecsLine(**codecs_line().read(args, problems)[""])
    problems.raise_any()
    # Their figures are computed, for which they need torch; --help does not.
    from thinwire.codecs.table import print_codecs

    print_codecs(line.texts)
    return 0


def run_checkpoints(args: Sequence[str]) -> int:
    """List checkpoints. Return the exit code."""
    problems = Problems()
    stated = checkpoints_line().read(args, problems)[""]
    problems.raise_any()
    line = CheckpointsLine(**stated)
    from thinwire.checkpoint.table import print_checkpoints

    return print_checkpoints(Path(line.run), verifies=line.verify)
