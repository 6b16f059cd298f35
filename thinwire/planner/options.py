"""The command line of `thinwire explain`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from thinwire.errors import Problems
from thinwire.flags import CommandLine, flag

LIMITS = {
    "nodes": (1, 10**6), "local_size": (1, 10**4), "parameters": (1, 10**15), "seq_len": (1, 10**9),
    "micro_batches": (1, 10**6), "stages": (1, 10**4),
}  # fmt: skip


@dataclass(frozen=True)
class ExplainConfig:
    """Say how much memory each strategy needs on a cluster, and how much it sends, without running anything.

    Options of a strategy or of the model are those of `thinwire train`.
    """

    strategy: str = "all"
    """Strategies, separated by commas, or all. A single one is shown in detail."""
    nodes: int = 2
    """Machines."""
    local_size: int = 1
    """Ranks on each machine."""
    model: str = "demo"
    """Preset (tiny, demo, 125m, 350m, 1b), or hf:DIR, whose weights are not read."""
    mesh: str | None = None
    """Axes of the ranks, such as data=2,tensor=2, as for `thinwire train`; by default all ranks are the data axis."""
    stages: int | None = None
    """Stages of a pipeline, as for `thinwire train`: figures are those of a rank of the largest stage."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json; it sets the size of the vocabulary."""
    seq_len: int = 256
    """Tokens of one sequence."""
    parameters: float | None = None
    """Number of parameters, such as 7e9, instead of a model; 32 equal layers of one matrix each."""
    micro_batches: int = 1
    """Forward and backward passes of one optimizer step."""
    rate: str | None = None
    """Rate of one machine's link to the others, which its ranks share, such as 10gbit; adds a column of seconds."""
    local_rate: str | None = None
    """Rate of one rank's link inside its machine; adds a column of seconds."""
    tables: Annotated[Mapping[str, Mapping[str, Any]], tyro.conf.Suppress] = field(default_factory=dict)


def command_line() -> CommandLine:
    """The flags of `thinwire explain`, and a prefix such as --sdp4bit. for each table."""
    return CommandLine("thinwire explain", ExplainConfig, tables=option_tables, presets={"llama": "the preset's"})


def option_tables() -> Mapping[str, type]:
    """See `thinwire.options`, which knows the strategies, and with them torch."""
    from thinwire import options

    return options.option_tables()


def read_explain(args: Sequence[str], problems: Problems) -> ExplainConfig:
    """Read the options from the command line. Notes all errors. Raises SystemExit after --help."""
    stated = command_line().read(args, problems)
    own = stated.pop("")
    return ExplainConfig(**own, tables={name: values for name, values in stated.items() if values})


def range_errors(config: ExplainConfig) -> Iterator[str]:
    """One message for each number that is out of its range."""
    for name, (lowest, highest) in LIMITS.items():
        value = getattr(config, name)
        if value is not None and not lowest <= value <= highest:
            close = highest if value > highest else lowest
            yield f"{flag(name)} {value:,}: must be from {lowest} to {highest:,}; nearest: {close:,}"
    parameters = config.parameters
    if parameters is not None and parameters > 1 and math.isfinite(parameters) and not parameters.is_integer():
        yield f"--parameters {parameters}: must be a whole number; nearest: {round(parameters)}"
