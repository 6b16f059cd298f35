"""What of a run lies in memory and what on a disk, once its model and batch are known."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from thinwire.collectives import Topology
from thinwire.hosts.offload.activations import kept_bytes
from thinwire.methods.memory import Floor, Residency, settled
from thinwire.methods.sharded import ShardedMethod
from thinwire.models.llama import Llama
from thinwire.training.config import derive
from thinwire.training.run import Run


def resolved(run: Run, skeleton: nn.Module) -> tuple[Residency, Floor]:
    """The residency of a run without "auto", and the least memory that a rank needs; skeleton: the model on meta.

    Where what a forward keeps does not fit beside the floor, layers are computed again in the backward.
    """
    config, residency, method = run.config, run.residency, run.strategy
    assert residency is not None
    assert isinstance(method, ShardedMethod)
    batch = derive(config, config.num_shares)
    topology = Topology.stated(config.world_size, config.local_size or config.workers)
    residency = settled(residency, method, skeleton, topology, batch.accumulation)
    floor = Floor.of(residency, method, skeleton, topology, batch.accumulation)
    if residency.activations != "auto":
        return residency, floor
    # Of other models nobody knows what a forward does besides computing.
    is_plain, budget = type(skeleton) is Llama, residency.memory_bytes
    is_tight = False
    if is_plain and budget is not None and not config.compile:
        tokens = torch.empty(batch.micro_batch, config.seq_len, dtype=torch.long, device="meta")
        is_tight = floor.num_bytes + kept_bytes(skeleton, tokens, tokens) > budget
    return replace(residency, activations="recompute" if is_tight else "keep"), floor
