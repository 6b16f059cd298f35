"""DiLoCo, Streaming DiLoCo and local SGD as strategies: an outer method around any strategy inside an island."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.methods.islands.base import IslandsMethod
from thinwire.methods.islands.fedspeed import FedSpeed
from thinwire.methods.islands.method import OuterMethod
from thinwire.methods.options import codec_of


@dataclass(frozen=True)
class DiLoCo(IslandsMethod):
    """DiLoCo: H inner steps on every island, then one outer Nesterov step with the mean of how far they went.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023).
    """

    name: ClassVar[str] = "diloco"

    outer_lr: float = 0.7
    """Learning rate of the outer step; above 0."""
    outer_momentum: float = 0.9
    """Momentum of the outer step; from 0 to below 1."""
    error_decay: float | None = None
    """What of the codec's error is kept and sent later, from 0 to 1; by default the error is lost."""
    fedspeed: float | None = None
    """lam of FedSpeed's correction, in units of the inverse curvature, above 0; by default no correction."""

    def method(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, outer_lr=self.outer_lr, outer_momentum=self.outer_momentum,
            codec=codec_of(self, "codec"), rejoin_steps=self.rejoin_steps,
            error_decay=self.error_decay,
            correction=None if self.fedspeed is None else FedSpeed(self.fedspeed),
        )  # fmt: skip


@dataclass(frozen=True)
class StreamingDiLoCo(IslandsMethod):
    """Streaming DiLoCo: the model in fragments, one after the other, at 4 bits, while inner steps go on.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication" (2025).
    """

    name: ClassVar[str] = "streaming-diloco"

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
    """What of the codec's error is kept and sent later, from 0 to 1; by default the error is lost."""
    codec: str = field(default="e3m0/256:bf16:nearest", kw_only=True)

    def method(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, self.num_fragments, self.pattern, self.overlap_steps, self.mix, self.outer_lr,
            self.outer_momentum, codec_of(self, "codec"), rejoin_steps=self.rejoin_steps,
            error_decay=self.error_decay,
        )  # fmt: skip


@dataclass(frozen=True)
class LocalSGD(IslandsMethod):
    """Local SGD: every H inner steps each island goes on with the mean of all islands' weights.

    Source: Stich, "Local SGD converges fast and communicates little" (ICLR
    2019); Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (ICLR 2020).
    """

    name: ClassVar[str] = "local-sgd"

    sync_every: int = 16
    start_after: int = 0
    """Up to this step the weights are averaged after every step (post-local SGD); at least 0."""
    fedspeed: float | None = None
    """lam of FedSpeed's correction, in units of the inverse curvature, above 0; by default no correction."""

    def method(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, codec=codec_of(self, "codec"), start_after=self.start_after,
            correction=None if self.fedspeed is None else FedSpeed(self.fedspeed), rejoin_steps=self.rejoin_steps,
        )  # fmt: skip


ISLANDS: dict[str, Callable[..., IslandsMethod]] = {
    "diloco": DiLoCo,
    "streaming-diloco": StreamingDiLoCo,
    "local-sgd": LocalSGD,
}
