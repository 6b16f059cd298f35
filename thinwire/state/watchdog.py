"""Stops a run whose gradient has been zero or not finite for too long."""

from __future__ import annotations

import math

from thinwire.errors import ConfigError, ThinwireError

DEFAULT_DEAD_STEPS = 20


class DeadGradientError(ThinwireError, RuntimeError):
    """The norm of the gradient was zero or not finite for many steps in a row."""


class Watchdog:
    """Counts consecutive steps whose gradient is zero or not finite.

    limit: number of such steps that ends the run; 0: no limit. Raises ConfigError for a limit below 0.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ConfigError(f"dead_steps {limit}: must be at least 0; nearest: 0, which watches nothing")
        self.limit = limit
        self._in_a_row = 0

    def note(self, norm: float, step: int) -> None:
        """Record the norm of the mean gradient of `step`. Raises DeadGradientError at the limit."""
        is_dead = norm == 0.0 or not math.isfinite(norm)
        self._in_a_row = self._in_a_row + 1 if is_dead else 0
        if self.limit and self._in_a_row >= self.limit:
            why = "is zero: is anything trained, and does the loss depend on it?"
            if not math.isfinite(norm):
                why = "is not finite: try a lower learning rate, a longer warm-up, or fp32"
            raise DeadGradientError(
                f"{self.limit} steps in a row, up to step {step}, had a dead gradient, and nothing is being learnt: "
                f"its norm, {norm:g}, {why}"
            )
