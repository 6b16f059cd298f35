"""All-to-all between nodes: each node sends one row of a tensor to every node."""

from __future__ import annotations

from torch import Tensor

from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds


def all_to_all_nodes(link: Link, sends: Tensor, *, operation: str = "all_to_all") -> Rounds[Tensor]:
    """Send row y of `sends` to node y, between the ranks that have the same local rank.

    Shape:
        sends: uint8 [num_nodes, bytes].
        result: the same shape, scratch of the link; row y came from node y.
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
