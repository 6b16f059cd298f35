"""Which ranks of a sequence exchange heads, which pass keys and values on, and which tokens each rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import ConfigError, nearest_divisor

AUTO, HEADS, RING = "auto", "ulysses", "ring"


@dataclass(frozen=True)
class SequenceLayout:
    """`ring` groups of `ulysses` ranks; neighbours exchange heads. Rank = group * ulysses + place in the group."""

    ulysses: int
    ring: int

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.ulysses * self.ring

    def heads_group(self, rank: int) -> list[int]:
        """The ranks with which a rank exchanges heads."""
        first = rank - rank % self.ulysses
        return list(range(first, first + self.ulysses))

    def ring_group(self, rank: int) -> list[int]:
        """The ranks among which keys and values travel, in their order."""
        return list(range(rank % self.ulysses, self.size, self.ulysses))

    @property
    def unit(self) -> int:
        """Lengths of sequences must be a multiple of this; others are padded."""
        return self.size if self.ring == 1 else 2 * self.size

    def __str__(self) -> str:
        if self.ring == 1:
            return HEADS
        return RING if self.ulysses == 1 else f"{HEADS}={self.ulysses},{RING}={self.ring}"

    @classmethod
    def parse(cls, method: str, ranks: int) -> SequenceLayout:
        """The layout that "ulysses", "ring" or "ulysses=2,ring=2" states, for `ranks` ranks. Raises ConfigError."""
        if method in (HEADS, RING):
            return cls(ranks, 1) if method == HEADS else cls(1, ranks)
        sizes: dict[str, int] = {}
        for part in method.split(","):
            name, _, number = (word.strip() for word in part.partition("="))
            if name not in (HEADS, RING) or name in sizes or not number.isdecimal() or not int(number):
                raise ConfigError(f"method {method!r}: must be auto, ulysses, ring, or such as 'ulysses=2,ring=2'")
            sizes[name] = int(number)
        found = cls(sizes.get(HEADS, 1), sizes.get(RING, 1))
        if found.size != ranks:
            near = next(str(each) for each in layouts(ranks)[::-1] if each.ulysses <= found.ulysses)
            raise ConfigError(f"method {method!r} has {found.size} ranks and the sequence {ranks}; nearest: {near!r}")
        return found


def layouts(ranks: int) -> list[SequenceLayout]:
    """All layouts of `ranks` ranks, from the largest ring to the most exchange of heads."""
    return [SequenceLayout(n, ranks // n) for n in range(1, ranks + 1) if ranks % n == 0]


def nearest_layout(heads: int, ranks: int) -> SequenceLayout:
    """The layout with the largest groups in which every rank gets a head."""
    return next(each for each in layouts(ranks)[::-1] if each.ulysses <= heads)


def head_shares(heads: int, ranks: int) -> list[slice]:
    """The query heads of each rank, in order: ceil(heads / ranks) for the first ranks, one less for the others.

    Raises ConfigError if a rank would get none.
    """
    if heads < ranks:
        which = " or ".join(dict.fromkeys([repr(RING), repr(str(nearest_layout(heads, ranks)))]))
        raise ConfigError(f"{heads} heads on {ranks} ranks: each needs a head; nearest that works: method {which}")
    few, more = divmod(heads, ranks)
    ends = [few * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ConfigError for key heads that do not serve equally many query heads each."""
    if heads % kv_heads:
        near = nearest_divisor(kv_heads, heads)
        raise ConfigError(
            f"{kv_heads} key heads for {heads} query heads: each must serve equally many; nearest: {near} key heads"
        )


def kv_share(share: slice, heads: int, kv_heads: int) -> slice:
    """The key and value heads that a share of the query heads needs.

    A head that several ranks need goes to all of them. Raises ConfigError as `check_heads`.
    """
    check_heads(heads, kv_heads)
    group = heads // kv_heads
    return slice(share.start // group, -(-share.stop // group))


def tokens_of(layout: SequenceLayout, rank: int, length: int) -> Tensor:
    """Positions of a rank's tokens in a sequence of `length`, a multiple of layout.unit: int64, ascending.

    Of 2 R chunks, ring group k of R has chunks k and 2 R - 1 - k: under a causal mask all then compute alike. The ranks
    of a group have consecutive parts of its tokens.
    """
    group, place = divmod(rank, layout.ulysses)
    positions = torch.arange(length)
    if layout.ring > 1:
        chunks = positions.chunk(2 * layout.ring)
        positions = torch.cat([chunks[group], chunks[2 * layout.ring - 1 - group]])
    return positions.chunk(layout.ulysses)[place]
