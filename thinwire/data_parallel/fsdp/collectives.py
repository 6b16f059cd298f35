"""FSDP2's plug-in points on thinwire's collectives: jobs of the communication thread, metered, over any codec."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import Communicator
from thinwire.collectives.algorithms import Link, all_gather_packets, reduce_scatter
from thinwire.collectives.rounds import Rounds


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
    """One direction of one FSDP2 module: what torch calls a Comm, whose base class is private."""

    def __init__(self, comm: Communicator, codec: Codec) -> None:
        self.comm, self.codec = comm, codec

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a buffer; FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Plug):
    """Every rank's shard after the codec, the own one included, so that all ranks compute with the same weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill output_tensor, fp32 [world_size * n], from input_tensor, fp32 [n], which is a view into it."""
        arriving = Arriving(self.comm, self.comm.submit(lambda link: self._job(link, output_tensor, input_tensor)))
        if async_op:
            return arriving
        arriving.wait()
        return None

    def _job(self, link: Link, whole: Tensor, shard: Tensor) -> Rounds[None]:
        grid, n = link.topology, shard.numel()
        with link.timed("encode_s", "weights"):
            packet = link.scratch("weights", self.codec.packet_bytes(n), device=shard.device)
            self.codec.encode(shard, out=packet)
        gathered = yield from all_gather_packets(link, packet, "weights")
        with link.timed("decode_s", "weights"):
            for rank in range(grid.world_size):
                packet = gathered[grid.local_rank(rank), grid.node(rank)]
                self.codec.decode(packet, n, out=whole[rank * n : (rank + 1) * n])


class ReduceScatter(Plug):
    """The mean over ranks, summed in fp32 in rank order, while backward goes on.

    FSDP2 makes `.grad` a view of the output without reading it, so the job may still be filling it; `finish` waits.
    """

    def __init__(self, comm: Communicator, codec: Codec) -> None:
        super().__init__(comm, codec)
        self._reducing: Future[None] | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill output_tensor, fp32 [n], from input_tensor, fp32 [world_size * n]; once before each `finish`."""
        # Of one rank, versions differ in whether they come here, and with which operation.
        assert op == dist.ReduceOp.AVG or self.comm.world_size == 1
        assert output_tensor.dtype == torch.float32
        if self._reducing is not None:
            raise RuntimeError(
                "a second backward reached gradients that were sent already: wrap every forward and backward but the "
                "last of a step in `with optimizer.no_sync():`"
            )
        self._reducing = self.comm.submit(lambda link: self._job(link, output_tensor, input_tensor))
        return None

    def _job(self, link: Link, mean: Tensor, gradients: Tensor) -> Rounds[None]:
        total = yield from reduce_scatter(link, gradients, self.codec, self.codec, operation="gradients")
        torch.mul(total, 1.0 / link.topology.world_size, out=mean)

    def finish(self) -> None:
        """Return when the output is complete."""
        if self._reducing is not None:
            self.comm.wait(self._reducing)
            self._reducing = None
