"""FedSpeed's ascent: an inner step also uses the gradient at a point a little uphill of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.errors import ConfigError

EPS = 1e-7


@dataclass(frozen=True)
class Ascent:
    """The gradient (1 - alpha) g1 + alpha g2 of an inner step, in place of g1.

        g1 = grad f(w)        g2 = grad f(w + rho g1 / (|g1| + 1e-7))

    Both use the same batch on this rank only: |g1| is the 2-norm of all gradients after the rank's backward, and
    nothing is sent for it. So each rank of an island climbs from the same w in its own direction. rho: in units of the
    weights.

    Raises ConfigError for a rho that is not positive, or an alpha outside of 0 < alpha <= 1.
    Source: Sun et al., "FedSpeed" (ICLR 2023), algorithm 1, lines 6 to 8, with the norm and the alpha of the authors'
    code.
    """

    rho: float
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.rho < float("inf"):
            raise ConfigError(f"ascent {self.rho}: must be above 0 and finite, or left out; the paper's is 0.1")
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"ascent_share {self.alpha}: must be above 0 and at most 1; nearest: 1")

    @contextmanager
    @torch.no_grad()
    def uphill(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Context for weights w with gradients g1: inside, weights are uphill, and gradients are (1 - alpha) g1.

        Backward passes inside add to the gradients. Afterwards the weights are w again, bit for bit.
        """
        climbing = [(param, param.grad) for param in parameters if param.grad is not None]
        before = [param.data.clone() for param, _ in climbing]
        rate = self.rho / (float(nn.utils.get_total_norm([grad for _, grad in climbing])) + EPS)
        for param, grad in climbing:
            # By `data`: whoever watches for edits of the weights must not take this for one.
            param.data.add_(grad, alpha=rate)
            grad.mul_(1 - self.alpha)
        try:
            yield
        finally:
            for (param, _), weights in zip(climbing, before, strict=True):
                param.data.copy_(weights)
