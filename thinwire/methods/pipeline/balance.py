"""Cuts a row of layers so that no chunk is much heavier than the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate


def balanced(operations: Sequence[float], num_parameters: Sequence[float], chunks: int) -> tuple[int, ...]:
    """Number of consecutive layers in each chunk, at least one each.

    Minimises the most operations of any chunk; among such cuts, the most parameters of any chunk.
    """
    most, _ = _lightest(operations, chunks, lambda start, end: True)
    sums = [0, *accumulate(operations)]
    _, sizes = _lightest(num_parameters, chunks, lambda start, end: sums[end] - sums[start] <= most)
    return sizes


def _lightest(
    weights: Sequence[float], chunks: int, may_be: Callable[[int, int], bool]
) -> tuple[float, tuple[int, ...]]:
    """The least weight of the heaviest chunk of layers start to end - 1, and the sizes of the chunks that give it."""
    sums = [0, *accumulate(weights)]
    # Of so many chunks, over the first so many layers.
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (-math.inf, ())}
    for made in range(1, chunks + 1):
        for end in range(made, len(weights) + 1):
            found = [
                (max(best[made - 1, start][0], sums[end] - sums[start]), (*best[made - 1, start][1], end - start))
                for start in range(made - 1, end)
                if (made - 1, start) in best and may_be(start, end)
            ]
            if found:
                best[made, end] = min(found, key=lambda item: item[0])
    return best[chunks, len(weights)]
