"""A row of a tensor for every node, from every node."""

from __future__ import annotations

from torch import Tensor

from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds


def all_to_all_nodes(link: Link, sends: Tensor, *, operation: str = "all_to_all") -> Rounds[Tensor]:
    """Row y of uint8 `sends` [num_nodes, bytes] to node y, between ranks of one local rank; scratch of the link.

    Row y of the result, of the same shape, came from node y.
    """
    received = link.scratch("exchanged", *sends.shape)
    received[link.node].copy_(sends[link.node])
    if link.topology.num_nodes > 1 and sends.numel():
        receives = {peer: received[link.topology.node(peer)] for peer in link.node_peers()}
        round_ = link.exchange(operation, "inter", receives)
        for peer in receives:
            round_.send(peer, sends[link.topology.node(peer)])
        yield from round_.finish()
    return received
