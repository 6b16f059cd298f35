"""Which queries of one group of a ring attend to which keys of another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from thinwire.methods.sequence.layout import SequenceLayout, tokens_of

# Sequences of the batch, queries, keys, and whether the mask is causal.
Rectangle = tuple[slice, slice, slice, bool]


@dataclass(frozen=True)
class RingBlocks:
    """The parts of a ring's attention that are not hidden by the causal mask, or by the borders of documents.

    A document is a run of tokens, and each group has its tokens in order. So the tokens of a document in a group are a
    run, too, and a block of keys meets a block of queries in one rectangle for each document.

    Attributes:
        groups: of the ring.
        num_tokens: of each group.
        is_causal: tokens attend only to themselves and to earlier tokens.
        bounds: for each sequence, where its documents begin, and where the last one ends, by positions in the whole
            sequence; empty: each sequence is one document.
    """

    groups: int
    num_tokens: int
    is_causal: bool
    bounds: Sequence[Sequence[int]] = ()

    def between(self, group: int, source: int) -> Iterator[Rectangle]:
        """The keys of group `source` to which queries of `group` attend."""
        for queries, keys, masked in visible(group, source, self.num_tokens, self.is_causal):
            if not self.bounds:
                yield slice(None), queries, keys, masked
            for row in range(len(self.bounds)):
                edges = pairwise(self._edges[group][row]), pairwise(self._edges[source][row])
                for asking, asked in zip(*edges, strict=True):
                    ours, theirs = common(queries, asking), common(keys, asked)
                    if ours.start < ours.stop and theirs.start < theirs.stop:
                        yield slice(row, row + 1), ours, theirs, masked

    def meet(self, group: int, source: int) -> bool:
        """Whether any query of `group` attends to a key of `source`."""
        return next(self.between(group, source), None) is not None

    @cached_property
    def _edges(self) -> list[list[list[int]]]:
        """For each group and sequence: how many of the group's tokens lie before each bound."""
        layout = SequenceLayout(1, self.groups)
        length = self.groups * self.num_tokens
        places = [tokens_of(layout, group, length).tolist() for group in range(self.groups)]
        return [[[bisect_left(own, bound) for bound in row] for row in self.bounds] for own in places]


def common(part: slice, edges: tuple[int, int]) -> slice:
    """What a slice and a range share; its end is not after its start if they share nothing."""
    return slice(max(part.start, edges[0]), min(part.stop, edges[1]))


def visible(rank: int, source: int, num_tokens: int, is_causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """The keys of group `source` that ring group `rank` attends to: (queries, keys, whether the mask is causal).

    num_tokens: of each group. Under a causal mask, two chunks of different groups attend fully or not at all, see
    `tokens_of`.
    """
    every, half = slice(0, num_tokens), num_tokens // 2
    if not is_causal or rank == source:
        yield every, every, is_causal
    elif source < rank:
        yield every, slice(0, half), False
    else:
        yield slice(half, num_tokens), every, False
