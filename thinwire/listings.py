"""`thinwire codecs`, `thinwire checkpoints` and `thinwire report` as commands."""

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


@dataclass(frozen=True)
class ReportLine:
    """Write report.html from what a run has recorded, in its directory and in those of its other islands. A run does so
    itself at its end; this is for one that was killed, and for a look at one that goes on."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run directory."""


def codecs_line() -> CommandLine:
    """The flags of `thinwire codecs`."""
    return CommandLine("thinwire codecs", CodecsLine)


def checkpoints_line() -> CommandLine:
    """The flags of `thinwire checkpoints`."""
    return CommandLine("thinwire checkpoints", CheckpointsLine)


def report_line() -> CommandLine:
    """The flags of `thinwire report`."""
    return CommandLine("thinwire report", ReportLine)


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


def run_report(args: Sequence[str]) -> int:
    """Write a report of each island, and say what became of the run. Raises ConfigError if there is no run."""
    problems = Problems()
    stated = report_line().read(args, problems)[""]
    problems.raise_any()
    from thinwire.launch.failures import way_on
    from thinwire.report import write_report
    from thinwire.report.run import read_run
    from thinwire.run.run_dir import RunDir

    whole = RunDir(ReportLine(**stated).run)
    islands = [one for path in whole.path.glob("island-*") if (one := RunDir(path)).holds_run()]
    are_whole = True
    for one in [whole, *sorted(islands, key=lambda one: (len(one.path.name), one.path.name))]:
        last, state = read_run(one.path).broken_off, "has ended"
        if last is not None:
            are_whole, state = False, f"was broken off after step {last}, or goes on"
        print(f"{one.path} {state}; report: {write_report(one.path)}")
    if not are_whole:
        print(way_on(whole, durable=True))
    return 0
