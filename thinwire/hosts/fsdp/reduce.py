"""FSDP2's plug-ins for gradients: the reduce_scatter, and the all_reduce of HSDP."""

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
from thinwire.codecs import derive_seed
from thinwire.collectives.feedback import Feedback
from thinwire.collectives.gather import all_gather, gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import reduce_bytes, reduce_scatter
from thinwire.collectives.rounds import Rounds
from thinwire.hosts.fsdp.gather import GRADIENTS, Plug
from thinwire.hosts.fsdp.mesh import RankGroup
from thinwire.hosts.fsdp.unit import GatheredUnit, LayoutError
from thinwire.layout.layout import sliced
from thinwire.methods.interface import GradientMemory

# Most whole gradients that may wait for the link at once; backward waits if there are more.
MAX_REDUCTIONS = 4
# Part of a reduction: takes the link, the sum so far, the present parameters, and a seed.
HopSum = Callable[[Link, Tensor, list[int], int], Rounds[Tensor]]
# Makes the memory of one module's reduction, given the elements of a rank's part of each parameter.
MemoryOf = Callable[[Sequence[int]], GradientMemory | None]


class ReduceScatter(Plug):
    """The mean over ranks, in two hops, summed in fp32 in rank order, while backward goes on if FSDP2 permits it.

    In HSDP the sum over `replicas` follows in the same job, so that FSDP2's own all_reduce has nothing left to do.
    FSDP2 makes `.grad` a view of the output. If it does nothing else, the job may still fill the output while backward
    goes on, and the end of backward waits for it. Otherwise the output is complete on return, and `waits` counts the
    reasons.
    Source: ZeRO++ (ICLR 2024), section 3.3, with the exact mean.
    """

    def __init__(
        self,
        axis: RankGroup,
        replicas: RankGroup,
        unit: GatheredUnit,
        seed: int,
        under_way: deque[Future[None]],
        memory: MemoryOf,
    ) -> None:
        super().__init__(axis, unit, seed)
        self.replicas = replicas
        numels = [param.shard_numel for param in unit.params]
        self.memories = [memory(numels), memory([-(-n // replicas.size) for n in numels])]
        if replicas.size == 1:
            self.memories.pop()
        self.waits: dict[str, int] = {}
        # The parameters that autograd reached, to be compared with other ranks.
        self.note_present: Callable[[GatheredUnit, list[int]], None] = lambda unit, present: None
        # Shared by all units.
        self._under_way = under_way
        self._checked = False
        # Elements of a sum over shards that already includes the replicas.
        self._done: Tensor | None = None
        self._present: list[int] | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill output_tensor, [n], from input_tensor, [num_shards * n]."""
        factor = _compat.factor_of(op, self.axis.size)
        present = self._take_present(output_tensor.numel())
        hops: list[HopSum] = [self._over_shards]
        reason = "it is divided after the sum" if op == dist.ReduceOp.SUM else ""
        if self.replicas.size > 1 and self.unit.group.all_reduces_at_once:
            factor *= self.unit.group.replica_factor(op, self.replicas.size)
            hops.append(self._over_replicas)
            self._done = output_tensor
        elif self.replicas.size > 1:
            self._present, reason = present, "it is summed over replicas later"
        self._submit(hops, input_tensor, output_tensor, factor, present, reason)
        return None

    def all_reduce(self, mean: Tensor, op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> None:
        """Sum `mean` over replicas in place, unless that has been done. FSDP2 calls this as its all_reduce."""
        if self._done is mean:
            self._done = None
            return
        present = self._present if self._present is not None else self._take_present(mean.numel())
        self._present = None
        factor = _compat.factor_of(op, self.replicas.size)
        reason = "it is divided after the sum" if op == dist.ReduceOp.SUM else ""
        self._submit([self._over_replicas], mean, mean, factor, present, reason)

    def reduce_bytes(self) -> int:
        """Payload bytes that this rank sends if all parameters have a gradient: over shards, then over replicas."""
        trained = self.unit.trained()
        intra, inter = self.unit.gradients(trained)
        sent = sum(reduce_bytes(self.axis.grid, intra.numel, intra, inter).values())
        return sent + self.replica_bytes()

    def replica_bytes(self) -> int:
        """Payload bytes of the sum over replicas."""
        if self.replicas.size == 1:
            return 0
        grid = self.replicas.grid
        intra, inter = self.unit.gradients(self.unit.trained(), self.replicas.size)
        back = inter if grid.num_nodes > 1 else intra
        sent = reduce_bytes(grid, intra.numel, intra, inter), gather_bytes(grid, back.packet_bytes(back.numel))
        return sum(sum(levels.values()) for levels in sent)

    def _take_present(self, numel: int) -> list[int]:
        present = self.unit.take_reached(numel)
        self.note_present(self.unit, present)
        return present

    def _submit(
        self, hops: Sequence[HopSum], start: Tensor, mean: Tensor, factor: float, present: list[int], reason: str
    ) -> None:
        seed = self.next_seed(GRADIENTS)

        def job(link: Link) -> Rounds[None]:
            total = start.float() if start.dtype == torch.float64 else start
            for hop in hops:
                total = yield from hop(link, total, present, seed)
            torch.mul(total, factor, out=mean)

        future = self.comm.submit(job)
        reason = reason or self.unit.group.reads_gradient_at_once(mean.dtype)
        if reason:
            self.waits[reason] = self.waits.get(reason, 0) + 1
            self.comm.wait(future)
        else:
            self._wait_later(future, mean, present)

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
        """Raise LayoutError unless FSDP2 has cut the output as thinwire filled it."""
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

    def _over_shards(self, link: Link, gradients: Tensor, present: list[int], seed: int) -> Rounds[Tensor]:
        intra, inter = self.unit.gradients(present)
        memory = self._memory(0, present)
        if self.replicas.size > 1:
            # With the same noise on all replicas, their mean would have a larger error.
            seed = derive_seed(seed, self.replicas.members.index(link.rank))
        link = self.axis.link(link)
        return (yield from reduce_scatter(link, gradients, intra, inter, seed=seed, operation="gradients", lost=memory))

    def _over_replicas(self, link: Link, part: Tensor, present: list[int], seed: int) -> Rounds[Tensor]:
        """Sum of the replicas' parts, the same bits on all of them: each adds up one piece of every parameter."""
        link, size = self.replicas.link(link), self.replicas.size
        seed = derive_seed(seed, size)
        intra, inter = self.unit.gradients(present, size)
        lengths = [self.unit.params[i].shard_numel for i in present]
        layout = sliced(lengths, size)
        pieces = layout.pack(part.float().split(lengths), torch.empty(size, layout.width, device=part.device))
        memory = self._memory(1, present)
        piece = yield from reduce_scatter(
            link, pieces.view(-1), intra, inter, seed=seed, operation="replicas", lost=memory
        )
        back = inter if link.topology.num_nodes > 1 else intra
        total = yield from all_gather(link, piece, back, seed=derive_seed(seed, size), operation="replicas")
        return torch.cat(layout.unpack(total))

    def _memory(self, number: int, present: list[int]) -> Feedback | None:
        memory = self.memories[number]
        return memory.of(present) if memory is not None else None


class ReplicaGroup(dist.ProcessGroup):
    """Stands in for FSDP2's group of replicas; its all_reduce is the method's."""

    def __init__(self, reduction: ReduceScatter) -> None:
        axis = reduction.replicas
        super().__init__(axis.members.index(axis.comm.rank), axis.size)  # type: ignore[call-arg]
        self._reduction = reduction

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], options: dist.AllreduceOptions
    ) -> dist.Work:
        """See ReduceScatter.all_reduce."""
        try:
            self._reduction.all_reduce(tensors[0], options.reduceOp)
        except Exception as error:
            # torch's wrapper of this call logs errors with the name of the group, and does not know this group.
            if not _compat.at_end_of_backward(partial(_throw, error)):
                raise
        return FinishedWork()


class FinishedWork(dist.Work):
    """A finished operation."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True


def _throw(error: Exception) -> None:
    raise error
