"""The third noun: who sends which packet to whom, in what order, and in which precision the sum is taken.

Generators over a Link, driven by the communication thread, which goes on with another job while one waits for its
messages. Every sum is taken in fp32 in rank order, so results do not depend on which message arrives first. A caller's
tensor is written only after all messages of the operation have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed, paired_seed
from thinwire.collectives.exchange import ROUNDS_OF_A_PART, Arrival, Exchange, Rounds, Wire
from thinwire.collectives.topology import Topology

HOP_INTRA, HOP_INTER = 1, 2


@dataclass
class Link:
    """What one job needs: the wire, the grid, its number among the jobs of the group, and scratch memory.

    The memory is reused from job to job, but never by two that are under way at once.
    """

    wire: Wire
    topology: Topology
    number: int
    memory: dict[str, Tensor]
    num_rounds: int = 0
    prefix: str = ""

    @property
    def rank(self) -> int:
        return self.wire.rank

    @property
    def node(self) -> int:
        return self.topology.node(self.wire.rank)

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank(self.wire.rank)

    def node_peers(self) -> list[int]:
        """The other nodes' ranks with this rank's local rank, nearest next node first."""
        grid = self.topology
        return [grid.rank((self.node + step) % grid.num_nodes, self.local_rank) for step in range(1, grid.num_nodes)]

    def local_peers(self) -> list[int]:
        """The other ranks of this node, next one first."""
        grid = self.topology
        return [grid.rank(self.node, (self.local_rank + step) % grid.local_size) for step in range(1, grid.local_size)]

    def scratch(self, name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """A tensor with undefined content that lives until the same name is asked for again."""
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        held = self.memory.get(self.prefix + name)
        if held is None or held.numel() < num_bytes:
            held = self.memory[self.prefix + name] = torch.empty(num_bytes, dtype=torch.uint8)
        return held[:num_bytes].view(dtype).view(shape)

    def part(self, number: int) -> Link:
        """A link for part 0, 1, ... of this job, with messages and memory of its own; see `together`."""
        return replace(self, prefix=f"{self.prefix}{number}.", num_rounds=(number + 1) * ROUNDS_OF_A_PART)

    def exchange(
        self, operation: str, level: str, receives: Mapping[int, Tensor], length: Callable[[Tensor], int] = Tensor.numel
    ) -> Exchange:
        """Open the job's next round of messages; see Exchange."""
        self.num_rounds += 1
        return Exchange(self.wire, self.number, self.num_rounds - 1, operation, level, receives, length)

    def timed(self, kind: str, operation: str) -> AbstractContextManager[None]:
        """Count a block's seconds; see Meter."""
        return self.wire.meter.timed(kind, f"{operation} {self.number}")


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

    @classmethod
    def zeros(cls, grid: Topology, num_elements: int) -> Lost:
        """Nothing lost yet of slices of `num_elements`, on the hops that this grid has."""
        return cls(
            torch.zeros(grid.num_nodes, grid.local_size, num_elements) if grid.local_size > 1 else None,
            torch.zeros(grid.num_nodes, num_elements) if grid.num_nodes > 1 else None,
            torch.zeros(num_elements),
        )

    def by_slices(self, grid: Topology, rank: int) -> Tensor:
        """All of it in the elements' own places, fp32 [num_nodes, local_size, n]."""
        num_elements = next(t.shape[-1] for t in (self.gather, self.inter, self.intra) if t is not None)
        node, local_rank = grid.node(rank), grid.local_rank(rank)
        whole = torch.zeros(grid.num_nodes, grid.local_size, num_elements)
        if self.intra is not None:
            whole.add_(self.intra)
        if self.inter is not None:
            whole[:, local_rank].add_(self.inter)
        if self.gather is not None:
            whole[node, local_rank].add_(self.gather)
        return whole


def together(*jobs: Rounds[Any]) -> Rounds[list[Any]]:
    """Run parts of one job side by side, each on a `Link.part` of its own; their results.

    While the messages of one travel, the next one packs.
    """
    results: list[Any] = [None] * len(jobs)
    active = dict(enumerate(jobs))
    while active:
        awaited: list[Arrival] = []
        for number, job in list(active.items()):
            try:
                awaited += next(job)
            except StopIteration as end:
                results[number] = end.value
                del active[number]
        if awaited:
            yield awaited
    return results


