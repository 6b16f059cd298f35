"""The outer optimizer: what becomes of the mean of the islands' outer gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.layout.layout import Layout
from thinwire.state.replicas import fingerprint

# Words that travel with the values inside an island: whether islands have agreed to stop, and where to go on instead.
NUM_WORDS = 2


@dataclass(frozen=True)
class Nesterov:
    """buf <- mu buf + D, x <- x - lr (D + mu buf), for the mean outer gradient D = mean of x - w.

    lr 1 and momentum 0: x becomes the mean of the islands' weights. Raises ConfigError for values out of range.
    Source: Douillard et al., "DiLoCo" (2023), algorithm 1; Sutskever et al. (ICML 2013), as torch.optim.SGD has it.
    """

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"outer_lr {self.lr}: must be above 0 and finite; the papers' are 0.4 to 1")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"outer_momentum {self.momentum}: must be at least 0 and below 1; the papers' is 0.9")


@dataclass(eq=False)
class OuterFragment:
    """The outer parameters of a fragment and their momentum, fp32 [numel] on the CPU; equal on all islands.

    number: exchanges applied so far. correction: the mean of the islands' h, see `Correction`; None without.
    """

    fragment: Layout
    parameters: Tensor
    momentum: Tensor
    number: int = 0
    correction: Tensor | None = None
    _fingerprint: int | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> int:
        """Stands for the bits of the parameters."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.parameters)
        return self._fingerprint

    def tensors(self) -> list[Tensor]:
        """All that an island needs to take part in the exchanges of this fragment, besides `number`."""
        return [tensor for tensor in (self.parameters, self.momentum, self.correction) if tensor is not None]

    def set_parameters(self, flat: Tensor) -> None:
        """Take other values."""
        self.parameters.copy_(flat)
        self._fingerprint = None

    def apply(self, rule: Nesterov, total: Tensor, weights: float, num_islands: int) -> None:
        """One outer step with the sum of the outer gradients, and of the weights in it; in fp32.

        num_islands: those whose h is in the mean, present in this exchange or not.
        """
        if weights:
            mean = total / weights
            self.momentum.mul_(rule.momentum).add_(mean)
            self.parameters.sub_(mean.add_(self.momentum, alpha=rule.momentum), alpha=rule.lr)
        if self.correction is not None:
            self.correction.sub_(total, alpha=1 / num_islands)
            self.parameters.add_(self.correction)
        self.number += 1
        self._fingerprint = None

    def take_mean(self, total: Tensor, weights: float) -> None:
        """Become the mean of the islands' weights: momentum of earlier steps would carry the result on, past it."""
        if weights:
            self.parameters.sub_(total.div_(weights))
        self.number += 1
        self._fingerprint = None

    @classmethod
    def starting(cls, fragment: Layout, parameters: Tensor, *, corrected: bool) -> OuterFragment:
        """Momentum and correction are zero."""
        return cls(fragment, parameters, fragment.zeros(), correction=fragment.zeros() if corrected else None)


def parameters_in(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The outer parameters by name in the state that an island's first rank has saved; shapes: of the model's."""
    found: dict[str, Tensor] = {}
    for names, (parameters, *_) in zip(state["names"], state["outer"], strict=True):
        fragment = Layout.of({name: torch.Size(shapes[name]) for name in names}, unit=state["block"])
        found |= fragment.views(parameters)
    return found


def merged(weights: Tensor, outer: Tensor, mix: float) -> Tensor:
    """mix * weights + (1 - mix) * outer: what an island goes on with."""
    return outer.clone() if mix == 0.0 else torch.lerp(outer, weights, mix)
