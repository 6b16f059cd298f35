"""SparseLoCo: islands send the largest part of their change; the rest is kept and replaces the outer momentum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.methods.options import codec_of
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.outer.method import OuterMethod


@dataclass(frozen=True)
class SparseLoCo(IslandsMethod):
    """SparseLoCo: H inner steps on every island, then a plain outer step along the largest of their residuals.

        e <- beta e + x - w                    e belongs to this island
        c  = C(e);  e <- e - c                 the largest of each chunk, in 2 bits
        x <- x - lr (mean over islands of c)

    An element that is small in every round adds up in e until it is sent, so e has the effect of an outer momentum.

    Raises ConfigError for values out of range, and for a codec that is no contraction.
    Source: Sarfi, Therien, Lidin and Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo" (2025),
    algorithm 1; fragments, overlap and mix: Douillard et al., "Streaming DiLoCo" (2025).
    """

    name: ClassVar[str] = "sparseloco"
    periods: ClassVar[tuple[int, ...]] = (30, 50)

    sync_every: int = 15
    """Inner steps H between two exchanges of one fragment; at least 1."""
    error_decay: float = 0.95
    """Share of the error that is kept, beta; from 0 to 1."""
    codec: str = field(default="topk1.5625%/4096:(sign/64:bf16+twice)", kw_only=True)
    """Codec of what islands send to each other; one that loses less than all, as `topk`, `sign` and `:nearest` do."""
    outer_lr: float = 1.0
    """Learning rate of the outer step; above 0."""
    num_fragments: int | None = 1
    """Fragments P of the model, from 1 to its number of layers; none: one for each three layers."""
    pattern: str = "strided"
    """strided: layer l goes to fragment l mod P; sequential: each fragment gets layers that follow each other."""
    overlap_steps: int = 0
    """Inner steps that an exchange may take before its result is waited for; from 0 to sync_every - 1."""
    mix: float = 0.0
    """Share of its own weights that an island keeps when the result arrives; from 0 to below 1."""

    def outer(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, self.num_fragments, self.pattern, self.overlap_steps, self.mix, self.outer_lr,
            codec=codec_of(self, "codec"), rejoin_steps=self.rejoin_steps, error_decay=self.error_decay,
        )  # fmt: skip
