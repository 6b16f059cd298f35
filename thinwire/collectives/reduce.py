"""Sums over ranks: the route of the packets, the order of the summands, and the precision of the sum.

Collectives are generators over a Link. The communication thread drives them, and runs another job while one waits for
its messages. Packets lie on the device of their tensors, CPU or CUDA. Every sum is taken in fp32 in rank order, so
results do not depend on which message arrives first. A caller's tensor is written only after all messages of the
operation have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import lcm

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity, derive_seed, paired_seed
from thinwire.codecs.rotated_sum import RotatedSum
from thinwire.collectives.feedback import HOP_INTER, HOP_INTRA, Feedback, Lost
from thinwire.collectives.gather import all_gather, gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.topology import Topology


def added(*sent: Mapping[str, int]) -> dict[str, int]:
    """Sum of several mappings from levels to bytes."""
    return {level: sum(one[level] for one in sent) for level in ("intra", "inter")}


def reduce_bytes(grid: Topology, num_elements: int, intra: Codec, inter: Codec) -> dict[str, int]:
    """Bytes that one rank sends on each level in `reduce_scatter`. num_elements: of the rank's slice."""
    to_neighbours = (grid.local_size - 1) * grid.num_nodes * intra.packet_bytes(num_elements)
    return {"intra": to_neighbours, "inter": (grid.num_nodes - 1) * inter.packet_bytes(num_elements)}


def reduce_scatter(
    link: Link,
    x: Tensor,
    intra: Codec,
    inter: Codec,
    *,
    seed: int = 0,
    counter: int = 0,
    operation: str = "reduce_scatter",
    lost: Feedback | None = None,
) -> Rounds[Tensor]:
    """This rank's slice of the sum over ranks of `x`.

    Args:
        intra, inter: codecs of the hop inside a node and of the hop between nodes.
        seed: of the codecs' randomness. Draws differ by rank in hop 1 and by node in hop 2, so the sum does not depend
            on which rank owns an element; neighbours draw opposite noise, which halves what the sum loses (see
            paired_seed).
        counter: the number of the first element of `x`, for the codecs' randomness.
        operation: what the meter calls it.
        lost: each hop feeds back what its codec lost the last time.

    Shape:
        x: fp32 [n], n a multiple of world_size times both codecs' block.
        result: fp32 [n / world_size], scratch of the link.

    Slice j of `x` belongs to rank j = y * local_size + i. Hop 1, inside the node: the num_nodes slices of local rank i
    travel with `intra` to local rank i, which adds local_size pieces in fp32. Hop 2, between nodes: each partial sum
    travels with `inter` to its owner, which adds num_nodes pieces. With one rank to a node, or one node, the hop that
    has no partner is left out. Where both codecs rotate alike, the sums stay rotated and are rotated back once.

    Source: SDP4Bit, NeurIPS 2024, two-level gradient reduction with Hadamard smoother.
    """
    grid = link.topology
    num_elements = x.numel() // grid.world_size
    slices = x.view(grid.num_nodes, grid.local_size, num_elements)
    if grid.world_size == 1 or num_elements == 0:
        return x.view(-1)
    sums = [RotatedSum(piece) for piece in slices[:, 0].unbind()]
    counters = [
        [counter + (y * grid.local_size + i) * num_elements for i in range(grid.local_size)]
        for y in range(grid.num_nodes)
    ]
    if grid.local_size > 1:
        own_seed = paired_seed(derive_seed(seed, HOP_INTRA), link.rank)
        sums = yield from _hop_intra(link, slices, intra, own_seed, counters, operation, lost)
    total = sums[0]
    if grid.num_nodes > 1:
        node_counters = [row[link.local_rank] for row in counters]
        own_seed = paired_seed(derive_seed(seed, HOP_INTER), link.node)
        total = yield from _hop_inter(link, sums, inter, own_seed, node_counters, operation, lost)
    with link.timed("decode_s", operation):
        return total.rotated_back()


def reduce_in_node(link: Link, x: Tensor, *, operation: str = "reduce_scatter") -> Rounds[Tensor]:
    """This local rank's slice of the sum over its node of flat fp32 `x`: fp32 [n / local_size], scratch of the link."""
    grid = link.topology
    slices = x.view(1, grid.local_size, -1)
    if grid.local_size == 1 or x.numel() == 0:
        return slices[0, 0]
    sums = yield from _hop_intra(link, slices, Identity(), 0, [[0] * grid.local_size], operation, None)
    return sums[0].values


def _hop_intra(
    link: Link,
    slices: Tensor,
    codec: Codec,
    seed: int,
    counters: list[list[int]],
    operation: str,
    lost: Feedback | None,
) -> Rounds[list[RotatedSum]]:
    """Sums over the node of this local rank's slices, one for each node, of n elements each."""
    num_nodes, local_size, num_elements = slices.shape
    packet_bytes = codec.packet_bytes(num_elements)
    device = slices.device
    sends = link.scratch("intra_send", local_size, num_nodes, packet_bytes, device=device)
    receives = link.scratch("intra_receive", local_size, num_nodes, packet_bytes, device=device)
    total = link.scratch("intra_sum", num_nodes, num_elements, dtype=torch.float32, device=device)
    grid = link.topology
    buffers = {peer: receives[grid.local_rank(peer)].view(-1) for peer in link.local_peers()}
    length = partial(_used, codec, num_nodes) if codec.has_variable_length else Tensor.numel
    round_ = link.exchange(operation, "intra", buffers, length)

    def pack() -> None:
        places = [(y, i) for i in range(local_size) for y in range(num_nodes)]
        xs = [piece for column in slices.unbind(1) for piece in column.unbind()]
        numbers, outs = [counters[y][i] for y, i in places], sends.flatten(0, 1).unbind()
        if lost is None:
            codec.encode_all(xs, outs, seed=seed, counters=numbers)
        else:
            pieces = [(HOP_INTRA, grid.rank(y, i)) for y, i in places]
            _encode_each(codec, lost, xs, pieces, seed, numbers, outs)
        for peer in buffers if codec.has_variable_length else ():
            _close_up(codec, sends[grid.local_rank(peer)])

    yield from link.work("encode_s", operation, pack)
    for peer in buffers:
        round_.send(peer, sends[grid.local_rank(peer)].view(-1))
    yield from round_.finish()

    def add_up() -> list[RotatedSum]:
        arrived = [sends[i].unbind() if i == link.local_rank else _apart(codec, receives[i]) for i in range(local_size)]
        return [RotatedSum.of(codec, [packets[y] for packets in arrived], total[y]) for y in range(num_nodes)]

    return (yield from link.work("decode_s", operation, add_up))