def _encode(codec: Codec, x: Tensor, lost: Tensor | None, out: Tensor, seed: int, counter: int) -> None:
    """out = C(x), or with error feedback out = C(x + lost) and lost <- x + lost - C(x + lost)."""
    if lost is None:
        codec.encode(x, seed=seed, counter=counter, out=out)
        return
    codec.encode(lost.add_(x), seed=seed, counter=counter, out=out)
    lost.sub_(codec.decode(out, x.numel()))


def all_gather_packets(
    link: Link, packet: Tensor, operation: str = "all_gather", length: Callable[[Tensor], int] = Tensor.numel
) -> Rounds[Tensor]:
    """Every rank's packet on every rank: uint8 [local_size, num_nodes, bytes], scratch of the link.

    Entry [i, y] comes from rank y * local_size + i. Packets cross between nodes once, then spread inside each node,
    so a node receives (num_nodes - 1) * local_size packets from outside and each rank sends world_size - 1 in all.
    Between nodes a packet is cut to its `length`.
    """
    grid = link.topology
    gathered = link.scratch("gathered", grid.local_size, grid.num_nodes, packet.numel())
    gathered[link.local_rank, link.node].copy_(packet)
    if packet.numel() == 0:
        return gathered
    own_row = gathered[link.local_rank]
    if grid.num_nodes > 1:
        receives = {peer: own_row[grid.node(peer)] for peer in link.node_peers()}
        round_ = link.exchange(operation, "inter", receives, length)
        for peer in receives:
            round_.send(peer, own_row[link.node])
        yield from round_.finish()
    if grid.local_size > 1:
        receives = {peer: gathered[grid.local_rank(peer)].view(-1) for peer in link.local_peers()}
        round_ = link.exchange(operation, "intra", receives)
        for peer in receives:
            round_.send(peer, own_row.view(-1))
        yield from round_.finish()
    return gathered


def all_gather(
    link: Link,
    shard: Tensor,
    codec: Codec,
    *,
    seed: int = 0,
    counter: int = 0,
    operation: str = "all_gather",
    lost: Tensor | None = None,
) -> Rounds[Tensor]:
    """All ranks' shards after the codec: fp32 [world_size, n] in rank order, equal on every rank, owner included.

    `counter` numbers the first element of the shard for the codec's randomness. lost: see Lost.gather.
    """
    grid, num_elements = link.topology, shard.numel()
    with link.timed("encode_s", operation):
        packet = link.scratch("shard", codec.packet_bytes(num_elements))
        _encode(codec, shard.view(-1), lost, packet, derive_seed(seed, link.rank), counter)
    gathered = yield from all_gather_packets(link, packet, operation, codec.length)
    out = torch.empty(grid.world_size, num_elements)
    with link.timed("decode_s", operation):
        for rank in range(grid.world_size):
            codec.decode(gathered[grid.local_rank(rank), grid.node(rank)], num_elements, out=out[rank])
    return out


