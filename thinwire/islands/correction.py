"""A correction that is added to gradients right before an optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thinwire.methods.outer.correction import CorrectionState, ProximalCorrection
from thinwire.state.whole import local_tensor


class Correction:
    """A correction of the gradients of the tensors that an optimizer steps: whole parameters or this rank's shards.

    It is added after any clipping.
    """

    def __init__(self, method: ProximalCorrection, optimizer: torch.optim.Optimizer) -> None:
        self.method = method
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        self._tensors = {str(number): tensor for number, tensor in enumerate(stepped)}
        self.state = CorrectionState({name: local_tensor(tensor).shape for name, tensor in self._tensors.items()})
        for name, tensor in self._tensors.items():
            self.state.anchors[name] = tensor.detach().clone()
            self.state.h[name] = torch.zeros_like(self.state.anchors[name])
        optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        for name, tensor in self._tensors.items():
            if tensor.grad is not None:
                self.method.correct_(tensor.grad, tensor, self.state.anchors[name], self.state.h[name])

    @torch.no_grad()
    def note_exchange(self) -> None:
        """Note that the present weights w are sent: h <- h + w - x."""
        for name, tensor in self._tensors.items():
            self.state.h[name].add_(tensor).sub_(self.state.anchors[name])

    @torch.no_grad()
    def note_start(self) -> None:
        """Note that the island continues with the present weights: x <- w."""
        for name, tensor in self._tensors.items():
            self.state.anchors[name].copy_(tensor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, on the devices of the tensors."""
        self.state.load_state_dict(state)
        for kept in (self.state.anchors, self.state.h):
            for name, tensor in self._tensors.items():
                kept[name] = kept[name].to(tensor.device)
