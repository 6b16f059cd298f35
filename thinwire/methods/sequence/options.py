"""Options of sequence parallelism: the ranks of a sequence, the attention, the codecs of both directions."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs import Codec
from thinwire.errors import ConfigError, Problems
from thinwire.methods.options import FIXED_SIZE, FP32, SAME_EACH_TIME, check_types, codec_or_none
from thinwire.methods.sequence.layout import AUTO, SequenceLayout


@dataclass(frozen=True)
class SequenceParallel:
    """Splits the tokens of a sequence over neighbouring ranks, which exchange heads, or keys and values.

    All of these ranks have the same weights. Raises ConfigError for values that can't work.
    """

    parallel: int = 1
    """Ranks that share a sequence."""
    method: str = AUTO
    """ulysses: exchange heads; ring: pass keys and values on; both, such as ulysses=2,ring=2; or auto: the one with the
    fewest seconds on the links."""
    wire: str = FP32
    """Codec of queries, keys, values and outputs, such as bf16 or int8/64:nearest; fp32, or exact: as they are. It must
    round the same way each time."""
    gradients: str = FP32
    """Codec of their gradients, such as bf16 or int8/64; fp32, or exact: as they are."""

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collect():
            check_types(self)
            if self.parallel < 1:
                raise ConfigError(f"parallel {self.parallel}: must be at least 1; nearest: 1")
            if self.method != AUTO:
                SequenceLayout.parse(self.method, self.parallel)
        for name in ("wire", "gradients"):
            problems.note(self.codec, name)
        problems.raise_any()

    def codec(self, name: str) -> Codec | None:
        """The codec of `wire` or `gradients`; None: they travel as they are."""
        return codec_or_none(self, name, *([SAME_EACH_TIME] if name == "wire" else []), FIXED_SIZE)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        return tuple(codec for codec in map(self.codec, ("wire", "gradients")) if codec is not None)
