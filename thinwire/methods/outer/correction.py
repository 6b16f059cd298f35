"""A correction of inner steps: keeps islands with different data near each other without holding them back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.state.memory import Merge, Place, State


@dataclass(frozen=True)
class ProximalCorrection:
    """gradient + (w - x + h) / lam in every inner step; h <- h + w - x at every exchange.

    x: the weights with which the island continued after the last exchange. h: its memory, from 0, fp32, in the
    parameters' shapes. The mean h of all islands is added to the outer parameters, which makes their common optimum a
    fixed point for any number of inner steps. lam: in units of the inverse curvature; an inner rate needs lr (L +
    1/lam) < 2.

    Raises ConfigError for a lam that is not positive. Source: Sun et al., "FedSpeed" (ICLR 2023), algorithm 1, in the
    form of its dual variable (h = -lam ghat); its ascent step is Ascent.
    """

    lam: float

    def __post_init__(self) -> None:
        if not 0 < self.lam < math.inf:
            raise ConfigError(f"lam {self.lam} of the FedSpeed correction: must be above 0 and finite; nearest: 10")

    def __str__(self) -> str:
        return f"FedSpeed, lam {self.lam:g}"

    def correct_(self, gradient: Tensor, weights: Tensor, anchor: Tensor, h: Tensor) -> None:
        """Add (w - x + h) / lam to a gradient, in place. All four tensors have one shape.

        Args:
            gradient: of the step; changed.
            weights: w, before the step.
            anchor: x.
            h: the memory.
        """
        gradient.add_((weights - anchor).add_(h), alpha=1 / self.lam)


class CorrectionState(State):
    """State of a correction for each tensor that is stepped, in its shape. shapes: of these tensors, by name.

    anchors: x. h: the memory. Both belong to one island's data, so other islands load neither.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(Place(shapes, Topology(1, 1)))
        row = "anchors and memory of the correction"
        self.anchors = self.add("anchors", Merge.OWN, row=row)
        self.h = self.add("h", Merge.OWN, row=row)
