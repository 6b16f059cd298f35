"""Shared by both implementations: the logits of a block, and sums of products in a stated precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.errors import ConfigError

ACCUMULATIONS = ("fp32", "kahan", "plain")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax and sums are computed: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def blocks(length: int, size: int) -> Iterator[slice]:
    """The ranges of `size` that make up `length`; the last may be shorter."""
    return (slice(first, min(length, first + size)) for first in range(0, length, size))


def logits_of(e: Tensor, c: Tensor, bias: Tensor | None, softcap: float | None, room: Tensor | None = None) -> Tensor:
    """e c^T + bias, then softcap tanh(x / softcap), in fp32 or fp64.

    room: where the result is to lie, in its dtype; None: in a new tensor.

    Shape:
        e: [N, D]. c: [V, D]. bias: [V] or None. room: [N V] or longer. Returns [N, V], whose transpose is contiguous.
    """
    # With far more words than tokens, products are faster this way round, those of the gradients too.
    if room is None:
        found = (c @ e.T).to(wide(e.dtype)).T
    else:
        words_first = room[: len(c) * len(e)].view(len(c), len(e))
        if room.dtype == e.dtype:
            torch.mm(c, e.T, out=words_first)
        else:
            words_first.copy_(c @ e.T)
        found = words_first.T
    if bias is not None:
        found += bias
    return found if softcap is None else found.div_(softcap).tanh_().mul_(softcap)


def slope_of(logits: Tensor, softcap: float) -> Tensor:
    """The derivative of the soft-cap at the place where its result is `logits`."""
    return logits.div(softcap).square_().neg_().add_(1)


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has no values to be counted."""
    from torch._subclasses.fake_tensor import FakeTensor

    return x.is_meta or isinstance(x, FakeTensor)


def check_ids(ids: Tensor, num_words: int, name: str = "target") -> None:
    """Raise ConfigError for an id outside of the vocabulary: no tile and no rank would have it, and its logit be 0."""
    if is_fake(ids) or not ids.numel():
        return
    for found in map(int, ids.aminmax()):
        if not 0 <= found < num_words:
            near = min(max(found, 0), num_words - 1)
            raise ConfigError(f"{name} {found}: the vocabulary has ids from 0 to {num_words - 1}; nearest: {near}")


class Sums:
    """A sum of products [rows, columns], in the shape of `like`.

    accumulation: "plain": in the dtype of `like`; "kahan": likewise, with the rounding errors of the additions kept and
    added later; "fp32": in fp32, or fp64 for fp64.
    """

    def __init__(self, rows: int, columns: int, like: Tensor, accumulation: str) -> None:
        dtype = wide(like.dtype) if accumulation == "fp32" else like.dtype
        self._dtype = like.dtype
        self._total = torch.zeros(rows, columns, dtype=dtype, device=like.device)
        self._lost = torch.zeros_like(self._total) if accumulation == "kahan" else None

    def add(self, rows: slice, a: Tensor, b: Tensor) -> None:
        """Add the product a b to these rows.

        Shape:
            a: [rows, k], fp32 or fp64, rounded to the dtype of b first. b: [k, columns].
        """
        a, total = a.to(b.dtype), self._total[rows]
        if self._lost is not None:
            lost = self._lost[rows]
            term = (a @ b).sub_(lost)
            after = total + term
            lost.copy_((after - total).sub_(term))
            total.copy_(after)
        elif total.dtype == b.dtype:
            total.addmm_(a, b)
        else:
            total.add_(a @ b)

    def total(self, *, exact: bool = False) -> Tensor:
        """The sum, in the dtype of `like`; exact: in the dtype in which it was added up."""
        return self._total if exact else self._total.to(self._dtype)
