"""The outer optimizer and its state."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.layout.layout import Layout
from thinwire.state.memory import Merge, Place, State
from thinwire.state.replicas import fingerprint

# Numbers that travel with the values inside an island: whether islands have agreed to stop, and where to go on instead.
NUM_WORDS = 2


@dataclass(frozen=True)
class Nesterov:
    """buf <- mu buf + D, x <- x - lr (D + mu buf), for the mean outer gradient D = mean of x - w.

    With lr 1 and momentum 0, x becomes the mean of the islands' weights. Raises ConfigError for values out of range.
    Source: Douillard et al., "DiLoCo" (2023), algorithm 1; Sutskever et al. (ICML 2013), in the form of
    torch.optim.SGD.
    """

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"outer_lr {self.lr}: must be above 0 and finite; the papers' are 0.4 to 1")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"outer_momentum {self.momentum}: must be at least 0 and below 1; the papers' is 0.9")


class OuterState(State):
    """State of an island's first rank between exchanges: for each fragment, by its number, fp32 [numel] on the CPU.

    Attributes:
        parameters, momentum: of the outer optimizer; the same on all islands. None: without momentum.
        correction: the mean of the islands' h, see ProximalCorrection; the same on all islands; None: no correction.
        lost: error feedback of this island's outer gradients; None: no error feedback.
        numbers: exchanges applied so far, by fragment.
    """

    def __init__(
        self, fragments: Sequence[Layout], *, has_momentum: bool, is_corrected: bool, has_feedback: bool
    ) -> None:
        shapes = {str(number): torch.Size([fragment.numel]) for number, fragment in enumerate(fragments)}
        super().__init__(Place(shapes, Topology(1, 1)))
        row = "outer parameters and momentum" if has_momentum else "outer parameters"
        self.parameters = self.add("parameters", Merge.SAME, row=row)
        self.momentum = self.add("momentum", Merge.SAME, row=row) if has_momentum else None
        self.correction = self.add("correction", Merge.SAME, row="outer correction") if is_corrected else None
        self.lost = self.add("lost", Merge.OWN, row="error feedback of outer gradients") if has_feedback else None
        self.numbers = [0] * len(fragments)
        self.add_attributes(self, "numbers")


class OuterFragment:
    """The outer step of one fragment of an OuterState. number: exchanges applied so far."""

    def __init__(self, state: OuterState, index: int) -> None:
        self._state, self._index = state, index
        self._fingerprint: int | None = None

    @property
    def parameters(self) -> Tensor:
        """x, fp32 [numel]."""
        return self._state.parameters[str(self._index)]

    @property
    def momentum(self) -> Tensor | None:
        """buf, fp32 [numel]; None without momentum."""
        return None if self._state.momentum is None else self._state.momentum[str(self._index)]

    @property
    def correction(self) -> Tensor | None:
        """The mean of the islands' h, fp32 [numel]; None without a correction."""
        return None if self._state.correction is None else self._state.correction[str(self._index)]

    @property
    def number(self) -> int:
        """Exchanges applied so far."""
        return self._state.numbers[self._index]

    @number.setter
    def number(self, number: int) -> None:
        # A list of its own: one that was saved may not be written yet.
        before, after = self._state.numbers[: self._index], self._state.numbers[self._index + 1 :]
        self._state.numbers = [*before, number, *after]

    @property
    def fingerprint(self) -> int:
        """A checksum of the bits of the parameters."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.parameters)
        return self._fingerprint

    def tensors(self) -> list[Tensor]:
        """All tensors that an island needs to take part in the exchanges of this fragment, besides `number`."""
        return [tensor for tensor in (self.parameters, self.momentum, self.correction) if tensor is not None]

    def set_parameters(self, flat: Tensor) -> None:
        """Replace the parameters."""
        self.parameters.copy_(flat)
        self._fingerprint = None

    def apply(self, rule: Nesterov, total: Tensor, weights: float, num_islands: int) -> None:
        """Take one outer step, in fp32.

        Args:
            rule: the outer optimizer.
            total: the weighted sum of the outer gradients, fp32 [numel].
            weights: the sum of the islands' weights in `total`.
            num_islands: number of islands whose h is in the mean, present in this exchange or not.
        """
        if weights:
            mean = total / weights
            if (momentum := self.momentum) is not None:
                momentum.mul_(rule.momentum).add_(mean)
                mean.add_(momentum, alpha=rule.momentum)
            self.parameters.sub_(mean, alpha=rule.lr)
        if self.correction is not None:
            self.correction.sub_(total, alpha=1 / num_islands)
            self.parameters.add_(self.correction)
        self.number += 1
        self._fingerprint = None

    def take_mean(self, total: Tensor, weights: float) -> None:
        """Set the parameters to the mean of the islands' weights.

        (An outer step's momentum would carry them past the mean.)

        Args:
            total: the weighted sum of the outer gradients, fp32 [numel]; overwritten.
            weights: the sum of the islands' weights in `total`.
        """
        if weights:
            self.parameters.sub_(total.div_(weights))
        self.number += 1
        self._fingerprint = None


def parameters_in(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The outer parameters by name, from the state that an island's first rank saved.

    shapes: of the model's parameters.
    """
    return _by_name(state, "parameters", shapes)


def residuals_in(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The error feedback of outer gradients by name, likewise; without that of fragments under way.

    The island's own weights still have what those sent, and part of it is in the error too.
    """
    flying = {fragment for fragment, _, _, _, is_applied in state["flights"] if not is_applied}
    return _by_name(state, "lost", shapes, flying)


def _by_name(
    state: Mapping[str, Any], kind: str, shapes: Mapping[str, Sequence[int]], without: Collection[int] = ()
) -> dict[str, Tensor]:
    """A kind of tensor of an OuterState, by parameter, without that of some fragments."""
    found, held = dict[str, Tensor](), state["outer"].get(kind, {})
    for number, names in enumerate(state["names"]):
        if number not in without and str(number) in held:
            fragment = Layout.of({name: torch.Size(shapes[name]) for name in names}, unit=state["block"])
            found |= fragment.views(held[str(number)])
    return found


def merged(weights: Tensor, outer: Tensor, mix: float) -> Tensor:
    """mix * weights + (1 - mix) * outer: the weights with which an island continues.

    Args:
        weights: of the island, fp32 [numel].
        outer: the outer parameters, fp32 [numel].
        mix: from 0 to below 1.
    """
    return outer.clone() if mix == 0.0 else torch.lerp(outer, weights, mix)
