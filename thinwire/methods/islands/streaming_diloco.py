"""Streaming DiLoCo: the model is exchanged in fragments while inner steps go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.methods.options import codec_of
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.outer.method import OuterMethod


@dataclass(frozen=True)
class StreamingDiLoCo(IslandsMethod):
    """Streaming DiLoCo: the model in fragments, one after the other, at 4 bits, while inner steps go on.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication" (2025).
    """

    name: ClassVar[str] = "streaming-diloco"
    periods: ClassVar[tuple[int, ...]] = (30,)

    num_fragments: int | None = None
    """Fragments P of the model, from 1 to its number of layers; by default one for each three layers."""
    pattern: str = "strided"
    """strided: layer l goes to fragment l mod P; sequential: each fragment gets layers that follow each other."""
    overlap_steps: int = 1
    """Inner steps that an exchange may take before its result is waited for; from 0 to sync_every - 1."""
    mix: float = 0.5
    """Share of its own weights that an island keeps when the result arrives; from 0 to below 1."""
    outer_lr: float = 0.4
    """Learning rate of the outer step; above 0."""
    outer_momentum: float = 0.9
    """Momentum of the outer step; from 0 to below 1."""
    error_decay: float | None = None
    """Share of the codec's error that is kept and sent later, from 0 to 1; by default the error is lost."""
    codec: str = field(default="e3m0/256:bf16:nearest", kw_only=True)

    def outer(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, self.num_fragments, self.pattern, self.overlap_steps, self.mix, self.outer_lr,
            self.outer_momentum, codec_of(self, "codec"), rejoin_steps=self.rejoin_steps,
            error_decay=self.error_decay,
        )  # fmt: skip
