"""Table of the formats: how each is recognised, opened, and converted to Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.checkpoint.foreign.rules import Rule
from thinwire.checkpoint.foreign.sources import DCPSource, ForeignSource, MegatronSource, SafetensorsSource, Zero3Source
from thinwire.checkpoint.foreign.tables import Sizes, huggingface, megatron, torchtitan
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Format:
    """A program's checkpoint format: the files that identify it, how to open it, and its table of rules."""

    marks: tuple[str, ...]
    open: Callable[[Path], ForeignSource]
    rules: Callable[[Sizes], tuple[Rule, ...]]

    def fits(self, folder: Path) -> bool:
        """Whether the folder looks like this format."""
        return any(any(folder.glob(mark)) for mark in self.marks)


FORMATS: dict[str, Format] = {
    "hf": Format(("*.safetensors",), SafetensorsSource, huggingface),
    "torchtitan": Format((".metadata",), DCPSource, torchtitan),
    "megatron": Format(("latest_checkpointed_iteration.txt", "mp_rank_*/model_optim_rng.pt"), MegatronSource, megatron),
    "zero3": Format(("latest", "*zero_pp_rank_*_optim_states.pt"), Zero3Source, huggingface),
}


def detect(folder: Path) -> str:
    """The name of the format that the folder looks like. Raises ConfigError for none or several."""
    fitting = [name for name, known in FORMATS.items() if known.fits(folder)]
    if len(fitting) != 1:
        looks = " and ".join(fitting) or "none of them"
        raise ConfigError(f"{folder} looks like {looks}: say --format, one of {', '.join(FORMATS)}")
    return fitting[0]
