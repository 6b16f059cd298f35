"""Error feedback of a sum: the loss of each hop's codec is added to the next message."""

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
    """Error feedback of a sum: encodes its pieces in place of the codecs, and remembers their losses."""

    def encode(
        self, codec: Codec, x: Tensor, piece: tuple[int, int], *, seed: int, counter: int, out: Tensor
    ) -> Tensor:
        """Encode `x` plus the previous loss of this piece.

        Args:
            x: fp32 [n].
            piece: (hop, the rank or node that receives it).
            seed, counter: see Codec.encode.
            out: uint8 [codec.packet_bytes(n)], where the packet is written.

        Returns `out`.
        """
        ...


@dataclass(frozen=True)
class Lost:
    """Losses of the codecs of a sum on this rank, in units of the sum, to be added to the next sum (error feedback).

    A hop with input x sends C(x + lost) and sets lost <- x + lost - C(x + lost), in place, so that
        sum of the totals + sum over ranks of the losses = sum of the inputs.
    The tensors are written while messages travel: after an error their content is invalid. None: not fed back.

    Shape, fp32, for slices of n elements:
        intra: [num_nodes, local_size, n], for this rank's tensor on the hop inside the node.
        inter: [num_nodes, n], for its node's sums on the hop between nodes.
        gather: [n], for the total that this rank owns, on the way to all ranks.
    """

    intra: Tensor | None = None
    inter: Tensor | None = None
    gather: Tensor | None = None

    def encode(
        self, codec: Codec, x: Tensor, piece: tuple[int, int], *, seed: int, counter: int, out: Tensor
    ) -> Tensor:
        """Encode `x` with error feedback; see Feedback."""
        hop, number = piece
        held = self.inter if hop == HOP_INTER else None if self.intra is None else self.intra.flatten(0, 1)
        return encode_with(codec, x, None if held is None else held[number], seed, counter, out)

    @classmethod
    def zeros(cls, grid: Topology, num_elements: int, device: torch.device = staging.CPU) -> Lost:
        """Zero losses for slices of `num_elements` elements, on the hops that this grid has."""
        return cls(
            torch.zeros(grid.num_nodes, grid.local_size, num_elements, device=device) if grid.local_size > 1 else None,
            torch.zeros(grid.num_nodes, num_elements, device=device) if grid.num_nodes > 1 else None,
            torch.zeros(num_elements, device=device),
        )

    def by_slices(self, grid: Topology, rank: int) -> Tensor:
        """The sum of all losses by element, fp32 [num_nodes, local_size, n]."""
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
        """Yield runs of elements: (tensor, first element in it, place of that element in all slices, length)."""
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
        """Set the losses to this rank's part of `mean`, the mean over ranks of `by_slices`, in any shape."""
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


@dataclass(frozen=True)
class Estimates:
    """Differences from estimates, on the hop between nodes: each node's sums x have one that their receiver shares.

        v <- v + fresh (x - v)               v = x where fresh is 1
        C(v - h) is sent;  h <- h + C(v - h)
        total = H + sum over nodes of C(v - h);  H <- total

    As sums settle, what is sent becomes small, and the total exact. Written while messages travel, as Lost is.

    Shape, fp32, for slices of n elements:
        sent: h, [num_nodes, n], of this node's sums, by the node that receives them.
        total: H, [n], the sum of all nodes' h for the slice that this rank owns.
        momentum: v, as h; None where fresh is 1.
    Source: EF21 (NeurIPS 2021), algorithm 2; with momentum: Fatkhullin et al. (NeurIPS 2023), algorithm 1.
    """

    sent: Tensor
    total: Tensor
    momentum: Tensor | None = None
    fresh: float = 1.0

    def encode(
        self, codec: Codec, x: Tensor, piece: tuple[int, int], *, seed: int, counter: int, out: Tensor
    ) -> Tensor:
        """Encode how far `x`, or its momentum, is from its estimate; see Feedback."""
        hop, number = piece
        if hop != HOP_INTER:
            return codec.encode(x, seed=seed, counter=counter, out=out)
        wanted = x if self.momentum is None else self.momentum[number].lerp_(x, self.fresh)
        codec.encode(wanted - self.sent[number], seed=seed, counter=counter, out=out)
        self.sent[number].add_(codec.decode(out, x.numel()))
        return out

    def add_up(self, differences: Tensor) -> Tensor:
        """The sum over nodes, of whose differences this is the sum."""
        return self.total.add_(differences)


def encode_with(codec: Codec, x: Tensor, lost: Tensor | None, seed: int, counter: int, out: Tensor) -> Tensor:
    """Write out = C(x). With error feedback, write out = C(x + lost) and set lost <- x + lost - C(x + lost).

    Shape:
        x: fp32 [n]. lost: fp32 [n], changed in place, or None. out: uint8 [codec.packet_bytes(n)].
    """
    if lost is None:
        return codec.encode(x, seed=seed, counter=counter, out=out)
    codec.encode(lost.add_(x), seed=seed, counter=counter, out=out)
    lost.sub_(codec.decode(out, x.numel()))
    return out
