"""How a GPU reads rows of a host's memory through the bus: which lines it asks for, and what the circular shift saves.

A warp's 32 lanes read 4 bytes each. The bus carries lines of 128 bytes, so a warp whose first address is not a
multiple of a line asks for two. This is the plain reference of a kernel's arithmetic; nothing here needs a GPU.

Source: Min et al., PyTorch-Direct (VLDB 2021), the index select with a circular shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of 4 bytes in a line, and lanes of a warp.
LINE = 32
LINE_BYTES = 4 * LINE


def shifted(width: int, source: int, target: int) -> Tensor:
    """Which column of a row each thread moves, int64 [width]: a permutation.

    Thread j stands at place target + j of the result, and moves column (j + shift) mod width with
    shift = (target - source) mod 32, so that a lane reads what lies at the same place of a line. Rows below a line, and
    whole numbers of lines, are moved as they are.

    Args:
        width: elements of a row.
        source: number of the row's first element in the matrix. target: in the result.
    """
    columns = torch.arange(width)
    return (columns + (target - source) % LINE) % width if is_shifted(width) else columns


def is_shifted(width: int) -> bool:
    """Whether a shift can save lines."""
    return width >= LINE and width % LINE > 0


def lines_read(width: int, source: int, target: int, *, shifts: bool = True) -> int:
    """Lines that the warps ask for to read a row: the distinct ones of each warp, summed."""
    threads = target + torch.arange(width)
    columns = shifted(width, source, target) if shifts else torch.arange(width)
    pairs = torch.stack([threads // LINE, (source + columns) // LINE], dim=1)
    return len(pairs.unique(dim=0))


def host_bytes(width: int, numbers: Tensor, *, direct: bool) -> int:
    """Bytes that pass the host's memory to bring rows of 4-byte elements to a GPU, in this order.

    direct: the GPU reads lines of the rows themselves. Else a processor reads the rows and writes them to a buffer that
    the GPU reads: three times the rows.
    """
    if not direct:
        return 3 * 4 * width * numbers.numel()
    places = enumerate(numbers.view(-1).tolist())
    return LINE_BYTES * sum(lines_read(width, number * width, at * width) for at, number in places)
