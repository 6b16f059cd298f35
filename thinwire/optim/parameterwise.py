"""Base class of optimizers that update one parameter after another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Parameterwise(torch.optim.Optimizer):
    """An optimizer whose step is `_update` of every parameter that has a gradient.

    needs_whole_tensors: whether the update of one element depends on others of its tensor.
    """

    needs_whole_tensors = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    @abstractmethod
    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place."""
