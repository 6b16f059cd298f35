"""All-to-all of rows in two hops: inside each node, then between nodes, with one message for each other node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.collectives.all_to_all import NUMBER_BYTES, Room, RowCodec, all_to_all_counted
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds


@dataclass
class Rooms:
    """What two ranks expect of each other, in bytes, on each hop."""

    inside: Room = field(default_factory=Room)
    between: Room = field(default_factory=Room)


def all_to_all_two_hops(
    link: Link, rows: Tensor, counts: Sequence[int], notes: Tensor, rooms: Rooms, how: RowCodec,
    numbers: Tensor, *, operation: str = "all_to_all",
) -> Rounds[tuple[Tensor, Tensor, list[int], Tensor]]:  # fmt: skip
    """`all_to_all_counted` on G nodes of L ranks: rank (g, l) sends what is for (any, m) to (g, m), which passes it on.

    Rows are rounded by their source, once, as in one hop. Between nodes a rank has G - 1 peers, not (G - 1) L, and each
    message carries the rows of L ranks. Own rows are rounded, too.

    Args:
        notes: int64 [ranks, n], on the CPU; numbers for each rank. rows, counts, how, numbers: see all_to_all_rows.

    Returns the rows, their numbers, how many came from each rank, and the notes from each rank.
    Source: Hwang et al., "Tutel" (MLSys 2023), section 3.4.
    """
    grid = link.topology
    inside = [grid.rank(link.node, place) for place in range(grid.local_size)]
    between = [grid.rank(node, link.local_rank) for node in range(grid.num_nodes)]
    head = NUMBER_BYTES * (1 + notes.shape[1])
    packets = []
    of_peers = zip(rows.split(list(counts)), numbers.split(list(counts)), strict=True)
    for peer, (block, own) in enumerate(of_peers):
        packet = torch.empty(head + how.num_bytes(len(block)), dtype=torch.uint8, device=rows.device)
        packet[:head].view(torch.int64).copy_(torch.tensor([len(block), *notes[peer].tolist()]))
        packets.append(packet)
        with link.timed("encode_s", operation):
            how.pack(block, own, packet[head:])
    by_place = [[packets[grid.rank(node, place)] for node in range(grid.num_nodes)] for place in range(len(inside))]
    # [places][nodes], of whoever sent them inside this node.
    passed = yield from _hop(link.subgroup(inside), by_place, rooms.inside, operation)
    by_node = [[passed[place][node] for place in range(len(inside))] for node in range(len(between))]
    arrived = yield from _hop(link.subgroup(between), by_node, rooms.between, operation)
    came, told, blocks, their_numbers = [], [], [], []
    # Copies: a packet among others may begin anywhere.
    for packet in (packet.clone() for of_node in arrived for packet in of_node):
        count, *noted = packet[:head].view(torch.int64).tolist()
        came.append(count)
        told.append(noted)
        their_numbers.append(torch.zeros(count, dtype=torch.int64))
        blocks.append(rows.new_empty(count, rows.shape[1]))
        with link.timed("decode_s", operation):
            how.unpack(packet[head:], blocks[-1], their_numbers[-1])
    noted_by_rank = torch.tensor(told, dtype=torch.int64).view(notes.shape)
    return torch.cat(blocks), torch.cat(their_numbers), came, noted_by_rank


def _hop(link: Link, packets: Sequence[Sequence[Tensor]], room: Room, operation: str) -> Rounds[list[list[Tensor]]]:
    """Send some packets to each rank, equally many; those that came, by rank."""
    sizes = torch.tensor([[packet.numel() for packet in each] for each in packets])
    octets = torch.cat([packet for each in packets for packet in each])[:, None]
    found, _, _, theirs = yield from all_to_all_counted(
        link, octets, sizes.sum(1).tolist(), sizes, room, RowCodec(1, torch.uint8), operation=operation
    )
    parts = found[:, 0].split(theirs.flatten().tolist())
    width = sizes.shape[1]
    return [list(parts[at : at + width]) for at in range(0, len(parts), width)]
