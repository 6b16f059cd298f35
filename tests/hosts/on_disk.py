"""Models on a disk, and how tests compare them."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import thinwire
from tests.checkpoint.replicas import Replica
from thinwire.hosts.offload import replicas, spill
from thinwire.layout import buckets
from thinwire.methods.memory import floor
from thinwire.tiers import DiskFile

STEPS = 3


def cut_small(num_held: int = 2) -> None:
    """Let every matrix be a bucket of its own, none of them too small for the disk, and few of them in memory."""
    floor.NUM_UNBOUNDED = num_held
    buckets.DEFAULT_BUCKET_NUMEL = buckets.MIN_BLOCKS_PER_SHARD = 1
    replicas.SMALL_NUMEL = spill.SMALL_BYTES = 0


def followed(replica: Replica, first: int, num: int) -> list[Any]:
    """Losses of some steps, and the weights after them."""
    losses = [replica.step(step) for step in range(first, first + num)]
    replica.optimizer.synchronize()
    replica.optimizer.check_replicas()
    with thinwire.whole(replica.model):
        return [losses, {name: param.detach().clone() for name, param in replica.model.named_parameters()}]


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    for key, weights in one[1].items():
        assert torch.equal(weights, other[1][key]), key


def tear_write(rank: int, at: int) -> None:
    """Let the second rank be killed in its write number `at` to a file with a name: half of it is written."""
    write, count = DiskFile.write, 0

    def torn_write(self: DiskFile, place: int, memory: torch.Tensor) -> None:
        nonlocal count
        count += rank == 1 and self.path is not None
        if count == at:
            memory[len(memory) // 2 :] = 255
        write(self, place, memory)
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    DiskFile.write = torn_write  # type: ignore[method-assign]


class View(torch.nn.Module):
    """A matrix of which autograd saves a view, in one of three ways."""

    def __init__(self, way: str, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.way, self.weight = way, torch.nn.Parameter(torch.randn(16, 16, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "linear":
            return torch.nn.functional.linear(x, self.weight).tanh()
        return (x @ self.weight.t() if self.way == "product" else torch.einsum("bi,oi->bo", x, self.weight)).tanh()


class Views(torch.nn.Module):
    """Six matrices, of which the first is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.views = torch.nn.ModuleList(View(way, generator) for way in ("linear", "product", "einsum") * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for view in self.views:
            x = view(x)
        first = self.views[0].weight
        assert isinstance(first, torch.Tensor)
        return (x @ first).square().mean()
