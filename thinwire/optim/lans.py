"""LANS: Adam on normalised gradients, with a trust ratio for each tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim.parameterwise import Parameterwise


class LANS(Parameterwise):
    """Per tensor x with gradient g, t steps so far:

        g <- g / (|g| + eps)
        m <- b1 m + (1 - b1) g         v <- b2 v + (1 - b2) g^2
        r  = m' / (sqrt(v') + eps) + decay x      m' = m / (1 - b1^t)
        c  = g  / (sqrt(v') + eps) + decay x      v' = v / (1 - b2^t)
        x <- x - lr |x| (b1 r/|r| + (1 - b1) c/|c|)

    |x|/|r| is 1 where either norm is 0, and so is |x|/|c|. A gradient's scale has no effect, which suits compressors
    that keep the direction of each tensor better than its length. params: tensors or groups, as for torch's
    optimizers; a tensor is one block, so LANS is not elementwise. State: `step`, `exp_avg`, `exp_avg_sq`, in x's dtype.

    Raises ConfigError for values outside of lr >= 0, 0 <= b < 1, eps > 0, weight_decay >= 0.
    Source: Zheng, Lin, Zha and Li, "Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes" (2020),
    algorithm 2.
    """

    needs_whole_tensors = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            _check(group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        state = self.state[param]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        state["step"] += 1
        grad = grad / (grad.norm() + eps)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        spread = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(eps)
        momentum = (state["exp_avg"] / (1 - beta1 ** state["step"])).div_(spread).add_(param, alpha=decay)
        gradient = grad.div_(spread).add_(param, alpha=decay)
        momentum.mul_(beta1 * _trust(param, momentum)).add_(gradient, alpha=(1 - beta1) * _trust(param, gradient))
        param.sub_(momentum, alpha=group["lr"])


def _trust(param: Tensor, direction: Tensor) -> float:
    """|x| / |direction|, 1 where either is 0."""
    length, own = float(param.norm()), float(direction.norm())
    return length / own if length > 0 and own > 0 else 1.0


def _check(group: dict[str, Any]) -> None:
    """Raise ConfigError for the first value of a parameter group that can't work."""
    lr, (beta1, beta2), eps, decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    rules = (
        ("lr", lr, lr >= 0, "at least 0; nearest: 0"),
        ("beta1", beta1, 0 <= beta1 < 1, "at least 0 and below 1; the usual: 0.9"),
        ("beta2", beta2, 0 <= beta2 < 1, "at least 0 and below 1; the usual: 0.999"),
        ("eps", eps, eps > 0, "above 0; the usual: 1e-6"),
        ("weight_decay", decay, decay >= 0, "at least 0; nearest: 0"),
    )
    for name, value, is_good, rule in rules:
        if not is_good:
            raise ConfigError(f"lans {name} {value}: must be {rule}")
