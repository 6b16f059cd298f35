"""First floor: moves packets between ranks, on one communication thread that posts them in order, and counts them."""

from thinwire.collectives.communicator import Communicator, communication_thread
from thinwire.collectives.exchange import Wire
from thinwire.collectives.meter import Meter, MeterReading, OpReading
from thinwire.collectives.peers import Peers, WorldPeers
from thinwire.collectives.topology import Topology

__all__ = [
    "Communicator",
    "Meter",
    "MeterReading",
    "OpReading",
    "Peers",
    "Topology",
    "Wire",
    "WorldPeers",
    "communication_thread",
]
