"""Muon: orthogonalised momentum for matrices, AdamW for all other tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.matrices import MatrixOptimizer, matrices_of, move, on_one, pieces_of
from thinwire.optim.sums import Part, Sum, Update

# Coefficients of a quintic with a steep slope at zero: five steps bring singular values near 1.
QUINTIC = 3.4445, -4.775, 2.0315
NUM_STEPS = 5
LEAST_NORM = 1e-7


class Muon(MatrixOptimizer):
    """Per matrix X [m, n] with gradient G:

        M <- momentum M + (1 - momentum) G        U = G + momentum (M - G)
        X <- (1 - lr decay) X - 0.2 sqrt(max(m, n)) lr orthogonalised(U)

    which are the steps of torch.optim.Muon with adjust_lr_fn="match_rms_adamw": updates are as large as AdamW's, so
    that one learning rate serves both. A tensor of three dimensions is a stack of matrices, if these have 8 rows and
    columns or more. All other tensors, and those of a group with `orthogonal` False, such as embeddings and heads, take
    AdamW's step with `betas` and `eps`.

    params: tensors or groups, as for torch's optimizers. State: `momentum_buffer`, or AdamW's `step`, `exp_avg`,
    `exp_avg_sq`. Not elementwise; where a host cuts tensors, each matrix becomes orthogonal on one rank, to which the
    others send their pieces of U in `codec`. bf16 changes no bit, since the steps of the orthogonalisation begin in it.

    Raises ConfigError for values outside of lr >= 0, 0 <= momentum, b < 1, eps > 0, weight_decay >= 0, for a vector in
    a group with `orthogonal` True, and for a codec of variable length.
    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the factor: Liu et al.,
    "Muon is scalable for LLM training" (2025), section 2.2.
    """

    title = "muon"
    num_rounds = 2
    operation = "orthogonal updates"
    # Who orthogonalises a part of a matrix that further axes cut, by name.
    orthogonalise: Callable[[str, Tensor], Tensor] = staticmethod(lambda name, x: orthogonalised(x))

    def sums(self, parts: Mapping[str, Part]) -> dict[str, Sequence[dict[str, Sum]]]:
        """Pieces go to the matrix's owner, and back: the rank with most of it, of equals the one with least work."""
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
