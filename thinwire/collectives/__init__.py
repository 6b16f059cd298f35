"""First floor: moves packets between ranks, on one communication thread that posts them in order, and counts them."""

from thinwire.collectives.communicator import Communicator, communication_thread
from thinwire.collectives.elastic import ElasticPeers, Membership, host_meeting
from thinwire.collectives.exchange import Members, Wire
from thinwire.collectives.meter import Meter, MeterReading, OpReading
from thinwire.collectives.peers import Peers, WorldPeers
from thinwire.collectives.topology import Topology

__all__ = [
    "Communicator",
    "ElasticPeers",
    "Members",
    "Membership",
    "Meter",
    "MeterReading",
    "OpReading",
    "Peers",
    "Topology",
    "Wire",
    "WorldPeers",
    "communication_thread",
    "host_meeting",
]
