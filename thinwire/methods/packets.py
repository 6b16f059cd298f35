"""Packets of a bucket's gradients in one message, which goes to every other rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives.gather import all_gather_packets
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.methods.reduction import OPERATION

# Packets are aligned to 8-byte words of a message.
WORD_BYTES = 8


@dataclass(frozen=True)
class PacketSection:
    """Place of a gradient's packet in the message of its bucket."""

    codec: Codec
    num_elements: int
    start: int

    def of(self, message: Tensor) -> Tensor:
        return message[self.start : self.start + self.codec.packet_bytes(self.num_elements)]

    @property
    def end(self) -> int:
        """Start of the next packet."""
        return self.start + -(-self.codec.packet_bytes(self.num_elements) // WORD_BYTES) * WORD_BYTES


def sections_of(
    shapes: Mapping[str, torch.Size], codec_of: Callable[[str, torch.Size], Codec]
) -> dict[str, PacketSection]:
    """The layout of a message that holds gradients of these shapes, in their order."""
    sections: dict[str, PacketSection] = {}
    start = 0
    for name, shape in shapes.items():
        sections[name] = PacketSection(codec_of(name, shape), shape.numel(), start)
        start = sections[name].end
    return sections


def message_bytes(sections: Mapping[str, PacketSection]) -> int:
    """Bytes of the whole message."""
    return max((section.end for section in sections.values()), default=0)


def sums_of(link: Link, message: Tensor, sections: Mapping[str, PacketSection]) -> Rounds[list[Tensor]]:
    """The sum of all ranks' decoded packets, by section: flat, fp32, in rank order, the same bits on all ranks."""
    gathered = yield from all_gather_packets(link, message, OPERATION)
    grid = link.topology
    totals = []
    with link.timed("decode_s", OPERATION):
        for section in sections.values():
            messages = [gathered[grid.local_rank(rank), grid.node(rank)] for rank in range(grid.world_size)]
            packets = [section.of(message) for message in messages]
            totals.append(section.codec.decode_sum(packets, torch.zeros(section.num_elements), add=True))
    return totals
