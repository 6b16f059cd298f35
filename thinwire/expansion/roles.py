"""The role of each tensor in a model, which decides how it grows with its axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from thinwire.codecs.random import named_seed
from thinwire.expansion.axes import GrownAxis, expand_gain, expand_matrix

KEPT, ALL_ZERO, CANCELLING = 0, 1, 2


@dataclass(frozen=True)
class Draw:
    """How the tensor `name` of the large model is drawn.

    layer: KEPT, or for a layer that is inserted and adds nothing: ALL_ZERO (its last matrices are zero, the paper's
    type 1) or CANCELLING (their effects cancel, type 2).
    """

    seed: int
    name: str
    layer: int = KEPT

    @property
    def number(self) -> int:
        """The seed of the tensor's elements."""
        return named_seed(self.seed, self.name)

    def axis(self, axis: GrownAxis) -> GrownAxis:
        """The axis in this layer. If copies must cancel, each needs a second one."""
        return (axis.paired() or axis) if self.layer == CANCELLING and axis.residue == "circular" else axis


class Role(Protocol):
    """The role of a tensor."""

    def shape(self, small: torch.Size) -> tuple[int, ...]:
        """The shape of the tensor in the large model."""
        ...

    def expand(self, small: Tensor, draw: Draw, rows: slice) -> Tensor:
        """Some rows, entries of dimension 0, of the tensor of the large model; the same bits as in the whole."""
        ...


@dataclass(frozen=True)
class GrownTensor:
    """A tensor of the large model, of which some rows can be made alone.

    small: that of the small model, in fp32 or fp64. dtype: of the rows.
    """

    small: Tensor
    role: Role
    draw: Draw
    dtype: torch.dtype

    @property
    def unrounded(self) -> GrownTensor:
        """The same tensor before it is rounded to `dtype`."""
        return replace(self, dtype=self.small.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.role.shape(self.small.shape)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start .. stop - 1."""
        rows = slice(*slice(start, stop).indices(self.shape[0]))
        return self.role.expand(self.small, self.draw, rows).to(self.dtype)

    def parts(self, num_bytes: int) -> Iterator[Tensor]:
        """All rows in order, in parts of about `num_bytes` bytes."""
        row = self.small.element_size() * math.prod(self.shape[1:])
        size = max(1, num_bytes // row)
        return (self.rows(first, first + size) for first in range(0, self.shape[0], size))


@dataclass(frozen=True)
class SameRole:
    """A tensor that stays as it is, such as the norm of a head, or the bias of the output layer."""

    def shape(self, small: torch.Size) -> tuple[int, ...]:
        return small

    def expand(self, small: Tensor, draw: Draw, rows: slice) -> Tensor:
        return small[rows]


@dataclass(frozen=True)
class EmbeddingRole:
    """Rows of an embedding, which write to an axis."""

    out: GrownAxis

    def shape(self, small: torch.Size) -> tuple[int, ...]:
        return small[0], self.out.large

    def expand(self, small: Tensor, draw: Draw, rows: slice) -> Tensor:
        return self.out.write(small[rows].t()).t()


@dataclass(frozen=True)
class GainRole:
    """Factors of a norm."""

    axis: GrownAxis

    def shape(self, small: torch.Size) -> tuple[int, ...]:
        return (self.axis.large,)

    def expand(self, small: Tensor, draw: Draw, rows: slice) -> Tensor:
        return expand_gain(small, self.axis, draw.number)[rows]


@dataclass(frozen=True)
class ShiftRole:
    """A bias on an axis. is_last: it belongs to the matrix that ends a branch."""

    out: GrownAxis
    is_last: bool = False

    def shape(self, small: torch.Size) -> tuple[int, ...]:
        return (self.out.parts * self.out.large,)

    def expand(self, small: Tensor, draw: Draw, rows: slice) -> Tensor:
        found = draw.axis(self.out).write(small, rows.start, rows.stop)
        return torch.zeros_like(found) if self.is_last and draw.layer else found


@dataclass(frozen=True)
class MatrixRole:
    """A linear layer. is_transposed: it lies as [in, out]. is_last: it ends a branch of the residual stream."""

    out: GrownAxis
    into: GrownAxis
    is_transposed: bool = False
    is_last: bool = False

    def shape(self, small: torch.Size) -> tuple[int, ...]:
        sizes = self.out.parts * self.out.large, self.into.large
        return sizes[::-1] if self.is_transposed else sizes

    def expand(self, small: Tensor, draw: Draw, rows: slice) -> Tensor:
        weight = small.t() if self.is_transposed else small
        out, into = draw.axis(self.out), draw.axis(self.into)
        adds_zero = self.is_last and draw.layer != KEPT
        if adds_zero and draw.layer == ALL_ZERO:
            return small.new_zeros(rows.stop - rows.start, self.shape(small.shape)[1])
        if self.is_transposed:
            # Copies of an input lie in many rows here, and what they add up to is known from all of them alone.
            return expand_matrix(weight, out, into, draw.number, columns=rows, adds_zero=adds_zero).t().contiguous()
        return expand_matrix(weight, out, into, draw.number, start=rows.start, stop=rows.stop, adds_zero=adds_zero)


@dataclass(frozen=True)
class HeadRole:
    """An output layer, whose rows stay.

    If the small model shares it with an embedding, it becomes a tensor of its own.
    """

    into: GrownAxis

    def shape(self, small: torch.Size) -> tuple[int, ...]:
        return small[0], self.into.large

    def expand(self, small: Tensor, draw: Draw, rows: slice) -> Tensor:
        out = GrownAxis(len(small), len(small))
        return expand_matrix(small, out, self.into, draw.number, start=rows.start, stop=rows.stop)
