"""Moves packets between ranks on one communication thread, and counts their bytes."""

from thinwire.collectives.communicator import Communicator
from thinwire.collectives.elastic import ElasticPeers, Membership, host_meeting
from thinwire.collectives.mailbox import Expected, Label, Mailbox
from thinwire.collectives.meter import Meter, MeterReading
from thinwire.collectives.peers import Peers, WorldPeers
from thinwire.collectives.topology import Topology

__all__ = [
    "Communicator", "ElasticPeers", "Expected", "Label", "Mailbox", "Membership", "Meter", "MeterReading", "Peers",
    "Topology", "WorldPeers", "host_meeting",
]  # fmt: skip
