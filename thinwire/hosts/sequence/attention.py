"""Attention over a sequence whose tokens lie on several ranks: exchange heads, or pass keys and values on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.collectives import Communicator
from thinwire.hosts.sequence.ring import ring_attention
from thinwire.hosts.sequence.wire import SequenceWire
from thinwire.methods.sequence import SequenceLayout, head_shares, kv_share
from thinwire.models.documents import Attend, apart


def ulysses_attention(
    q: Tensor | Sent, k: Tensor | Sent, v: Tensor | Sent, wire: SequenceWire | Communicator, *, is_causal: bool = True,
    attend: Attend | None = None, members: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Attention over the whole sequence: each rank gets all tokens of some heads, attends, and sends the outputs back.

    If heads do not divide evenly, the first ranks get one more each. A key head that several ranks need goes to each of
    them. Every rank has equally many tokens, and ranks have the tokens in the sequence's order. q, k and v travel in
    separate messages at the same time; their gradients are awaited one by one, when autograd needs each.

    Args:
        q, k, v: this rank's tokens, or the results of `send_heads` for all three.
        wire: ranks of the sequence, with the codecs; a Communicator: exact.
        is_causal: tokens attend only to themselves and to earlier tokens.
        attend: attention of whole sequences; by default torch's, with is_causal.
        members: ranks of `wire` that exchange heads; by default all.

    Shape:
        q: [batch, heads, tokens, d]. k, v: [batch, kv_heads, tokens, d].
        result: this rank's tokens of the output, in the shape of q.

    A collective. Raises ConfigError for fewer heads than ranks, and for key heads that do not divide the query heads.
    Source: Jacobs et al., "DeepSpeed Ulysses" (2023), section 3.
    """
    wire = SequenceWire(wire) if isinstance(wire, Communicator) else wire
    if not (isinstance(q, Sent) and isinstance(k, Sent) and isinstance(v, Sent)):
        assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor), "all are sent, or none"
        exchange = HeadExchange(wire, members or range(wire.comm.world_size), q.shape[1], k.shape[1])
        q, k, v = (Sent.of(exchange, x) for x in (q, k, v))
    exchange, attend = q.exchange, attend or partial(whole_attention, is_causal=is_causal)
    whole_q, whole_k, whole_v = (_Arrive.apply(x, x.token) for x in (q, k, v))
    out = attend(whole_q, exchange.for_queries(whole_k), exchange.for_queries(whole_v))
    return _ToTokens.apply(exchange, out)


def send_heads(x: Tensor, heads: int, kv_heads: int, wire: SequenceWire, layout: SequenceLayout) -> Tensor | Sent:
    """Start to send q, k or v, [batch, its heads, tokens, d], to the ranks of its heads, for `sequence_attention`.

    Every rank sends them in the same order. If no heads are exchanged, it returns x itself. A collective.
    """
    if layout.ulysses == 1:
        return x
    return Sent.of(HeadExchange(wire, layout.heads_group(wire.comm.rank), heads, kv_heads), x)


def sequence_attention(
    q: Tensor | Sent, k: Tensor | Sent, v: Tensor | Sent, wire: SequenceWire, layout: SequenceLayout, *,
    is_causal: bool = True, scale: float | None = None, attend: Attend | None = None,
    bounds: Sequence[Sequence[int]] = (),
) -> Tensor:  # fmt: skip
    """Attention of a layout: heads are exchanged inside each group, keys and values travel between the groups.

    q, k, v: see ulysses_attention. attend: attention of whole sequences, for layouts without a ring. bounds: of the
    documents of whole sequences, see ring_attention.
    """
    rank = wire.comm.rank
    if layout.ring > 1:
        ring = layout.ring_group(rank)
        attend = partial(ring_attention, wire=wire, is_causal=is_causal, scale=scale, members=ring, bounds=bounds)
    else:
        attend = attend or partial(whole_attention, is_causal=is_causal, scale=scale)
        attend = apart(attend, bounds) if bounds else attend
    if layout.ulysses == 1:
        assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor), "no heads are exchanged"
        return attend(q, k, v)
    return ulysses_attention(q, k, v, wire, attend=attend, members=layout.heads_group(rank))


def whole_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None = None) -> Tensor:
    """torch's attention, in which each key head serves a group of query heads.

    Shape:
        q: [batch, heads, tokens, d]. k, v: [batch, kv_heads, tokens, d]. Returns the shape of q.
    """
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