def reduce_scatter(
    link: Link,
    x: Tensor,
    intra: Codec,
    inter: Codec,
    *,
    seed: int = 0,
    counter: int = 0,
    operation: str = "reduce_scatter",
    lost: Lost | None = None,
) -> Rounds[Tensor]:
    """This rank's slice of the sum over ranks of flat fp32 `x`: fp32 [n / world_size], scratch of the link.

    Slice j of `x` belongs to rank j = y * local_size + i. Hop 1, inside the node: the num_nodes slices of local rank i
    travel with `intra` to local rank i, which adds local_size pieces in fp32. Hop 2, between nodes: each partial sum
    travels with `inter` to its owner, which adds num_nodes pieces. With one rank to a node, or one node, the hop that
    has no partner is left out. Where both codecs rotate alike, the sums stay rotated and are rotated back once.
    `counter` numbers the first element of `x` for the codecs' randomness. Draws differ by rank in hop 1 and by node in
    hop 2, so the sum does not depend on which rank owns an element; neighbours draw opposite noise, which halves what
    the sum loses (see paired_seed). With `lost`, each hop feeds back what its codec lost the last time.

    Source: SDP4Bit, NeurIPS 2024, two-level gradient reduction with Hadamard smoother.
    """
    grid = link.topology
    num_elements = x.numel() // grid.world_size
    slices = x.view(grid.num_nodes, grid.local_size, num_elements)
    if grid.world_size == 1 or num_elements == 0:
        return x.view(-1)
    lost = lost or Lost()
    rotated_by: Codec | None = None
    partial = slices[:, 0]
    counters = [
        [counter + (y * grid.local_size + i) * num_elements for i in range(grid.local_size)]
        for y in range(grid.num_nodes)
    ]
    if grid.local_size > 1:
        own_seed = paired_seed(derive_seed(seed, HOP_INTRA), link.rank)
        partial = yield from _hop_intra(link, slices, intra, own_seed, counters, operation, lost.intra)
        rotated_by = intra
    if grid.num_nodes > 1:
        if rotated_by is not None and (rotated_by.rotation != inter.rotation or lost.inter is not None):
            rotated_by.unrotate_(partial.view(-1))
            rotated_by = None
        codec = inter if rotated_by is None else inter.inner
        node_counters = [row[link.local_rank] for row in counters]
        own_seed = paired_seed(derive_seed(seed, HOP_INTER), link.node)
        partial = yield from _hop_inter(link, partial, codec, own_seed, node_counters, operation, lost.inter)
        rotated_by = inter
    assert rotated_by is not None
    with link.timed("decode_s", operation):
        return rotated_by.unrotate_(partial.view(-1))


def _hop_intra(
    link: Link,
    slices: Tensor,
    codec: Codec,
    seed: int,
    counters: list[list[int]],
    operation: str,
    lost: Tensor | None,
) -> Rounds[Tensor]:
    """Sum over the node, rotated: fp32 [num_nodes, n], the partial sums of this local rank's slices."""
    num_nodes, local_size, num_elements = slices.shape
    packet_bytes = codec.packet_bytes(num_elements)
    sends = link.scratch("intra_send", local_size, num_nodes, packet_bytes)
    receives = link.scratch("intra_receive", local_size, num_nodes, packet_bytes)
    total = link.scratch("intra_sum", num_nodes, num_elements, dtype=torch.float32)
    grid = link.topology
    buffers = {peer: receives[grid.local_rank(peer)].view(-1) for peer in link.local_peers()}
    round_ = link.exchange(operation, "intra", buffers)
    for peer in [*link.local_peers(), link.rank]:
        i = grid.local_rank(peer)
        with link.timed("encode_s", operation):
            for y in range(num_nodes):
                own_lost = None if lost is None else lost[y, i]
                _encode(codec, slices[y, i], own_lost, sends[i, y], seed, counters[y][i])
        if peer != link.rank:
            round_.send(peer, sends[i].view(-1))
    yield from round_.finish()
    for i in range(local_size):
        packets = sends[i] if i == link.local_rank else receives[i]
        with link.timed("decode_s", operation):
            for y in range(num_nodes):
                _accumulate(codec.inner, packets[y], total[y], first=i == 0)
    return total


def _hop_inter(
    link: Link,
    partial: Tensor,
    codec: Codec,
    seed: int,
    counters: list[int],
    operation: str,
    lost: Tensor | None,
) -> Rounds[Tensor]:
    """Sum over the nodes, rotated: fp32 [n], this rank's slice."""
    num_nodes, num_elements = partial.shape
    packet_bytes = codec.packet_bytes(num_elements)
    sends = link.scratch("inter_send", num_nodes, packet_bytes)
    receives = link.scratch("inter_receive", num_nodes, packet_bytes)
    total = link.scratch("inter_sum", num_elements, dtype=torch.float32)
    grid = link.topology
    buffers = {peer: receives[grid.node(peer)] for peer in link.node_peers()}
    round_ = link.exchange(operation, "inter", buffers, codec.length)
    for peer in [*link.node_peers(), link.rank]:
        y = grid.node(peer)
        with link.timed("encode_s", operation):
            _encode(codec, partial[y], None if lost is None else lost[y], sends[y], seed, counters[y])
        if peer != link.rank:
            round_.send(peer, sends[y])
    yield from round_.finish()
    for y in range(num_nodes):
        with link.timed("decode_s", operation):
            _accumulate(codec.inner, sends[y] if y == link.node else receives[y], total, first=y == 0)
    return total


