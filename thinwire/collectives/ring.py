"""Sums by gloo's own all_reduce, which can't be metered, as jobs of the communication thread."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.link import Link
from thinwire.collectives.topology import Topology

BY_FORMULA = ("bytes sent", "by formula: 2 (P-1)/P of what is reduced", "torch's collectives are not metered")


@dataclass(frozen=True)
class AllReduce:
    """An in-place sum over all ranks by gloo that the communication thread can wait for.

    operation: its name in the meter.
    """

    link: Link
    operation: str
    tensor: Tensor
    work: dist.Work

    @classmethod
    def start(cls, link: Link, operation: str, tensor: Tensor) -> AllReduce:
        work = dist.all_reduce(tensor, group=link.wire.group, async_op=True)
        assert work is not None
        return cls(link, operation, tensor, work)

    def wait(self) -> None:
        with self.link.timed("wait_s", self.operation):
            self.work.wait(timedelta(seconds=self.link.wire.timeout_s))
        count_ring(self.link, self.operation, self.tensor.nbytes)


def ring_bytes(num_bytes: int, grid: Topology) -> dict[str, int]:
    """Bytes that one rank sends on each level for a ring all_reduce: P-1 of P parts to sum, then again to spread.

    If there are several nodes, all bytes count as sent between nodes, as they are for the ranks at a node's ends.
    """
    sent = 2 * (grid.world_size - 1) * num_bytes // grid.world_size
    return {"intra": 0, "inter": sent} if grid.num_nodes > 1 else {"intra": sent, "inter": 0}


def count_ring(link: Link, operation: str, num_bytes: int) -> None:
    """Count a gloo all_reduce in the meter, by its formula."""
    for level, sent in ring_bytes(num_bytes, link.topology).items():
        if sent:
            link.wire.meter.count(operation, level, sent, sent)
