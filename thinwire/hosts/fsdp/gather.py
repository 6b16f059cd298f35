"""FSDP2's plug-in for gathers: metered jobs of the communication thread, over any codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import derive_seed
from thinwire.collectives import Communicator
from thinwire.collectives.gather import all_gather_packets, gather_across_nodes, gather_inside_node
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.hosts.fsdp.mesh import RankGroup
from thinwire.hosts.fsdp.unit import GatheredUnit, StaleWeightsError, Version

GRADIENTS, WEIGHTS = 0, 1


class Arriving(dist.Work):
    """A job of the communication thread, in the form in which FSDP2 waits for it."""

    def __init__(self, comm: Communicator, future: Future[None]) -> None:
        super().__init__()
        self._comm, self._future = comm, future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the job, which has a timeout of its own. Raises its error."""
        self._comm.wait(self._future)
        return True


class Plug:
    """One direction of one FSDP2 module. torch calls this a Comm; its base class is private.

    Args:
        axis: the ranks that cut the module's parameters.
        count: number of collectives of new values so far. With the unit's number and `seed`, it seeds the next codecs.
    """

    def __init__(self, axis: RankGroup, unit: GatheredUnit, seed: int) -> None:
        self.axis, self.comm, self.unit, self.seed = axis, axis.comm, unit, seed
        self.count = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a buffer, as FSDP2 asks for it."""
        # An evaluation may run in inference mode; the communication thread, which writes to this, does not.
        with torch.inference_mode(False):
            return torch.empty(*size, dtype=dtype, device=device)

    def next_seed(self, kind: int) -> int:
        """A new seed for every collective of new values."""
        self.count += 1
        return derive_seed(self.seed, self.count - 1, self.unit.index, kind)


class AllGather(Plug):
    """Every rank's shard after the codec, also on its owner, so that all ranks compute with the same weights.

    keep: hold the node's part of all packets (num_nodes packets per rank). Until the weights change, later gathers (in
    backward, of further micro-batches, in evaluation) use these packets, and nothing crosses between nodes. FSDP2
    doesn't say which gather is which. The version counter of the weights shows a change, and so does `forget` after an
    optimizer's step. Writes that neither of them shows are an error.
    Source: ZeRO++ (ICLR 2024), sections 3.1 (quantised weights) and 3.2 (secondary partition), here in packets.
    """

    def __init__(
        self, axis: RankGroup, unit: GatheredUnit, seed: int, keep: bool, called: Callable[[GatheredUnit], None]
    ) -> None:
        super().__init__(axis, unit, seed)
        self.keep = keep
        self.codec = unit.weights()
        self._called = called
        self._kept: Tensor | None = None
        self._kept_of: Version | None = None
        self._kept_bits: list[int] = []

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill output_tensor from input_tensor, which is a view into it.

        Shape:
            output_tensor: [world_size * n].
            input_tensor: [n].
        """
        self._called(self.unit)
        if output_tensor.dtype != self.unit.dtype:
            raise ConfigError(
                f"{self.unit.names[0]!r} is gathered as {output_tensor.dtype} and was as {self.unit.dtype} when "
                "compress_fsdp was called: convert the model before it"
            )
        if self.axis.size == 1:
            return None
        job = self._job_of(output_tensor, input_tensor, group)
        arriving = Arriving(self.comm, self.axis.submit(job))
        if async_op:
            return arriving
        arriving.wait()
        return None

    def forget(self, *, replaced: bool = False) -> None:
        """Note that the weights have or may have changed: the next gather takes them from their owners."""
        self._kept_of = None

    def state(self) -> Tensor | None:
        """State, besides `count`, that the next gather needs after a restart."""
        return None

    def load(self, state: Tensor | None) -> None:
        """Restore the state that `state` returned."""
        self.forget()

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's part of the secondary partition."""
        return self.axis.grid.num_nodes * self.packet_bytes if self.keep else 0

    @property
    def packet_bytes(self) -> int:
        """Packet size of this rank's part of the weights, in bytes."""
        return self.codec.packet_bytes(self.codec.numel) + self.unit.raw_bytes

    def gather_bytes(self) -> int:
        """Payload bytes that this rank sends in a gather of new weights."""
        return (self.axis.size - 1) * self.packet_bytes

    def again_bytes(self) -> int:
        """Payload bytes that this rank sends in a gather of weights that it has sent before."""
        grid = self.axis.grid
        return (grid.local_size - 1) * grid.num_nodes * self.packet_bytes if self.keep else self.gather_bytes()

    def _job_of(self, whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Callable[[Link], Rounds[None]]:
        if group.size() != self.axis.size:
            return partial(gather_exact, whole=whole, shard=shard, ranks=self._positions(group))
        if not self.keep:
            return partial(self._gather, whole=whole, shard=shard, seed=self.next_seed(WEIGHTS))
        version, bits = self.unit.version(), self.unit.fingerprint()
        if self._kept_of is not None and version.is_that_of(self._kept_of):
            self._refuse_stale(bits)
            return partial(self._gather_again, whole=whole)
        self._kept_of, self._kept_bits = version, bits
        return partial(self._gather_and_keep, whole=whole, shard=shard, seed=self.next_seed(WEIGHTS))

    def _refuse_stale(self, bits: list[int]) -> None:
        """Raise if weights changed without notice. Only this rank may have changed, so a gather can't be agreed on."""
        changed = [name for name, a, b in zip(self.unit.names, bits, self._kept_bits, strict=True) if a != b]
        if changed:
            raise StaleWeightsError(
                f"{changed[0]!r} was written in a way that torch does not count, such as through .data or by a "
                "torch._foreach function: after it, call weights_changed() of compress_fsdp's result on all ranks"
            )

    def _positions(self, group: dist.ProcessGroup) -> list[int]:
        return [self.axis.global_ranks.index(rank) for rank in dist.get_process_group_ranks(group)]

    def _encode(self, link: Link, shard: Tensor, seed: int) -> Tensor:
        values, rest = self.unit.split(shard)
        with link.timed("encode_s", "weights"):
            packet = link.scratch("weights", self.packet_bytes, device=shard.device)
            coded = packet[: self.packet_bytes - rest.numel()]
            self.codec.encode(values, seed=derive_seed(seed, link.rank), out=coded)
            packet[coded.numel() :].copy_(rest)
        return packet

    def _decode(self, link: Link, gathered: Tensor, whole: Tensor) -> None:
        grid, n, coded = link.topology, self.codec.numel, self.packet_bytes - self.unit.raw_bytes
        shards = whole.view(grid.world_size, -1)
        with link.timed("decode_s", "weights"):
            for rank in range(grid.world_size):
                packet = gathered[grid.local_rank(rank), grid.node(rank)]
                if whole.dtype == torch.float32:
                    self.codec.decode(packet, n, out=shards[rank])
                else:
                    values = link.scratch("decoded", n, dtype=torch.float32, device=whole.device)
                    self.codec.decode(packet[:coded], n, out=values)
                    self.unit.join(values, packet[coded:], shards[rank])

    def _gather(self, link: Link, whole: Tensor, shard: Tensor, seed: int) -> Rounds[None]:
        packet = self._encode(link, shard, seed)
        self._decode(link, (yield from all_gather_packets(link, packet, "weights")), whole)

    def _gather_and_keep(self, link: Link, whole: Tensor, shard: Tensor, seed: int) -> Rounds[None]:
        packet = self._encode(link, shard, seed)
        if self._kept is None:
            self._kept = packet.new_empty(link.topology.num_nodes, packet.numel())
        yield from gather_across_nodes(link, packet, self._kept, "weights")
        yield from self._spread(link, whole, "weights")

    def _gather_again(self, link: Link, whole: Tensor) -> Rounds[None]:
        yield from self._spread(link, whole, "weights_again")

    def _spread(self, link: Link, whole: Tensor, operation: str) -> Rounds[None]:
        assert self._kept is not None
        gathered = link.scratch("gathered", link.topology.local_size, *self._kept.shape, device=whole.device)
        gathered[link.local_rank].copy_(self._kept)
        yield from gather_inside_node(link, gathered, operation)
        self._decode(link, gathered, whole)


class DifferenceGather(AllGather):
    """Sends, between nodes, the weights' difference from a reference that every node keeps once.

    For the shard w of rank r, and its reference m on r and on the ranks of the same local rank on other nodes:
        d = C(w - m) is sent;    m <- m + d
    The first gather, and one after `forget(replaced=True)`, sends w exactly. Inside a node m itself travels, in the
    dtype of the gathered weights. The loss of C stays in w - m and is part of the next difference. Parameters that
    have no codec travel whole.
    Memory: fp32 [num_nodes, n] a rank, 4 N / local_size bytes in all for N parameters.
    Source: SDP4Bit, NeurIPS 2024, section 3.1; ZeRO++ (ICLR 2024), section 3.2, for the place of the references.
    """

    def __init__(
        self, axis: RankGroup, unit: GatheredUnit, seed: int, keep: bool, called: Callable[[GatheredUnit], None]
    ) -> None:
        super().__init__(axis, unit, seed, True, called)
        self._reference: Tensor | None = None
        self._rest: Tensor | None = None
        self._exact = unit.weights_exact()

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's part of the reference."""
        return self.axis.grid.num_nodes * (4 * self.codec.numel + self.unit.raw_bytes)

    def forget(self, *, replaced: bool = False) -> None:
        """Note that the weights have or may have changed. replaced: by values too different to send as a difference."""
        super().forget()
        if replaced:
            self._reference = None

    def state(self) -> Tensor | None:
        """The reference."""
        return self._reference

    def load(self, state: Tensor | None) -> None:
        """Restore the reference."""
        self.forget()
        self._reference = None if state is None else state.clone()

    def gather_bytes(self) -> int:
        """Payload bytes that this rank sends in a gather of new weights."""
        return (self.axis.grid.num_nodes - 1) * self.packet_bytes + self.again_bytes()

    def again_bytes(self) -> int:
        """Payload bytes that this rank sends in a gather of weights that it has sent before."""
        grid = self.axis.grid
        return (grid.local_size - 1) * grid.num_nodes * self.unit.shard_bytes

    def _gather_and_keep(self, link: Link, whole: Tensor, shard: Tensor, seed: int) -> Rounds[None]:
        codec, n, num_nodes = self.codec, self.codec.numel, link.topology.num_nodes
        values, rest = self.unit.split(shard)
        if self._reference is None:
            self._reference, codec = torch.zeros(num_nodes, n, device=shard.device), self._exact
        reference, coded = self._reference, codec.packet_bytes(n)
        with link.timed("encode_s", "weights"):
            packet = link.scratch("weights", coded + rest.numel(), device=shard.device)
            codec.encode(values - reference[link.node], seed=derive_seed(seed, link.rank), out=packet[:coded])
            packet[coded:].copy_(rest)
        packets = link.scratch("packets", num_nodes, packet.numel(), device=shard.device)
        yield from gather_across_nodes(link, packet, packets, "weights")
        with link.timed("decode_s", "weights"):
            for node in range(num_nodes):
                codec.decode_add(packets[node, :coded], reference[node])
            self._rest = packets[:, coded:].clone()
        yield from self._spread(link, whole, "weights")

    def _spread(self, link: Link, whole: Tensor, operation: str) -> Rounds[None]:
        assert self._reference is not None and self._rest is not None
        grid, shards = link.topology, whole.view(link.topology.world_size, -1)
        num_bytes = self.unit.shard_bytes
        gathered = link.scratch("gathered", grid.local_size, grid.num_nodes, num_bytes, device=whole.device)
        for node in range(grid.num_nodes):
            own = gathered[link.local_rank, node].view(whole.dtype)
            self.unit.join(self._reference[node], self._rest[node], own)
        yield from gather_inside_node(link, gathered, operation)
        for rank in range(grid.world_size):
            shards[rank].copy_(gathered[grid.local_rank(rank), grid.node(rank)].view(whole.dtype))


def gather_exact(link: Link, whole: Tensor, shard: Tensor, ranks: Sequence[int]) -> Rounds[None]:
    """Fill `whole` with the bits of the shards of `ranks`, as many as fit. It already holds this rank's own shard.

    FSDP2 gathers like this in backward if reshard_after_forward is a number. The values have been through a codec.
    """
    pieces = whole.view(len(ranks), -1).view(torch.uint8)
    peers = [rank for rank in ranks if rank != link.rank]
    nodes = {link.topology.node(rank) for rank in ranks}
    received = {peer: link.scratch(f"from {peer}", pieces.shape[1], device=whole.device) for peer in peers}
    round_ = link.exchange("weights_again", "intra" if len(nodes) == 1 else "inter", received)
    own = shard.view(torch.uint8)
    for peer in peers:
        round_.send(peer, own)
    yield from round_.finish()
    for peer in peers:
        pieces[ranks.index(peer)].copy_(received[peer])