def _accumulate(codec: Codec, packet: Tensor, total: Tensor, *, first: bool) -> None:
    if first:
        codec.decode(packet, total.numel(), out=total)
    else:
        codec.decode_add(packet, total)


def all_reduce(
    link: Link,
    x: Tensor,
    intra: Codec,
    inter: Codec,
    gather: Codec,
    *,
    seed: int = 0,
    operation: str = "all_reduce",
    lost: Lost | None = None,
) -> Rounds[Tensor]:
    """The sum over ranks of `x`, fp32 in its shape, equal on every rank: reduce_scatter, then all_gather.

    lost: for slices of `slice_length` elements.
    """
    world_size = link.topology.world_size
    if world_size == 1:
        return x.float().clone()
    padded = torch.zeros(world_size * slice_length(x.numel(), world_size, intra, inter, gather))
    padded[: x.numel()].copy_(x.reshape(-1))
    shard = yield from reduce_scatter(link, padded, intra, inter, seed=seed, operation=operation, lost=lost)
    own = lost.gather if lost is not None else None
    total = yield from all_gather(link, shard, gather, seed=seed, operation=operation, lost=own)
    return total.view(-1)[: x.numel()].view(x.shape)


def slice_length(num_elements: int, world_size: int, *codecs: Codec) -> int:
    """Elements of each rank's slice of a tensor that zeros fill up to where the codecs can cut it."""
    block = lcm(*(codec.block for codec in codecs))
    return -(-num_elements // (world_size * block)) * block


def all_reduce_bytes(num_elements: int, grid: Topology, intra: Codec, inter: Codec, gather: Codec) -> int:
    """Payload that one rank sends for an all_reduce of `num_elements`."""
    n = slice_length(num_elements, grid.world_size, intra, inter, gather)
    inside = (grid.local_size - 1) * grid.num_nodes * intra.packet_bytes(n)
    between = (grid.num_nodes - 1) * inter.packet_bytes(n)
    return inside + between + (grid.world_size - 1) * gather.packet_bytes(n)


def broadcast_(link: Link, x: Tensor, source: int) -> Rounds[Tensor]:
    """Overwrite contiguous `x` on every rank with rank `source`'s bits: across nodes first, then inside each node."""
    if link.topology.world_size == 1 or x.numel() == 0:
        return x
    grid = link.topology
    message = x.view(-1).view(torch.uint8)
    received = link.scratch("broadcast", message.numel())
    held = message if link.rank == source else received
    for level in ("inter", "intra"):
        if level == "inter":
            column = link.local_rank == grid.local_rank(source)
            senders_peers = link.node_peers() if link.rank == source else []
            receives = {source: received} if column and link.rank != source else {}
        else:
            leader = grid.rank(link.node, grid.local_rank(source))
            senders_peers = link.local_peers() if link.rank == leader else []
            receives = {leader: received} if link.rank != leader else {}
        round_ = link.exchange("broadcast", level, receives)
        for peer in senders_peers:
            round_.send(peer, held)
        yield from round_.finish()
    if held is received:
        message.copy_(received)
    return x


def all_gather_exact(link: Link, x: Tensor) -> Rounds[Tensor]:
    """The raw bits of every rank's `x`, stacked in rank order: [world_size, *x.shape] in x's dtype."""
    grid = link.topology
    packet = x.contiguous().view(-1).view(torch.uint8)
    gathered = yield from all_gather_packets(link, packet, "all_gather_exact")
    return gathered.transpose(0, 1).reshape(-1).view(x.dtype).view(grid.world_size, *x.shape).clone()
