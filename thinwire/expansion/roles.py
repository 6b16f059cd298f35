"""The role of each tensor in a model, which decides how it grows with its axes."""

from __future__ import annotations

from dataclasses import dataclass
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

    def expand(self, small: Tensor, draw: Draw) -> Tensor:
        """The tensor of the large model."""
        ...


@dataclass(frozen=True)
class SameRole:
    """A tensor that stays as it is, such as the norm of a head, or the bias of the output layer."""

    def expand(self, small: Tensor, draw: Draw) -> Tensor:
        return small


@dataclass(frozen=True)
class EmbeddingRole:
    """Rows of an embedding, which write to an axis."""

    out: GrownAxis

    def expand(self, small: Tensor, draw: Draw) -> Tensor:
        return self.out.write(small.t()).t()


@dataclass(frozen=True)
class GainRole:
    """Factors of a norm."""

    axis: GrownAxis

    def expand(self, small: Tensor, draw: Draw) -> Tensor:
        return expand_gain(small, self.axis, draw.number)


@dataclass(frozen=True)
class ShiftRole:
    """A bias on an axis. is_last: it belongs to the matrix that ends a branch."""

    out: GrownAxis
    is_last: bool = False

    def expand(self, small: Tensor, draw: Draw) -> Tensor:
        found = draw.axis(self.out).write(small)
        return torch.zeros_like(found) if self.is_last and draw.layer else found


@dataclass(frozen=True)
class MatrixRole:
    """A linear layer. is_transposed: it lies as [in, out]. is_last: it ends a branch of the residual stream."""

    out: GrownAxis
    into: GrownAxis
    is_transposed: bool = False
    is_last: bool = False

    def expand(self, small: Tensor, draw: Draw) -> Tensor:
        weight = small.t() if self.is_transposed else small
        out, into = draw.axis(self.out), draw.axis(self.into)
        adds_zero = self.is_last and draw.layer != KEPT
        if adds_zero and draw.layer == ALL_ZERO:
            found = weight.new_zeros(out.large, into.large)
        else:
            found = expand_matrix(weight, out, into, draw.number, adds_zero=adds_zero)
        return found.t().contiguous() if self.is_transposed else found


@dataclass(frozen=True)
class HeadRole:
    """An output layer, whose rows stay.

    If the small model shares it with an embedding, it becomes a tensor of its own.
    """

    into: GrownAxis

    def expand(self, small: Tensor, draw: Draw) -> Tensor:
        return expand_matrix(small, GrownAxis(len(small), len(small)), self.into, draw.number)
