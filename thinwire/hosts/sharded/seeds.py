"""The seeds of what codecs draw, by step, layout and direction."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs import derive_seed
from thinwire.layout.buckets import BucketLayout

GRADIENTS, WEIGHTS, UPDATES = 0, 1, 2


@dataclass
class Seeds:
    """The seeds of one run. base: of the run; step: the number of the step under way."""

    base: int
    step: int = 0

    def gradients(self, layout: BucketLayout, number: int) -> int:
        """The seed of a layout's gradients; number: how often they have left in this step."""
        numbers = () if layout.module is None else (number,)
        return derive_seed(self.base, self.step, layout.stream, GRADIENTS, *numbers)

    def weights(self, layout: BucketLayout) -> int:
        """The seed of a layout's updated weights."""
        return derive_seed(self.base, self.step, layout.stream, WEIGHTS)

    def updates(self) -> int:
        """The seed of what an optimizer sums over ranks."""
        return derive_seed(self.base, self.step, 0, UPDATES)
