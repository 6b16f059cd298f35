"""Privacy loss of noisy sums: epsilon, computed by the package dp-accounting."""

from __future__ import annotations

import importlib.util
import math

from thinwire.errors import ConfigError


def check_accountant() -> None:
    """Raise ConfigError if the package is missing."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError(
            "noise needs the package dp-accounting to account for it: pip install -e '.[privacy]' in thinwire's folder"
        )


def epsilon(noise: float, num_steps: int, delta: float) -> float:
    """The least epsilon for which `num_steps` noisy sums are (epsilon, delta)-differentially private.

    Each sum has Gaussian noise of standard deviation `noise` times the largest 2-norm that one unit adds to it. Every
    unit takes part in every step, so sampling gives no amplification. T such sums reveal as much as a single sum with
    noise / sqrt(T), whose epsilon is known exactly.
    Source: Dong, Roth and Su, "Gaussian differential privacy" (2019), corollary 2; Balle and Wang, "Improving the
    Gaussian mechanism" (ICML 2018), as dp-accounting computes it.
    """
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise / math.sqrt(num_steps), delta)) if num_steps else 0.0
