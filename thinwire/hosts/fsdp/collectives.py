"""FSDP2's plug-in points on thinwire's collectives: jobs of the communication thread, metered, over any codec."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire import _compat
from thinwire.codecs import Identity, derive_seed
from thinwire.collectives import Communicator
from thinwire.collectives.gather import all_gather_packets, gather_across_nodes, gather_inside_node
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import reduce_scatter
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.hosts.fsdp.layout import (
    LayoutError,
    StaleWeightsError,
    Unit,
    Version,
    at_most,
)
from thinwire.layout.sections import Sections
from thinwire.methods.data.loco import LoCo

GRADIENTS, WEIGHTS = 0, 1
# Whole gradients that may wait for the link at once; backward stands still for more.
MAX_REDUCTIONS = 4


class Arriving(dist.Work):
    """A job of the communication thread, as FSDP2 waits for it."""

    def __init__(self, comm: Communicator, future: Future[None]) -> None:
        super().__init__()
        self._comm, self._future = comm, future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the job is done, which has a timeout of its own; raises what it raised."""
        self._comm.wait(self._future)
        return True


class Plug:
    """One direction of one FSDP2 module: what torch calls a Comm, whose base class is private.

    count: the collectives of new values so far; with the unit's number and `seed` it seeds the codecs of the next.
    """

    def __init__(self, comm: Communicator, unit: Unit, seed: int) -> None:
        self.comm, self.unit, self.seed = comm, unit, seed
        self.count = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a buffer; FSDP2 asks for it."""
        # An evaluation may run in inference mode, and the communication thread, which writes to this, does not.
        with torch.inference_mode(False):
            return torch.empty(*size, dtype=dtype, device=device)

    def next_seed(self, kind: int) -> int:
        """Another one for every collective of new values."""
        self.count += 1
        return derive_seed(self.seed, self.count - 1, self.unit.index, kind)


class AllGather(Plug):
    """Every rank's shard after the codec, the own one included, so that all ranks compute with the same weights.

    keep: hold on to what came from other nodes, the node's part of all packets: num_nodes packets a rank. As long as
    nothing writes to the weights, later gathers (in backward, of further micro-batches, in evaluation) take them from
    there, so that nothing crosses between nodes. FSDP2 doesn't say which gather is which; the version of the weights
    tells, and `forget` after an optimizer's step. Writes that neither tells are an error.
    Source: ZeRO++ (ICLR 2024), sections 3.1 (quantised weights) and 3.2 (secondary partition), here in packets.
    """

    def __init__(self, comm: Communicator, unit: Unit, seed: int, keep: bool, called: Callable[[Unit], None]) -> None:
        super().__init__(comm, unit, seed)
        self.keep = keep
        self.codec = unit.weights()
        self._called = called
        self._kept: Tensor | None = None
        self._kept_of: Version | None = None
        self._kept_bits: list[int] = []

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill output_tensor, [world_size * n], from input_tensor, [n], which is a view into it."""
        self._called(self.unit)
        if output_tensor.dtype != self.unit.dtype:
            raise ConfigError(
                f"{self.unit.names[0]!r} is gathered as {output_tensor.dtype} and was as {self.unit.dtype} when "
                "compress_fsdp was called: convert the model before it"
            )
        if self.comm.world_size == 1:
            return None
        job = self._job_of(output_tensor, input_tensor, group)
        arriving = Arriving(self.comm, self.comm.submit(job))
        if async_op:
            return arriving
        arriving.wait()
        return None

    def forget(self, *, replaced: bool = False) -> None:
        """The weights have changed, or may have: the next gather takes them from their owners."""
        self._kept_of = None

    def state(self) -> Tensor | None:
        """What must be saved for the next gather to be the same, besides `count`."""
        return None

    def load(self, state: Tensor | None) -> None:
        """Restore what `state` gave."""
        self.forget()

    @property
    def kept_bytes(self) -> int:
        """Memory of this rank's part of the secondary partition."""
        return self.comm.topology.num_nodes * self.codec.packet_bytes(self.codec.numel) if self.keep else 0

    def gather_bytes(self) -> int:
        """Payload this rank sends for a gather of new weights."""
        return (self.comm.world_size - 1) * self.codec.packet_bytes(self.codec.numel)

    def again_bytes(self) -> int:
        """Payload this rank sends for a gather of weights that it has sent before."""
        grid = self.comm.topology
        packet = self.codec.packet_bytes(self.codec.numel)
        return (grid.local_size - 1) * grid.num_nodes * packet if self.keep else self.gather_bytes()

    def _job_of(self, whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Callable[[Link], Rounds[None]]:
        if group.size() != self.comm.world_size:
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
        """What changed unnoticed may have changed on this rank alone: too late to agree on a gather."""
        changed = [name for name, a, b in zip(self.unit.names, bits, self._kept_bits, strict=True) if a != b]
        if changed:
            raise StaleWeightsError(
                f"{changed[0]!r} was written in a way that torch does not count, such as through .data or by a "
                "torch._foreach function: call weights_changed() of what compress_fsdp gave after it, on all ranks"
            )

    def _positions(self, group: dist.ProcessGroup) -> list[int]:
        return [self.comm.global_ranks.index(rank) for rank in dist.get_process_group_ranks(group)]

    def _encode(self, link: Link, shard: Tensor, seed: int) -> Tensor:
        with link.timed("encode_s", "weights"):
            packet = link.scratch("weights", self.codec.packet_bytes(shard.numel()), device=shard.device)
            return self.codec.encode(shard, seed=derive_seed(seed, link.rank), out=packet)

    def _decode(self, link: Link, gathered: Tensor, whole: Tensor) -> None:
        grid, n = link.topology, self.codec.numel
        with link.timed("decode_s", "weights"):
            for rank in range(grid.world_size):
                packet, shard = gathered[grid.local_rank(rank), grid.node(rank)], whole[rank * n : (rank + 1) * n]
                if whole.dtype == torch.float32:
                    self.codec.decode(packet, n, out=shard)
                else:
                    values = link.scratch("decoded", n, dtype=torch.float32, device=whole.device)
                    shard.copy_(self.codec.decode(packet, n, out=values))

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
    """Between nodes travels what the weights differ by from a reference, which every node keeps once.

    For the shard w of rank r, and its reference m on r and on the ranks of the same local rank on other nodes:
        d = C(w - m) is sent;    m <- m + d
    The first gather, and one after `forget(replaced=True)`, sends w exactly. Inside a node m itself travels, in the
    dtype of the gathered weights. What C loses stays in w - m and comes back with the next difference.
    Memory: fp32 [num_nodes, n] a rank, 4 N / local_size bytes in all for N parameters.
    Source: SDP4Bit, NeurIPS 2024, section 3.1; ZeRO++ (ICLR 2024), section 3.2, for who keeps what.
    """

    def __init__(self, comm: Communicator, unit: Unit, seed: int, keep: bool, called: Callable[[Unit], None]) -> None:
        super().__init__(comm, unit, seed, True, called)
        self._reference: Tensor | None = None
        self._exact = Sections.of([(at_most(Identity(), unit.dtype), unit.shard_numel)])

    @property
    def kept_bytes(self) -> int:
        """Memory of this rank's part of the reference."""
        return 4 * self.comm.topology.num_nodes * self.codec.numel

    def forget(self, *, replaced: bool = False) -> None:
        """The weights have changed, or may have; replaced: so much that a difference would be a poor guess of them."""
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
        """Payload this rank sends for a gather of new weights."""
        return (self.comm.topology.num_nodes - 1) * self.codec.packet_bytes(self.codec.numel) + self.again_bytes()

    def again_bytes(self) -> int:
        """Payload this rank sends for a gather of weights that it has sent before."""
        grid = self.comm.topology
        return (grid.local_size - 1) * grid.num_nodes * self.codec.numel * self.unit.dtype.itemsize

    def _gather_and_keep(self, link: Link, whole: Tensor, shard: Tensor, seed: int) -> Rounds[None]:
        codec, n, num_nodes = self.codec, self.codec.numel, link.topology.num_nodes
        if self._reference is None:
            self._reference, codec = torch.zeros(num_nodes, n, device=shard.device), self._exact
        reference = self._reference
        with link.timed("encode_s", "weights"):
            packet = link.scratch("weights", codec.packet_bytes(n), device=shard.device)
            codec.encode(shard - reference[link.node], seed=derive_seed(seed, link.rank), out=packet)
        packets = link.scratch("packets", num_nodes, packet.numel(), device=shard.device)
        yield from gather_across_nodes(link, packet, packets, "weights")
        with link.timed("decode_s", "weights"):
            for node in range(num_nodes):
                codec.decode_add(packets[node], reference[node])
        yield from self._spread(link, whole, "weights")

    def _spread(self, link: Link, whole: Tensor, operation: str) -> Rounds[None]:
        assert self._reference is not None
        grid, n, num_bytes = link.topology, self.codec.numel, self.codec.numel * whole.itemsize
        gathered = link.scratch("gathered", grid.local_size, grid.num_nodes, num_bytes, device=whole.device)
        gathered[link.local_rank].view(whole.dtype).copy_(self._reference)
        yield from gather_inside_node(link, gathered, operation)
        for rank in range(grid.world_size):
            values = gathered[grid.local_rank(rank), grid.node(rank)].view(whole.dtype)
            whole[rank * n : (rank + 1) * n].copy_(values)


def gather_exact(link: Link, whole: Tensor, shard: Tensor, ranks: Sequence[int]) -> Rounds[None]:
    """Fill `whole` with the bits of the shards of `ranks`, as many as fit; this rank's own lies in it already.

    FSDP2 gathers so in backward where reshard_after_forward is a number: the values have been through a codec before.
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


class ReduceScatter(Plug):
    """The mean over ranks, in two hops, summed in fp32 in rank order, while backward goes on where FSDP2 permits it.

    FSDP2 makes `.grad` a view of the output. Where it does no more than that, the job may still be filling the output
    when backward goes on; the end of backward waits for it. Otherwise the output is complete on return, and `waits`
    counts the reasons.
    Source: ZeRO++ (ICLR 2024), section 3.3, with the exact mean.
    """

    def __init__(
        self, comm: Communicator, unit: Unit, seed: int, under_way: deque[Future[None]], loco: LoCo | None
    ) -> None:
        super().__init__(comm, unit, seed)
        self.loco = loco
        self.waits: dict[str, int] = {}
        # Of all units together.
        self._under_way = under_way
        self._checked = False

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill output_tensor, [n], from input_tensor, [world_size * n]."""
        factor = _compat.factor_of(op, self.comm.world_size)
        present = self.unit.take_reached(output_tensor.numel())
        seed = self.next_seed(GRADIENTS)
        job = partial(self._job, mean=output_tensor, gradients=input_tensor, factor=factor, present=present, seed=seed)
        future = self.comm.submit(job)
        reason = self._reason_to_wait(op, output_tensor.dtype)
        if reason:
            self.waits[reason] = self.waits.get(reason, 0) + 1
            self.comm.wait(future)
        else:
            self._wait_later(future, output_tensor, present)
        return None

    def reduce_bytes(self) -> int:
        """Payload this rank sends where all parameters have a gradient: hop 1, then hop 2."""
        intra, inter = self.unit.gradients(self.unit.trained())
        grid = self.comm.topology
        hop_1 = (grid.local_size - 1) * grid.num_nodes * intra.packet_bytes(intra.numel)
        return hop_1 + (grid.num_nodes - 1) * inter.packet_bytes(inter.numel)

    def _reason_to_wait(self, op: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> str:
        if op == dist.ReduceOp.SUM:
            return "it is divided after the sum"
        return self.unit.group.reads_gradient_at_once(dtype)

    def _wait_later(self, future: Future[None], mean: Tensor, present: list[int]) -> None:
        if not _compat.at_end_of_backward(partial(self._finish, future, mean, present)):
            self.comm.wait(future)
            return
        self._under_way.append(future)
        while len(self._under_way) > MAX_REDUCTIONS:
            self.comm.wait(self._under_way.popleft())

    def _finish(self, future: Future[None], mean: Tensor, present: list[int]) -> None:
        self.comm.wait(future)
        if not self._checked:
            self._check_views(mean, present)
            self._checked = True

    def _check_views(self, mean: Tensor, present: list[int]) -> None:
        """Whether FSDP2 has cut the output as thinwire filled it; raises LayoutError."""
        start = 0
        for i in present:
            param = self.unit.params[i]
            grad = param.sharded.grad
            local = grad.to_local() if isinstance(grad, DTensor) else None
            if local is None or (local.numel() and local.data_ptr() != mean[start:].data_ptr()):
                raise LayoutError(
                    f"torch {torch.__version__} does not take the gradient of {self.unit.names[i]!r} from where "
                    "thinwire puts it: use torch 2.11 to 2.13, and tell thinwire's authors of this version"
                )
            start += param.shard_numel

    def _job(
        self, link: Link, mean: Tensor, gradients: Tensor, factor: float, present: list[int], seed: int
    ) -> Rounds[None]:
        intra, inter = self.unit.gradients(present)
        memory = self.loco.of(present) if self.loco is not None else None
        total = yield from reduce_scatter(link, gradients, intra, inter, seed=seed, operation="gradients", lost=memory)
        torch.mul(total, factor, out=mean)