class HeadExchange:
    """Turns some tokens of all heads into all tokens of some heads, and back. members: the ranks that exchange."""

    def __init__(self, wire: SequenceWire, members: Sequence[int], heads: int, kv_heads: int) -> None:
        self.wire, self.members = wire, list(members)
        self.own = self.members.index(wire.comm.rank)
        self.queries = head_shares(heads, len(self.members))
        self.keys = [kv_share(share, heads, kv_heads) for share in self.queries]
        self.group = heads // kv_heads

    def shares(self, num_heads: int) -> list[slice]:
        """The heads of each rank, for a tensor with `num_heads` heads: of queries, or of keys or values."""
        return self.queries if num_heads == self.queries[-1].stop else self.keys

    def to_heads(self, x: Tensor, shares: Sequence[slice], *, is_backward: bool) -> Future[Tensor]:
        """Start to send x [batch, all heads, own tokens, d] to the ranks of its heads; see `heads_here`."""
        heads = x.transpose(0, 1)
        if not is_disjoint(shares):
            heads = torch.cat([heads[share] for share in shares])
        each = x.shape[0] * x.shape[2]
        counts = [each * _len(share) for share in shares]
        return self._send(heads, counts, [each * _len(shares[self.own])] * len(counts), is_backward)

    def heads_here(self, sent: Future[Tensor], shares: Sequence[slice], batch: int, tokens: int) -> Tensor:
        """The result of all ranks' `to_heads`: [batch, own heads, all tokens, d]."""
        rows = self.wire.comm.wait(sent)
        parts = rows.view(len(self.members), _len(shares[self.own]), batch, tokens, rows.shape[1])
        return parts.permute(2, 1, 0, 3, 4).flatten(2, 3)

    def to_tokens(self, x: Tensor, shares: Sequence[slice], *, is_backward: bool) -> Future[Tensor]:
        """Start to send x [batch, own heads, all tokens, d] to the ranks of its tokens; see `tokens_here`."""
        batch, heads, tokens, _ = x.shape
        by_rank = x.unflatten(2, (len(self.members), tokens // len(self.members))).permute(2, 1, 0, 3, 4)
        each = batch * tokens // len(self.members)
        counts = [each * _len(share) for share in shares]
        return self._send(by_rank, [each * heads] * len(counts), counts, is_backward)

    def tokens_here(self, sent: Future[Tensor], shares: Sequence[slice], batch: int, tokens: int) -> Tensor:
        """The result of all ranks' `to_tokens`: [batch, all heads, own tokens, d].

        The transpose of `heads_here`: what several ranks send for one head is added.
        """
        rows, numbers = self.wire.comm.wait(sent), [_len(share) for share in shares]
        rows = rows.view(sum(numbers), batch, tokens, rows.shape[1])
        if is_disjoint(shares):
            return rows.transpose(0, 1)
        result = rows.new_zeros(batch, shares[-1].stop, tokens, rows.shape[-1])
        parts = rows.split(numbers)
        for share, part in zip(shares, parts, strict=True):
            result[:, share] += part.transpose(0, 1)
        return result

    def for_queries(self, x: Tensor) -> Tensor:
        """The key or value heads that this rank's queries need, repeated in equal groups."""
        share, first = self.queries[self.own], self.keys[self.own].start
        heads = [head // self.group - first for head in range(share.start, share.stop)]
        each, rest = divmod(len(heads), x.shape[1])
        if not rest and heads == [number // each for number in range(len(heads))]:
            return x
        return x[:, heads]

    def _send(self, sends: Tensor, counts: Sequence[int], receives: Sequence[int], is_backward: bool) -> Future[Tensor]:
        wire, rows = self.wire, sends.reshape(-1, sends.shape[-1]).contiguous()
        codec, seed = (wire.gradients, wire.draw()) if is_backward else (wire.codec, wire.seed)
        name = "sequence_gradients" if is_backward else "sequence"
        return wire.rows(self.members, rows, counts, receives, codec, seed, name)


class Sent:
    """q, k or v on its way to the ranks of its heads, in its own message. Its gradient returns in another message.

    token: an empty tensor through which autograd orders both.
    """

    def __init__(self, exchange: HeadExchange, num_heads: int, batch: int, tokens: int) -> None:
        self.exchange, self.shares, self.sizes = exchange, exchange.shares(num_heads), (batch, tokens)
        self.under_way: Future[Tensor] = Future()
        self.token = torch.empty(0)

    @classmethod
    def of(cls, exchange: HeadExchange, x: Tensor) -> Sent:
        """Start to send x [batch, heads, own tokens, d]."""
        made = cls(exchange, x.shape[1], len(x), x.shape[2])
        made.token = _Leave.apply(made, x)
        return made


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Sent, x: Tensor) -> Tensor:
        ctx.sent = sent
        sent.under_way = sent.exchange.to_heads(x.detach(), sent.shares, is_backward=False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor) -> tuple[Tensor | None, ...]:
        sent = ctx.sent
        return None, sent.exchange.tokens_here(sent.under_way, sent.shares, *sent.sizes)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Sent, token: Tensor) -> Tensor:
        ctx.sent, ctx.token = sent, token.detach()
        return sent.exchange.heads_here(sent.under_way, sent.shares, *sent.sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent = ctx.sent
        sent.under_way = sent.exchange.to_tokens(grads[0], sent.shares, is_backward=True)
        return None, ctx.token


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, out: Tensor) -> Tensor:
        ctx.exchange, ctx.sizes = exchange, (len(out), out.shape[2] // len(exchange.members))
        sent = exchange.to_tokens(out.detach(), exchange.queries, is_backward=False)
        return exchange.tokens_here(sent, exchange.queries, *ctx.sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        sent = exchange.to_heads(grads[0], exchange.queries, is_backward=True)
        return None, exchange.heads_here(sent, exchange.queries, *ctx.sizes)


def _len(share: slice) -> int:
    return share.stop - share.start


def is_disjoint(shares: Sequence[slice]) -> bool:
    """Whether no two ranks need the same head."""
    return sum(map(_len, shares)) == shares[-1].stop
