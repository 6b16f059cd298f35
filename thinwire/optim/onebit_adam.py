"""AdamW whose variance can be frozen; from then on, it uses the gradient as the momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim.parameterwise import Parameterwise


class OneBitAdamW(Parameterwise):
    """torch's AdamW until `freeze_after_step` names a tensor. From then on, for tensor x at its step t:

        m <- x.grad           x <- x - lr (m / (1 - b1^t) / (sqrt(v) + eps) + decay x)

    v is the variance of that step, v_t / (1 - b2^t), and stays fixed. Its positive elements are raised to at least
    `floor` times their mean: an element that hardly ever had a gradient would otherwise take huge steps, since one bit
    can't express how small its momentum is. params: tensors or groups, as for torch's optimizers. State: `step`,
    `exp_avg`, `exp_avg_sq` in x's dtype, and `frozen`.

    Raises ConfigError for values outside of lr >= 0, 0 <= b < 1, eps > 0, weight_decay >= 0, 0 <= floor <= 1.
    Source: Tang et al., "1-bit Adam" (ICML 2021), algorithm 1, with the bias corrections of Adam.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        floor: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "floor": floor})
        for group in self.param_groups:
            _check(group)
        self._freezing: set[Tensor] = set()

    def freeze_after_step(self, params: Iterable[Tensor]) -> None:
        """Freeze the variance of these parameters at the end of the next `step`."""
        self._freezing = set(params)

    def is_frozen(self, param: Tensor) -> bool:
        """Whether a parameter's `.grad` is used as its momentum."""
        return self.state[param].get("frozen", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, then freeze the named ones."""
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param in self._freezing and self.state[param]:
                    self._freeze(self.state[param], group)
        self._freezing.clear()
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), state = group["betas"], self.state[param]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            state["frozen"] = False
        state["step"] += 1
        if state["frozen"]:
            state["exp_avg"].copy_(grad)
            spread = state["exp_avg_sq"].sqrt()
        else:
            state["exp_avg"].lerp_(grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            spread = state["exp_avg_sq"].sqrt().div_((1 - beta2 ** state["step"]) ** 0.5)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(state["exp_avg"], spread.add_(group["eps"]), value=-group["lr"] / (1 - beta1 ** state["step"]))

    def _freeze(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        variance = state["exp_avg_sq"].div_(1 - group["betas"][1] ** state["step"])
        seen = variance > 0
        if bool(seen.any()):
            variance.clamp_(min=group["floor"] * float(variance[seen].mean())).mul_(seen)
        state["frozen"] = True


def _check(group: dict[str, Any]) -> None:
    """Raise ConfigError for the first value of a parameter group that can't work."""
    (beta1, beta2), floor = group["betas"], group["floor"]
    for name, value, is_good, rule in (
        ("lr", group["lr"], group["lr"] >= 0, "at least 0; nearest: 0"),
        ("beta1", beta1, 0 <= beta1 < 1, "at least 0 and below 1; the usual: 0.9"),
        ("beta2", beta2, 0 <= beta2 < 1, "at least 0 and below 1; the usual: 0.999"),
        ("eps", group["eps"], group["eps"] > 0, "above 0; the usual: 1e-8"),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0, "at least 0; nearest: 0"),
        ("floor", floor, 0 <= floor <= 1, "from 0 to 1; the usual: 0.01"),
    ):
        if not is_good:
            raise ConfigError(f"onebit-adam {name} {value}: must be {rule}")
