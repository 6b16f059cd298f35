"""The bytes that an outer loop sends, and its rows of the start-up table."""

from __future__ import annotations

from thinwire.islands.loop import OuterLoop
from thinwire.layout.layout import Layout
from thinwire.layout.zeros import describe_zeros
from thinwire.methods.outer.exchange import sent_bytes
from thinwire.methods.outer.parameters import NUM_WORDS
from thinwire.table import Row


class LoopTraffic:
    """Bytes of a loop's exchanges, computed from shapes, and the rows that describe the loop."""

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop

    @property
    def num_islands(self) -> int:
        """Number of islands present; 0 on ranks that don't know, all but the island's first."""
        connected = self._loop.exchanges.connected
        return len(connected.members) if connected is not None else 0

    def exchange_bytes(self, number: int) -> int:
        """Payload bytes that this rank sends to other islands for one exchange of a fragment."""
        exchanges = self._loop.exchanges
        if exchanges.connected is None:
            return 0
        return sent_bytes(exchanges.method.codec, exchanges.fragments[number].numel, self.num_islands)

    @property
    def bytes_per_round(self) -> int:
        """Payload bytes that this rank sends in sync_every steps, each fragment once, besides the inner strategy's."""
        fragments = self._loop.exchanges.fragments
        return sum(self.exchange_bytes(n) + self._inside_bytes(f) for n, f in enumerate(fragments))

    @property
    def bytes_per_step(self) -> int:
        """The same spread over the steps of a round, rounded up."""
        return -(-self.bytes_per_round // self._loop.method.sync_every)

    def _inside_bytes(self, fragment: Layout) -> int:
        """Bytes inside the island: collecting a fragment on the first rank, and sending the merged one to all."""
        host, comm = self._loop.host, self._loop.host.comm
        if comm is None or comm.world_size == 1:
            return 0
        reads, writes = host.handover_bytes(fragment.names)
        grid, node, local_rank = comm.topology, comm.topology.node(comm.rank), comm.topology.local_rank(comm.rank)
        copies = (grid.local_size - 1 if local_rank == 0 else 0) + (grid.num_nodes - 1 if comm.rank == 0 else 0)
        copies = copies if node == 0 or local_rank == 0 else 0
        return (1 + bool(self._loop.method.mix)) * reads + writes + 4 * (fragment.numel + NUM_WORDS) * copies

    def rows(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        exchanges, method, codec = self._loop.exchanges, self._loop.method, self._loop.method.codec
        connected = exchanges.connected
        largest = max(map(self.exchange_bytes, range(len(exchanges.fragments))))
        held = {row: f"{num_bytes / 1e6:.3f} MB" for row, num_bytes in exchanges.state.kept_bytes().items()}
        schedule = f"every {method.sync_every} steps"
        if method.start_after:
            schedule += f", every step until step {method.start_after}"
        overlap = f"{method.overlap_steps} steps" if method.overlap_steps else "off: all wait for each exchange"
        going_on = f"{method.mix:g} of the island's own weights" if method.mix else "the outer parameters"
        outer_kept = held[str(exchanges.state.parameters.row)]
        outer = f"descent, rate {method.outer_lr:g}, without momentum"
        if method.outer_momentum:
            outer = f"Nesterov, rate {method.outer_lr:g}, momentum {method.outer_momentum:g}"
        rows: list[Row] = [
            ("islands", f"{self.num_islands}, this is {connected.island if connected else '?'}", ""),
            self._loop.start_row,
            ("exchange of each fragment", schedule, f"{len(exchanges.fragments)} fragment(s), {method.pattern}"),
            ("outer gradients", str(codec), f"{codec.bits_per_element:.4g} bits an element"),
            *describe_zeros([codec]),
            ("outer optimizer", outer, f"{outer_kept} on the CPU of each island's first rank"),
            ("overlap of an exchange", overlap, ""),
            ("after an exchange go on with", going_on, ""),
            ("largest exchange", f"{largest / 1e6:.3f} MB", "sent by each island"),
        ]  # fmt: skip
        if method.error_decay is not None:
            effect = f"{method.error_decay:g} of it joins the next"
            if codec.traits.lossless:
                effect = f"no effect: {codec} loses nothing"
            rows.append(("error feedback", effect, f"{held['error feedback of outer gradients']} beside them"))
        if (correction := self._loop.correction) is not None:
            kept = sum(correction.state.kept_bytes().values()) / 1e6
            rows.append(("correction", str(correction.method), f"behind clipping; {kept:.3f} MB on each rank"))
        return rows
