"""Local SGD: islands continue with the mean of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.methods.options import codec_of
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.outer.correction import ProximalCorrection
from thinwire.methods.outer.method import OuterMethod


@dataclass(frozen=True)
class LocalSGD(IslandsMethod):
    """Local SGD: after every H inner steps all islands continue with the mean of their weights.

    Source: Stich, "Local SGD converges fast and communicates little" (ICLR 2019); Lin, Stich, Patel and Jaggi, "Don't
    use large mini-batches, use local SGD" (ICLR 2020).
    """

    name: ClassVar[str] = "local-sgd"
    periods: ClassVar[tuple[int, ...]] = (8, 32)

    sync_every: int = 16
    start_after: int = 0
    """Up to this step the weights are averaged after every step (post-local SGD); at least 0."""
    fedspeed: float | None = None
    """lam of FedSpeed's correction, in units of the inverse curvature, above 0; by default no correction."""

    def outer(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, codec=codec_of(self, "codec"), start_after=self.start_after,
            correction=None if self.fedspeed is None else ProximalCorrection(self.fedspeed),
            rejoin_steps=self.rejoin_steps,
        )  # fmt: skip
