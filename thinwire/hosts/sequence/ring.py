"""Attention whose keys and values pass from rank to rank, while each rank keeps its queries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.collectives import Communicator
from thinwire.errors import ConfigError
from thinwire.hosts.sequence import blocks
from thinwire.hosts.sequence.wire import SequenceWire, pack, unpack
from thinwire.methods.sequence import RingBlocks
from thinwire.methods.sequence.layout import check_heads


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, wire: SequenceWire | Communicator, *, is_causal: bool = True,
    scale: float | None = None, members: Sequence[int] | None = None, bounds: Sequence[Sequence[int]] = (),
) -> Tensor:  # fmt: skip
    """Attention over the whole sequence: keys and values pass from rank to rank while the previous block is computed.

    Outputs of blocks are merged by the logarithms of their softmax's sums. In the backward, keys and values pass once
    more, and each block's gradients go straight to its owner. With a codec, each block is rounded once, by its owner.
    With documents, keys and values go straight to the ranks that have later tokens of their documents, and to no other.

    Args:
        q, k, v: this rank's tokens.
        wire, members: see ulysses_attention.
        is_causal: tokens attend only to themselves and to earlier tokens. The ranks' tokens must be those of
            `SequenceLayout(1, ranks)`, see `tokens_of`: of 2 P chunks, rank r has chunks r and 2 P - 1 - r, so that
            under a causal mask all ranks compute equally much.
        scale: factor of q k^T; by default 1 / sqrt(d).
        bounds: for each sequence of the batch, where its documents begin, ascending from 0, and where the last one
            ends, by positions in the whole sequence. Tokens then attend only to their own document. Every rank gives
            the same.

    Shape:
        q: [batch, heads, tokens, d]. k: [batch, kv_heads, tokens, d]. v: [batch, kv_heads, tokens, e]; where e is not
            d, the narrower of both travels with zeros up to the width of the other.
        result: this rank's tokens of the output, [batch, heads, tokens, e].

    A collective. Raises ConfigError for an odd number of tokens with a causal mask, and for bounds that do not cover
    the sequences.
    Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023).
    """
    check_heads(q.shape[1], k.shape[1])
    wire = SequenceWire(wire) if isinstance(wire, Communicator) else wire
    ring = _RingRank(wire, list(members or range(wire.comm.world_size)), q.shape[2], is_causal, bounds)
    if is_causal and ring.size > 1 and q.shape[2] % 2:
        raise ConfigError(f"{q.shape[2]} tokens on a rank of a causal ring: must be even; pad to {q.shape[2] + 1}")
    check_bounds(bounds, len(q), q.shape[2] * ring.size)
    scale, of_values = q.shape[-1] ** -0.5 if scale is None else scale, v.shape[-1]
    # Blocks, and messages of keys beside values, know one width. Zeros add nothing to a product.
    width = max(q.shape[-1], of_values)
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    out = _Ring.apply(q, k, v, ring, scale)
    return out if width == of_values else out[..., :of_values]


def check_bounds(bounds: Sequence[Sequence[int]], batch: int, length: int) -> None:
    """Raise ConfigError unless the bounds of documents cover `batch` sequences of `length`, or there are none."""
    if bounds and len(bounds) != batch:
        raise ConfigError(f"bounds of documents of {len(bounds)} sequences, for a batch of {batch}: each needs its own")
    for row in bounds:
        if not row or row[0] != 0 or row[-1] != length or list(row) != sorted(row):
            raise ConfigError(f"bounds of documents {list(row)}: must ascend from 0 to the whole length, {length}")


class _RingRank:
    """A rank's place in a ring, and the blocks that meet."""

    def __init__(
        self, wire: SequenceWire, members: list[int], num_tokens: int, is_causal: bool, bounds: Sequence[Sequence[int]]
    ) -> None:
        self.wire, self.members = wire, members
        self.rank, self.size = members.index(wire.comm.rank), len(members)
        self.blocks = RingBlocks(self.size, num_tokens, is_causal, bounds)

    def passing(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its keys and values [2, batch, kv_heads, tokens, d]) for all ranks, this one first.

        They are empty if they meet none of this rank's queries. The next message travels meanwhile.
        """
        wire, pair = self.wire, own
        packet = first = pack(own, wire.codec, wire.seed) if self.size > 1 else own
        for step in range(1, self.size):
            following = self._next(first, packet, step)
            yield (self.rank - step + 1) % self.size, pair
            packet = wire.comm.wait(following)
            pair = unpack(packet, own, wire.codec) if packet.numel() else own[:, :0]
        yield (self.rank + 1) % self.size, pair

    def home(self, source: int, part: Tensor) -> Future[Tensor]:
        """Send the gradients of rank `source`'s keys and values to it, and get those of this rank's from another rank.

        Nothing travels between ranks whose blocks do not meet: then the result is empty.
        """
        packet, by = pack(part, self.wire.gradients, self.wire.draw()), (source - self.rank) % self.size
        meet, behind = self.blocks.meet, (self.rank - by) % self.size
        return self.wire.shift(
            self.members, packet, by, "sequence_gradients", meet(self.rank, source), meet(behind, self.rank)
        )

    def _next(self, first: Tensor, last: Tensor, step: int) -> Future[Tensor]:
        """Pass on what came last. With documents, send this rank's own packet to a rank that has a use for it."""
        if not self.blocks.bounds:
            return self.wire.shift(self.members, last, 1, "sequence")
        meet, before, behind = self.blocks.meet, (self.rank - step) % self.size, (self.rank + step) % self.size
        return self.wire.shift(self.members, first, step, "sequence", meet(behind, self.rank), meet(self.rank, before))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _RingRank, scale: float) -> Tensor:
        own = torch.stack((k, v)).detach()
        wide = torch.promote_types(q.dtype, torch.float32)
        out, sums = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:3], -math.inf, dtype=wide)
        for source, pair in ring.passing(own):
            for rows, queries, read, masked in ring.blocks.between(ring.rank, source):
                keys, values = pair[:, rows, :, read]
                found = blocks.forward(q[rows, :, queries], keys, values, masked, scale)
                merged = blocks.merge(out[rows, :, queries], sums[rows, :, queries], *found)
                out[rows, :, queries], sums[rows, :, queries] = merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, sums)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, own, out, sums = ctx.saved_tensors
        ring, grad = ctx.ring, grads[0].contiguous()
        dq = torch.zeros_like(q, dtype=sums.dtype)

        def of_block(source: int, pair: Tensor) -> Tensor:
            """Add to the gradients of queries; return those of a block's keys and values."""
            part = torch.zeros_like(own, dtype=sums.dtype)
            for rows, queries, read, masked in ring.blocks.between(ring.rank, source):
                own_grad, own_q, own_out, own_sums = (x[rows, :, queries] for x in (grad, q, out, sums))
                keys, values = pair[:, rows, :, read]
                more, *both = blocks.backward(
                    own_grad, own_q, keys, values, own_out, own_sums, masked, ctx.scale
                )  # fmt: skip
                dq[rows, :, queries] += more
                part[:, rows, :, read] = torch.stack(both)
            return part

        parts = ring.passing(own)
        total = of_block(*next(parts))
        home = [ring.home(source, of_block(source, pair).to(own.dtype)) for source, pair in parts]
        for packet in map(ring.wire.comm.wait, home):
            if packet.numel():
                total += unpack(packet, own, ring.wire.gradients)
        dk, dv = total.to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None
