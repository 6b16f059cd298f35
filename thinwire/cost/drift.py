"""Tells when a link is no longer the one for which a step was planned."""

from __future__ import annotations

# How much slower or faster a link's messages must be than planned, and their part of a step that makes it matter.
DRIFT, MATTERS = 0.25, 0.05
# So much later a busy machine takes a message up.
JITTER_S = 1e-3


def drifted_s(before_s: float, now_s: float, step_s: float) -> float:
    """Seconds by which a step's messages on a link take longer, or shorter, than planned.

    0 where that is at most DRIFT of the shorter time, or at most MATTERS of the step.

    Args:
        before_s, now_s: seconds of the messages, as planned and by the link as it is. step_s: of the planned step.
    """
    moved = abs(now_s - before_s)
    return moved if moved > DRIFT * min(before_s, now_s) and moved > MATTERS * step_s else 0.0


def moved_s(before_s: float, now_s: float) -> float:
    """Seconds by which a delay has grown, or, negative, become shorter; 0 for no more than JITTER_S."""
    return now_s - before_s if abs(now_s - before_s) > JITTER_S else 0.0
