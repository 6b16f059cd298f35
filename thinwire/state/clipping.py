"""By how much clipping, which comes after compression, shortens error feedback."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Clip(NamedTuple):
    """A step's clipping. factor: f_t, of the mean gradient. share: min(1, f_t / f_{t-1}), see Clipping."""

    factor: float
    share: float


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / norm), by which a gradient of this norm is clipped; 1 for a norm that is not finite."""
    return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0


@dataclass
class Clipping:
    """The factors f by which the mean gradient is clipped, step by step. last: the latest; 1 before the first step.

    A gradient travels with the error of the last one, is clipped by f_t when all of it has come, and leaves an error e.
    What e stands for was clipped by f_t too, but it travels with the next gradient, which will be clipped as gradients
    usually are. So
        e <- e min(1, f_t / f_{t-1}):
    as it is while all steps are clipped alike; shortened after a step that is clipped by far more than those before it,
    most of which would else come back in the steps that follow. Who is better off with a short memory takes f_t.
    """

    last: float = 1.0

    def note(self, norm: float, max_norm: float) -> Clip:
        """A step's norm was clipped to `max_norm`; one that is not finite does not count."""
        if not math.isfinite(norm):
            return Clip(1.0, 1.0)
        factor = clip_factor(norm, max_norm)
        share = min(1.0, factor / self.last)
        # Nothing was left of a step that was clipped to 0, which says nothing about the next one.
        self.last = factor or self.last
        return Clip(factor, share)
