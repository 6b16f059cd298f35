"""A correction of inner steps: islands that see different data stay near each other without being held back."""

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

    x: what the island went on with after the last exchange. h: its memory, from 0, fp32, in the parameters' places. The
    mean h of all islands is added to the outer parameters, which makes their common optimum a fixed point however many
    inner steps there are. lam: in units of the inverse curvature; an inner rate needs lr (L + 1/lam) < 2.

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
        """Add (w - x + h) / lam to a gradient, in place.

        Args:
            gradient: of the step; changed.
            weights: w, before the step.
            anchor: x.
            h: the memory. All four have one shape.
        """
        gradient.add_((weights - anchor).add_(h), alpha=1 / self.lam)


class CorrectionState(State):
    """What a correction keeps of each tensor that is stepped, in its shape; shapes: of these tensors, by name.

    anchors: x. h: the memory. Both belong to one island's data: others take over neither.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(Place(shapes, Topology(1, 1)))
        row = "anchors and memory of the correction"
        self.anchors = self.add("anchors", Merge.OWN, row=row)
        self.h = self.add("h", Merge.OWN, row=row)
