"""How much is told by noisy sums: epsilon, accounted by the package dp-accounting."""

from __future__ import annotations

import importlib.util

from thinwire.errors import ConfigError


def check_accountant() -> None:
    """Raises ConfigError where the package is missing."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError("noise needs the package dp-accounting to account for it: pip install 'thinwire[privacy]'")


def epsilon(noise: float, num_steps: int, delta: float) -> float:
    """The least epsilon for which `num_steps` noisy sums are (epsilon, delta)-differentially private.

    Each sum has Gaussian noise of standard deviation `noise` times the most, in 2-norm, that one unit adds to it. Every
    unit takes part in every step, so nothing is amplified by sampling.
    Source: the privacy loss distribution of Koskela, Jälkö and Honkela (AISTATS 2020), as dp-accounting composes it.
    """
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    if num_steps == 0:
        return 0.0
    return float(PLDAccountant().compose(GaussianDpEvent(noise), num_steps).get_epsilon(delta))
