"""A shift: every rank sends its packet to the rank a fixed number of places further on."""

from __future__ import annotations

from torch import Tensor

from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.together import together


def shift(
    link: Link, packet: Tensor, by: int = 1, *, operation: str = "shift", sends: bool = True, receives: bool = True
) -> Rounds[Tensor]:
    """Send `packet` to rank + by, and return that of rank - by; ranks are counted around.

    sends, receives: whether this rank's packet travels, and that of rank - by. Both ends of a message say the same.

    Shape:
        packet: uint8 [bytes], of the same length on all ranks; read until the job ends.
        result: the same, memory of its own; empty if nothing is received.
    """
    size = link.topology.world_size
    target, source = (link.rank + by) % size, (link.rank - by) % size
    received = packet.new_empty(packet.shape if receives else 0)
    if target == link.rank:
        return received.copy_(packet)
    exchanges = []
    # Both ends of a message count it on the level that lies between them.
    for level in ("intra", "inter"):
        comes = receives and _level(link, source) == level
        goes = sends and _level(link, target) == level
        exchange = link.exchange(operation, level, {source: received} if comes else {})
        if goes:
            exchange.send(target, packet)
        if comes or goes:
            exchanges.append(exchange.finish())
    yield from together(*exchanges)
    return received


def _level(link: Link, peer: int) -> str:
    return "intra" if link.topology.node(peer) == link.node else "inter"
