"""Wire formats: the codecs for one kind of parameter, and the interface of a strategy that chooses them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Protocol

import torch

from thinwire.codecs import Codec, NonzeroRows, backends
from thinwire.codecs.rows import around
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.layout.zeros import describe_zeros
from thinwire.table import Row


@dataclass(frozen=True)
class WireFormat:
    """The codecs for one kind of parameter.

    Attributes:
        weights: codec of the all_gather.
        differences: send master - replica instead of the master itself.
        intra, inter: codecs of the gradient's hop inside a node and between nodes.
        feedback: add what these codecs lose to the next gradient.
        fresh: above 0: send differences from estimates between nodes, see Estimates.
        aligned: parameters and slices start at multiples of this many elements.

    Raises ConfigError for a combination that can't work.
    """

    weights: Codec
    differences: bool
    intra: Codec
    inter: Codec
    feedback: bool = False
    fresh: float = 0.0
    # 4 make whole 8-byte words of every codec's codes.
    aligned: int = 4

    def __post_init__(self) -> None:
        for codec in (self.intra, self.inter):
            if self.feedback and not codec.traits.contraction:
                raise ConfigError(
                    f"{codec} can't have error feedback: its error may exceed its input, so residuals would grow; use "
                    "rounding 'nearest', an unscaled random-k, or no feedback"
                )
        is_measured = self.differences and not self.weights.traits.contraction
        if is_measured and (lost := _lost_energy(self.weights)) >= 1.0:
            raise ConfigError(
                f"{self.weights} can't carry weight differences: on Gaussian values its error has {lost:.1f} times "
                "their energy, so that what is lost in one step grows in the next; use more bits, smaller groups, or "
                "rounding 'nearest'"
            )

    @property
    def block(self) -> int:
        """Parameters and slices start at multiples of this many elements."""
        return lcm(self.aligned, self.weights.block, self.intra.block, self.inter.block)

    @property
    def has_rows(self) -> bool:
        """Whether gradients travel without their rows of zeros."""
        return isinstance(self.intra, NonzeroRows) or isinstance(self.inter, NonzeroRows)

    def by_rows(self, width: int, most: int) -> WireFormat:
        """The same for a table with rows of `width` elements, whose gradients travel without rows of zeros.

        Slices begin where rows do, unless they would be multiples of more than `most` elements.
        """
        rows = lcm(self.block, width)
        aligned = rows if rows <= most else self.block
        intra, inter = (around(codec, width, aligned) for codec in (self.intra, self.inter))
        made = replace(self, aligned=aligned, intra=intra, inter=inter)
        return made if made.has_rows else self

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return self.weights, self.intra, self.inter

    def lossy_pieces(self, grid: Topology) -> dict[str, tuple[int, ...]]:
        """For each hop with a lossy codec of gradients, the shape of the pieces (one shard long) that it encodes."""
        pieces: dict[str, tuple[int, ...]] = {}
        if grid.local_size > 1 and not self.intra.traits.lossless:
            pieces["intra"] = grid.num_nodes, grid.local_size
        if grid.num_nodes > 1 and not self.inter.traits.lossless:
            pieces["inter"] = (grid.num_nodes,)
        return pieces


@functools.cache
def _lost_energy(codec: Codec) -> float:
    """E|C(x) - x|^2 / |x|^2 for Gaussian x, estimated on eight blocks."""
    x = torch.randn(8 * codec.block, generator=torch.Generator().manual_seed(0))
    with backends.without_kernels():
        error = codec.decode(codec.encode(x, seed=1), x.numel()) - x
    return float(error.square().sum() / x.square().sum())


class Strategy(Protocol):
    """The interface of a strategy for `thinwire.zero`: a choice of codecs for the two kinds of parameters."""

    @property
    def name(self) -> str:
        """Its name in `--strategy`."""
        ...

    def matrix(self) -> WireFormat:
        """For parameters of two and more dimensions."""
        ...

    def vector(self) -> WireFormat:
        """For parameters of at most one dimension: norms and biases."""
        ...


def describe_formats(method: Strategy, grid: Topology) -> list[Row]:
    """Rows of the start-up table: one for each kind of parameter and each hop on this grid."""
    rows: list[Row] = []
    for kind, wire in {"matrices": method.matrix(), "norms and biases": method.vector()}.items():
        what = "differences" if wire.differences else "weights"
        rows.append((f"{kind}: {what}", f"{wire.weights}", f"{wire.weights.bits_per_element:.4g} bits an element"))
        for hop, codec, partners in (
            ("inside a node", wire.intra, grid.local_size),
            ("between nodes", wire.inter, grid.num_nodes),
        ):
            effect = f"{codec}" if partners > 1 else "not sent"
            why = f"{codec.bits_per_element:.4g} bits an element" if partners > 1 else f"there are {grid}"
            rows.append((f"{kind}: gradients {hop}", effect, why))
    wires = method.matrix(), method.vector()
    inside = [wire.intra for wire in wires if grid.local_size > 1]
    return [*rows, *describe_zeros([*inside, *(wire.inter for wire in wires if grid.num_nodes > 1)])]


@dataclass(frozen=True)
class LevelFormat(WireFormat):
    """The codecs for one kind of parameter whose weights are cut over ranks.

    shards: codec of the gather of compute weights. weights: codec of the refresh from the masters; with `differences`,
    it carries master - weight. intra, inter: codecs of the gradient's hop inside a node and between nodes.
    """

    shards: Codec = field(kw_only=True)

    @property
    def block(self) -> int:
        """Parameters and slices start at multiples of this many elements."""
        return math.lcm(super().block, self.shards.block)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return *super().codecs, self.shards
