"""DiLoCo: many inner steps on every island, then one outer step with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.methods.options import codec_of
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.outer.correction import ProximalCorrection
from thinwire.methods.outer.method import OuterMethod


@dataclass(frozen=True)
class DiLoCo(IslandsMethod):
    """DiLoCo: H inner steps on every island, then one outer Nesterov step with the mean change of all islands.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023).
    """

    name: ClassVar[str] = "diloco"
    periods: ClassVar[tuple[int, ...]] = (50, 500)

    outer_lr: float = 0.7
    """Learning rate of the outer step; above 0."""
    outer_momentum: float = 0.9
    """Momentum of the outer step; from 0 to below 1."""
    error_decay: float | None = None
    """Share of the codec's error that is kept and sent later, from 0 to 1; by default the error is lost."""
    fedspeed: float | None = None
    """lam of FedSpeed's correction, in units of the inverse curvature, above 0; by default no correction."""

    def outer(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, outer_lr=self.outer_lr, outer_momentum=self.outer_momentum,
            codec=codec_of(self, "codec"), rejoin_steps=self.rejoin_steps,
            error_decay=self.error_decay,
            correction=None if self.fedspeed is None else ProximalCorrection(self.fedspeed),
        )  # fmt: skip
