"""Cross-entropy by tiles of both axes: the forward keeps one number per token, the backward computes tiles again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.losses.blocks import Sums, blocks, check_ids, logits_of, slope_of, wide

FILTERS = ("drop", "unbiased")
# Below it an addition to a gradient is lost, as a share of the dtype's epsilon.
LEAST_SHARE = 1 / 32


@dataclass(frozen=True)
class Tiling:
    """How tiles are computed; see `cut_cross_entropy`. tokens, words: size of a tile. dtype: of products; None: e's."""

    softcap: float | None = None
    accumulation: str = "fp32"
    filter_e: str | None = None
    filter_c: str | None = None
    group: dist.ProcessGroup | None = None
    generator: torch.Generator | None = None
    dtype: torch.dtype | None = None
    tokens: int = 256
    words: int = 1024

    @property
    def filters(self) -> bool:
        """Whether any tile may be left out."""
        return self.filter_e is not None or self.filter_c is not None


class Tiles(torch.autograd.Function):
    """(lse_n - logit of target n, lse_n), each [N] in fp32 or fp64, lse_n = log sum_v exp(logit_nv).

    Shape:
        e: [N, D]. c: [V, D], or this rank's rows of it, in the order of the group's ranks. bias: like c, [V]. targets:
        int64 [N], of the whole vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, tiling: Tiling
    ) -> tuple[Tensor, Tensor]:
        given = e, c
        e, c = _cast(e, c, tiling)
        lse, means = _log_sums(e, c, bias, tiling)
        first = 0
        if tiling.group is not None:
            lse, first, num_words = _joined(lse, len(c), tiling.group)
            check_ids(targets, num_words)
        correct = _correct(e, c, bias, targets - first, tiling)
        if tiling.group is not None:
            dist.all_reduce(correct, group=tiling.group)
        order = None if means is None else means.argsort(descending=True)
        ctx.save_for_backward(*given, bias, targets - first, lse, order)
        ctx.tiling = tiling
        return lse - correct, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given_e, given_c, bias, targets, lse, order = ctx.saved_tensors
        tiling: Tiling = ctx.tiling
        e, c = _cast(given_e, given_c, tiling)
        wants_e, wants_c, wants_bias, *_ = ctx.needs_input_grad
        of_loss, of_lse = grads
        if order is not None and len(c):
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order), device=order.device)
            is_here = (targets >= 0) & (targets < len(c))
            targets = torch.where(is_here, place[targets.clamp(0, len(c) - 1)], -1)
        sums = Sums(len(e), e.shape[1], e, tiling.accumulation) if wants_e else None
        of_c = torch.empty_like(given_c) if wants_c else None
        of_bias = torch.empty_like(bias) if wants_bias else None
        for words in blocks(len(c), tiling.words):
            own: Any = words if order is None else order[words]
            rows_of_c, own_bias = c[own], None if bias is None else bias[own]
            sums_c = Sums(len(rows_of_c), c.shape[1], c, tiling.accumulation) if wants_c else None
            sum_bias = torch.zeros(len(rows_of_c), dtype=lse.dtype, device=e.device)
            for rows in blocks(len(e), tiling.tokens):
                logits = logits_of(e[rows], rows_of_c, own_bias, tiling.softcap)
                slope = None if tiling.softcap is None else slope_of(logits, tiling.softcap)
                grad = logits.sub_(lse[rows, None]).exp_()
                at, is_in = inside(targets[rows], words)
                grad.scatter_add_(1, at, -is_in.to(grad.dtype))
                for_e, for_c = _factors(grad, e.dtype, tiling)
                if not (for_e or for_c):
                    continue
                grad.mul_((of_loss + of_lse)[rows, None]).scatter_add_(1, at, is_in * of_lse[rows, None])
                if slope is not None:
                    grad.mul_(slope)
                if sums is not None and for_e:
                    sums.add(rows, grad if for_e == 1 else grad * for_e, rows_of_c)
                if for_c:
                    grad = grad if for_c == 1 else grad.mul_(for_c)
                    sum_bias += grad.sum(0)
                    if sums_c is not None:
                        sums_c.add(slice(None), grad.T, e[rows])
            if of_c is not None and sums_c is not None:
                of_c[own] = sums_c.total(exact=True).to(of_c.dtype)
            if of_bias is not None:
                of_bias[own] = sum_bias.to(of_bias.dtype)
        of_e = None
        if sums is not None:
            of_e = sums.total(exact=True)
            if tiling.group is not None:
                dist.all_reduce(of_e, group=tiling.group)
        return None if of_e is None else of_e.to(given_e.dtype), of_c, of_bias, None, None


def _cast(e: Tensor, c: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
    return (e, c) if tiling.dtype is None else (e.to(tiling.dtype), c.to(tiling.dtype))


def _log_sums(e: Tensor, c: Tensor, bias: Tensor | None, tiling: Tiling) -> tuple[Tensor, Tensor | None]:
    """log sum_v exp(logit_nv) [N] over this rank's rows of c; where tiles are filtered, each row's mean logit [V]."""
    lse = torch.full((len(e),), -torch.inf, dtype=wide(e.dtype), device=e.device)
    means = torch.zeros(len(c), dtype=lse.dtype, device=e.device) if tiling.filters else None
    for rows in blocks(len(e), tiling.tokens):
        for words in blocks(len(c), tiling.words):
            logits = logits_of(e[rows], c[words], None if bias is None else bias[words], tiling.softcap)
            if means is not None:
                means[words] += logits.sum(0)
            peak = logits.amax(1, keepdim=True)
            own = logits.sub_(peak).exp_().sum(1).log_().add_(peak[:, 0])
            lse[rows] = torch.logaddexp(lse[rows], own)
    return lse, means


def _correct(e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, tiling: Tiling) -> Tensor:
    """The logit of each target [N]; 0 if another rank has its row."""
    found = torch.zeros(len(e), dtype=wide(e.dtype), device=e.device)
    # A rank may have no rows at all.
    for rows in blocks(len(e), tiling.tokens) if len(c) else ():
        at, is_in = inside(targets[rows], slice(0, len(c)))
        at = at[:, 0]
        logits = (e[rows].to(found.dtype) * c[at].to(found.dtype)).sum(1)
        if bias is not None:
            logits += bias[at]
        if tiling.softcap is not None:
            logits = logits.div_(tiling.softcap).tanh_().mul_(tiling.softcap)
        found[rows] = logits * is_in[:, 0]
    return found


def inside(targets: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Where targets lie among some words [n, 1], and whether they do: 1 or 0, [n, 1]; elsewhere the place is 0."""
    is_in = (targets >= words.start) & (targets < words.stop)
    return torch.where(is_in, targets - words.start, 0)[:, None], is_in[:, None]


