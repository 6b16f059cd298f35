"""MuLoCo: islands train by Muon and send what they have learnt in two bits and a half."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.errors import ConfigError
from thinwire.methods.options import codec_of
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.outer.method import OuterMethod

MUON = "muon"


@dataclass(frozen=True)
class MuLoCo(IslandsMethod):
    """MuLoCo: H steps of Muon on every island, then one outer Nesterov step with the islands' changes in few bits.

        e <- beta e + x - w                    e belongs to this island
        c  = C(e);  e <- e - c                 four levels to an element
        buf <- mu buf + mean over islands of c
        x <- x - lr (mean of c + mu buf)

    Islands that train by Muon go on in directions that agree, so that few bits and error feedback lose little.

    Raises ConfigError for values out of range, for a codec that is no contraction, and for a strategy inside islands
    that can't train by Muon.
    Source: Therien, Huang, Rish and Belilovsky, "MuLoCo: Muon is a practical inner optimizer for DiLoCo" (2025);
    fragments, overlap and mix: Douillard et al., "Streaming DiLoCo" (2025).
    """

    name: ClassVar[str] = "muloco"

    sync_every: int = 30
    """Inner steps H between two exchanges of one fragment; at least 1."""
    outer_lr: float = 0.7
    """Learning rate of the outer step; above 0."""
    outer_momentum: float = 0.9
    """Momentum of the outer step; from 0 to below 1."""
    error_decay: float = 0.9
    """Share of the error that is kept, beta; from 0 to 1."""
    codec: str = field(default="sign/64:bf16+twice", kw_only=True)
    """Codec of what islands send to each other; one that loses less than all, as `topk`, `sign` and `:nearest` do."""
    num_fragments: int | None = 1
    """Fragments P of the model, from 1 to its number of layers; none: one for each three layers."""
    pattern: str = "strided"
    """strided: layer l goes to fragment l mod P; sequential: each fragment gets layers that follow each other."""
    overlap_steps: int = 0
    """Inner steps that an exchange may take before its result is waited for; from 0 to sync_every - 1."""
    mix: float = 0.0
    """Share of its own weights that an island keeps when the result arrives; from 0 to below 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if MUON not in self.inner.optimizers:
            raise ConfigError(
                f"muloco trains islands by {MUON}, and {self.inner.name} inside an island "
                f"{self.inner.optimizers_reason}; nearest: --inner ddp, or --strategy sparseloco"
            )

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Those of the inner strategy; Muon unless another is asked for."""
        return MUON, *(name for name in self.inner.optimizers if name != MUON)

    def outer(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, self.num_fragments, self.pattern, self.overlap_steps, self.mix, self.outer_lr,
            self.outer_momentum, codec_of(self, "codec"), rejoin_steps=self.rejoin_steps, error_decay=self.error_decay,
        )  # fmt: skip
