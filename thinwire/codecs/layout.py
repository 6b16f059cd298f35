"""Where each bit of a packet of groups lies (integers, signs, powers of two), and so how large it is.

[scale of group 0, 1, ...] [codes of group 0] [codes of group 1] ... [zeros up to a multiple of 4 bytes]

A scale is never negative, so its sign bit is free: of an integer's group it says that the rotation around the codec
left this group alone, see `Hadamard`.

A lane is the fewest codes that fill whole bytes. A group of n codes is padded with zero codes to L lanes-
worth planes of width w = ceil(n / L): plane p holds codes p*w .. p*w + w - 1, so that byte j of the packed
group needs only the j-th code of each plane and both directions run as straight vector loops.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

# bits -> (codes per lane, bytes per lane)
LANES = {1: (8, 1), 2: (4, 1), 3: (8, 3), 4: (2, 1), 6: (4, 3), 8: (1, 1)}


def plane_width(num_elements: int, bits: int) -> int:
    """Codes per plane of a group with `num_elements` elements."""
    return -(-num_elements // LANES[bits][0])


def group_bytes(num_elements: int, bits: int) -> int:
    """Bytes of one group's packed codes."""
    return plane_width(num_elements, bits) * LANES[bits][1]


class Groups(NamedTuple):
    """How a codec with a scale for each group lays out a packet; what its kernels must know of it.

    bits: of a code. size: elements of a group. shift: lower bits of an fp32 scale that do not travel, 0 or 16.
    """

    bits: int
    size: int
    shift: int

    @property
    def bf16(self) -> bool:
        """Whether scales travel as bf16."""
        return self.shift == 16

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - a value of three numbers, not an object that would live on
    def sections(self, num_elements: int) -> tuple[int, int, int]:
        """(bytes of scales, bytes of scales and codes, packet bytes); the last is rounded up to 4."""
        full, tail = divmod(num_elements, self.size)
        scales = (full + (tail > 0)) * (32 - self.shift) // 8
        used = scales + full * group_bytes(self.size, self.bits) + group_bytes(tail, self.bits)
        return scales, used, -(-used // 4) * 4


class Rounding(NamedTuple):
    """How a kernel rounds: to nearest, or stochastically by the draws of a seed, numpy.uint64, and counters."""

    is_stochastic: bool
    seed: Any