def _joined(lse: Tensor, num_words: int, group: dist.ProcessGroup) -> tuple[Tensor, int, int]:
    """The logarithm of all ranks' sums, and the number of words of earlier and of all ranks. Costs two messages."""
    peak, first, total_words = peak_of_ranks(lse, num_words, group)
    total = (lse - peak).exp_()
    dist.all_reduce(total, group=group)
    return total.log_().add_(peak), first, total_words


def peak_of_ranks(own: Tensor, num_words: int, group: dist.ProcessGroup) -> tuple[Tensor, int, int]:
    """The largest number of any rank for each token [N], and the number of words of earlier and of all ranks.

    Costs one message.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counts = torch.zeros(size, dtype=torch.float64, device=own.device)
    counts[rank] = num_words
    word = torch.cat((own.double(), counts))
    dist.all_reduce(word, dist.ReduceOp.MAX, group)
    held = word[len(own) :]
    return word[: len(own)].to(own.dtype), int(held[:rank].sum()), int(held.sum())


def _factors(grad: Tensor, dtype: torch.dtype, tiling: Tiling) -> tuple[float, float]:
    """The factors of a tile in the gradients of e and of c; 0 leaves the tile out. grad: softmax less the targets."""
    if not tiling.filters:
        return 1.0, 1.0
    share = float(torch.linalg.vector_norm(grad, torch.inf)) / (torch.finfo(dtype).eps * LEAST_SHARE)
    if share >= 1:
        return 1.0, 1.0
    drawn = 1.0
    if "unbiased" in (tiling.filter_e, tiling.filter_c):
        drawn = float(torch.rand((), generator=tiling.generator))
    unbiased = 1 / share if drawn < share else 0.0
    kinds = {None: 1.0, "drop": 0.0, "unbiased": unbiased}
    return kinds[tiling.filter_e], kinds[tiling.filter_c]
