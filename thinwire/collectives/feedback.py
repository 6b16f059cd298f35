"""Error feedback of a sum: what the codecs of each hop lost, added to the next message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import staging
from thinwire.collectives.topology import Topology

HOP_INTRA, HOP_INTER = 1, 2


class Feedback(Protocol):
    """Error feedback of a sum: packs its pieces in the codecs' place, and remembers what they lose."""

    def encode(
        self, codec: Codec, x: Tensor, piece: tuple[int, int], *, seed: int, counter: int, out: Tensor
    ) -> Tensor:
        """Pack `x` and what was lost of this piece before; piece: (hop, rank or node that it is for)."""
        ...


@dataclass(frozen=True)
class Lost:
    """What the codecs of a sum lost on this rank, in units of the sum: it is added to the next one (error feedback).

    A hop that was given x sends C(x + lost) and leaves lost <- x + lost - C(x + lost), in place, so that
        sum of the totals + sum over ranks of what is lost = sum of what was put in.
    For slices of n elements, fp32: intra [num_nodes, local_size, n], of this rank's tensor on its way inside the node;
    inter [num_nodes, n], of its node's sums, between nodes; gather [n], of the total that it owns, on the way to all.
    None: not fed back. It is written while messages travel: after an error it is worth nothing.
    """

    intra: Tensor | None = None
    inter: Tensor | None = None
    gather: Tensor | None = None

    def encode(
        self, codec: Codec, x: Tensor, piece: tuple[int, int], *, seed: int, counter: int, out: Tensor
    ) -> Tensor:
        """See Feedback."""
        hop, number = piece
        held = self.inter if hop == HOP_INTER else None if self.intra is None else self.intra.flatten(0, 1)
        return encode_with(codec, x, None if held is None else held[number], seed, counter, out)

    @classmethod
    def zeros(cls, grid: Topology, num_elements: int, device: torch.device = staging.CPU) -> Lost:
        """Nothing lost yet of slices of `num_elements`, on the hops that this grid has."""
        return cls(
            torch.zeros(grid.num_nodes, grid.local_size, num_elements, device=device) if grid.local_size > 1 else None,
            torch.zeros(grid.num_nodes, num_elements, device=device) if grid.num_nodes > 1 else None,
            torch.zeros(num_elements, device=device),
        )

    def by_slices(self, grid: Topology, rank: int) -> Tensor:
        """All of it in the elements' own places, fp32 [num_nodes, local_size, n]."""
        held = next(t for t in (self.gather, self.inter, self.intra) if t is not None)
        num_elements, device = held.shape[-1], held.device
        node, local_rank = grid.node(rank), grid.local_rank(rank)
        whole = torch.zeros(grid.num_nodes, grid.local_size, num_elements, device=device)
        if self.intra is not None:
            whole.add_(self.intra)
        if self.inter is not None:
            whole[:, local_rank].add_(self.inter)
        if self.gather is not None:
            whole[node, local_rank].add_(self.gather)
        return whole

    def places(self, grid: Topology, rank: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """Where its elements lie, in runs: (tensor, first element in it, that one's place in all slices, length)."""
        if self.intra is not None:
            yield self.intra, 0, 0, self.intra.numel()
        if self.inter is not None:
            n = self.inter.shape[-1]
            for node in range(grid.num_nodes):
                yield self.inter, node * n, grid.rank(node, grid.local_rank(rank)) * n, n
        if self.gather is not None:
            n = self.gather.shape[-1]
            yield self.gather, 0, rank * n, n

    def spread(self, mean: Tensor, grid: Topology, rank: int) -> None:
        """Hold this rank's part of `mean`, in any shape: the mean over ranks of `by_slices`."""
        mean = mean.view(grid.num_nodes, grid.local_size, -1)
        node, local_rank = grid.node(rank), grid.local_rank(rank)
        for tensor in (self.intra, self.inter, self.gather):
            if tensor is not None:
                tensor.zero_()
        if self.intra is not None:
            self.intra.copy_(mean)
        elif self.inter is not None:
            self.inter.copy_(mean[:, local_rank]).mul_(grid.local_size)
        elif self.gather is not None:
            self.gather.copy_(mean[node, local_rank]).mul_(grid.world_size)


def encode_with(codec: Codec, x: Tensor, lost: Tensor | None, seed: int, counter: int, out: Tensor) -> Tensor:
    """out = C(x), or with error feedback out = C(x + lost) and lost <- x + lost - C(x + lost)."""
    if lost is None:
        return codec.encode(x, seed=seed, counter=counter, out=out)
    codec.encode(lost.add_(x), seed=seed, counter=counter, out=out)
    lost.sub_(codec.decode(out, x.numel()))
    return out
