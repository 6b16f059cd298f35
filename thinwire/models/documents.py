"""Documents that are packed into one sequence, each of which attends only to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def bounds_of(documents: Tensor, *more: int) -> list[list[int]]:
    """Where the documents of each sequence begin, and where the sequence ends. more: further bounds.

    Shape:
        documents: int64 [batch, length], the number of each token's document, a run of equal numbers.
    """
    changes = (documents[:, 1:] != documents[:, :-1]).cpu()
    ends = {0, documents.shape[1], *more}
    return [sorted({*(1 + row.nonzero().flatten()).tolist(), *ends}) for row in changes]


def apart(attend: Attend, bounds: Sequence[Sequence[int]]) -> Attend:
    """An attention in which each document of a sequence attends only to itself.

    bounds: for each whole sequence, where its documents begin, and where the last one ends.
    """

    def attend_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [
            torch.cat(
                [attend(*(x[row : row + 1, :, begin:end] for x in (q, k, v))) for begin, end in pairwise(ends)], 2
            )
            for row, ends in enumerate(bounds)
        ]
        return torch.cat(rows)

    return attend_apart
