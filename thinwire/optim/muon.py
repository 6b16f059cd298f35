"""Muon: orthogonalised momentum for matrices, AdamW for all other tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.grammar import read
from thinwire.errors import ConfigError
from thinwire.optim.parameterwise import Parameterwise

# Coefficients of a quintic with a steep slope at zero: five steps bring singular values near 1.
QUINTIC = 3.4445, -4.775, 2.0315
NUM_STEPS = 5
LEAST_NORM = 1e-7


@dataclass(frozen=True)
class Shards:
    """What Muon needs where it steps pieces of matrices, which a host gives it.

    Args:
        names: of the parameter that a piece belongs to, by piece.
        shapes: of the whole parameters, by name.
        turn: pieces of directions, flat, by name -> this rank's pieces of the orthogonalised whole; a collective.
    """

    names: Mapping[Tensor, str]
    shapes: Mapping[str, torch.Size]
    turn: Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Muon(Parameterwise):
    """Per matrix X [m, n] with gradient G:

        M <- momentum M + (1 - momentum) G        U = G + momentum (M - G)
        X <- (1 - lr decay) X - 0.2 sqrt(max(m, n)) lr orthogonalised(U)

    which are the steps of torch.optim.Muon with adjust_lr_fn="match_rms_adamw": updates are as large as AdamW's, so
    that one learning rate serves both. A tensor of three dimensions is a stack of matrices. Vectors, tensors of more
    dimensions, and all tensors of a group with `orthogonal` False, such as embeddings and heads, take AdamW's step with
    `betas` and `eps`.

    params: tensors or groups, as for torch's optimizers. State: `momentum_buffer`, or AdamW's `step`, `exp_avg`,
    `exp_avg_sq`. Not elementwise; where a host cuts tensors, each matrix becomes orthogonal on one rank, to which the
    others send their pieces of U in `codec`. bf16 changes no bit, since the steps of the orthogonalisation begin in it.

    Raises ConfigError for values outside of lr >= 0, 0 <= momentum, b < 1, eps > 0, weight_decay >= 0, and for a codec
    of variable length.
    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the factor: Liu et al.,
    "Muon is scalable for LLM training" (2025), section 2.2.
    """

    needs_whole_tensors = True
    shards: Shards | None = None

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        orthogonal: bool = True,
        codec: str = "bf16",
    ) -> None:
        given = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**given, "orthogonal": orthogonal})
        for group in self.param_groups:
            _check(group)
        self.codec = read(codec)
        if self.codec.has_variable_length:
            raise ConfigError(f"muon codec {codec}: its packets differ in length; leave zstd out")

    @property
    def matrices(self) -> list[Tensor]:
        """The parameters whose updates become orthogonal."""
        return [p for group in self.param_groups for p in group["params"] if group["orthogonal"] and p.dim() in (2, 3)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; where matrices are cut, a collective."""
        self._cut: list[tuple[Tensor, dict[str, Any], str, Tensor]] = []
        loss = super().step(closure)
        if self.shards is not None:
            turned = self.shards.turn({name: direction for _, _, name, direction in self._cut})
            for param, group, name, _ in self._cut:
                _move(param, turned[name].view_as(param), self.shards.shapes[name], group)
        self._cut.clear()
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if self.shards is not None and param in self.shards.names:
            name = self.shards.names[param]
            self._cut.append((param, group, name, self._direction(param, grad, group)))
        elif self.shards is None and group["orthogonal"] and param.dim() in (2, 3):
            _move(param, orthogonalised(self._direction(param, grad, group)), param.shape, group)
        else:
            self._step_adamw(param, grad, group)

    def _direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """U, and the momentum in its place."""
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        held: Tensor = state["momentum_buffer"]
        held.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(held, group["momentum"])

    def _step_adamw(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        state["step"] += 1
        param.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        spread = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
        param.addcdiv_(state["exp_avg"], spread, value=-group["lr"] / (1 - beta1 ** state["step"]))


def _move(param: Tensor, update: Tensor, shape: torch.Size, group: dict[str, Any]) -> None:
    """Take a step along `update`; shape: of the whole, of which `param` may be a piece."""
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.add_(update, alpha=-0.2 * math.sqrt(max(shape[-2:])) * group["lr"])


def orthogonalised(x: Tensor) -> Tensor:
    """About U V^T for x = U S V^T, bf16 in the shape of x, [m, n] or [number, m, n]: five Newton-Schulz steps in bf16.

    Singular values end between about 0.7 and 1.2. Those of a zero matrix stay 0.
    Source: Jordan et al., "Muon" (2024).
    """
    if x.dim() == 3:
        return torch.stack([orthogonalised(matrix) for matrix in x]) if len(x) else x.bfloat16()
    (a, b, c), is_tall = QUINTIC, x.shape[0] > x.shape[1]
    y = x.bfloat16()
    y = y.T if is_tall else y
    y = y / y.norm().clamp(min=LEAST_NORM)
    for _ in range(NUM_STEPS):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if is_tall else y


def _check(group: dict[str, Any]) -> None:
    """Raise ConfigError for the first value of a parameter group that can't work."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    rules = (
        ("lr", group["lr"], group["lr"] >= 0, "at least 0; nearest: 0"),
        ("momentum", group["momentum"], 0 <= group["momentum"] < 1, "at least 0 and below 1; the usual: 0.95"),
        ("beta1", beta1, 0 <= beta1 < 1, "at least 0 and below 1; the usual: 0.9"),
        ("beta2", beta2, 0 <= beta2 < 1, "at least 0 and below 1; the usual: 0.95"),
        ("eps", group["eps"], group["eps"] > 0, "above 0; the usual: 1e-8"),
        ("weight_decay", decay, decay >= 0, "at least 0; nearest: 0"),
    )
    for name, value, is_good, rule in rules:
        if not is_good:
            raise ConfigError(f"muon {name} {value}: must be {rule}")
