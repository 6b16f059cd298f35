"""The command line of `thinwire explain`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from thinwire.errors import ConfigError, Problems, nearest
from thinwire.flags import CommandLine, Stated, flag, is_plain
from thinwire.lab.spec import read_rate
from thinwire.layout.mesh import MeshShape
from thinwire.models.presets import check_preset
from thinwire.registry import STRATEGIES

LIMITS = {
    "nodes": (1, 10**6), "local_size": (1, 10**4), "parameters": (1, 10**15), "seq_len": (1, 10**9),
    "tensor": (1, 10**4), "micro_batches": (1, 10**6), "micro_batch": (1, 10**6),
    "gflops": (1e-3, 1e9), "memory_gb": (1e-3, 1e6),
}  # fmt: skip
MOST_STAGES = 10**4
# Options that are checked without torch, for which nobody who misspells a flag waits.
PLAIN = LIMITS.keys() - {"tensor"} | {"strategy", "model", "rate", "local_rate", "dtype", "loss"}
AUTO = "auto"


@dataclass(frozen=True)
class ExplainConfig:
    """Say how much memory each strategy needs on a cluster, and how much it sends, without running anything.

    Options of a strategy or of the model are those of `thinwire train`; `thinwire codecs` lists how codecs are written.
    """

    strategy: str = "all"
    """Strategies, separated by commas, or all. A single one is shown in detail."""
    nodes: int = 2
    """Machines; by default 2, or with a number of stages as many as these fill."""
    local_size: int = 1
    """Ranks on each machine."""
    model: str = "demo"
    """Preset (tiny, demo, 125m, 350m, 1b), or hf:DIR, whose weights are not read."""
    optimizer: str | None = None
    """Optimizer whose state and messages are counted, as for `thinwire train`; by default the one that each strategy
    takes. Of muon, dion, apollo, apollo-mini and mfac they are counted on the data axis alone."""
    mesh: str | None = None
    """Axes of the ranks, such as data=2,tensor=2, as for `thinwire train`; by default all ranks are the data axis."""
    stages: str | None = None
    """Stages of a pipeline, as for `thinwire train`, or auto: those of the fastest way to train that is found."""
    tensor: int | Literal["auto"] | None = None
    """Ranks over which the matrices of each layer are cut, as for `thinwire train`, or auto, beside --stages auto."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json; it sets the size of the vocabulary."""
    seq_len: int = 256
    """Tokens of one sequence."""
    parameters: float | None = None
    """Number of parameters, such as 7e9, instead of a model; 32 equal layers of one matrix each."""
    micro_batches: int | None = None
    """Forward and backward passes of one optimizer step; by default 1, and 1 for each stage of a pipeline, as in
    `thinwire train`."""
    micro_batch: int = 8
    """Sequences of one such pass: it sets the activations that a rank keeps."""
    rate: str | None = None
    """Rate of one machine's link to the others, which its ranks share, such as 10gbit; adds a column of seconds."""
    local_rate: str | None = None
    """Rate of one rank's link inside its machine; adds a column of seconds."""
    dtype: Literal["bf16", "fp32"] = "fp32"
    """Compute type: what rows of experts and of a sequence travel in, where no codec says otherwise."""
    loss: Literal["auto", "plain", "cut"] = "auto"
    """How the loss is computed, as for `thinwire train`: it sets what the head keeps."""
    gflops: float | None = None
    """Billions of operations per second that one rank reaches, for stages and --memory; by default measured here in a
    moment."""
    memory_gb: float | None = None
    """Memory of one rank in GB, for --stages auto."""
    memory: str | None = None
    """Budget of each rank, such as 2gb, as for `thinwire train`: of a single strategy, by default sdp4bit, where all
    lies, in memory or on a disk, and what a step moves."""
    store: str | None = None
    """none: nothing lies on a disk, as for `thinwire train`, with --memory. Nothing is written, so any folder does."""
    disk_rate: str | None = None
    """Rate of each rank's disk, such as 500MB/s, with --memory; adds the disk's seconds."""
    recipe: Literal["22b", "175b", "1t"] | None = None
    """How a model of this size was trained on a supercomputer: ranks, memory, idle time and operations, instead of
    everything else."""
    activations: str | None = None
    """What a forward keeps, as for `thinwire train`, with --memory."""
    slices: int | None = None
    """Parts of a micro-batch that each layer computes in turn, as for `thinwire train`, with --memory."""
    tables: Annotated[Mapping[str, Mapping[str, Any]], tyro.conf.Suppress] = field(default_factory=dict)

    @property
    def num_stages(self) -> int | None:
        """The number of stages that is stated; None: not stated, or to be found."""
        return int(self.stages) if self.stages is not None and self.stages != AUTO else None

    @property
    def passes(self) -> int:
        """Number of micro-batches of a step."""
        stages = self.num_stages or (MeshShape.parse(self.mesh).pipeline if self.mesh else 1)
        return self.micro_batches or stages


