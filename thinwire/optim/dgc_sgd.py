"""SGD for gradients that already contain momentum, such as DGC's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim.parameterwise import Parameterwise


class DGCSGD(Parameterwise):
    """SGD whose gradients are already sums of momenta. Per tensor x with gradient G:

        d <- m d + decay x          x <- x - lr (G + d)          with nesterov: x <- x - lr (G + decay x + m d)

    This is SGD with momentum and weight decay, with its buffer split in two: the gradient's part, of which ranks hold
    different and late shares, and the decay's part, which is the same on all ranks. params: tensors or groups, as for
    torch's optimizers. State: `decay_momentum` in x's dtype, unless weight_decay is 0.

    Raises ConfigError for values outside of lr >= 0, 0 <= momentum < 1, weight_decay >= 0.
    Source: the published code of DGC (ICLR 2018).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay})
        for group in self.param_groups:
            for name, is_good, rule in (
                ("lr", group["lr"] >= 0, "at least 0; nearest: 0"),
                ("momentum", 0 <= group["momentum"] < 1, "at least 0 and below 1; the usual: 0.9"),
                ("weight_decay", group["weight_decay"] >= 0, "at least 0; nearest: 0"),
            ):
                if not is_good:
                    raise ConfigError(f"dgc-sgd {name} {group[name]}: must be {rule}")

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            decay = param * group["weight_decay"]
            held = self.state[param].setdefault("decay_momentum", torch.zeros_like(param))
            held.mul_(group["momentum"]).add_(decay)
            decay = decay.add_(held, alpha=group["momentum"]) if group["nesterov"] else held
            param.sub_(decay, alpha=group["lr"])
        param.sub_(grad, alpha=group["lr"])
