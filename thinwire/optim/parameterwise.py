"""Base class of optimizers that update one parameter after another, and the step that most of them share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError


class Parameterwise(torch.optim.Optimizer):
    """An optimizer whose step calls `_update` for every parameter that has a gradient.

    needs_whole_tensors: whether the update of one element depends on others of its tensor.
    """

    needs_whole_tensors = False

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has; torch's own would lack all that a class sets itself, such as a codec."""
        of_torch = dir(torch.optim.Optimizer([torch.empty(1)], {}))
        own = {name: value for name, value in vars(self).items() if name not in of_torch}
        return super().__getstate__() | own

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


# What `adamw` remembers of a parameter, by kind; a tensor of one element stands for each tensor.
ADAMW_KINDS = {"step": 0} | dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.empty(1, device="meta"))


def adamw(state: dict[str, Any], param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
    """AdamW's step in place, by the group's lr, betas, eps and weight_decay.

    Args:
        state: `step`, `exp_avg` and `exp_avg_sq` of the parameter; an empty one is filled.
        param, grad: of one shape.
    """
    beta1, beta2 = group["betas"]
    if not state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
    state["step"] += 1
    param.mul_(1 - group["lr"] * group["weight_decay"])
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    spread = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
    param.addcdiv_(state["exp_avg"], spread, value=-group["lr"] / (1 - beta1 ** state["step"]))


def check_adamw(name: str, group: dict[str, Any], *more: tuple[str, object, bool, str]) -> None:
    """Raise ConfigError for the first value of a parameter group that can't work, of AdamW's and `more`.

    more: (option, value, whether it is good, the rule).
    """
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    rules = (
        ("lr", group["lr"], group["lr"] >= 0, "at least 0; nearest: 0"),
        ("beta1", beta1, 0 <= beta1 < 1, "at least 0 and below 1; the usual: 0.9"),
        ("beta2", beta2, 0 <= beta2 < 1, "at least 0 and below 1; the usual: 0.95"),
        ("eps", group["eps"], group["eps"] > 0, "above 0; the usual: 1e-8"),
        ("weight_decay", decay, decay >= 0, "at least 0; nearest: 0"),
        *more,
    )
    for option, value, is_good, rule in rules:
        if not is_good:
            raise ConfigError(f"{name} {option} {value}: must be {rule}")