def command_line() -> CommandLine:
    """The flags of `thinwire explain`, and a prefix such as --sdp4bit. for each table."""
    return CommandLine(
        "thinwire explain", ExplainConfig, tables=option_tables, presets=dict.fromkeys(("llama", "moe"), "the preset's")
    )


def option_tables() -> Mapping[str, type]:
    """See `thinwire.options`, which loads the strategies and with them torch."""
    from thinwire import options

    return options.option_tables()


# What to say about flags of `thinwire train` that have another name here.
OF_A_RUN = {
    "--workers": ": the ranks are --nodes times --local-size; nearest: --local-size",
    "--tokens-per-step": ": a rank takes --micro-batches times --micro-batch sequences; nearest: --micro-batches",
    "--inner": ": islands are explained with ddp inside; nearest: --strategy NAME, for one island alone",
}


def read_explain(args: Sequence[str], problems: Problems) -> ExplainConfig:
    """Read the options from the command line. Notes all errors. Raises SystemExit after --help."""
    stated = command_line().read(args, problems, elsewhere=lambda name: OF_A_RUN.get(name, ""))
    plain = is_plain(stated, PLAIN)
    own = stated.pop("")
    stages, tensor = str(own.get("stages", "")), own.get("tensor")
    if "nodes" not in own and stages.isdecimal():
        # As many as the stages fill.
        ranks = int(stages) * (tensor if isinstance(tensor, int) else 1)
        own["nodes"] = max(ExplainConfig.nodes, -(-ranks // max(1, own.get("local_size", ExplainConfig.local_size))))
    config = ExplainConfig(**own, tables=tables_of(own.get("model", ExplainConfig.model), stated, problems))
    if plain:
        refuse_early(config, problems)
    return config


def refuse_early(config: ExplainConfig, problems: Problems) -> None:
    """Raise ConfigError with all that is wrong, if nothing but PLAIN options is stated."""
    found = Problems([*problems.messages, *range_errors(config)])
    for rate in (config.rate, config.local_rate):
        read(rate, found)
    chosen(config.strategy, found)
    found.note(check_preset, config.model)
    # What is wrong with a folder is found later.
    if not config.model.startswith("hf:"):
        found.raise_any()


def tables_of(model: str, stated: Stated, problems: Problems) -> Mapping[str, Mapping[str, Any]]:
    """The tables that are stated for a model. Notes a capacity that is stated twice."""
    found = {name: values for name, values in stated.items() if values}
    if not found:
        return found
    from thinwire import options

    return options.with_capacity(model, found, problems)


def chosen(text: str, problems: Problems) -> list[str]:
    """The names in `a,b`, or all of them. Notes unknown ones."""
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not names:
        problems.messages.append("--strategy is empty: name at least one, or all")
    for name in names:
        if name not in STRATEGIES and name != "all":
            problems.messages.append(f"--strategy {name}: no such strategy{nearest(name, [*STRATEGIES, 'all'])}")
    return list(STRATEGIES) if "all" in names else [name for name in names if name in STRATEGIES]


def read(text: str | None, problems: Problems) -> float | None:
    """Bits per second; None if not stated. Notes a rate that can't be read."""
    if text is None:
        return None
    with problems.collect():
        rate = read_rate(text)
        if rate:
            return rate
        raise ConfigError(f"rate {text!r} must be above 0; nearest: '1mbit'")
    return None


def range_errors(config: ExplainConfig) -> Iterator[str]:
    """One message for each number that is out of its range."""
    for name, (lowest, highest) in LIMITS.items():
        value = getattr(config, name)
        if value not in (None, AUTO) and not lowest <= value <= highest:
            close = highest if value > highest else lowest
            yield f"{flag(name)} {value:,}: must be from {lowest} to {highest:,}; nearest: {close:,}"
    stages = config.stages
    if stages not in (None, AUTO) and not (str(stages).isdecimal() and 1 <= int(str(stages)) <= MOST_STAGES):
        yield f"--stages {stages}: must be a whole number from 1 to {MOST_STAGES:,}, or {AUTO}; nearest: {AUTO}"
    parameters = config.parameters
    if parameters is not None and parameters > 1 and math.isfinite(parameters) and not parameters.is_integer():
        yield f"--parameters {parameters}: must be a whole number; nearest: {round(parameters)}"
