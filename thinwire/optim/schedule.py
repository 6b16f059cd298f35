"""The learning rate of a step."""

from __future__ import annotations

import math

FINAL_SHARE = 0.1


def lr_at(step: int, *, peak: float, num_warmup_steps: int, num_steps: int) -> float:
    """The learning rate of a step: linear from 0 to `peak` in the warm-up, then half a cosine to a tenth of it.

    Steps count from 1.
    """
    if step <= num_warmup_steps:
        return peak * step / num_warmup_steps
    progress = min(1.0, (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
