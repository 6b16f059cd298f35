"""A vocabulary spread over ranks that each hold some rows of the head and of the embedding: what one rank computes.

S and T are the passes between two exchanges, C is what ranks agree on. X: [N, h], the hidden states behind the last
layer, which all ranks have. W_i: [V/p, h], the rows of rank i. Rows from `valid` on pad the vocabulary: they count as
logits of -inf, and get no gradient. Products are computed in the dtype of X and W_i, softmax and loss in fp32, or fp64
for fp64.

Source: "Balancing Pipeline Parallelism with Vocabulary Parallelism" (MLSys 2025), algorithms 1 and 2, which have 2
barriers and 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers of a token that ranks tell each other: its largest logit, the sum of exponents, the target's logit.
NUM_SCORES = 3


def padded_rows(vocab_size: int, num_ranks: int) -> int:
    """Rows of the padded vocabulary: the next multiple of 2p."""
    return -(-vocab_size // (2 * num_ranks)) * 2 * num_ranks


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax and loss are computed."""
    return torch.promote_types(dtype, torch.float32)


def kept_elements(num_tokens: int, num_rows: int, features: int, barriers: int) -> int:
    """The most numbers that a rank keeps of N tokens between S and T: probabilities [N, V/p], and X [N, h].

    With one barrier also the two parts of the gradient of X, [N, h] each: from S to C, which waits for all ranks.
    """
    return num_tokens * (num_rows + features * (3 if barriers == 1 else 1))


@dataclass(frozen=True)
class Own:
    """The rows of the vocabulary that a rank holds: first to first + size - 1, those below `valid` real ones."""

    first: int
    size: int
    valid: int

    @classmethod
    def of(cls, rank: int, num_ranks: int, vocab_size: int) -> Own:
        """The rows of one of the ranks."""
        size = padded_rows(vocab_size, num_ranks) // num_ranks
        return cls(rank * size, size, vocab_size)

    @property
    def num_real(self) -> int:
        """Rows here that are no padding."""
        return min(self.size, max(0, self.valid - self.first))

    def part(self, whole: Tensor) -> Tensor:
        """The rows [size, ...] of a tensor [V, ...], with zeros as padding."""
        found = whole.new_zeros(self.size, *whole.shape[1:])
        found[: self.num_real] = whole[self.first : self.first + self.num_real]
        return found

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers of ids [N] here, 0 for those that are not here, and which are, bool [N]."""
        here = (ids >= self.first) & (ids < self.first + self.size)
        return torch.where(here, ids - self.first, 0), here


@dataclass(frozen=True)
class Scores:
    """The result of S on a rank, for N tokens.

    Attributes:
        probabilities: [N, V/p], softmax over the rank's own rows.
        told: what the rank sends to the others, [3, N]: the largest of its logits, the sum of exp(logit - largest), and
            the target's logit (0 if another rank has the target's row).
        expected: with one barrier, [N, h]: probabilities times weights.
        aimed: with one barrier, [N, h]: the target's weights or 0.
    """

    probabilities: Tensor
    told: Tensor
    expected: Tensor | None = None
    aimed: Tensor | None = None


def logits_of(x: Tensor, weight: Tensor, own: Own) -> Tensor:
    """[N, V/p], -inf for padding."""
    logits = (x @ weight.T).to(wide(x.dtype))
    # In place of a matrix of masks, since logits are the largest tensor of all.
    logits[:, own.num_real :] = -math.inf
    return logits


def scores(x: Tensor, weight: Tensor, targets: Tensor, own: Own, *, barriers: int) -> Scores:
    """Action S: this rank's part of the softmax; with one barrier also both parts of the gradient of X.

    Shape:
        x: [N, h]. weight: [V/p, h]. targets: int64 [N].
    """
    logits = logits_of(x, weight, own)
    rows, here = own.local(targets)
    largest = logits.amax(1)
    target = torch.where(here, logits.gather(1, rows[:, None])[:, 0], 0.0)
    # A rank that holds nothing but padding has no largest logit.
    finite = torch.where(largest == -math.inf, 0.0, largest)
    probabilities = logits.sub_(finite[:, None]).exp_()
    total = probabilities.sum(1)
    probabilities /= total.clamp_min(torch.finfo(total.dtype).tiny)[:, None]
    told = torch.stack([largest, total, target])
    if barriers == 2:
        return Scores(probabilities, told)
    expected = probabilities.to(weight.dtype) @ weight
    return Scores(probabilities, told, expected.to(told.dtype), (weight[rows] * here[:, None]).to(told.dtype))


@dataclass(frozen=True)
class SoftmaxShare:
    """The result of C on a rank: loss [N]; share [N], its part of Z.

    Part [N, h], with one barrier, of the gradient of X.
    """

    loss: Tensor
    share: Tensor
    part: Tensor | None


def agree(found: Scores, told: Tensor, rank: int, token_gradients: Tensor) -> SoftmaxShare:
    """Action C, on one rank.

    m = max_i m_i; c_i = z_i exp(m_i - m); Z = sum_i c_i; loss = log Z + m - target logit; and with one barrier the
    rank's part of dX, (c_i / Z) A_i - B_i times token_gradients. The sum over ranks is dX.

    Shape:
        told: Scores.told of all ranks, [p, 3, N].
        token_gradients: [N], gradient of the whole loss by each token's loss.
    """
    largest, total, target = told.unbind(1)
    most = largest.amax(0)
    parts = total * (largest - most).exp()
    whole = parts.sum(0)
    loss, share, part = whole.log() + most - target.sum(0), parts[rank] / whole, None
    if found.expected is not None and found.aimed is not None:
        part = (found.expected * share[:, None] - found.aimed) * token_gradients[:, None]
    return SoftmaxShare(loss, share, part)


def gradients(
    x: Tensor, weight: Tensor, targets: Tensor, own: Own, found: Scores, agreed: SoftmaxShare,
    token_gradients: Tensor, *, barriers: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Action T: the gradient of this rank's weights, and with two barriers its part of that of X. Uses up `found`.

    Q_i = P_i c_i / Z; dW_i = (Q_i - G_i)^T X; dX_i = (Q_i - G_i) W_i; both times token_gradients. With one barrier
    nothing needs the result before the step, so T may run at any time.

    Shape:
        x: [N, h]. weight: [V/p, h]. targets: int64 [N]. token_gradients: [N].
        results: [V/p, h]; [N, h] with two barriers, else None.
    """
    rows, here = own.local(targets)
    errors = found.probabilities.mul_(agreed.share[:, None])
    errors.scatter_add_(1, rows[:, None], -here.to(errors.dtype)[:, None])
    errors = errors.mul_(token_gradients[:, None]).to(x.dtype)
    return errors.T @ x, errors @ weight if barriers == 2 else None


def embedded_gradient(gradient: Tensor, tokens: Tensor, own: Own) -> Tensor:
    """[V/p, h]: each row's part of the gradient [n, h] of the embedding of n tokens, which are all here."""
    return gradient.new_zeros(own.size, gradient.shape[1]).index_add_(0, tokens - own.first, gradient)
