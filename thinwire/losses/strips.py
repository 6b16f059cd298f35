"""Cross-entropy over a head in strips of words, each of which is used by itself: its weight may come and go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.losses.blocks import check_ids, is_fake
from thinwire.losses.tiles import Tiles, Tiling

IGNORED = -100


def strip_cross_entropy(
    e: Tensor, strips: Sequence[nn.Linear], targets: Tensor, *, dtype: torch.dtype | None = None,
    ignore_index: int = IGNORED,
) -> Tensor:  # fmt: skip
    """The mean loss of `cut_cross_entropy` over a head whose words lie in several Linears, one after another.

        lse_n = log sum_s exp(lse_ns)         loss_n = lse_n - sum_s logit_ns

    with lse_ns over the words of strip s, and logit_ns the target's logit where s has it, else 0. The gradient of
    lse_ns is exp(lse_ns - lse_n), so a strip's backward needs no other strip. Its weight is asked for once in the
    forward and once in the backward, which goes through the strips in reverse and gives each its gradient before it
    asks for the next one. Nothing of the size of the whole head is kept.

    Args:
        e: the input of the head [..., D].
        targets: int64 [...], of the whole vocabulary, or `ignore_index`.
        dtype: of products; None: that of e. The gradient of e is summed over the strips in e's own.

    Returns a scalar in fp32 or fp64. A mean over no tokens is 0. Raises ConfigError for a target that no strip has.
    """
    e, targets = e.reshape(-1, e.shape[-1]), targets.reshape(-1)
    counts, tiling = targets != ignore_index, Tiling(dtype=dtype)
    num = len(targets)
    if not is_fake(counts):
        num = int(counts.sum())
        e, targets = (e, targets) if num == len(targets) else (e[counts], targets[counts])
    check_ids(targets, sum(strip.out_features for strip in strips))
    first, sums, correct = 0, list[Tensor](), list[Tensor]()
    for strip in strips:
        losses, lse = Tiles.apply(e, strip.weight, strip.bias, targets - first, tiling)
        sums.append(lse)
        correct.append(lse - losses)
        first += strip.out_features
    return (torch.stack(sums).logsumexp(0) - torch.stack(correct).sum(0)).sum() / max(num, 1)
