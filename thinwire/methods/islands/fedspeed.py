"""FedSpeed's correction: islands that see different data stay near each other without being held back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class FedSpeed:
    """gradient + (w - x + h) / lam in every inner step; h <- h + w - x at every exchange.

    x: what the island went on with after the last exchange. h: its memory, from 0, fp32, in the parameters' places. The
    mean h of all islands is added to the outer parameters, which makes their common optimum a fixed point however many
    inner steps there are. lam: in units of the inverse curvature; an inner rate needs lr (L + 1/lam) < 2.

    Raises ConfigError for a lam that is not positive. Source: Sun et al., "FedSpeed" (ICLR 2023), algorithm 1, in the
    form of its dual variable (h = -lam ghat), without its ascent step.
    """

    lam: float

    def __post_init__(self) -> None:
        if not 0 < self.lam < math.inf:
            raise ConfigError(f"lam {self.lam} of the FedSpeed correction: must be above 0 and finite; nearest: 10")


class Correction:
    """The correction on the tensors that an optimizer steps, whole parameters or this rank's shards of them.

    It is added behind any clipping, right before the update.
    """

    def __init__(self, method: FedSpeed, optimizer: torch.optim.Optimizer) -> None:
        self.method = method
        self._tensors = [param for group in optimizer.param_groups for param in group["params"]]
        self._anchors = [tensor.detach().clone() for tensor in self._tensors]
        self._h = [torch.zeros_like(tensor) for tensor in self._anchors]
        optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for tensor, anchor, h in zip(self._tensors, self._anchors, self._h, strict=True):
            if tensor.grad is not None:
                tensor.grad.add_((tensor - anchor).add_(h), alpha=1 / self.method.lam)

    @torch.no_grad()
    def note_exchange(self) -> None:
        """The weights are those that are sent: h <- h + w - x."""
        for tensor, anchor, h in zip(self._tensors, self._anchors, self._h, strict=True):
            h.add_(tensor).sub_(anchor)

    @torch.no_grad()
    def note_start(self) -> None:
        """The weights are those that the island goes on with: x <- w."""
        for tensor, anchor in zip(self._tensors, self._anchors, strict=True):
            anchor.copy_(tensor)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The live tensors."""
        return {"anchors": self._anchors, "h": self._h}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Restore what state_dict gave."""
        for own, saved in ((self._anchors, state["anchors"]), (self._h, state["h"])):
            for tensor, value in zip(own, saved, strict=True):
                tensor.copy_(value)
