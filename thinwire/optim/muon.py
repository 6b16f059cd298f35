"""Muon: orthogonalised momentum for matrices, AdamW for all other tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.parameterwise import check_adamw
from thinwire.optim.sums import Part, Span, Sum, SummingOptimizer, Update, codec_of_sums

# Coefficients of a quintic with a steep slope at zero: five steps bring singular values near 1.
QUINTIC = 3.4445, -4.775, 2.0315
NUM_STEPS = 5
LEAST_NORM = 1e-7


class Muon(SummingOptimizer):
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

    num_rounds = 2
    operation = "orthogonal updates"
    # Shapes that further axes cut, and who orthogonalises a part of such a matrix, by name.
    shapes: Mapping[str, torch.Size] = {}
    orthogonalise: Callable[[str, Tensor], Tensor] = staticmethod(lambda name, x: orthogonalised(x))

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
            momentum = group["momentum"]
            is_good = 0 <= momentum < 1
            check_adamw("muon", group, ("momentum", momentum, is_good, "at least 0 and below 1; the usual: 0.95"))
        self.codec = codec_of_sums("muon", codec)

    def is_across(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether it is a matrix, or a stack of them, of a group that becomes orthogonal."""
        return group["orthogonal"] and param.dim() in (2, 3)

    def sums(self, parts: Mapping[str, Part]) -> dict[str, Sequence[dict[str, Sum]]]:
        """To the rank that holds most of a matrix, the one with the least work of several, and from it back."""
        found: dict[str, Sequence[dict[str, Sum]]] = {name: ({}, {}) for name in parts}
        for name, key, pieces, owner in matrices_of(parts):
            there, back = found[name]
            whole = on_one(owner, len(pieces), parts[name].shape[-2:].numel())
            there[key], back[key] = Sum(1, pieces, whole, self.codec), Sum(1, whole, pieces, self.codec)
        return found

    def num_kept(self, part: Part) -> int:
        """The momentum of each element."""
        return part.own[1] - part.own[0]

    def _kinds(self) -> dict[str, Any]:
        return {"momentum_buffer": torch.empty(1)}

    def _across(self, param: Tensor, grad: Tensor, part: Part, group: dict[str, Any]) -> Update:
        flat, size = self._direction(param, grad, group).reshape(-1, 1), part.shape[-2:].numel()
        own = {key: pieces[part.rank] for key, pieces in pieces_of(part).items()}
        starts = {key: int(key) * size - part.own[0] for key in own}
        wholes = yield {
            key: flat[starts[key] + first : starts[key] + last] for key, (first, last) in own.items() if first < last
        }
        turned = yield {
            key: self.orthogonalise(part.name, whole.view(part.shape[-2:])).reshape(-1, 1)
            for key, whole in wholes.items()
            if len(whole)
        }
        update = torch.cat([turned[key] for key in own if len(turned[key])]) if turned else flat
        move(param, update.view_as(param), self.shapes.get(part.name, part.shape), group)

    def _direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """U, and the momentum in its place."""
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        held: Tensor = state["momentum_buffer"]
        held.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(held, group["momentum"])


def matrices_of(parts: Mapping[str, Part]) -> Iterator[tuple[str, str, tuple[Span, ...], int]]:
    """(parameter, number of a matrix in it, the elements that each rank has of it, the rank that owns it).

    The owner holds most of it; of several the one with the least work so far.
    """
    work = [0] * max((len(part.spans) for part in parts.values()), default=0)
    for name, part in parts.items():
        rows, columns = part.shape[-2:]
        for key, pieces in pieces_of(part).items():
            lengths = [last - first for first, last in pieces]
            owner = max(range(len(pieces)), key=lambda rank: (lengths[rank], -work[rank]))
            work[owner] += rows * columns * min(rows, columns)
            yield name, key, pieces, owner


def on_one(owner: int, num_ranks: int, length: int) -> tuple[Span, ...]:
    """Rows of which one rank has all."""
    return tuple((0, length) if rank == owner else (0, 0) for rank in range(num_ranks))


def pieces_of(part: Part) -> dict[str, tuple[Span, ...]]:
    """Of each matrix of a stack, by its number, the elements that each rank holds."""
    size, found = part.shape[-2:].numel(), dict[str, tuple[Span, ...]]()
    for number in range(part.shape.numel() // size if size else 0):
        inside = [(first - number * size, last - number * size) for first, last in part.spans]
        held = [(max(first, 0), min(last, size)) for first, last in inside]
        found[str(number)] = tuple(span if span[0] < span[1] else (0, 0) for span in held)
    return found


def move(param: Tensor, update: Tensor, shape: torch.Size, group: dict[str, Any]) -> None:
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
