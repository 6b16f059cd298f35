"""Seeds for the codecs, by step, layout and direction."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs import derive_seed
from thinwire.layout.buckets import BucketLayout

GRADIENTS, WEIGHTS, UPDATES, ACTIVATIONS = 0, 1, 2, 3


@dataclass
class Seeds:
    """The seeds of one run. base: of the run. step: number of the current step."""

    base: int
    step: int = 0

    def gradients(self, layout: BucketLayout, number: int) -> int:
        """Seed for a layout's gradients. number: how often they were sent in this step."""
        numbers = () if layout.module is None else (number,)
        return derive_seed(self.base, self.step, layout.stream, GRADIENTS, *numbers)

    def weights(self, layout: BucketLayout) -> int:
        """Seed for a layout's updated weights."""
        return derive_seed(self.base, self.step, layout.stream, WEIGHTS)

    def updates(self) -> int:
        """Seed for an optimizer's sums over ranks."""
        return derive_seed(self.base, self.step, 0, UPDATES)

    def activations(self, rank: int) -> int:
        """The seed of what a rank keeps of activations."""
        return derive_seed(self.base, self.step, rank, ACTIVATIONS)
