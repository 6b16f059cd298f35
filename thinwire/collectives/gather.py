"""All-gathers: every rank's tensor on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed
from thinwire.collectives.feedback import encode_with
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.topology import Topology
from thinwire.errors import CorruptMessageError

# Messages of LARGE_BYTES or more may cross between nodes in turns, of which there are at most MAX_TURNS.
LARGE_BYTES, MAX_TURNS = 1 << 18, 4


def gather_bytes(grid: Topology, packet_bytes: int) -> dict[str, int]:
    """Bytes that one rank sends on each level in `all_gather_packets`."""
    intra = (grid.local_size - 1) * grid.num_nodes * packet_bytes
    return {"intra": intra, "inter": (grid.num_nodes - 1) * packet_bytes}


def all_gather_packets(
    link: Link,
    packet: Tensor,
    operation: str = "all_gather",
    length: Callable[[Tensor], int] = Tensor.numel,
    *,
    in_turns: bool = False,
) -> Rounds[Tensor]:
    """Every rank's packet on every rank.

    Packets cross between nodes once, then spread inside each node. A node receives (num_nodes - 1) * local_size packets
    from outside, and each rank sends world_size - 1 packets in all.

    Args:
        length: the number of bytes of a packet that cross between nodes.
        in_turns: see gather_across_nodes.

    Shape:
        packet: uint8 [bytes], of the same length on all ranks.
        result: uint8 [local_size, num_nodes, bytes], scratch of the link; entry [i, y] comes from rank
            y * local_size + i.
    """
    grid = link.topology
    gathered = link.scratch("gathered", grid.local_size, grid.num_nodes, packet.numel(), device=packet.device)
    if packet.numel() == 0:
        return gathered
    yield from gather_across_nodes(link, packet, gathered[link.local_rank], operation, length, in_turns=in_turns)
    yield from gather_inside_node(link, gathered, operation)
    return gathered


def gather_across_nodes(
    link: Link,
    packet: Tensor,
    column: Tensor,
    operation: str,
    length: Callable[[Tensor], int] = Tensor.numel,
    *,
    in_turns: bool = False,
) -> Rounds[None]:
    """The first half of all_gather_packets: fill `column` from the ranks that have this local rank.

    Together the columns of a node's ranks hold the packets of all ranks. A node that keeps them can gather the same
    packets again without messages from outside. A damaged packet is reported after all have come, so that every rank
    ends in the same round.

    Args:
        column: uint8 [num_nodes, bytes].
        in_turns: send a large packet to few nodes at a time, for a job that runs alone. Several streams that meet at
            one node lose packets, and half of the node's rate.
    """
    column[link.node].copy_(packet)
    targets, sources = link.node_peers(), link.node_peers()[::-1]
    is_cut = in_turns and packet.numel() >= LARGE_BYTES
    at_once = -(-len(targets) // MAX_TURNS) if is_cut else len(targets)
    damaged: CorruptMessageError | None = None
    for first in range(0, len(targets), max(at_once, 1)):
        turn = slice(first, first + at_once)
        receives = {peer: column[link.topology.node(peer)] for peer in sources[turn]}
        round_ = link.exchange(operation, "inter", receives, length)
        for peer in targets[turn]:
            round_.send(peer, column[link.node])
        try:
            yield from round_.finish()
        except CorruptMessageError as error:
            damaged = error
    if damaged is not None:
        raise damaged


def gather_inside_node(link: Link, gathered: Tensor, operation: str) -> Rounds[None]:
    """The second half: fill uint8 [local_size, num_nodes, bytes], which holds this rank's column, from the node."""
    if link.topology.local_size > 1:
        own = gathered[link.local_rank].view(-1)
        receives = {peer: gathered[link.topology.local_rank(peer)].view(-1) for peer in link.local_peers()}
        round_ = link.exchange(operation, "intra", receives)
        for peer in receives:
            round_.send(peer, own)
        yield from round_.finish()


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
    """All ranks' shards after the codec, equal on every rank; the owner also gets the decoded values.

    Args:
        counter: the number of the shard's first element, for the codec's randomness.
        lost: see Lost.gather.

    Shape:
        shard: fp32, n elements.
        result: fp32 [world_size, n] in rank order.
    """
    grid, num_elements = link.topology, shard.numel()
    packet = link.scratch("shard", codec.packet_bytes(num_elements), device=shard.device)
    pack = partial(encode_with, codec, shard.view(-1), lost, derive_seed(seed, link.rank), counter, packet)
    yield from link.work("encode_s", operation, pack)
    gathered = yield from all_gather_packets(link, packet, operation, codec.length)

    def unpack() -> Tensor:
        out = torch.empty(grid.world_size, num_elements, device=shard.device)
        packets = [gathered[grid.local_rank(rank), grid.node(rank)] for rank in range(grid.world_size)]
        codec.decode_all(packets, out.unbind())
        return out

    return (yield from link.work("decode_s", operation, unpack))


def broadcast_(link: Link, x: Tensor, source: int) -> Rounds[Tensor]:
    """Overwrite contiguous `x` on every rank with rank `source`'s bits: across nodes first, then inside each node."""
    if link.topology.world_size == 1 or x.numel() == 0:
        return x
    grid = link.topology
    message = x.view(-1).view(torch.uint8)
    received = link.scratch("broadcast", message.numel(), device=x.device)
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
    """Every rank's `x`, bit for bit, stacked in rank order: [world_size, *x.shape] in x's dtype."""
    grid = link.topology
    packet = x.contiguous().view(-1).view(torch.uint8)
    gathered = yield from all_gather_packets(link, packet, "all_gather_exact")
    return gathered.transpose(0, 1).reshape(-1).view(x.dtype).view(grid.world_size, *x.shape).clone()
