"""The orthonormal cosine transform, DCT-II, of the blocks of a matrix, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends

# What a transform back does with `out`.
How = Literal["set", "subtract", "sign"]
# As the kernels know them.
HOWS: dict[How, int] = {"set": 0, "subtract": 1, "sign": 2}
# An odd length takes half of its square in turns; longer ones are products of matrices.
LARGEST_ODD = 63
HALF = math.sqrt(0.5)
# Rows p and q become a p + b q and c p + d q.
Turn = tuple[int, int, float, float, float, float]


@functools.cache
def cosines(size: int) -> Tensor:
    """The matrix of the orthonormal DCT-II: fp32 [size, size], a row for each frequency."""
    return _frequencies(size, 0).float()


def to_coefficients(x: Tensor, block: tuple[int, int], width: int, out: Tensor) -> Tensor:
    """out = the coefficients of each block of rows x columns, as [blocks, columns, rows].

    Args:
        x: fp32, contiguous, rows of `width` elements, which the block's sides divide.
        out: fp32, contiguous, as many elements; changed in place and returned in that shape.
    """
    rows, columns = block
    out = out.view(x.numel() // max(1, rows * columns), columns, rows)
    if not x.numel():
        return out
    kernels = _kernels(block, x)
    if kernels is None:
        blocks = x.reshape(-1, rows, width // columns, columns)
        return out.copy_((cosines(columns) @ blocks.permute(0, 2, 3, 1) @ cosines(rows).T).view_as(out))
    kernels.forward(
        x.reshape(-1).numpy(), out.view(-1).numpy(), np.uint64(width), *turns(rows).arrays, *turns(columns).arrays,
        np.empty(2 * rows * columns, np.float32),
    )  # fmt: skip
    return out


def from_coefficients(blocks: Tensor, out: Tensor, width: int, *, how: How = "set") -> Tensor:
    """out = the matrix with these coefficients, or its signs, or out -= that matrix. The sign of NaN is NaN.

    It is fast if most coefficients are 0.

    Args:
        blocks: see `to_coefficients`.
        out: fp32, contiguous, changed in place and returned.
    """
    _, columns, rows = blocks.shape
    if not out.numel():
        return out
    kernels = _kernels((rows, columns), blocks)
    if kernels is None:
        found = (cosines(rows).T @ blocks.mT @ cosines(columns)).view(-1, width // columns, rows, columns)
        found = found.transpose(1, 2).reshape(out.shape)
        if how == "sign":
            # torch's sign of NaN is 0, which would hide the damage.
            return torch.add(found.sign(), found, alpha=0.0, out=out)
        return out.sub_(found) if how == "subtract" else out.copy_(found)
    right = cosines(columns).view(-1).numpy()
    kernels.backward(
        blocks.view(-1).numpy(), out.view(-1).numpy(), np.uint64(width), *turns(rows).back, right, np.uint64(columns),
        np.uint64(HOWS[how]), np.empty(rows * columns, np.float32),
    )  # fmt: skip
    return out


def _kernels(block: tuple[int, int], x: Tensor) -> ModuleType | None:
    is_short = all(side // (side & -side) <= LARGEST_ODD for side in block)
    return backends.numba_module("cosines", x.device) if is_short else None


def _frequencies(size: int, shift: int) -> Tensor:
    """fp64 [size, size]: the orthonormal DCT-II, or DCT-IV with shift 1."""
    frequency, place = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi * (2 * frequency + shift) * (2 * place + 1) / (4 * size)) * math.sqrt(2 / size)
    if not shift:
        matrix[0] /= math.sqrt(2)
    return matrix


@dataclass(frozen=True)
class Turns:
    """A transform as a product of orthogonal 2 x 2 matrices.

    arrays: pairs of rows, flat uint64; their matrices, flat fp32; the row in which each frequency ends. back: the same
    of the inverse, where a frequency begins in that row.
    """

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    back: tuple[np.ndarray, np.ndarray, np.ndarray]


@functools.cache
def turns(size: int) -> Turns:
    """The turns of the DCT-II of `size` rows: 228 for 64 rows, where the product with its matrix takes 4,096 sums.

    Source: Plonka and Tasche, "Fast and numerically stable algorithms for discrete cosine transforms" (2005).
    """
    made: list[Turn] = []
    places = np.array(_dct2(list(range(size)), made.append), np.uint64)
    pairs = np.array([turn[:2] for turn in made], np.uint64).reshape(-1, 2)
    factors = np.array([turn[2:] for turn in made], np.float32).reshape(-1, 2, 2)
    back = pairs[::-1].reshape(-1), factors[::-1].swapaxes(1, 2).reshape(-1), places
    return Turns((pairs.reshape(-1), factors.reshape(-1), places), back)


def _dct2(rows: Sequence[int], turn: Callable[[Turn], None]) -> list[int]:
    """The rows in which the frequencies of the DCT-II of `rows` are, after these turns."""
    size = len(rows)
    if size % 2:
        return _by_single_turns(rows, _frequencies(size, 0).numpy(), turn)
    first, last = rows[: size // 2], rows[: size // 2 - 1 : -1]
    for p, q in zip(first, last, strict=True):
        turn((p, q, HALF, HALF, HALF, -HALF))
    even, odd = _dct2(first, turn), _dct4(last, turn)
    return [row for both in zip(even, odd, strict=True) for row in both]


def _dct4(rows: Sequence[int], turn: Callable[[Turn], None]) -> list[int]:
    """As `_dct2`, of the DCT-IV: a turn of each pair, two DCT-IIs, and a turn of each pair of frequencies."""
    size = len(rows)
    if size % 2:
        return _by_single_turns(rows, _frequencies(size, 1).numpy(), turn)
    first, last = rows[: size // 2], rows[: size // 2 - 1 : -1]
    for i, (p, q) in enumerate(zip(first, last, strict=True)):
        angle, sign = math.pi * (2 * i + 1) / (4 * size), (-1) ** i
        cos, sin = math.cos(angle), math.sin(angle)
        turn((p, q, cos, sin, sign * sin, -sign * cos))
    sums, others = _dct2(first, turn), _dct2(last, turn)
    found = [sums[0]]
    for p, q in zip(sums[1:], others[:0:-1], strict=True):
        turn((p, q, HALF, HALF, HALF, -HALF))
        found += [p, q]
    return [*found, others[0]]


def _by_single_turns(rows: Sequence[int], matrix: np.ndarray, turn: Callable[[Turn], None]) -> list[int]:
    """Any orthogonal matrix: turns that make it diagonal, from the last to the first."""
    left, made = matrix.copy(), []
    for column in range(len(rows)):
        for row in range(column + 1, len(rows)):
            length = math.hypot(left[column, column], left[row, column])
            cos, sin = left[column, column] / length, left[row, column] / length
            both = np.array([[cos, sin], [-sin, cos]])
            left[[column, row]] = both @ left[[column, row]]
            made.append((rows[column], rows[row], cos, -sin, sin, cos))
    if len(rows) > 1 and left[-1, -1] < 0:
        turn((rows[0], rows[-1], 1.0, 0.0, 0.0, -1.0))
    for one in reversed(made):
        turn(one)
    return list(rows)
