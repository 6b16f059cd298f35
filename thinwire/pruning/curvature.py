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
# Of the gradients of all sequences that are in memory at once.
MOST_BYTES = 1 << 30


def gradients(
    model: nn.Module, weights: Sequence[Tensor], batches: Sequence[Tensor],
    parts: Sequence[Callable[[Tensor], Tensor]] | None = None,
) -> list[tuple[Tensor, float]]:  # fmt: skip
    """The gradient of the loss of each sequence by each of the weights, and the mean square of its elements.

    The loss is the mean cross-entropy of the next token.

    Args:
        parts: of each weight, what is kept of a gradient; None: all.

    Shape: fp32 [sequences, *shape of the part].
    """
    trained = {param: param.requires_grad for param in model.parameters()}
    options: dict[str, Any] = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    found: list[list[Tensor]] = [[] for _ in weights]
    squares = [0.0] * len(weights)
    try:
        for param in trained:
            param.requires_grad_(any(param is weight for weight in weights))
        with torch.enable_grad():
            for tokens in (row for batch in batches for row in batch.split(1)):
                given = model(tokens, **options)
                logits = getattr(given, "logits", given)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
                for place, grad in enumerate(torch.autograd.grad(loss, list(weights), materialize_grads=True)):
                    squares[place] += float(grad.float().square().mean())
                    found[place].append((grad if parts is None else parts[place](grad)).float().clone())
    finally:
        for param, was_trained in trained.items():
            param.requires_grad_(was_trained)
    return [(torch.stack(each), square / len(each)) for each, square in zip(found, squares, strict=True)]


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


def operate(
    weight: Tensor, grads: Tensor, mean_square: float, choose: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """`surgery` on rows [rows, in] of a matrix; grads: [sequences, rows, in], mean_square: of all its gradients."""
    # Where no sequence has a gradient, sizes alone decide.
    damping = DAMPING * mean_square or 1.0
    pairs = zip(weight.float().split(ROWS_AT_ONCE), grads.split(ROWS_AT_ONCE, dim=1), strict=True)
    found = [surgery(part, own.transpose(0, 1), damping, choose) for part, own in pairs]
    stays, values = (torch.cat(each) for each in zip(*found, strict=True))
    return stays, values


def in_groups(shapes: Sequence[torch.Size], num_sequences: int) -> list[list[tuple[int, slice]]]:
    """Rows of matrices [rows, in] whose gradients fit in memory together: of each group (number of a matrix, rows)."""
    groups: list[list[tuple[int, slice]]] = []
    left = 0
    for number, (num_rows, width) in enumerate(shapes):
        row_bytes, first = 4 * num_sequences * width, 0
        while first < num_rows:
            if left < row_bytes:
                groups.append([])
                left = max(MOST_BYTES, row_bytes)
            last = min(num_rows, first + left // row_bytes)
            groups[-1].append((number, slice(first, last)))
            left -= (last - first) * row_bytes
            first = last
    return groups
