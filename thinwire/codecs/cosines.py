"""The orthonormal cosine transform, DCT-II, of the blocks of a matrix, and back."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends


@functools.cache
def cosines(size: int) -> Tensor:
    """The matrix of the orthonormal DCT-II: fp32 [size, size], a row for each frequency."""
    frequency, place = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi * frequency * (2 * place + 1) / (2 * size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


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
    kernels = backends.numba_module("cosines", x.device)
    if kernels is None:
        blocks = x.reshape(-1, rows, width // columns, columns)
        return out.copy_((cosines(columns) @ blocks.permute(0, 2, 3, 1) @ cosines(rows).T).view_as(out))
    kernels.forward(
        x.reshape(-1).numpy(), out.view(-1).numpy(), *map(np.uint64, (rows, columns, width)), _flat(rows),
        _flat(columns), np.arange(max(block), dtype=np.uint64), np.empty(3 * rows * columns, np.float32),
    )  # fmt: skip
    return out


def from_coefficients(blocks: Tensor, out: Tensor, width: int, *, subtract: bool = False) -> Tensor:
    """out = the matrix with these coefficients, or out -= it; most of them should be 0.

    Args:
        blocks: see `to_coefficients`.
        out: fp32, contiguous, changed in place and returned.
    """
    _, columns, rows = blocks.shape
    if not out.numel():
        return out
    kernels = backends.numba_module("cosines", blocks.device)
    if kernels is None:
        found = (cosines(rows).T @ blocks.mT @ cosines(columns)).view(-1, width // columns, rows, columns)
        found = found.transpose(1, 2).reshape(out.shape)
        return out.sub_(found) if subtract else out.copy_(found)
    kernels.backward(
        blocks.view(-1).numpy(), out.view(-1).numpy(), *map(np.uint64, (rows, columns, width)), _flat(rows, True),
        _flat(columns), subtract, *np.empty((2, rows + 1), np.uint64),
        np.empty(2 * rows * columns + columns, np.float32),
    )  # fmt: skip
    return out


@functools.cache
def _flat(size: int, is_turned: bool = False) -> np.ndarray:
    """The matrix as the kernels read it, by rows or by columns."""
    matrix = cosines(size)
    return (matrix.T if is_turned else matrix).contiguous().view(-1).numpy()
