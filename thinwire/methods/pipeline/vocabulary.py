"""Vocabulary parallelism: the head's cross-entropy, and the embedding, over ranks that each hold some of the rows.

Each function is what one rank computes between two exchanges, S and T, or what the ranks agree on, C1. X: [N, h], the
hidden states behind the last layer, which all ranks have. W_i: [V/p, h], the rows of rank i. Rows from `valid` on pad
the vocabulary: they count as logits of -inf, and get no gradient.

Source: "Balancing Pipeline Parallelism with Vocabulary Parallelism" (MLSys 2025), algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def padded_rows(vocab_size: int, num_ranks: int) -> int:
    """Rows of the padded vocabulary: the next multiple of 2p."""
    return -(-vocab_size // (2 * num_ranks)) * 2 * num_ranks


@dataclass(frozen=True)
class Own:
    """The rows of the vocabulary that a rank holds: first to first + size - 1, those below `valid` real ones."""

    first: int
    size: int
    valid: int

    @classmethod
    def of(cls, rank: int, num_ranks: int, vocab_size: int) -> Own:
        """Of one of the ranks."""
        size = padded_rows(vocab_size, num_ranks) // num_ranks
        return cls(rank * size, size, vocab_size)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers of ids [N] here, 0 for those that are not here, and which are, bool [N]."""
        here = (ids >= self.first) & (ids < self.first + self.size)
        return torch.where(here, ids - self.first, 0), here


@dataclass(frozen=True)
class Scores:
    """What S leaves on a rank, of N tokens.

    probabilities: [N, V/p], softmax over the rank's own rows. largest, total: [N], of its logits, and the sum of
    exp(logit - largest). target: [N], the target's logit, 0 where the target is another rank's. For algorithm 2 also
    expected: [N, h], probabilities times weights, and aimed: [N, h], the target's weights or 0.
    """

    probabilities: Tensor
    largest: Tensor
    total: Tensor
    target: Tensor
    expected: Tensor | None = None
    aimed: Tensor | None = None


def scores(x: Tensor, weight: Tensor, targets: Tensor, own: Own, *, algorithm: int) -> Scores:
    """S: this rank's part of the softmax. Algorithm 2 also has both parts of the gradient of X."""
    logits = x @ weight.T
    # In place of a matrix of masks, since logits are the largest tensor of all.
    logits[:, max(0, own.valid - own.first) :] = -math.inf
    rows, here = own.local(targets)
    largest = logits.amax(1)
    # A rank that holds nothing but padding has no largest logit.
    finite = torch.where(largest == -math.inf, 0.0, largest)
    exponents = (logits - finite[:, None]).exp_()
    total = exponents.sum(1)
    probabilities = exponents / total.clamp_min(torch.finfo(total.dtype).tiny)[:, None]
    target = torch.where(here, logits.gather(1, rows[:, None])[:, 0], 0.0)
    if algorithm == 1:
        return Scores(probabilities, largest, total, target)
    return Scores(probabilities, largest, total, target, probabilities @ weight, weight[rows] * here[:, None])


@dataclass(frozen=True)
class Agreed:
    """What C1 gives a rank: loss [N]; share [N], its part of Z; for algorithm 2 gradient [N, h], that of X."""

    loss: Tensor
    share: Tensor
    gradient: Tensor | None


def agree(of_ranks: Sequence[Scores], token_gradients: Tensor) -> list[Agreed]:
    """C1, for all ranks: maximum of `largest`; sums of `total`, `target` and, for algorithm 2, the gradient of X.

    m = max_i m_i; c_i = z_i exp(m_i - m); Z = sum_i c_i; loss = log Z + m - target logit; and with algorithm 2
    dX = sum_i (c_i / Z) A_i - B_i, times token_gradients [N], the gradient of the whole loss by each token's.
    """
    most = torch.stack([each.largest for each in of_ranks]).amax(0)
    parts = [each.total * (each.largest - most).exp() for each in of_ranks]
    whole = torch.stack(parts).sum(0)
    loss = whole.log() + most - torch.stack([each.target for each in of_ranks]).sum(0)
    shares = [part / whole for part in parts]
    gradient: Tensor | None = None
    for each, share in zip(of_ranks, shares, strict=True):
        if each.expected is not None and each.aimed is not None:
            own = (each.expected * share[:, None] - each.aimed) * token_gradients[:, None]
            gradient = own if gradient is None else gradient + own
    return [Agreed(loss, share, gradient) for share in shares]


def gradients(
    x: Tensor, weight: Tensor, targets: Tensor, own: Own, found: Scores, agreed: Agreed, token_gradients: Tensor, *,
    algorithm: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """T: the gradient of this rank's weights, and with algorithm 1 its part of that of X, which C2 adds up.

    Q_i = P_i c_i / Z; dW_i = (Q_i - G_i)^T X; dX_i = (Q_i - G_i) W_i; both times token_gradients [N]. With algorithm 2
    it is needed by nobody before the step, so T may be done at any time.
    """
    rows, here = own.local(targets)
    errors = found.probabilities * agreed.share[:, None]
    errors.scatter_add_(1, rows[:, None], -here.to(errors.dtype)[:, None])
    errors *= token_gradients[:, None]
    return errors.T @ x, errors @ weight if algorithm == 1 else None


def embedded(weight: Tensor, tokens: Tensor, own: Own) -> Tensor:
    """[N, h]: the rows of the tokens that are here, zeros for the others: the sum over ranks is the embedding."""
    rows, here = own.local(tokens)
    return weight[rows] * here[:, None]


def embedded_gradient(gradient: Tensor, tokens: Tensor, own: Own) -> Tensor:
    """[V/p, h]: what each row here gets of the gradient [N, h] of the embedding's output."""
    rows, here = own.local(tokens)
    return gradient.new_zeros(own.size, gradient.shape[1]).index_add_(0, rows, gradient * here[:, None])
