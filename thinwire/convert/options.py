"""The command lines of `thinwire export`, `import` and `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro

from thinwire.errors import Problems
from thinwire.flags import CommandLine, flag

SourceArgument = Annotated[str, tyro.conf.Positional]


@dataclass(frozen=True)
class ExportConfig:
    """Write a run's last checkpoint as a folder for transformers, and compare what transformers loads with the run."""

    run: Annotated[SourceArgument, tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    folder: Annotated[SourceArgument, tyro.conf.arg(metavar="DIR")]
    """The folder to write; it must be empty, or not exist."""
    to: Literal["hf"] = "hf"
    """hf: .safetensors, config.json and a tokenizer, which transformers loads."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights; bf16 rounds them and takes half the space."""
    data: str | None = None
    """Text to compare on, as for `thinwire train`; by default the run's own. Only the held-out part is used."""
    sequences: int = 16
    """Largest number of held-out sequences to compare on."""
    max_kl: float = 1e-3
    """Largest mean KL divergence from the run's model, in nats per token; above it the folder is deleted."""
    min_agreement: float = 0.99
    """Smallest share of tokens for which both models must predict the same next token."""


@dataclass(frozen=True)
class ImportConfig:
    """Turn another program's checkpoint of a Llama, Mistral, Mixtral or Qwen model into a folder for `--model hf:DIR`.

    A folder of transformers needs no import, whatever the family: thinwire train --model hf:DIR trains it as it is.
    """

    source: Annotated[SourceArgument, tyro.conf.arg(metavar="FROM")]
    """The folder of the checkpoint."""
    folder: Annotated[SourceArgument, tyro.conf.arg(metavar="DIR")]
    """The folder to write; it must be empty, or not exist."""
    format: str = "auto"
    """hf, torchtitan, megatron or zero3; auto: recognised by the files."""
    config: str | None = None
    """config.json of the model, in Hugging Face's form; by default the one beside the checkpoint."""


@dataclass(frozen=True)
class GenerateConfig:
    """Let a run's last checkpoint, or a folder of transformers, continue a text."""

    source: Annotated[SourceArgument, tyro.conf.arg(metavar="RUN|DIR")]
    """The run directory, or the folder."""
    prompt: str = "def "
    """Start of the text."""
    tokens: int = 200
    """Tokens to generate."""
    temperature: float = 0.8
    """Softmax temperature of the draws; 0: always the likeliest token."""
    seed: int = 0
    """Seed of the random draws."""


AnyConfig = TypeVar("AnyConfig", ExportConfig, ImportConfig, GenerateConfig)


def export_line() -> CommandLine:
    """The flags of `thinwire export`."""
    return CommandLine("thinwire export", ExportConfig)


def import_line() -> CommandLine:
    """The flags of `thinwire import`."""
    return CommandLine("thinwire import", ImportConfig)


def generate_line() -> CommandLine:
    """The flags of `thinwire generate`."""
    return CommandLine("thinwire generate", GenerateConfig)


LINES = {ExportConfig: export_line, ImportConfig: import_line, GenerateConfig: generate_line}


def read(cls: type[AnyConfig], args: Sequence[str]) -> AnyConfig:
    """Read the options from the command line. Raises ConfigError with all errors at once; SystemExit after --help."""
    problems = Problems()
    stated = LINES[cls]().read(args, problems)[""]
    problems.messages += range_errors(stated)
    problems.raise_any()
    return cls(**stated)


# The smallest and the largest value of each number.
LIMITS = {
    "sequences": (1, 10**9), "max_kl": (0, 1e9), "min_agreement": (0, 1), "tokens": (1, 10**9),
    "temperature": (0, 1e9), "seed": (0, (1 << 63) - 1),
}  # fmt: skip


def range_errors(stated: Mapping[str, Any]) -> Iterator[str]:
    """One message for each number that is out of its range."""
    for name, (lowest, highest) in LIMITS.items():
        value = stated.get(name)
        # `value < lowest` would let NaN pass.
        if value is not None and not lowest <= value <= highest:
            close = highest if value > highest else lowest
            yield f"{flag(name)} {value:g}: must be from {lowest} to {highest:g}; nearest: {close:g}"
