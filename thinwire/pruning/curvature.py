"""Optimal brain surgeon: what goes by the curvature of the loss, and how what stays makes up for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.optim.fisher import InverseFisher, combined, products

# Of the mean square of a gradient's elements: what is added to the diagonal of F.
DAMPING = 0.01
# Rows whose matrices are in memory at once.
ROWS_AT_ONCE = 64


def gradients(model: nn.Module, weights: Sequence[Tensor], batches: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of the loss of each sequence by each of the weights, fp32 [sequences, *shape].

    The loss is the mean cross-entropy of the next token.
    """
    trained = {param: param.requires_grad for param in model.parameters()}
    options: dict[str, Any] = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    found: list[tuple[Tensor, ...]] = []
    try:
        for param in trained:
            param.requires_grad_(any(param is weight for weight in weights))
        with torch.enable_grad():
            for tokens in (row for batch in batches for row in batch.split(1)):
                given = model(tokens, **options)
                logits = getattr(given, "logits", given)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
                found.append(torch.autograd.grad(loss, list(weights), materialize_grads=True))
    finally:
        for param, was_trained in trained.items():
            param.requires_grad_(was_trained)
    return [torch.stack(each).float() for each in zip(*found, strict=True)]


def surgery(weight: Tensor, rows: Tensor, damping: float, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """What stays, bool [rows, in], and its values, fp32 [rows, in], with 0 elsewhere.

    Each row w of a matrix has F = damping I + (1/m) G^T G of its m gradients. The score of an element is its saliency,
    w_i^2 / [F^-1]_ii. For what goes, S, what stays, R, moves by F_RR^-1 F_RS w_S: so w^T F w / 2 grows least.

    Args:
        weight: [rows, in]. rows: G of each, [rows, m, in].
        choose: scores -> what stays.

    Source: Hassibi and Stork, "Second order derivatives for network pruning" (1992), for several weights at once; with
    the matrix of M-FAC (NeurIPS 2021), section 3.
    """
    stays = choose(weight.square() / InverseFisher(rows, damping).diagonal())
    lost = products(rows, weight * ~stays) / rows.shape[-2]
    kept = rows * stays.unsqueeze(-2)
    return stays, (weight + InverseFisher(kept, damping).product(combined(kept, lost))) * stays


def operate(matrices: Tensor, grads: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """`surgery` on all rows of matrices [..., out, in]; grads: [sequences, ..., out, in]."""
    shape = matrices.shape
    weight, grads = matrices.flatten(0, -2).float(), grads.flatten(1, -2)
    # Where no sequence has a gradient, sizes alone decide.
    damping = DAMPING * float(grads.square().mean()) or 1.0
    parts = zip(weight.split(ROWS_AT_ONCE), grads.split(ROWS_AT_ONCE, dim=1), strict=True)
    found = [surgery(part, own.transpose(0, 1), damping, choose) for part, own in parts]
    stays, values = (torch.cat(each).view(shape) for each in zip(*found, strict=True))
    return stays, values
