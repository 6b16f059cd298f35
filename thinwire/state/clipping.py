"""How clipping, which comes after compression, scales error feedback."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Clip(NamedTuple):
    """The clipping of one step. factor: f_t, applied to the mean gradient.

    share: min(1, f_t / f_{t-1}), see Clipping.
    """

    factor: float
    share: float


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / norm), the factor that clips a gradient of this norm; 1 if the norm is not finite."""
    return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0


@dataclass
class Clipping:
    """The factors f by which the mean gradient is clipped, step by step. last: the latest; 1 before the first step.

    A rank sends its gradient plus the error of the previous step. The sum is clipped by f_t after it has arrived, and
    compression leaves a new error e. This error belongs to a gradient that was clipped by f_t, but it travels with the
    next gradient, which will be clipped as gradients usually are. Therefore

        e <- e min(1, f_t / f_{t-1}).

    While all steps are clipped alike, errors stay as they are. After a step that is clipped far more than the one
    before, they shrink; else most of that step would come back in the following ones. A method that is better off with
    a short memory uses f_t instead.
    """

    last: float = 1.0

    def note(self, norm: float, max_norm: float) -> Clip:
        """Note that a gradient of this norm was clipped to `max_norm`. A norm that is not finite does not count."""
        if not math.isfinite(norm):
            return Clip(1.0, 1.0)
        factor = clip_factor(norm, max_norm)
        share = min(1.0, factor / self.last)
        # Nothing was left of a step that was clipped to 0, which says nothing about the next one.
        self.last = factor or self.last
        return Clip(factor, share)
