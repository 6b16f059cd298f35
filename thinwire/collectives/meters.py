"""Several meters read as one."""

from __future__ import annotations

from thinwire.collectives import Meter, MeterReading, Peers


class Meters(Meter):
    """The meters of an island and of its peers, read as one."""

    def __init__(self, own: Meter, peers: Peers | None) -> None:
        super().__init__()
        self._peers = peers
        self._parts = [own]

    def snapshot(self) -> MeterReading:
        """The totals so far."""
        # Peers that have met anew have another one, which starts at nothing.
        if self._peers is not None and self._peers.comm.meter not in self._parts:
            self._parts.append(self._peers.comm.meter)
        return sum((meter.snapshot() for meter in self._parts), MeterReading())
