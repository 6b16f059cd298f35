"""One-byte gradients: the options, and how samples are averaged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from thinwire.errors import ConfigError, nearest
from thinwire.methods.forward import ForwardMethod
from thinwire.methods.options import check_types
from thinwire.methods.slope_code import MAX_SLOPE

# Factors by which the sum over n samples is multiplied.
AVERAGES = {"mean": -1.0, "sqrt": -0.5}


@dataclass(frozen=True)
class OneByte(ForwardMethod):
    """Fine-tuning without backward: a gradient is one byte along a direction that every rank draws for itself.

    p = (L(w + eps z) - L(w - eps z)) / (2 eps). z is normal, drawn from (seed, step, rank, k), and never sent. Every
    rank gets every p as one byte, and gives its optimizer g = (1/n) sum p z over all n samples of all ranks. E[g] is
    the gradient to within O(eps^2), and |g - E[g]|^2 is about (d + 1)/n of its square, for d trained parameters.

    Raises ConfigError for values out of range. Source: Zelikman, Huang, Liang, Haber and Goodman, "Just One Byte (per
    gradient)" (2023); Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (NeurIPS 2023), algorithm
    1; Spall, "Multivariate stochastic approximation using a simultaneous perturbation gradient approximation" (1992).
    """

    name: ClassVar[str] = "one-byte"

    samples: int = 1
    """Samples of each rank in one step, at least 1; each costs two forward passes per micro-batch."""
    eps: float = 1e-3
    """Factor of the step along a direction z to the two weights that are compared; above 0."""
    average: str = "mean"
    """mean divides the sum by n, sqrt by the root of n, as published: its step grows with the ranks."""
    cap: float = MAX_SLOPE
    """Largest absolute p that any rank applies; above 0, up to 2630.69, the most that a byte can hold."""
    check_every: int = 64
    """Steps between comparisons of the replicas; 0: never."""
    log: str = ""
    """File of the SlopeLog that the first rank keeps; `catch_up` begins with what is in it. Empty: none."""

    def __post_init__(self) -> None:
        check_types(self)
        for option, lowest in (("samples", 1), ("check_every", 0)):
            if getattr(self, option) < lowest:
                raise ConfigError(
                    f"{option} {getattr(self, option)} of one-byte: must be at least {lowest}; nearest: {lowest}"
                )
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"eps {self.eps} of one-byte: must be above 0 and finite; take 0.001")
        if not 0 < self.cap <= MAX_SLOPE:
            raise ConfigError(
                f"cap {self.cap} of one-byte: must be above 0, and at most {MAX_SLOPE}, which a byte can hold"
            )
        if self.average not in AVERAGES:
            raise ConfigError(
                f"average {self.average!r} of one-byte: must be mean or sqrt{nearest(self.average, AVERAGES)}"
            )

    def factor(self, num_samples: int) -> float:
        """Factor by which the sum over `num_samples` samples is multiplied."""
        return num_samples ** AVERAGES[self.average]