def _close_up(codec: Codec, packets: Tensor) -> None:
    """Move packets of variable length, uint8 [num, bytes], one behind another, each from a whole word on."""
    message, at = packets.view(-1), 0
    for packet in packets:
        length = codec.length(packet)
        message[at : at + length] = packet[:length].clone()
        at += _words(length)


def _ends(codec: Codec, num: int, message: Tensor) -> list[tuple[int, int]]:
    """Where each of `num` packets begins and ends in a message that `_close_up` made."""
    found, at, most = [], 0, message.numel() // num
    for _ in range(num):
        end = at + codec.length(message[at : at + most])
        found.append((at, end))
        at = _words(end)
    return found


def _used(codec: Codec, num: int, message: Tensor) -> int:
    """Bytes of a message that travel."""
    return _ends(codec, num, message)[-1][1]


def _apart(codec: Codec, packets: Tensor) -> Sequence[Tensor]:
    """The packets in the message that fills [num, bytes]."""
    if not codec.has_variable_length:
        return packets.unbind()
    message = packets.view(-1)
    return [message[start:end] for start, end in _ends(codec, len(packets), message)]


def _words(num_bytes: int) -> int:
    return -(-num_bytes // 4) * 4


def _hop_inter(
    link: Link,
    sums: list[RotatedSum],
    codec: Codec,
    seed: int,
    counters: list[int],
    operation: str,
    lost: Feedback | None,
) -> Rounds[RotatedSum]:
    """Sum over the nodes of this rank's slice, n elements. `sums` must not be used afterwards."""
    num_nodes, num_elements, device = len(sums), sums[0].values.numel(), sums[0].values.device
    packet_bytes = codec.packet_bytes(num_elements)
    sends = link.scratch("inter_send", num_nodes, packet_bytes, device=device)
    receives = link.scratch("inter_receive", num_nodes, packet_bytes, device=device)
    total = link.scratch("inter_sum", num_elements, dtype=torch.float32, device=device)
    grid = link.topology
    buffers = {peer: receives[grid.node(peer)] for peer in link.node_peers()}
    round_ = link.exchange(operation, "inter", buffers, codec.length)

    def pack() -> None:
        outs = sends.unbind()
        if lost is None:
            RotatedSum.encode_all(sums, codec, seed=seed, counters=counters, outs=outs)
        else:
            pieces = [(HOP_INTER, y) for y in range(num_nodes)]
            _encode_each(codec, lost, [part.rotated_back() for part in sums], pieces, seed, counters, outs)

    yield from link.work("encode_s", operation, pack)
    for peer in buffers:
        round_.send(peer, sends[grid.node(peer)])
    yield from round_.finish()

    def add_up() -> RotatedSum:
        packets = [sends[y] if y == link.node else receives[y] for y in range(num_nodes)]
        return RotatedSum.of(codec, packets, total)

    return (yield from link.work("decode_s", operation, add_up))


def _encode_each(
    codec: Codec, lost: Feedback, xs: Sequence[Tensor], pieces: Sequence[tuple[int, int]], seed: int,
    counters: Sequence[int], outs: Sequence[Tensor],
) -> None:  # fmt: skip
    for x, piece, counter, out in zip(xs, pieces, counters, outs, strict=True):
        lost.encode(codec, x, piece, seed=seed, counter=counter, out=out)


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
    length = slice_length(x.numel(), world_size, intra, inter, gather)
    padded = torch.zeros(world_size * length, device=x.device)
    padded[: x.numel()].copy_(x.reshape(-1))
    shard = yield from reduce_scatter(link, padded, intra, inter, seed=seed, operation=operation, lost=lost)
    own = lost.gather if lost is not None else None
    total = yield from all_gather(link, shard, gather, seed=seed, operation=operation, lost=own)
    return total.view(-1)[: x.numel()].view(x.shape)


def slice_length(num_elements: int, world_size: int, *codecs: Codec) -> int:
    """Elements of each rank's slice of a tensor that is padded to where the codecs can cut it."""
    block = lcm(*(codec.block for codec in codecs))
    return -(-num_elements // (world_size * block)) * block


def all_reduce_bytes(num_elements: int, grid: Topology, intra: Codec, inter: Codec, gather: Codec) -> dict[str, int]:
    """Bytes that one rank sends on each level in `all_reduce`."""
    n = slice_length(num_elements, grid.world_size, intra, inter, gather)
    return added(reduce_bytes(grid, n, intra, inter), gather_bytes(grid, gather.packet_bytes(n)))
