"""The command line of `thinwire plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from thinwire.errors import ConfigError
from thinwire.flags import CommandLine
from thinwire.planner.options import option_tables

BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


@dataclass(frozen=True)
class PlanConfig:
    """Find the fastest way to train a model on machines that `thinwire calibrate` has measured.

    What it writes is a CONFIG.toml of `thinwire train`. Options of strategies and of the pipeline are those of
    `thinwire train`; those that are stated are not searched.
    """

    machine: str = "machine.json"
    """What `thinwire calibrate` has written."""
    model: str = "demo"
    """Preset (tiny, demo, 125m, 350m, 1b)."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json; it sets the size of the vocabulary."""
    tokens_per_step: int | None = None
    """Tokens of one optimizer step on all ranks together; by default 8 sequences a rank."""
    seq_len: int = 256
    """Tokens of one sequence."""
    micro_batch: int = 8
    """Most sequences in one forward pass of one worker."""
    strategies: str = "all"
    """Strategies to choose from, separated by commas, methods of islands included; all: those that learn as much from a
    token as exact training, and islands of which it is known what they learn."""
    stages: int | None = None
    """Stages of a pipeline; by default those of the fastest."""
    memory: str | None = None
    """Memory of one rank, such as 8gb; by default what the machines have. The run is held to it."""
    store: str | None = None
    """Folder on a disk for what does not fit, or, without --memory, for all that can lie there, as in `thinwire train`;
    none: nothing lies on a disk."""
    activations: str | None = None
    """What a forward keeps for its backward, as for `thinwire train`; ways that can't do so are left out."""
    slices: int | None = None
    """Parts of a micro-batch that each layer computes in turn, as for `thinwire train`; ways that can't do so are left
    out."""
    optimizer: str | None = None
    """Optimizer with its options, as for `thinwire train`, by default adamw; ways that it can't train are left out."""
    runs: str | None = None
    """Folder of earlier runs under plans; the memory of a process is learnt from them. By default it is 1.5 times what
    is counted, and what a process holds before it has a model."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Compute type."""
    loss: Literal["auto", "plain", "cut"] = "auto"
    """How the loss is computed, as for `thinwire train`: it sets what the head keeps."""
    out: str = "plan.toml"
    """File to write; the prediction goes beside it, with the ending .json."""
    verify: int = 0
    """How many of the fastest ways to race in the lab, on links like the measured ones and on the CPU; print predicted
    beside measured, and write the fastest. 0: no race."""
    trace: str | None = None
    """File for the simulated step's timeline, which Perfetto shows."""
    tables: Annotated[Mapping[str, Mapping[str, Any]], tyro.conf.Suppress] = field(default_factory=dict)


@dataclass(frozen=True)
class TuneConfig(PlanConfig):
    """Measure some ways to train in the lab, correct the prediction of the others by what these take, and measure on.

    Options are those of `thinwire plan`; the fastest way that was measured is written. Says what the times depend on.
    """

    verify: int = 3
    """Ways in one race. The first are those that are predicted to be the fastest; after each race the most promising
    of all others by the corrected prediction."""
    trials: int = 9
    """Ways that are measured in all."""


def found_by_plan(name: str) -> str:
    """What to say about a flag of `thinwire train` for what a plan finds; empty for any other."""
    found = {
        "--mesh": "the mesh; nearest: --stages, --sequence.parallel or --experts.parallel, each of which fixes an axis",
        "--tensor": "the tensor axis; nearest: leave it out, or train with --strategy auto --tensor",
        "--order": "the order of ranks, and writes it; nearest: leave it out",
    }
    return f": a plan finds {found[name]}" if name in found else ""


def plan_line() -> CommandLine:
    """The flags of `thinwire plan`, and a prefix such as --pipeline. for each table."""
    return CommandLine(
        "thinwire plan", PlanConfig, tables=option_tables, presets=dict.fromkeys(("llama", "moe"), "the preset's")
    )


def tune_line() -> CommandLine:
    """The flags of `thinwire tune`."""
    return CommandLine(
        "thinwire tune", TuneConfig, tables=option_tables, presets=dict.fromkeys(("llama", "moe"), "the preset's")
    )


def read_bytes(text: str) -> float:
    """Bytes of a text such as `8gb`. Raises ConfigError that names a valid spelling."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmgt]b)", text.strip().lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"--memory {text!r} is not a number and a unit of {', '.join(BYTES)}; did you mean '8gb'?")
    return float(match[1]) * BYTES[match[2]]
